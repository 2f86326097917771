"""The routes of the embedded engine."""

from __future__ import annotations

import asyncio
import logging
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from msgspec import Struct
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from actor.engine.generate_request import GenerateBody, GenerateRequest
from actor.engine.http import AnyObject, Handler, HttpError
from actor.engine.request_images import ImageCache
from actor.engine.runner import Runner
from actor.engine.scheduler import Scheduler
from actor.engine.server_settings import EngineSettings
from actor.engine.weight_routes import WeightUpdates
from shared.engine.nccl_versions import loaded_nccl
from shared.engine.sent_images import IMAGES_ROUTE
from shared.families.registry import family_in
from shared.util.refusals import Refusals
from shared.vision import VisionSpec

log = logging.getLogger("engine")
MAX_OPEN_REQUESTS = 4096
MAX_TEXT = 2**16  # characters of a text to tokenise


def load_model(settings: EngineSettings) -> Any:
    """Load the model in `settings.model_path`. Raise ValueError for an unknown family, a missing device, or weight
    files that cannot be read."""
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {settings.device}, but torch sees no GPU: use --device cpu")
    if settings.device.startswith("cuda") and settings.mem_fraction:
        torch.cuda.set_per_process_memory_fraction(settings.mem_fraction)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(settings.threads)
    dtype = getattr(torch, settings.dtype)
    path = settings.model_path
    family = family_in(path)
    family.prepare()
    try:
        model: Any = getattr(transformers, family.auto_class).from_pretrained(path, dtype=dtype, use_safetensors=True)
    except SafetensorError as error:
        raise ValueError(f"the .safetensors files in {path} cannot be read ({error}): copy them anew") from error
    return model.to(device=settings.device)


