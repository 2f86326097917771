"""Packing of episodes into this rank's microbatch, or into its shard of one.

Shape suffixes: T = tokens of the microbatch, N = its sampled tokens, M = its visual tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from learner.batch.context_shard import divide, filled
from learner.batch.distinct_images import load_images
from learner.batch.episodes import Document, ExpandedTokens, TrainingEpisode, shortest_first
from learner.batch.image_decoder import ImageDecoder
from learner.batch.microbatch import Microbatch, WholeEpisodes
from learner.batch.packing import packing_of
from learner.batch.shared_prefixes import computed_part, find_prefixes
from learner.batch.to_device import on, pinned
from learner.batch.vision_inputs import tower_inputs
from learner.distributed import ALONE, Context


@dataclass(eq=False)
class Packer:
    """Packs episodes for one rank, on the host; a thread can do it while a device computes."""

    decoder: ImageDecoder
    banned_ids: Sequence[int]  # ids that never occur in text
    device: torch.device
    context: Context = ALONE
    share_prefixes: bool = True

    def pack(self, episodes: Sequence[TrainingEpisode]) -> Microbatch:
        """Return episodes as a microbatch on the host, in memory from which a GPU can copy; a stand-in with loss 0 for
        no episodes."""
        if self.device.type != "cuda":
            return self._pack(episodes)
        with torch.cuda.device(self.device):  # a new thread uses the first GPU, which may belong to another rank
            return pinned(self._pack(episodes, pin=True))

    def _pack(self, episodes: Sequence[TrainingEpisode], *, pin: bool = False) -> Microbatch:
        if not episodes:
            harmless_id = next(i for i in range(len(self.banned_ids) + 1) if i not in self.banned_ids)
            return empty_microbatch(self.decoder, harmless_id, self.context)
        return pack_on_host(episodes, self.decoder, self.context, share_prefixes=self.share_prefixes, pin=pin)


def pack(
    episodes: Sequence[TrainingEpisode],
    decoder: ImageDecoder,
    device: torch.device,
    context: Context = ALONE,
    **options: bool,
) -> Microbatch:
    """Return episodes as one microbatch on `device`. `options`: those of `pack_on_host`."""
    return on(pack_on_host(episodes, decoder, context, **options), device)


def pack_on_host(
    episodes: Sequence[TrainingEpisode],
    decoder: ImageDecoder,
    context: Context = ALONE,
    *,
    share_prefixes: bool = True,
    pin: bool = False,
) -> Microbatch:
    """Return episodes, shortest first, as one microbatch or as this rank's shard of it, without using a device.

    Only this rank's images are decoded. `share_prefixes`: equal first tokens of a group's episodes are computed once,
    unless ranks share the microbatch. `pin`: patches are put into pinned memory.
    """
    episodes = shortest_first(episodes)
    arrays = _stream(episodes, decoder.spec.image_token_id)
    lengths, predictors = tuple(d.num_tokens for e in episodes for d in e.documents), arrays["predictors"]
    images = load_images([e.images for e in episodes], decoder, context, pin=pin)
    arrays["visual_rows"] = images.rows_M
    arrays["readable"] = np.repeat(images.readable, [e.num_sampled for e in episodes])
    shard, own, prefixes = None, None, None
    if context.size > 1:
        arrays, lengths = filled(arrays, lengths, context.size)
        arrays, shard = divide(arrays, lengths, images.visual_tokens, context)
        own = shard.positions.numpy()
        predictors = own[arrays["predictors"]]
    elif share_prefixes:
        prefixes = find_prefixes(arrays, lengths, [e.group for e in episodes for _ in e.documents])
        if prefixes is not None:
            arrays, own = arrays | computed_part(arrays, prefixes), prefixes.positions.numpy()
    return Microbatch(
        patches=images.patches,
        lengths=lengths,
        tower=tower_inputs(images.grids, decoder.spec),
        packing=packing_of(
            lengths,
            causal=True,
            shard=shard,
            own=own,
            asked=predictors,
            prefixes=prefixes,
            recurrent=decoder.spec.family.is_recurrent,
        ),
        image_lengths=images.lengths,
        sampled=tuple(e.num_sampled for e in episodes),
        empty=False,
        indices=tuple(e.index for e in episodes),
        firsts=tuple(e.first for e in episodes),
        whole=_whole_episodes(episodes) if any(e.whole is not None for e in episodes) else None,
        shard=shard,
        **{name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()},
    )


def _stream(episodes: Sequence[TrainingEpisode], image_token_id: int) -> dict[str, np.ndarray]:
    """Return a microbatch's arrays, except those of its images, for whole episodes, one after another."""
    expanded = [e.expanded() for e in episodes]
    counts = np.array([e.num_sampled for e in episodes])
    of_episodes = np.array([(e.whole or e).num_sampled for e in episodes], dtype=np.float32)
    starts = np.cumsum([0, *(e.num_tokens for e in episodes)])
    targets = np.concatenate([e.targets + start for e, start in zip(expanded, starts, strict=False)])
    input_ids = np.concatenate([e.input_ids for e in expanded])
    advantages = np.repeat(np.array([e.advantage for e in episodes], dtype=np.float32), counts)
    if any(e.turn_advantages is not None for e in episodes):
        advantages = advantages + turn_advantages_of(episodes)
    arrays = {
        "input_ids": input_ids[None],
        "position_ids": np.concatenate([e.position_ids for e in expanded], axis=1)[:, None],
        "visual_positions": np.flatnonzero(input_ids == image_token_id),
        "predictors": targets - 1,
        "target_ids": input_ids[targets],
        "asked_ids": input_ids[targets],
        "episode_end": _ends(counts),
        "advantages": advantages,
        "episode_tokens": np.repeat(of_episodes, counts),
    }
    return arrays | _token_columns(episodes)


