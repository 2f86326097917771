"""Where the time of a request of the embedded engine goes on a CPU, and the floor of its products.

    python -m tests.bench.rollout.engine_parts [--recipe R.toml] [--seconds 10] [--section.key VALUE ...]

The model is called as the scheduler calls it, without HTTP: `encode` an image, `prefill` a prompt (both among a few
others, as they come), `decode` a token for each of 32 requests. They are those of `tests.bench.engines`, which measures
`requests_per_s` of the whole engine here too; `rest_ms` is what is left of a request then: HTTP, images' files,
scheduling, sampling. `products_ms` is the floor: the model's matrix products at the rate at which this machine
multiplies 4,096 rows by its MLP's matrices. One thread. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
from PIL import Image as PILImage
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer

from actor.engine.request_images import load_rgb
from actor.engine.runner import Row, Runner
from actor.render import Fragment, Renderer
from launch.task_samples import ready
from shared.config.recipe import Recipe, load
from shared.vision import VisionSpec, expand, patchify
from tests.bench.engines import NEW_TOKENS, measure_kind, starts
from tests.support.tiny import load_model

AT_ONCE, TOGETHER = 32, 4  # requests that decode, and prompts that come in one step
REPEATS = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="launch/recipes/sokoban_tiny.toml")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the whole engine")
    options, overrides = parser.parse_known_args()
    torch.set_num_threads(1)
    recipe = ready(load(options.recipe, ["--eval.samples", "256", *overrides]))
    parts = parts_of(recipe)
    whole = measure_kind(recipe, options.seconds)[str(AT_ONCE)]["requests_per_s"]
    request_ms = 1e3 / whole
    rest = request_ms - parts["encode_ms"] - parts["prefill_ms"] - parts["decode_ms"]
    figures = parts | {"requests_per_s": whole, "request_ms": request_ms, "rest_ms": rest}
    figures["of_floor"] = figures["products_ms"] / request_ms
    print(json.dumps({"benchmark": "engine_parts"} | {name: round(value, 3) for name, value in figures.items()}))
    return 0


def parts_of(recipe: Recipe) -> dict[str, float]:
    """Milliseconds of a request."""
    vision = VisionSpec.load(recipe.model.path, min_pixels=recipe.model.min_pixels, max_pixels=recipe.model.max_pixels)
    renderer = Renderer(AutoTokenizer.from_pretrained(recipe.model.path), vision)
    model = load_model(recipe.model.path)
    runner = Runner(model, vision, num_slots=2 * AT_ONCE, max_context=recipe.model.max_context)
    first = starts(recipe, renderer)[:TOGETHER]
    images = [_patches(fragment, vision) for fragment in first]

    def encode() -> list[tuple[torch.Tensor, ...]]:
        return runner.encode(*zip(*images, strict=True))

    prompts = [_row(slot, *each, vision) for slot, each in enumerate(zip(first, images, encode(), strict=True))]
    length = len(prompts[0].token_ids)
    token, place = np.array([first[0].token_ids[-1]]), np.full((3, 1), length)
    decoding = [Row(slot, length + NEW_TOKENS // 2, token, place) for slot in range(AT_ONCE)]
    steps: dict[str, tuple[Callable[[], Any], float]] = {
        "encode": (encode, 1 / TOGETHER),
        "prefill": (lambda: runner.forward(prompts), 1 / TOGETHER),
        "decode": (lambda: runner.forward(decoding), (NEW_TOKENS - 1) / AT_ONCE),
    }
    flops = sum(_flops(step) * share for step, share in steps.values())
    rate = _rate(model.config.get_text_config())
    found = {f"{name}_ms": 1e3 * _seconds(step) * share for name, (step, share) in steps.items()}
    return found | {"gflops_per_s": rate / 1e9, "products_ms": 1e3 * flops / rate}


def _patches(fragment: Fragment, vision: VisionSpec) -> tuple[np.ndarray, tuple[int, int, int]]:
    with PILImage.open(io.BytesIO(fragment.images[0].data)) as image:
        return patchify(load_rgb(image, vision), vision), vision.grid(*image.size)


def _row(
    slot: int,
    fragment: Fragment,
    image: tuple[np.ndarray, tuple[int, int, int]],
    features: tuple[torch.Tensor, ...],
    vision: VisionSpec,
) -> Row:
    ids, _ = expand(list(fragment.token_ids), [image[1]], vision)
    return Row(
        slot,
        0,
        ids,
        vision.position_ids(ids, [image[1]]),
        np.flatnonzero(ids == vision.image_token_id),
        features,
    )


def _flops(step: Callable[[], Any]) -> float:
    """Of matrix products; what C computes is not among them."""
    with FlopCounterMode(display=False) as counter:
        step()
    return float(counter.get_total_flops())


def _rate(text: Any) -> float:
    """Floating-point operations a second of large products with the MLP's matrices."""
    x = torch.randn(4096, text.hidden_size)
    up, down = (
        torch.randn(text.intermediate_size, text.hidden_size),
        torch.randn(text.hidden_size, text.intermediate_size),
    )

    def both() -> torch.Tensor:
        return torch.nn.functional.linear(torch.nn.functional.linear(x, up), down)

    return 4.0 * len(x) * text.hidden_size * text.intermediate_size / _seconds(both)


def _seconds(step: Callable[[], Any]) -> float:
    """The median."""
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    sys.exit(main())
