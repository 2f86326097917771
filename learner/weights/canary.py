"""The canary: a fixed prompt, with an image if the model takes any, and fixed tokens after it whose logprobs an engine
must compute as the learner does.

The tolerance for the difference is measured during the run, because nobody knows the noise beforehand: it depends on
the model, the dtype and the kernels. The first verification is judged by its checksums and by a ceiling for the dtype;
every later one by a multiple of the largest gap that has passed. If the noise grows with the weights, the tolerance
grows with it; weights that are not the learner's cause a larger gap at once.
"""

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

from learner.batch.episodes import Document, ExpandedTokens, TrainingEpisode
from learner.batch.image_decoder import ImageDecoder
from learner.batch.microbatch import Microbatch
from learner.batch.packer import pack
from learner.model.policy import Policy
from shared.types import Image
from shared.vision import VisionSpec, expand

NUM_WATCHED = 16
QUESTION = "Which colour?"
PICTURED = [{"type": "text", "text": QUESTION}, {"type": "image"}]
CEILING = {torch.float32: 1e-3, torch.bfloat16: 0.5}  # neighbouring bfloat16 values between 16 and 32 are 0.125 apart
# same limits as the alarm on publish/canary_gap: a gap below them is no fault
FLOOR = {torch.float32: 1e-4, torch.bfloat16: 0.05}
NOISE_MULTIPLE = 5.0
"""The gap is a mean of 16 errors that share one error, the normaliser's, so the largest of a few gaps says little more
than the scale of the noise: five times that is a chance of one in a million, if errors are normal, and still far below
the ceiling."""


class Canary:
    """The canary prompt and its watched tokens, which are spread over the vocabulary.

    The logprob of each watched token as the first generated token is compared.
    """

    def __init__(self, policy: Policy, model_path: str, device: torch.device) -> None:
        self._policy = policy
        tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        messages = [{"role": "user", "content": PICTURED if policy.spec.takes_images else QUESTION}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        self.token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        self.images = (canary_image(policy.spec),) if policy.spec.takes_images else ()
        allowed = np.setdiff1d(np.arange(policy.vlm.config.get_text_config().vocab_size), policy.banned_ids)
        self.watched = [int(allowed[i]) for i in np.linspace(0, len(allowed) - 1, NUM_WATCHED).round().astype(int)]
        self._batch = self._pack(ImageDecoder(policy.spec), device)

    @torch.no_grad()
    def expected_logprobs(self) -> list[float]:
        """Compute the learner's logprobs of the watched tokens, at temperature 1. A collective if the policy is
        sharded."""
        logprobs = self._policy(self._batch, 1.0).logprobs
        if isinstance(self._policy, FSDPModule):
            self._policy.reshard()  # no backward follows that would do it
        return [float(value) for value in logprobs]

    def _pack(self, decoder: ImageDecoder, device: torch.device) -> Microbatch:
        spec, grids = self._policy.spec, tuple(decoder.grid(image) for image in self.images)
        ids, _ = expand(self.token_ids, grids, spec)
        ids = np.append(ids, self.watched[0])  # the prompt's last token needs a successor; any token will do
        positions = np.concatenate([np.arange(len(ids))[None], spec.position_ids(ids, grids)])
        targets = np.full(len(self.watched), len(ids) - 1)  # all watched tokens are targets at the same position
        zeros = np.zeros(len(targets), dtype=np.float32)
        episode = TrainingEpisode(
            expanded=lambda: ExpandedTokens(ids, positions, targets),
            documents=(Document(len(ids), len(targets), 1),),
            images=self.images,
            grids=grids,
            behaviour_logprobs=zeros,
            versions=np.zeros(len(targets), dtype=np.int32),
            rewards=zeros,
            turn_end=np.ones(len(targets), dtype=bool),
            advantage=0.0,
        )
        watched = torch.tensor(self.watched)
        return dataclasses.replace(pack([episode], decoder, device), target_ids=watched, asked_ids=watched)


def canary_image(spec: VisionSpec) -> Image:
    """Draw smooth bands of colour, no two patches alike, in the smallest square that is not resized."""
    unit = spec.patch_size * spec.merge_size
    side = unit * max(2, math.ceil(math.sqrt(spec.min_pixels) / unit))
    rows, columns = np.mgrid[:side, :side]
    waves = (np.sin(rows / 9), np.cos(columns / 13), np.sin((rows + columns) / 23))
    pixels = np.stack([127.5 + 127.5 * wave for wave in waves], axis=-1).astype(np.uint8)
    buffer = io.BytesIO()
    PILImage.fromarray(pixels).save(buffer, "PNG")
    return Image.of(buffer.getvalue())


def gap(expected: list[float], answered: list[float]) -> float:
    """Return the mean absolute difference; infinity if either list holds a NaN or an infinity."""
    value = sum(abs(a - b) for a, b in zip(expected, answered, strict=True)) / len(expected)
    return value if math.isfinite(value) else math.inf


class CanaryTolerance:
    """The largest gap that is accepted, for each kind of engine (`ServerInfo.kind`), because kinds differ in their
    noise."""

    def __init__(self, dtype: torch.dtype, fixed: float = 0.0, *, has_experts: bool = False) -> None:
        """Start with the ceiling as the tolerance of every kind.

        If `fixed` is not 0, it is the tolerance throughout. For a model with experts in a dtype other than float32 the
        tolerance stays at the ceiling: rounding can route a token to another expert, which makes the gap jump although
        the weights are right.
        """
        self.ceiling = CEILING[dtype]
        self._fixed = fixed
        self._floor = self.ceiling if has_experts and dtype != torch.float32 else FLOOR[dtype]
        self._noise: dict[str, float] = {}

    def limit(self, kind: str) -> float:
        """Return the largest gap that the next verification of an engine of this kind may have."""
        if self._fixed:
            return self._fixed
        if kind not in self._noise:
            return self.ceiling
        return min(max(NOISE_MULTIPLE * self._noise[kind], self._floor), self.ceiling)

    def record_passed(self, kind: str, gap: float) -> None:
        """Record the gap of a verification that found nothing wrong."""
        self._noise[kind] = max(gap, self._noise.get(kind, 0.0))
