"""Plays an environment that another process serves over HTTP (`python -m envs.serve`).

    [env]
    module = "envs.remote"
    threads = 64  # calls that wait for the servers at once
    args = {url = "http://127.0.0.1:8100", args = {render_mode = "text"}}

An answer that does not come is asked for again, and the server makes no step twice. With several addresses each
episode is played at one of them; one that cannot be reached when an episode begins is passed over.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Iterator
from functools import cache
from typing import Any

from PIL.Image import Image
from pydantic import Field, field_validator

from envs.base import Info, Observation, setting
from envs.env_loops import EnvLoop
from envs.env_settings import EnvSettings, read_settings
from envs.remote_messages import decoded, encoded
from shared.engine.http_client import HttpFailure, JsonClient
from shared.keys import is_local, read_api_key
from shared.rgb_images import open_image
from shared.util.user_errors import RaisedElsewhere, in_words

FIRST_PAUSE_S = 0.2
CLOSE_S = 2.0


class RemoteSettings(EnvSettings):
    url: str | list[str] = Field(..., description="address of the server, or a list of several: http://host:port")
    api_key_file: str = Field("", description="file with the servers' API key (mode 0600); needed off loopback")
    timeout_s: float = Field(8.0, gt=0, description="time limit of one request; with `tries`, below env.timeout_s")
    tries: int = Field(3, ge=1, description="requests for one call, while a server is silent, busy or gone")
    args: dict[str, Any] = Field(default_factory=dict, description="settings of the environment that is served")

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, value: str | list[str]) -> str | list[str]:
        for url in [value] if isinstance(value, str) else value:
            JsonClient(url)
        if not value:
            raise ValueError("name a server, as http://host:port")
        return value

    @property
    def urls(self) -> list[str]:
        return [self.url] if isinstance(self.url, str) else list(self.url)


SETTINGS = RemoteSettings


class EnvServerError(Exception):
    """A server of environments gave no answer that can be used; the message begins with its address."""


class RemoteRaised(RaisedElsewhere):
    """An exception of an environment that is served. Each is raised as a subclass with the name of the original
    class."""


def system_prompt(args: Any = None) -> str:
    """Return the system prompt of the environment that is served. Raise EnvServerError if no server answers."""
    settings = read_settings(RemoteSettings, None, args)
    return _prompt(settings.model_dump_json(), _json_args(settings, args))


def build_env(sample: Any = None, args: Any = None, **_: Any) -> HttpEnv:
    """Return the environment of a sample at one of the servers, where its first `reset` builds it. Raise ValueError for
    a server off loopback without a key."""
    settings = read_settings(RemoteSettings, None, args)
    return HttpEnv(settings, sample, _served_args(settings, args))


def episode_reward(env: HttpEnv) -> Any:
    """Return the `episode_reward` of the module that is served; without one the sum of the turns' rewards."""
    return env.episode_reward()