def eos_ids(settings: EngineSettings, config: Any) -> frozenset[int]:
    """Return the tokens that end a turn, from generation_config.json, else from the text config."""
    folder = Path(settings.model_path)
    ids = None
    if (folder / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(folder).eos_token_id
    ids = config.get_text_config().eos_token_id if ids is None else ids
    return frozenset([ids] if isinstance(ids, int) else ids or [])


@cache
def tokenizer_of(model_path: str) -> Tokenizer:
    """Load the model's tokenizer. Raise HttpError if the model has none."""
    file = Path(model_path) / "tokenizer.json"
    if not file.is_file():
        raise HttpError(404, f"no tokenizer.json in {model_path!r}")
    return Tokenizer.from_file(str(file))


class TokenizeBody(Struct, frozen=True):
    prompt: str
    add_special_tokens: bool = True


class AbortBody(Struct, frozen=True):
    rid: str | None = None
    abort_all: bool = False


class PauseBody(Struct, frozen=True):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class EngineApp:
    """State and handlers of one engine."""

    def __init__(self, settings: EngineSettings, model: Any, spec: VisionSpec, stop: asyncio.Event) -> None:
        self.settings, self.spec = settings, spec
        self._loop = asyncio.get_running_loop()
        self.eos_ids = eos_ids(settings, model.config)
        runner = Runner(model, spec, num_slots=settings.num_slots, max_context=settings.max_context)
        self.scheduler = Scheduler(
            runner,
            max_batch=settings.max_batch,
            request_timeout_s=settings.request_timeout_s,
            weight_version=settings.weight_version,
            on_failure=lambda: self._loop.call_soon_threadsafe(stop.set),
        )
        self.updates = WeightUpdates(model, self.scheduler, self._on_model, timeout_s=settings.update_timeout_s)
        self.images = ImageCache(spec, settings.max_context)
        self.refusals = Refusals("a request", log)
        self.vocab_size = runner.vocab_size
        self.scheduler.start()

    @staticmethod
    def load(settings: EngineSettings, stop: asyncio.Event) -> EngineApp:
        spec = VisionSpec.load(
            settings.model_path, min_pixels=settings.min_pixels or None, max_pixels=settings.max_pixels or None
        )
        try:
            return EngineApp(settings, load_model(settings), spec, stop)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"no room on the GPU for the model and {settings.num_slots} slots of {settings.max_context} tokens: "
                "lower engine.max_batch or model.max_context, or raise engine.mem_fraction "
                f"({str(error).partition('. ')[0]})"
            ) from None

    def close(self) -> None:
        self.scheduler.stop()
        self.updates.close()

    def routes(self) -> dict[str, Handler]:
        return {
            "POST /generate": self.generate,
            f"POST {IMAGES_ROUTE}": self.add_image,
            "POST /abort_request": self.abort,
            "POST /flush_cache": self.flush_cache,
            "POST /pause_generation": self.pause,
            "POST /continue_generation": self.resume,
            "POST /tokenize": self.tokenize,
            "GET /health": self.health,
            "POST /health": self.health,
            "GET /model_info": self.model_info,
            "GET /get_model_info": self.model_info,
            "GET /server_info": self.server_info,
            "GET /get_server_info": self.server_info,
            **self.updates.routes(),
        }

    # ------------------------------------------------------------------ generation

    async def generate(self, body: GenerateBody) -> dict[str, Any]:
        if self.scheduler.num_open >= MAX_OPEN_REQUESTS:
            raise HttpError(503, f"{MAX_OPEN_REQUESTS} requests are open already")
        body.check(self.vocab_size)
        images, unknown = self.images.get(body.images)
        if unknown:  # not an error: the client sends them and repeats the request
            return {"unknown_images": unknown}
        request = GenerateRequest(body, images, self.spec, max_context=self.settings.max_context, eos_ids=self.eos_ids)
        del body  # frees the images' text while the request is open
        done = asyncio.Event()
        request.on_done = lambda: self._loop.call_soon_threadsafe(done.set)
        self.scheduler.submit(request)
        try:
            await done.wait()
        except asyncio.CancelledError:  # the client is gone
            self.scheduler.call(lambda: self.scheduler.abort(request.rid))
            raise
        return request.answer()

    async def add_image(self, file: bytes) -> dict[str, Any]:
        """Store the file of an image; answer the name by which requests may refer to it, as long as it is cached."""
        return {"image": self.images.add(file)}

    async def abort(self, body: AbortBody) -> dict[str, Any]:
        if body.rid is None and not body.abort_all:
            raise ValueError("name a rid, or set abort_all")
        rid = None if body.abort_all else body.rid
        return {"success": True, "aborted": await self._on_model(lambda: self.scheduler.abort(rid))}

    async def flush_cache(self, _: AnyObject) -> dict[str, Any]:
        """Drop the KV cache of idle slots now, and that of running requests as soon as they end."""
        return {"success": True, "running": await self._on_model(self.scheduler.slots.flush)}

    async def pause(self, body: PauseBody) -> dict[str, Any]:
        await self._on_model(lambda: self.scheduler.pause(body.mode))
        return {"status": "ok", "message": f"paused ({body.mode})"}

    async def resume(self, _: AnyObject) -> dict[str, Any]:
        await self._on_model(self.scheduler.resume)
        return {"status": "ok", "message": "continued"}

    # ------------------------------------------------------------------ information

    async def health(self, _: AnyObject) -> dict[str, Any]:
        if self.scheduler.failed is not None:
            raise HttpError(503, f"the model thread failed: {self.scheduler.failed}")
        return {"status": "ok"}

    async def model_info(self, _: AnyObject) -> dict[str, Any]:
        return {
            "model_path": self.settings.model_path,
            "tokenizer_path": self.settings.model_path,
            "is_generation": True,
            "weight_version": self.scheduler.weight_version,
            "vocab_size": self.vocab_size,
        }

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """Answer the tokens of a text, so that a client can check that the engine has the same vocabulary."""
        if len(body.prompt) > MAX_TEXT:
            raise ValueError(f"a prompt of {len(body.prompt)} characters, the limit is {MAX_TEXT}")
        tokenizer = await asyncio.to_thread(tokenizer_of, self.settings.model_path)
        ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens).ids
        return {"tokens": ids, "count": len(ids)}

    async def server_info(self, _: AnyObject) -> dict[str, Any]:
        s = self.scheduler
        return {
            "engine": "embedded",
            "weight_version": s.weight_version,
            "device": self.settings.device,
            "nccl": loaded_nccl() if self.settings.device == "cuda" else "",
            "tp_size": 1,
            "updates_beside_generation": True,
            "names_updates": True,
            "takes_adapters": True,
            "takes_claims": True,
            "max_context": self.settings.max_context,
            "max_batch": self.settings.max_batch,
            "paused": s.paused,
            "open_requests": s.num_open,
            "steps": s.steps,
            "tokens_out": s.tokens_out,
            "tokens_in": s.tokens_in,
            "tokens_reused": s.tokens_reused,
            "refused": dict(self.refusals.counts),
        }

    async def _on_model(self, function: Any) -> Any:
        """Run a function on the scheduler's thread between two steps; a step takes well below a second."""
        return await asyncio.wait_for(asyncio.wrap_future(self.scheduler.call(function)), 60.0)
