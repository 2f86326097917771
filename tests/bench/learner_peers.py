"""What the learner's step is compared with: a padded loop of transformers, and TRL's GRPOTrainer.

Both take their batches collated beforehand: pixel values, token ids and masks are made outside of what is timed.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer

from learner.batch.episodes import TrainingEpisode as Episode
from learner.batch.image_decoder import ImageDecoder
from shared.vision import pixel_values

BATCH = 8
LR, CLIP_LOW, CLIP_HIGH, MAX_NORM = 1e-6, 0.2, 0.28, 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """A batch of B episodes, padded on the right to L tokens; every image of every episode stands for itself."""

    inputs: dict[str, Tensor]  # what the model takes
    mask: Tensor  # float32 [B,L], 1 where the token was sampled
    behaviour_logprobs: Tensor  # float32 [B,L]
    advantages: Tensor  # float32 [B]
    num_images: list[int]


def padded(batch: Sequence[Episode], decoder: ImageDecoder, longest: int = 0) -> Padded:
    """To the longest episode of the batch, or to `longest` tokens."""
    spec, longest = decoder.spec, longest or max(e.num_tokens for e in batch)
    ids, attention = np.zeros((2, len(batch), longest), dtype=np.int64)
    mask, behaviour = np.zeros((2, len(batch), longest), dtype=np.float32)
    for row, e in enumerate(batch):
        expanded = e.expanded()
        ids[row, : e.num_tokens], attention[row, : e.num_tokens] = expanded.input_ids, 1
        mask[row, expanded.targets], behaviour[row, expanded.targets] = 1, e.behaviour_logprobs
    images = [decoder.get(image) for e in batch for image in e.images]
    inputs = {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(attention),
        "mm_token_type_ids": torch.from_numpy((ids == spec.image_token_id).astype(np.int64)),
        "pixel_values": torch.from_numpy(np.concatenate([pixel_values(p.patches, spec) for p in images])),
        "image_grid_thw": torch.tensor([p.grid for p in images]),
    }
    advantages = torch.tensor([e.advantage for e in batch], dtype=torch.float32)
    counts = [len(e.images) for e in batch]
    return Padded(inputs, torch.from_numpy(mask), torch.from_numpy(behaviour), advantages, counts)


class PaddedLoop:
    """Padded batches through transformers' own forward, its default attention, and AdamW.

    A plain loop computes the logits of all positions, takes batches in the order of arrival and pads each to its
    longest episode. `kept_logits` computes the logits from the first sampled token on alone, `by_length` sorts the
    episodes first, and with `context` every batch is padded to so many tokens, as verl's are by default: see
    docs/figures/learner.md.
    """

    def __init__(
        self,
        path: str,
        episodes: list[Episode],
        decoder: ImageDecoder,
        *,
        kept_logits: bool = False,
        by_length: bool = False,
        context: int = 0,
    ) -> None:
        if by_length:
            episodes = sorted(episodes, key=lambda e: e.num_tokens)
        self.kept_logits = kept_logits
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)
        self.batches = [padded(episodes[i : i + BATCH], decoder, context) for i in range(0, len(episodes), BATCH)]
        self.num_tokens = sum(float(batch.mask.sum()) for batch in self.batches)

    def step(self) -> float:
        """The gradient's norm."""
        self.optimizer.zero_grad()
        for batch in self.batches:
            (self._loss(batch) / self.num_tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return float(norm)

    def _loss(self, batch: Padded) -> Tensor:
        first = int(batch.mask.any(0).nonzero()[0])
        keep = batch.mask.shape[1] - first + 1 if self.kept_logits else 0  # 0 = all
        logits = self.model(**batch.inputs, logits_to_keep=keep, use_cache=False).logits[:, :-1]
        span = slice(-logits.shape[1], None)
        logprobs = logits.log_softmax(-1).gather(-1, batch.inputs["input_ids"][:, span, None])[..., 0]
        mask, advantages = batch.mask[:, span], batch.advantages[:, None]
        ratio = ((logprobs - batch.behaviour_logprobs[:, span]) * mask).exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        return -(torch.minimum(ratio * advantages, clipped * advantages) * mask).sum()


class TrlLoop:
    """TRL's GRPOTrainer, from collated batches to the end of the optimizer's step.

    Timed: for each of the gradient-accumulation steps its `compute_loss` (which calls `_compute_loss` and
    `_get_per_token_logps_and_entropies`, with its metrics) and accelerate's backward, then the clipping and the
    optimizer's step. Not timed: generation, rewards and collation. As its trainer does, prompts are padded on the left
    and completions on the right to the longest of the whole generation batch, and the tokens that the environment wrote
    are left out by `tool_mask`. Its defaults but for float32 on the CPU and, in its favour, no gradient checkpointing.
    """

    def __init__(self, path: str, episodes: list[Episode], decoder: ImageDecoder, group_size: int) -> None:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        settings: dict[str, Any] = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": []}
        settings |= {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": len(episodes) // BATCH}
        settings |= {"num_generations": group_size, "learning_rate": LR, "max_grad_norm": MAX_NORM}
        settings |= {"epsilon": CLIP_LOW, "epsilon_high": CLIP_HIGH}
        with contextlib.redirect_stdout(io.StringIO()):
            self.trainer = GRPOTrainer(
                model=AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32),
                reward_funcs=lambda **_: [0.0],
                args=GRPOConfig(output_dir=tempfile.mkdtemp(), **settings),
                train_dataset=Dataset.from_list([{"prompt": "x"}] * len(episodes)),
                processing_class=AutoTokenizer.from_pretrained(path),
            )
        self.trainer.model.train()
        self.trainer.create_optimizer()
        self.trainer.current_gradient_accumulation_steps = settings["gradient_accumulation_steps"]
        self.batches = self._batches(episodes, decoder)

    def _batches(self, episodes: list[Episode], decoder: ImageDecoder) -> list[dict[str, Any]]:
        starts = [int(e.expanded().targets[0]) for e in episodes]
        prompt = max(starts)
        longest = max(e.num_tokens - first for e, first in zip(episodes, starts, strict=True))
        num_tokens = torch.tensor(float(sum(e.num_sampled for e in episodes)))
        batches = []
        for start in range(0, len(episodes), BATCH):
            batch = episodes[start : start + BATCH]
            firsts = starts[start : start + BATCH]
            flat = padded(batch, decoder, prompt + longest)
            moved = {
                name: torch.stack([row.roll(prompt - first) for row, first in zip(tensor, firsts, strict=True)])
                for name, tensor in (*flat.inputs.items(), ("mask", flat.mask), ("old", flat.behaviour_logprobs))
                if tensor.shape[:2] == flat.mask.shape
            }
            batches.append(
                {
                    "prompt_ids": moved["input_ids"][:, :prompt],
                    "prompt_mask": moved["attention_mask"][:, :prompt],
                    "completion_ids": moved["input_ids"][:, prompt:],
                    "completion_mask": moved["attention_mask"][:, prompt:],
                    "tool_mask": moved["mask"][:, prompt:],
                    "old_per_token_logps": moved["old"][:, prompt:],
                    "mm_token_type_ids": moved["mm_token_type_ids"],
                    "pixel_values": flat.inputs["pixel_values"],
                    "image_grid_thw": flat.inputs["image_grid_thw"],
                    "num_images": flat.num_images,
                    "advantages": flat.advantages,
                    "num_items_in_batch": num_tokens,
                }
            )
        return batches

    def step(self) -> float:
        """The gradient's norm."""
        trainer = self.trainer
        trainer.optimizer.zero_grad()
        for batch in self.batches:
            trainer.accelerator.backward(trainer.compute_loss(trainer.model, batch))
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), MAX_NORM)
        trainer.optimizer.step()
        return float(norm)