class HttpEnv:
    """One session at a server. The player numbers its calls, so that one that is sent again is not made again."""

    def __init__(self, settings: RemoteSettings, sample: Any, args: dict[str, Any]) -> None:
        self._settings, self._sample, self._args = settings, sample, args
        self._key = key_of(settings)
        self._urls = random.sample(settings.urls, len(settings.urls))
        self._path, self._number = f"/sessions/{uuid.uuid4().hex}", 0
        self._http: JsonClient | None = None

    async def reset(self) -> tuple[Observation, Info]:
        """Build the environment with the first call; start its episode."""
        first = {"sample": _sample_of(self._sample), "args": self._args} if not self._number else {}
        answer = await self._call({"call": "reset"} | first)
        return self._observation(answer), self._of_type(answer, "info", dict)

    async def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        answer = await self._call({"call": "step", "text": response_text})
        done, observation = self._of_type(answer, "done", bool), self._observation(answer)
        if not done and not observation:
            raise self._nonsense("it has no observation, and the episode is not done")
        return observation, done, self._of_type(answer, "info", dict)

    def format_observation(self, observation: Observation) -> Any:
        """Return the messages that the server has already made of the observation."""
        return observation["messages"]

    async def episode_reward(self) -> Any:
        return (await self._call({"call": "episode_reward"})).get("reward")

    async def close(self) -> None:
        """End the session. A server that does not answer ends it by itself."""
        if self._http is None:
            return
        try:
            await self._http.request("DELETE", self._path, timeout_s=CLOSE_S)
        except HttpFailure:
            return
        finally:
            await self._http.close()

    async def _call(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to the next call."""
        number, self._number = self._number, self._number + 1
        content_type, content = encoded(body)
        path = f"{self._path}/calls/{number}"
        if self._http is None:
            answer = await self._first(path, content, content_type)
        else:
            answer = await asked(self._http, path, content, content_type, self._settings)
        if "error" in answer:
            words = [str(answer.get(name, ""))[:100_000] for name in ("text", "place", "trace")]
            raise type(str(answer["error"])[:100], (RemoteRaised,), {})(*words)
        return answer

    async def _first(self, path: str, content: bytes, content_type: str) -> dict[str, Any]:
        """Return the answer to the first call, of the first server that can be reached."""
        for index, url in enumerate(self._urls):
            http = JsonClient(url, connections=1, api_key=self._key)
            try:
                answer = await asked(http, path, content, content_type, self._settings)
            except EnvServerError:
                await http.close()
                if index == len(self._urls) - 1:
                    raise
                continue
            except BaseException:
                await http.close()
                raise
            self._http = http
            return answer
        raise AssertionError

    def _observation(self, answer: dict[str, Any]) -> Observation:
        observation: Observation = self._of_type(answer, "observation", dict)
        if observation and not isinstance(observation.get("messages"), list):
            raise self._nonsense(f"its observation is {in_words(observation)}, without messages")
        return observation | {"multi_modal_data": {"image": list(_images_in(observation))}} if observation else {}

    def _of_type(self, answer: dict[str, Any], name: str, kind: type) -> Any:
        if not isinstance(answer.get(name), kind):
            raise self._nonsense(f"its {name} is {in_words(answer.get(name))}, not {kind.__name__}")
        return answer[name]

    def _nonsense(self, why: str) -> EnvServerError:
        assert self._http is not None
        return EnvServerError(f"{self._http.url}: an answer that is none: {why}")


def _images_in(value: Any) -> Iterator[Image]:
    if isinstance(value, Image):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _images_in(each)


async def asked(
    http: JsonClient, path: str, content: bytes, content_type: str, settings: RemoteSettings
) -> dict[str, Any]:
    """Return the answer to a request, which is sent again while the server is silent, busy or gone. Raise
    EnvServerError if there is none."""
    why = ""
    for attempt in range(settings.tries):
        if attempt:
            await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
        try:
            answer = decoded(await http.post_for_content(path, content, content_type, timeout_s=settings.timeout_s))
        except HttpFailure as failure:
            why = str(failure).replace(f" {path}:", "", 1)
            if failure.may_pass:
                continue
        except ValueError as error:
            why = f"{http.url}: an answer that is none: {error}"
        else:
            if isinstance(answer, dict):
                return answer
            why = f"{http.url}: an answer that is none: {in_words(answer)}"
        break
    tried = f" ({attempt + 1} tries)" if attempt else ""
    raise EnvServerError(f"{why}{tried}")


def key_of(settings: RemoteSettings) -> str:
    """Return the servers' API key, "" for none. Raise ValueError if a server off loopback has none."""
    for url in settings.urls:
        scheme, _, rest = url.partition("://")
        if scheme == "http" and not settings.api_key_file and not is_local(f"tcp://{_host_port(rest)}"):
            raise ValueError(
                f"url = {url!r} is not loopback, and there is no API key: make one with python -m shared.keys FOLDER "
                "--engine, and name its file in api_key_file here and for envs.serve"
            )
    return read_api_key(settings.api_key_file, "api_key_file")


def _host_port(rest: str) -> str:
    place = rest.partition("/")[0].rpartition("@")[2]
    return place if place.rpartition(":")[2].isdigit() else f"{place}:80"


@cache
def _prompt(settings_json: str, args_json: bytes) -> str:
    settings = RemoteSettings.model_validate_json(settings_json)
    key = key_of(settings)

    async def ask() -> str:
        for index, url in enumerate(settings.urls):
            async with JsonClient(url, api_key=key) as http:
                try:
                    answer = await asked(http, "/task", args_json, "application/json", settings)
                except EnvServerError:
                    if index == len(settings.urls) - 1:
                        raise
                    continue
            if "error" in answer:
                raise ValueError(f"{url}: {answer.get('text')}")
            return str(answer.get("system_prompt") or "")
        raise AssertionError

    loop = EnvLoop()
    try:
        return loop.run(ask())
    finally:
        loop.close()


def _served_args(settings: RemoteSettings, args: Any) -> dict[str, Any]:
    turns = setting(args, "max_turns")
    return settings.args | ({} if turns is None else {"max_turns": turns})


def _json_args(settings: RemoteSettings, args: Any) -> bytes:
    return encoded({"args": _served_args(settings, args)})[1]


def _sample_of(sample: Any) -> dict[str, Any] | None:
    """Return what `build_env` may read of a sample; its images as files."""
    if sample is None:
        return None
    images = [open_image(image.data) for image in sample.images]
    return {"id": sample.id, "label": sample.label, "metadata": sample.metadata, "images": images}
