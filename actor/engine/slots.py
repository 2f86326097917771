"""Keeps track of the tokens in each slot of the KV cache, for reuse between the turns of an episode.

A sequence is represented by a stream of keys: the token id, or -(content hash) at the visual tokens of an image, so
that equal keys mean equal inputs. A slot's keys are exactly those of the tokens whose K and V it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIN_COPIED_PREFIX = 16


@dataclass(frozen=True, slots=True)
class Placement:
    """The slot for a sequence: its first `reused` entries can be reused, after copying them from slot `donor` (-1 =
    already there)."""

    slot: int
    reused: int
    donor: int = -1


class SlotTable:
    """The bookkeeping of the cache's slots; it holds no tensors. `only_whole`: a slot's content can be continued, but
    no part of it be reused, as its states are those after its last token."""

    def __init__(self, num_slots: int, max_context: int, *, only_whole: bool = False) -> None:
        self.only_whole = only_whole
        self.keys = np.zeros((num_slots, max_context), dtype=np.int64)
        self.lengths = np.zeros(num_slots, dtype=np.int64)
        self.busy = np.zeros(num_slots, dtype=bool)
        self._version = np.zeros(num_slots, dtype=np.int64)  # generation of the weights of the oldest entry
        self._answered = np.zeros(num_slots, dtype=bool)  # holds sampled tokens, so it belongs to one episode
        self._last_used = np.zeros(num_slots, dtype=np.int64)
        self._doomed = np.zeros(num_slots, dtype=bool)  # to be flushed as soon as it is idle
        self._clock = 0

    def place(self, keys: np.ndarray, generation: int) -> Placement | None:
        """Find a slot for the stream `keys` int64[E] and mark it busy; return None if all are busy.
        Preferred is an idle slot whose whole content is a prefix of the stream. If older weights have computed it, it
        is used only if it holds sampled tokens, since then it belongs to the same episode. Otherwise take the least
        recently used slot, with the longest common prefix copied from any slot that the present weights have computed
        entirely. At least the last key is always left to compute.
        """
        idle = np.flatnonzero(~self.busy)
        if not len(idle):
            return None
        usable = len(keys) - 1
        differs = self.keys[:, :usable] != keys[None, :usable]
        common = (
            np.where(differs.any(axis=1), differs.argmax(axis=1), usable) if usable else np.zeros_like(self.lengths)
        )
        common = np.minimum(common, self.lengths)
        complete = idle[(common[idle] == self.lengths[idle]) & (self.lengths[idle] > 0)]
        complete = complete[self._answered[complete] | (self._version[complete] == generation)]
        if len(complete):
            slot = int(complete[common[complete].argmax()])
            return self._take(slot, int(common[slot]), -1, int(self._version[slot]))
        slot = int(idle[np.where(self.lengths[idle] > 0, self._last_used[idle], -1).argmin()])
        donors = np.where((self._version == generation) & ~self._doomed, common, 0)
        donor = int(donors.argmax())
        reused = int(donors[donor])
        if self.only_whole or reused < MIN_COPIED_PREFIX:
            return self._take(slot, 0, -1, generation)
        return self._take(slot, reused, -1 if donor == slot else donor, generation)

    def _take(self, slot: int, reused: int, donor: int, version: int) -> Placement:
        self.busy[slot] = True
        self._doomed[slot] = self._answered[slot] = False
        if donor >= 0:
            self.keys[slot, :reused] = self.keys[donor, :reused]
        self.lengths[slot] = reused
        self._version[slot] = version
        return Placement(slot, reused, donor)

    def shorten(self, slot: int, length: int) -> None:
        self.lengths[slot] = min(length, self.lengths[slot])

    def append(self, slot: int, keys: np.ndarray) -> None:
        """Record that the K and V of these keys are now in the slot."""
        start = self.lengths[slot]
        self.keys[slot, start : start + len(keys)] = keys
        self.lengths[slot] = start + len(keys)

    def release(self, slot: int, *, answered: bool = False, keep: bool = True) -> None:
        """Mark the slot idle; its content stays for reuse, unless `keep` is false or the slot was flushed meanwhile.
        `answered`: the content includes sampled tokens."""
        self._clock += 1
        self.busy[slot], self._answered[slot] = False, answered
        self._last_used[slot] = self._clock
        if not keep or self._doomed[slot]:
            self.lengths[slot] = 0
            self._doomed[slot] = False

    def flush(self) -> int:
        """Empty all idle slots now, and the busy ones as soon as they are idle; return the number of busy ones."""
        self.lengths[~self.busy] = 0
        self._doomed |= self.busy
        return int(self.busy.sum())
