"""Whether an engine serves the recipe's model: its kind, its vocabulary, its width; and one answer to a picture."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image as PILImage
from tokenizers import Tokenizer

from actor.client import EngineClient, EngineError
from shared.types import Image
from shared.vision import VisionSpec

PROBE = "Picture 12: <answer>up, left</answer> \u00e9\u6f22<|im_end|>"
NORM = "model.language_model.norm.weight"
CALL_S = 30.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What an engine can be asked about its model. `probe_ids`: the tokens of PROBE."""

    path: str
    model_type: str
    vocab_size: int
    hidden_size: int
    probe_ids: tuple[int, ...]
    vision: VisionSpec

    @staticmethod
    def load(path: str, vision: VisionSpec) -> ModelFacts:
        """From a model's folder. ValueError for a missing tokenizer."""
        config = json.loads((Path(path) / "config.json").read_text())
        text = config.get("text_config", config)
        file = Path(path) / "tokenizer.json"
        if not file.exists():
            raise ValueError(f"model.path = {path!r} has no tokenizer.json")
        ids = tuple(Tokenizer.from_file(str(file)).encode(PROBE).ids)
        return ModelFacts(path, config["model_type"], text["vocab_size"], text["hidden_size"], ids, vision)


async def check_engine(client: EngineClient, model: ModelFacts, timeout_s: float) -> None:
    """Waits until the engine answers a picture. EngineError: silent for `timeout_s`, or it serves another model."""
    await client.wait_healthy(timeout_s)
    info = await client.model_info(CALL_S)
    if not isinstance(info, dict) or "model_path" not in info:
        raise EngineError(f"{client.url} answers, but is no engine: /model_info says {str(info)[:80]!r}")
    other = f"{client.url} serves another model ({info['model_path']}) than model.path = {model.path!r}"
    if info.get("model_type", model.model_type) != model.model_type:
        raise EngineError(f"{other}: a {info['model_type']}, not a {model.model_type}")
    if info.get("vocab_size", model.vocab_size) != model.vocab_size:
        raise EngineError(f"{other}: a vocabulary of {info['vocab_size']} tokens, not {model.vocab_size}")
    ids = await _ask(client, "/tokenize", {"prompt": PROBE, "add_special_tokens": False}, "tokens")
    if ids is not None and tuple(ids) != model.probe_ids:
        raise EngineError(f"{other}: its vocabulary makes other tokens of the same text")
    width = await _ask(client, "/get_weights_by_name", {"name": NORM, "truncate_size": 2 * model.hidden_size}, None)
    if isinstance(width, list) and len(width) != model.hidden_size:
        raise EngineError(f"{other}: its hidden size is {len(width)}, not {model.hidden_size}")
    ids, image = picture_prompt(model.vision)
    await client.warm_up(ids, [image], timeout_s)


def picture_prompt(vision: VisionSpec) -> tuple[list[int], Image]:
    """A compact stream with one small picture, and that picture."""
    side = vision.patch_size * vision.merge_size * 2
    buffer = io.BytesIO()
    PILImage.new("RGB", (side, side), (200, 120, 40)).save(buffer, "PNG")
    return [vision.image_token_id], Image.of(buffer.getvalue())


async def _ask(client: EngineClient, path: str, body: dict[str, Any], key: str | None) -> Any:
    """An answer, or one part of it; None from a server that has no such route."""
    try:
        answer = await client.call(path, body, CALL_S)
    except EngineError:
        return None
    return answer if key is None else answer.get(key) if isinstance(answer, dict) else None
