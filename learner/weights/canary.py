"""A fixed prompt with an image, and the learner's logprobs of fixed tokens after it; an engine's must agree."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import numpy as np
import torch
from PIL import Image as PILImage
from torch.distributed.fsdp import FSDPModule
from transformers import AutoTokenizer

from learner.batch import Episode, Microbatch, pack
from learner.images import ImageDecoder
from learner.model.policy import Policy
from learner.packing.expanded import Expanded
from shared.types import Image
from shared.vision import VisionSpec, expand, mrope_positions

NUM_WATCHED = 16
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Which colour?"}, {"type": "image"}]}]


class Canary:
    """The watched tokens are spread over the vocabulary; all of them are candidates for the first generated one."""

    def __init__(self, policy: Policy, model_path: str, device: torch.device) -> None:
        self._policy = policy
        tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        self.token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        self.image = image(policy.spec)
        allowed = np.setdiff1d(np.arange(policy.vlm.config.text_config.vocab_size), policy.banned_ids)
        self.watched = [int(allowed[i]) for i in np.linspace(0, len(allowed) - 1, NUM_WATCHED).round().astype(int)]
        self._batch = self._pack(ImageDecoder(policy.spec), device)

    @torch.no_grad()
    def expected(self) -> list[float]:
        """The learner's logprobs of the watched tokens, at temperature 1. A collective where the policy is sharded."""
        logprobs = self._policy(self._batch, 1.0).logprobs
        if isinstance(self._policy, FSDPModule):
            self._policy.reshard()  # no backward does it
        return [float(value) for value in logprobs]

    def _pack(self, decoder: ImageDecoder, device: torch.device) -> Microbatch:
        spec, grid = self._policy.spec, decoder.grid(self.image)
        ids, _ = expand(self.token_ids, [grid], spec)
        ids = np.append(ids, self.watched[0])  # whatever follows the last token of the prompt
        positions = np.concatenate([np.arange(len(ids))[None], mrope_positions(ids, [grid], spec)])
        targets = np.full(len(self.watched), len(ids) - 1)  # each watched token is asked for at the same place
        zeros = np.zeros(len(targets), dtype=np.float32)
        episode = Episode(
            expanded=lambda: Expanded(ids, positions, targets),
            num_tokens=len(ids),
            images=(self.image,),
            behaviour_logprobs=zeros,
            versions=np.zeros(len(targets), dtype=np.int32),
            rewards=zeros,
            turn_end=np.ones(len(targets), dtype=bool),
            advantage=0.0,
        )
        watched = torch.tensor(self.watched)
        return dataclasses.replace(pack([episode], decoder, device), target_ids=watched, asked_ids=watched)


def image(spec: VisionSpec) -> Image:
    """Smooth bands of colour, no two patches alike, in the smallest square that is not resized."""
    unit = spec.patch_size * spec.merge_size
    side = unit * max(2, math.ceil(math.sqrt(spec.min_pixels) / unit))
    rows, columns = np.mgrid[:side, :side]
    waves = (np.sin(rows / 9), np.cos(columns / 13), np.sin((rows + columns) / 23))
    pixels = np.stack([127.5 + 127.5 * wave for wave in waves], axis=-1).astype(np.uint8)
    buffer = io.BytesIO()
    PILImage.fromarray(pixels).save(buffer, "PNG")
    return Image.of(buffer.getvalue())


def gap(own: list[float], theirs: list[float]) -> float:
    """The mean absolute difference; infinite if either holds what is no number."""
    value = sum(abs(a - b) for a, b in zip(own, theirs, strict=True)) / len(own)
    return value if math.isfinite(value) else math.inf
