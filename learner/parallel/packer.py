"""Episodes of an update -> the microbatches of this rank, or of the ranks that share them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from learner.batch import Episode, Microbatch, empty_microbatch, pack_on_host, shortest_first
from learner.distributed import Ranks
from learner.images import ImageDecoder
from learner.metrics.balance import Load
from learner.microbatches import plan, plan_together
from learner.model.sizes import ModelSizes
from learner.packing.ahead import ahead
from learner.packing.pictures import deal_images
from learner.packing.place import on, pinned
from learner.parallel.delivery import Delivery
from shared.learner_config import LearnerConfig
from shared.types import Image


class Packer:
    """Plans and packs, the same on every rank; ranks of one context group have the same microbatches."""

    def __init__(
        self,
        config: LearnerConfig,
        ranks: Ranks,
        decoder: ImageDecoder,
        sizes: ModelSizes | None,
        banned_ids: Sequence[int],
    ) -> None:
        """`sizes`: None for a model whose sizes are not known. `banned_ids`: those of no text."""
        self.config = config
        self.ranks = ranks
        self.decoder = decoder
        self.delivery = Delivery(ranks, decoder)
        self._sizes = sizes
        self._last: list[list[int]] = []  # of each context group's microbatches, as planned last
        self._harmless_id = next(i for i in range(len(banned_ids) + 1) if i not in banned_ids)

    def plan(self, episodes: list[Episode]) -> list[list[int]]:
        """This rank's microbatches, whose images come to it from rank 0: a collective. Episodes whose loss is exactly 0
        take no part; the token count still has them."""
        useful = list(range(len(episodes)))
        config, objective, context = self.config, self.config.objective, self.ranks.context
        if objective.group_relative and objective.entropy_coef == 0 and not objective.has_reference:
            useful = [i for i in useful if episodes[i].advantage != 0.0]
        self._last = []
        if not useful:
            return []  # on every rank
        lengths = [episodes[i].num_tokens for i in useful]
        place = plan if config.group_size == 1 else plan_together
        budget = config.parallel.microbatch_tokens * context.size
        costs = self._costs([episodes[i] for i in useful])
        of_all = [
            [[useful[i] for i in chosen] for chosen in bins]
            for bins in place(lengths, self.ranks.size // context.size, budget, costs)
        ]
        self._bring([[[episodes[i] for i in chosen] for chosen in bins] for bins in of_all])
        self._last = [bins[-1] for bins in of_all]
        return of_all[self.ranks.rank // context.size]

    def _bring(self, microbatches: list[list[list[Episode]]]) -> None:
        """Of each context group. A collective."""
        self.delivery.bring(partial(self._images, microbatches))

    def _images(self, microbatches: list[list[list[Episode]]], rank: int) -> dict[str, Image]:
        """What a rank decodes of its microbatches, by content hash."""
        size = self.ranks.context.size
        found: dict[str, Image] = {}
        for chosen in microbatches[rank // size]:
            shown = [e.images for e in shortest_first(chosen)]
            found |= {image.content_hash: image for image in deal_images(shown, self.decoder, size)[0][rank % size]}
        return found

    def _costs(self, episodes: list[Episode]) -> list[float] | None:
        """Operations of each: attention grows with the square of its length; an image counts where it is seen first."""
        if self._sizes is None:
            return None
        seen: set[str] = set()
        costs = []
        for episode in episodes:
            new = {image.content_hash: image for image in episode.images if image.content_hash not in seen}
            seen |= new.keys()
            patches = [math.prod(self.decoder.grid(image)) for image in new.values()]
            costs.append(self._sizes.forward_flops((episode.num_tokens,), patches, episode.num_sampled))
        return costs

    def pack(self, episodes: list[Episode]) -> Microbatch:
        """On the host, from where a GPU can copy it; a stand-in of no weight where there are none."""
        if self.ranks.device.type != "cuda":
            return self._pack(episodes)
        with torch.cuda.device(self.ranks.device):  # a thread begins with the first GPU, which may be another rank's
            return pinned(self._pack(episodes, pin=True))

    def _pack(self, episodes: list[Episode], *, pin: bool = False) -> Microbatch:
        context, share_prefixes = self.ranks.context, self.config.parallel.share_prefixes
        if not episodes:
            return empty_microbatch(self.decoder, self._harmless_id, context)
        return pack_on_host(episodes, self.decoder, context, share_prefixes=share_prefixes, pin=pin)

    def packed(self, episodes: list[Episode]) -> Microbatch:
        """On the device."""
        return on(self.pack(episodes), self.ranks.device)

    def parts_of_last(self, episodes: Sequence[Episode]) -> list[list[Episode]] | None:
        """Of the last microbatch of each context group a quarter, by episodes, as planned last; None where none has
        any."""
        quarters = (last[: -(-len(last) // 4)] for last in self._last)
        return [[episodes[i] for i in chosen] for chosen in quarters] or None

    def packed_part(self, parts: list[list[Episode]]) -> Microbatch:
        """This rank's, on the device. A collective: ranks that share a part deal its images among them otherwise than
        those of the whole."""
        self._bring([[part] for part in parts])
        return self.packed(parts[self.ranks.rank // self.ranks.context.size])

    @contextmanager
    def batches(self, episodes: Sequence[Episode], microbatches: list[list[int]]) -> Iterator[Iterator[Microbatch]]:
        """Of these episodes, on the device: while one is computed, a thread packs the next."""
        with ahead(lambda chosen: self.pack([episodes[i] for i in chosen]), microbatches) as packed:
            yield (on(batch, self.ranks.device) for batch in packed)

    def load(self, batch: Microbatch) -> Load:
        """This rank's."""
        if batch.empty:
            return Load(0, 0.0)
        share, tokens, rows = batch.share, batch.input_ids.shape[1], batch.num_tokens
        pairs, shared = sum(n * (n + 1) // 2 for n in batch.lengths), 0
        if (prefixes := batch.packing.prefixes) is not None:
            pairs, shared = pairs - prefixes.saved_pairs, sum(batch.lengths) - tokens
        if share is not None:
            pairs, rows = sum(chunk.pairs for chunk in share.chunks), share.num_own
        flops = 0.0 if self._sizes is None else 3 * self._sizes.part_flops(tokens, pairs, batch.image_lengths, rows)
        return Load(tokens, flops, shared)
