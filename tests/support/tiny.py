"""A tiny random Qwen3-VL folder for tests, and plain references to compare with."""

from __future__ import annotations

import asyncio
import io
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image as PILImage
from transformers import (
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from actor.engine.app import EngineApp
from actor.engine.http import HttpServer
from actor.engine.server_settings import EngineSettings
from launch.tiny_models.build import build_config, build_model, build_tokenizer, save
from learner.model.policy import Policy
from shared.families.registry import family_in
from shared.vision import VisionSpec, expand, patchify, pixel_values

PHRASES = [
    "Answer with your next moves like this: <answer>up, left</answer>",
    "<answer>up, down, left, right</answer>",
    "Valid last actions: up, left. Provide your next move(s).",
]


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(PHRASES, vocab_size=640)


def tiny_model_dir(tmp: str | Path, *, hidden: int = 64, layers: int = 2, seed: int = 0) -> Path:
    """Write a random tiny Qwen3-VL with tokenizer, chat template and image processor; return its folder."""
    folder = Path(tmp) / f"tiny-{hidden}-{layers}-{seed}"
    if not folder.exists():
        tokenizer = tiny_tokenizer()
        config = build_config(tokenizer, hidden=hidden, layers=layers, vision_hidden=32, vision_depth=2)
        save(folder, build_model(config, seed), tokenizer)
    return folder


def load_model(folder: str | Path) -> Any:
    auto_class = getattr(transformers, family_in(folder).auto_class)
    return auto_class.from_pretrained(folder, dtype=torch.float32).eval()


def moe_policy(folder: str | Path, spec: VisionSpec) -> Policy:
    """Return a policy with random weights and the shape of the model in `folder`, but with eight experts per layer, two
    of them for each token."""
    config = Qwen3VLMoeConfig.from_dict(load_model(folder).config.to_dict())
    for name, value in {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}.items():
        setattr(config.text_config, name, value)
    config.model_type = "qwen3_vl_moe"
    return Policy(Qwen3VLMoeForConditionalGeneration(config), spec)


@torch.no_grad()
def mixture_dir(dense: Path) -> Path:
    """Write a mixture with the shape of the tiny model in `dense` into a folder beside it, with random matrices, so
    that experts differ."""
    policy = moe_policy(dense, VisionSpec.load(dense))
    folder = shutil.copytree(dense, dense.parent / "moe")
    for name, p in policy.vlm.named_parameters():
        if p.ndim > 1 and "visual" not in name:
            p.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
    config = policy.vlm.config
    config.text_config._attn_implementation = config.vision_config._attn_implementation = "sdpa"
    policy.vlm.save_pretrained(folder)
    return folder


def draw_image(width: int = 64, height: int = 64, seed: int = 0) -> PILImage.Image:
    """Return an image of random noise, so that images of different seeds differ for any model."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PILImage.fromarray(pixels)


def png(image: PILImage.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@torch.no_grad()
def reference_logits(
    model: PreTrainedModel, token_ids: list[int], images: list[PILImage.Image], spec: VisionSpec
) -> torch.Tensor:
    """Return float32 logits [T, V] at every compact position (for an image, at its last visual token), from one plain
    forward of transformers over the whole expanded stream, without a cache. Images must need no resizing."""
    grids = [spec.grid(*image.size) for image in images]
    ids, compact = expand(token_ids, grids, spec)
    positions = spec.position_ids(ids, grids)
    extra = {}
    if images:
        patches = [patchify(np.asarray(i), spec) for i in images]
        extra = {
            "pixel_values": torch.from_numpy(np.concatenate([pixel_values(p, spec) for p in patches])),
            "image_grid_thw": torch.tensor(grids),
        }
    of_rotary = spec.family.rotary_positions(torch.from_numpy(positions)[:, None])
    out = model(input_ids=torch.from_numpy(ids)[None], position_ids=of_rotary, **extra)
    last = np.searchsorted(compact, np.arange(len(token_ids)), side="right") - 1
    return out.logits[0, torch.from_numpy(last)].float()


def logprobs_under(
    model: PreTrainedModel,
    spec: VisionSpec,
    prompt: Sequence[int],
    sampled: Sequence[int],
    images: Sequence[PILImage.Image] = (),
    banned: Sequence[int] | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return the logprobs of `sampled` after `prompt` under the model, with the ids `banned` excluded (None: the vision
    ids)."""
    logits = reference_logits(model, [*prompt, *sampled], list(images), spec)[len(prompt) - 1 : -1]
    return chosen(logits / temperature, sampled, spec.banned_ids if banned is None else banned)


def chosen(logits: torch.Tensor, tokens: Sequence[int], banned: Sequence[int]) -> torch.Tensor:
    """Return the logprobs of `tokens`, each from its row of `logits` with the banned ids excluded."""
    logits = logits.index_fill(1, torch.tensor(banned, dtype=torch.int64), -torch.inf)
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@torch.no_grad()
def continued(
    old: Any, new: Any, spec: VisionSpec, prompt: list[int], tokens: list[int], split: int, image: PILImage.Image,
    banned: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """Return the logprobs of tokens[split:] under `new`, given keys and values that `old` has computed for everything
    before."""
    grids = [spec.grid(*image.size)]
    expanded, _ = expand([*prompt, *tokens], grids, spec)
    positions = torch.from_numpy(spec.position_ids(expanded, grids))[:, None]
    ids = torch.from_numpy(expanded)[None]
    border = ids.shape[1] - len(tokens) + split - 1  # the first token that `new` reads is the last one sampled by `old`
    pixels = pixel_values(patchify(np.asarray(image), spec), spec)
    cache = DynamicCache(config=old.config.text_config)
    old(
        input_ids=ids[:, :border], position_ids=positions[..., :border], past_key_values=cache, use_cache=True,
        pixel_values=torch.from_numpy(pixels), image_grid_thw=torch.tensor(grids),
    )  # fmt: skip
    rest = new(input_ids=ids[:, border:-1], position_ids=positions[..., border:-1], past_key_values=cache)
    return chosen(rest.logits[0].float(), tokens[split:], banned)


@contextmanager
def running_engine(folder: str | Path, **settings: Any) -> Iterator[tuple[str, EngineApp]]:
    """Run the embedded engine in this process, on a free port; yield (url, app). `settings` are fields of
    EngineSettings."""
    ready: Future[tuple[str, EngineApp, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        app = EngineApp.load(EngineSettings(**{"model_path": str(folder), "port": 0, "max_batch": 16} | settings), stop)
        server = HttpServer(app.routes(), refusals=app.refusals)
        port = await server.start("127.0.0.1", 0)
        ready.set_result((f"http://127.0.0.1:{port}", app, asyncio.get_running_loop(), stop))
        await stop.wait()
        server.close()
        app.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    url, app, loop, stop = ready.result(timeout=60)
    try:
        yield url, app
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        thread.join(10)