def turn_advantages_of(episodes: Sequence[TrainingEpisode]) -> np.ndarray:
    """Return what turns add to the advantages of the episodes' sampled tokens, float32 [N]."""
    parts = (np.zeros(e.num_sampled, np.float32) if e.turn_advantages is None else e.turn_advantages for e in episodes)
    return np.concatenate(list(parts))


def _token_columns(episodes: Sequence[TrainingEpisode]) -> dict[str, np.ndarray]:
    names = ("behaviour_logprobs", "versions", "rewards", "turn_end")
    return {name: np.concatenate([getattr(e, name) for e in episodes]) for name in names}


def _ends(counts: np.ndarray) -> np.ndarray:
    """Return bool [sum of counts], true at the last token of each episode."""
    ends = np.zeros(counts.sum(), dtype=bool)
    ends[counts.cumsum() - 1] = True
    return ends


def _whole_episodes(episodes: Sequence[TrainingEpisode]) -> WholeEpisodes:
    """Return the columns of the episodes of which some are pieces."""
    whole = [e.whole or e for e in episodes]
    counts = np.array([e.num_sampled for e in whole])
    starts = np.cumsum(counts) - counts
    own = [start + e.first + np.arange(e.num_sampled) for start, e in zip(starts, episodes, strict=True)]
    columns = _token_columns(whole) | {"episode_end": _ends(counts), "own": np.concatenate(own)}
    return WholeEpisodes(sampled=tuple(counts.tolist()), **{name: torch.from_numpy(a) for name, a in columns.items()})


def empty_microbatch(decoder: ImageDecoder, token_id: int, context: Context = ALONE) -> Microbatch:
    """Return a stand-in of two tokens, on the host. With it, a rank without episodes runs the same collectives; its
    loss counts 0."""
    ids = np.full(2, token_id, dtype=np.int64)
    episode = TrainingEpisode(
        expanded=lambda: ExpandedTokens(ids, np.tile(np.arange(2), (4, 1)), np.array([1])),
        documents=(Document(2, 1),),
        images=(),
        grids=(),
        behaviour_logprobs=np.zeros(1, dtype=np.float32),
        versions=np.zeros(1, dtype=np.int32),
        rewards=np.zeros(1, dtype=np.float32),
        turn_end=np.ones(1, dtype=bool),
        advantage=0.0,
    )
    return replace(pack_on_host([episode], decoder, context), empty=True)
