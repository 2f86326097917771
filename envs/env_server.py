"""Serves environments over HTTP, each in a session of its own; `envs.remote_messages` describes the requests.

A session makes one call after another, each in a thread. The answer to its last call is kept, and given to whoever asks
for it again. Sessions are bounded in number, and closed when nobody has used them for a while.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from envs.base import Info, total_turn_reward
from envs.env_calls import check_methods, close_env, make_env, messages_of, reset_env, reward_of, step_env
from envs.env_loops import interrupt
from envs.loader import check_settings, system_prompt
from envs.remote_messages import JSON_TYPE, MAX_BYTES, MAX_CALLS, SESSION_ID, decoded, encoded
from shared.keys import is_local
from shared.rgb_images import as_png
from shared.types import Image as FileImage
from shared.types import Sample
from shared.util.threads import in_thread
from shared.util.user_errors import describe, name_of, place_of, text_of, trace_of

READ_S = 30.0  # for the body of a request
LOOK_S = 1.0  # between two looks for idle sessions
Reply = tuple[int, str, bytes]  # status, content type, body
log = logging.getLogger("envs.serve")


@dataclass(frozen=True, slots=True)
class ServeLimits:
    sessions: int = 256
    idle_s: float = 600.0
    call_s: float = 30.0


@dataclass(eq=False, slots=True)
class ServedSession:
    """One environment. `number` is that of the last call, `answer` its answer, which may still be computed."""

    used_s: float
    env: Any = None
    infos: list[Info] = field(default_factory=list)
    number: int = -1
    answer: asyncio.Task[Reply] | None = None

    @property
    def is_busy(self) -> bool:
        return self.answer is not None and not self.answer.done()


class EnvServer:
    """Serves the environments of one module; `args` are its settings, which a session's own override."""

    def __init__(
        self,
        module: ModuleType,
        build_env: Callable[..., Any],
        args: Mapping[str, Any],
        limits: ServeLimits,
        api_key: str = "",
    ) -> None:
        self._module, self._build_env, self._args = module, build_env, dict(args)
        self._limits, self._api_key = limits, api_key
        self._sessions: dict[str, ServedSession] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def application(self) -> web.Application:
        """Return the HTTP application."""
        app = web.Application(client_max_size=MAX_BYTES, middlewares=[self._guarded])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.post("/task", self._task),
                web.post("/sessions/{session}/calls/{number}", self._call),
                web.delete("/sessions/{session}", self._delete),
            ]
        )
        return app

    async def close_idle(self) -> None:
        """Close sessions that nobody uses, again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            oldest = time.monotonic() - self._limits.idle_s
            for name, session in list(self._sessions.items()):
                if session.used_s < oldest and not session.is_busy:
                    self._close(name)

    async def close(self, within_s: float) -> int:
        """Close all sessions; return how many there were."""
        names = list(self._sessions)
        for name in names:
            self._close(name)
        if self._closing:
            await asyncio.wait(self._closing, timeout=within_s)
        return len(names)

    # ------------------------------------------------------------------ requests

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse who has no key. Without a key, refuse what a web page may send: a request with an origin, or for
        another host's name."""
        if request.path != "/health":
            if self._api_key:
                given = request.headers.get("authorization", "")
                if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {self._api_key}".encode()):
                    return _failure(401, "this server needs its API key: set api_key_file")
            elif "origin" in request.headers or not _is_loopback(request.host):
                return _failure(403, "without an API key only programs on this machine are served")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _failure(error.status, error.reason)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"module": self._module.__name__, "sessions": len(self._sessions)})

    async def _task(self, request: web.Request) -> web.Response:
        try:
            args = self._settings(_mapping(await _body(request)).get("args"))
            prompt = await in_thread(lambda: system_prompt(self._module, args))
        except ValueError as error:
            return _response((200, *encoded(_raised(error))))
        return web.json_response({"system_prompt": prompt})

    async def _call(self, request: web.Request) -> web.Response:
        name, number = request.match_info["session"], request.match_info["number"]
        if not SESSION_ID.fullmatch(name) or not number.isdecimal() or len(number) > 9:
            return _failure(404, "a session's name has 32 hex digits, a call a number")
        try:
            body = _mapping(await _body(request))
        except ValueError as error:
            return _failure(400, str(error))
        session, call = self._sessions.get(name), int(number)
        if session is None:
            if call:
                return _failure(404, "no such session: it was closed, or this server was started anew")
            if len(self._sessions) >= self._limits.sessions:
                return _failure(503, f"all {self._limits.sessions} sessions are open: raise --sessions")
            session = self._sessions[name] = ServedSession(time.monotonic())
        session.used_s = time.monotonic()
        if call == session.number + 1 and call < MAX_CALLS and not session.is_busy:
            session.number = call
            session.answer = asyncio.create_task(self._answer(name, session, body))
        elif call != session.number or session.answer is None:
            return _failure(409, f"call {call} of a session whose last call is {session.number}")
        reply = await asyncio.shield(session.answer)
        session.used_s = time.monotonic()
        return _response(reply)

    async def _delete(self, request: web.Request) -> web.Response:
        self._close(request.match_info["session"])
        return web.json_response({})

    # ------------------------------------------------------------------ calls

    async def _answer(self, name: str, session: ServedSession, body: dict[str, Any]) -> Reply:
        """Return the answer to a call. One that overruns its limit ends its session."""
        thread: list[int] = []

        def run() -> Reply:
            thread.append(threading.get_ident())
            return 200, *self._called(session, body)

        work = asyncio.ensure_future(in_thread(run))
        done, _ = await asyncio.wait([work], timeout=self._limits.call_s)
        if done:
            return work.result()
        work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        if thread:
            interrupt(thread[0])
        self._close(name, after=work)
        text = f"no return within {self._limits.call_s:g} s"
        log.warning("a call of session %s: %s; the session is closed", name[:8], text)
        return 200, *encoded({"error": "EnvTimeout", "text": text})

    def _called(self, session: ServedSession, body: dict[str, Any]) -> tuple[str, bytes]:
        try:
            return encoded(self._result(session, body))
        except BaseException as error:  # noqa: BLE001 - any exception of the user's code is the player's answer
            log.warning("a call raised %s", describe(error))
            return encoded(_raised(error))

    def _result(self, session: ServedSession, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("call") != "reset" and session.env is None:
            raise ValueError("the first call of a session is reset")
        match body.get("call"):
            case "reset":
                if session.env is None:
                    args = self._settings(body.get("args"))
                    session.env = make_env(self._build_env, sample=_sample_of(body.get("sample")), args=args)
                    check_methods(session.env)
                session.infos.clear()
                observation, info = reset_env(session.env)
                seen = {"messages": messages_of(session.env, observation)} if observation else {}
                return {"observation": seen, "info": info if isinstance(info, dict) else {}}
            case "step":
                text = body.get("text")
                if not isinstance(text, str):
                    raise ValueError("a step has a text")
                observation, done, info = step_env(session.env, text)
                session.infos.append(info)
                seen = {"messages": messages_of(session.env, observation)} if observation or not done else {}
                return {"observation": seen, "done": done, "info": info}
            case "episode_reward":
                own = getattr(self._module, "episode_reward", None)
                return {"reward": total_turn_reward(session.infos) if own is None else reward_of(own, session.env)}
        raise ValueError(f"no call {body.get('call')!r}")

    def _settings(self, given: Any) -> dict[str, Any]:
        args = self._args | _mapping(given or {})
        check_settings(self._module, args, "env.args.args")
        return args

    def _close(self, name: str, after: asyncio.Future[Any] | None = None) -> None:
        session = self._sessions.pop(name, None)
        if session is None:
            return

        async def end() -> None:
            if waits := after or session.answer:
                await asyncio.wait([waits])
            if session.env is None:
                return
            try:
                await in_thread(lambda: close_env(session.env))
            except Exception as error:  # noqa: BLE001 - the user's function may raise anything
                log.warning("an environment's close failed: %s", describe(error))

        task = asyncio.create_task(end())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _body(request: web.Request) -> Any:
    """Return the value of a request's body. Raise ValueError for one that is late or of another form."""
    try:
        async with asyncio.timeout(READ_S):
            return decoded(await request.read())
    except TimeoutError:
        raise ValueError(f"the body has not come within {READ_S:g} s") from None


def _sample_of(value: Any) -> Sample | None:
    """Return the sample that `build_env` gets."""
    if value is None:
        return None
    sample = _mapping(value)
    label, images = sample.get("label"), sample.get("images") or ()
    return Sample(
        id=str(sample.get("id", "")),
        label=None if label is None else str(label),
        metadata=_mapping(sample.get("metadata") or {}),
        images=tuple(FileImage.of(as_png(image)) for image in images),
    )


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} where an object belongs")
    return value


def _raised(error: BaseException) -> dict[str, str]:
    return {"error": name_of(error), "text": text_of(error), "place": place_of(error), "trace": trace_of(error)}


def _is_loopback(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return name == "localhost" or is_local(f"tcp://{f'[{name}]' if ':' in name else name}:1")
    except ValueError:
        return False


def _failure(status: int, why: str) -> web.Response:
    return web.json_response({"error": why}, status=status)


def _response(reply: Reply) -> web.Response:
    status, content_type, body = reply
    return web.Response(status=status, body=body, headers={"content-type": content_type or JSON_TYPE})
