"""Checks that an engine serves the recipe's model: by its model type, its vocabulary, and its answer to a prompt, with
an image if the model takes any."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path

from PIL import Image as PILImage
from tokenizers import Tokenizer

from shared.engine.engine_api import EngineClient, EngineError
from shared.types import Image
from shared.vision import VisionSpec

PROBE = "Image 12: <answer>up, left</answer> \u00e9\u6f22"  # the end of a turn is appended
SPELLED = "answer"  # one or a few tokens in any vocabulary, but also writable letter by letter


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the recipe's model that an engine's answers are compared with. `probe_ids`: the tokens of PROBE and
    the end of a turn. `image_ids`: the tokens of an image in the compact stream. `spelled_ids`: the tokens of SPELLED
    written letter by letter; `num_spelled`: the number of its tokens when it is tokenized as a word."""

    path: str
    model_type: str
    vocab_size: int
    probe_ids: tuple[int, ...]
    image_ids: tuple[int, ...]
    spelled_ids: tuple[int, ...]
    num_spelled: int
    vision: VisionSpec

    @staticmethod
    def load(path: str, vision: VisionSpec) -> ModelFacts:
        """Read the facts from a model's folder. Raise ValueError for a missing or broken tokenizer."""
        config, family = json.loads((Path(path) / "config.json").read_text()), vision.family
        file = Path(path) / "tokenizer.json"
        if not file.exists():
            raise ValueError(f"model.path = {path!r} has no tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exceptions
            reason = " ".join(str(error).split())
            raise ValueError(f"{file} cannot be read as a tokenizer ({reason}): copy the model's own anew") from error
        ids, letters = (
            tuple(tokenizer.encode(PROBE + family.ends_of_turn[0]).ids),
            tuple(i for c in SPELLED for i in tokenizer.encode(c).ids),
        )
        vocab_size = family.text_config(config)["vocab_size"]
        image = family.image_block(config)
        num_spelled = len(tokenizer.encode(SPELLED).ids)
        return ModelFacts(path, config["model_type"], vocab_size, ids, image, letters, num_spelled, vision)


async def check_engine(client: EngineClient, model: ModelFacts, timeout_s: float) -> None:
    """Wait until the engine answers a request. Raise EngineError if it does not within `timeout_s`, or if
    it serves another model."""
    await client.wait_healthy(timeout_s)
    info = await client.model_info()
    other = f"serves another model ({info['model_path']}) than model.path = {model.path!r}"
    if info.get("model_type", model.model_type) != model.model_type:
        raise EngineError(client.url, f"{other}: a {info['model_type']}, not a {model.model_type}")
    if info.get("vocab_size", model.vocab_size) != model.vocab_size:
        raise EngineError(client.url, f"{other}: a vocabulary of {info['vocab_size']} tokens, not {model.vocab_size}")
    ids = await client.tokenize(PROBE + model.vision.family.ends_of_turn[0])
    if ids is not None and ids != model.probe_ids:
        raise EngineError(client.url, f"{other}: its vocabulary makes other tokens of the same text")
    await check_answers(client, model, timeout_s)


async def check_answers(client: EngineClient, model: ModelFacts, timeout_s: float) -> None:
    """Check that requests reach the engine unchanged (directly or through a router): an image's size, each token of the
    prompt, and banned tokens. Raise EngineError if they do not."""
    images: list[Image] = []
    image_tokens = 0
    if model.vision.takes_images:
        width, height = 2 * model.vision.patch_size * model.vision.merge_size, model.vision.patch_size
        images = [_image(width, height)]
        image_tokens = model.vision.num_tokens(model.vision.grid(width, height)) + len(model.image_ids) - 1
    prompt = (*model.image_ids, *model.spelled_ids)
    num_tokens, likeliest = await client.warm_up(prompt, images, timeout_s)
    expected = image_tokens + len(model.spelled_ids)
    if num_tokens == image_tokens + model.num_spelled != expected:
        raise EngineError(
            client.url,
            f"makes {num_tokens} tokens of {expected}: it decodes a prompt with an image and encodes it anew, and "
            "would continue other tokens than were sampled; use SGLang 0.5.23 with SGLANG_MM_AVOID_RETOKENIZE left on, "
            "and launch/sglang_env/plugin on its PYTHONPATH",
        )
    if num_tokens != expected:
        raise EngineError(
            client.url,
            f"makes {num_tokens} tokens of a prompt with an image, the learner {expected}; give it "
            "the bounds model.min_pixels and model.max_pixels, as the embedded and the SGLang engine are started with",
        )
    if (await client.warm_up(prompt, images, timeout_s, (likeliest,)))[1] == likeliest:
        raise EngineError(
            client.url,
            "samples a token that the request bans: it loses logit_bias (sglang-router 0.3.2 does), "
            "and every logprob would be a little wrong; use a proxy that passes requests on as they are",
        )


def _image(width: int, height: int) -> Image:
    buffer = io.BytesIO()
    PILImage.new("RGB", (width, height), (200, 120, 40)).save(buffer, "PNG")
    return Image.of(buffer.getvalue())
