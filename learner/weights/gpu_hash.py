"""The 64-bit hash that SGLang's server computes of a parameter on a GPU (its `gpu_tensor_hash`), in plain torch.

The bytes, filled up with zeros, are 32-bit words. Each word is mixed with its index, twice, from two seeds; the results
are added up over each tile, mixed again with the parameter's size, and joined to 64 bits; those are added up over all
tiles. All of it is arithmetic modulo 2^32 or 2^64, for which integers that wrap around serve.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_BYTES = 2**33  # the server's kernels count words in 32 bits
TILE = 8192  # words
_SPAN = 256 * TILE  # words at once: what is computed of them takes about 50 MB
_SEEDS = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_FACTORS, _TURNS = (0x27D4EB2D, 0x165667B1), (15, 13)  # of a word's index
_MASK = 2**64 - 1


@torch.no_grad()
def gpu_hash(values: Tensor) -> str:
    """The hash as 16 digits, of `values` of any dtype and shape, on any device, of less than MAX_BYTES. Memory
    beside them: one copy where they are not contiguous, and a bounded amount."""
    data = values.contiguous().reshape(-1).view(torch.uint8)
    size = len(data) + -len(data) % 4
    total, whole = 0, len(data) - len(data) % 4
    for begin in range(0, size, 4 * _SPAN):
        part = data[begin : begin + 4 * _SPAN]
        if begin + len(part) > whole:
            part = torch.nn.functional.pad(part, (0, -len(part) % 4))
        total += _of_tiles(part if part.storage_offset() % 4 == 0 else part.clone(), begin // 4, size)
    return f"{_finished(total & _MASK):016x}" if size else f"{0:016x}"


def _of_tiles(data: Tensor, first: int, num_bytes: int) -> int:
    """The sum of the hashes of the tiles in `data`, whose first word is the parameter's word `first`."""
    words = data.view(torch.int32)
    filled = -len(words) % TILE
    index = torch.arange(first, first + len(words), dtype=torch.int32, device=data.device)
    halves = []
    for seed, factor, turn in zip(_SEEDS, _FACTORS, _TURNS, strict=True):
        mixed = (index * _signed(factor)).add_(_signed(seed))
        mixed ^= (index << turn) | _shifted(index, 32 - turn)
        mixed = torch.nn.functional.pad(_mix(mixed.bitwise_xor_(words)), (0, filled))
        sums = mixed.view(-1, TILE).sum(1).to(torch.int32)  # of int64, cut to 32 bits
        halves.append(_mix(sums ^ _signed(num_bytes)).to(torch.int64) & 0xFFFFFFFF)
    high, low = (int(half.sum()) for half in halves)
    return (high << 32) + low


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's last step, in place: int32 of any shape."""
    x ^= _shifted(x, 16)
    x *= _signed(0x85EBCA6B)
    x ^= _shifted(x, 13)
    x *= _signed(0xC2B2AE35)
    x ^= _shifted(x, 16)
    return x


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, as if without a sign."""
    return (x >> by) & (0xFFFFFFFF >> by)


def _signed(value: int) -> int:
    """The int32 with the same low 32 bits."""
    return ((value + 2**31) & 0xFFFFFFFF) - 2**31


def _finished(x: int) -> int:
    """SplitMix64's last step."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
