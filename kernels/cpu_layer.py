"""The parts of a decoder layer that torch computes slowly on a CPU, in C: attention of single tokens to their cache,
norms, rotation, SwiGLU; float32, no gradient. The machine's C compiler (cc, gcc or clang) builds kernels/cpu when it
is first asked for, in four seconds; the library is kept in the user's cache folder.

Suffixes as there: N = tokens, H = query heads, K = key heads, D = head size, C = entries of a slot.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger("kernels")
MAX_HEAD, MAX_GROUP = 256, 32  # as in cpu/shared.h and cpu/attention.c
_FOLDER = Path(__file__).with_name("cpu")
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O2", "-ftree-vectorize", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros",
          "-fassociative-math")  # fmt: skip
_OF_MACHINE = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())
"""What a compiler may not know: the first that it takes is used. Without OpenMP one thread computes."""
_COMPILE_TIMEOUT_S = 120.0

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_PIECES = (_P, _I, _I, _I, _I, _I, _P, _I, _P, _P, _I, _I, _P, _I, _I, _F, _I)
_SIGNATURES = {
    "add_rms_norm": (_P, _P, _P, _F, _I, _I, _I, _P),
    "silu_mul": (_P, _P, _I, _I, _I, _I, _P),
    "rotate_and_store": (_P, _I, _I, _I, _I, _P, _F, _P, _P, _P, _I, _I, _P, _P),
    "rotate_heads": (_P, _I, _I, _I, _I, _P, _P, _I, _I),
    "attend_together": (_P, _I, _I, _I, _I, _I, _I, _I, _P, _I, _I, _P, _I, _I, _F, _I, _P),
    "attend": (_P, _I, _I, _I, _I, _I, _P, _P, _I, _P, _P, _F, _I, _P),
    "attend_pieces": (*_PIECES, _P, _P),
    "attend_pieces_backward": (*_PIECES, _P, _P, _P, _P, _P, _P),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or None where this machine has no compiler that builds them (one line of the log)."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        log.info("no C compiler (%s): decoding on the CPU is computed by torch alone, slower", ", ".join(_COMPILERS))
        return None
    try:
        found = ctypes.CDLL(str(_built(compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home
        log.warning("%s does not build kernels/cpu, torch computes instead, slower: %s", compiler, _line(error))
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None
    return found


def _built(compiler: str) -> Path:
    """The library for this source, compiler and processor; OSError or SubprocessError if it cannot be built."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = [line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))][:1]
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_TIMEOUT_S
    ).stdout
    sources = [path.read_bytes() for path in sorted(_FOLDER.glob("*.[ch]"))]
    parts = (*sources, version, platform.machine().encode(), *(line.encode() for line in flags))
    name = f"cpu_layer-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pronk"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = Path(work) / name
            _compile(compiler, made)
            os.replace(made, target)
    return target


def _compile(compiler: str, target: Path) -> None:
    for place, options in enumerate(_OF_MACHINE):
        command = [compiler, *_FLAGS, *options, *map(str, sorted(_FOLDER.glob("*.c"))), "-o", str(target), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
        if not done.returncode:
            return
        if place + 1 == len(_OF_MACHINE):
            raise subprocess.SubprocessError(done.stderr)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def fits(tensor: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Whether the functions below compute a layer of this shape on such tensors, here."""
    small = head_dim <= MAX_HEAD and head_dim % 8 == 0 and num_heads <= MAX_GROUP * num_kv_heads
    return small and tensor.device.type == "cpu" and tensor.dtype == torch.float32 and library() is not None


def add_rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Adds `delta` to `hidden` [..., width] in place; the RMS norm of the sum, times weight [width]."""
    normed = torch.empty_like(hidden)
    added = None if delta is None else delta.data_ptr()
    pointers = hidden.data_ptr(), added, weight.data_ptr()
    shape = hidden.numel() // len(weight), len(weight)
    _library().add_rms_norm(*pointers, eps, *shape, torch.get_num_threads(), normed.data_ptr())
    return normed


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of [N, width], whose rows are equally far apart in both; [N, width]."""
    out = gate.new_empty(gate.shape)
    pointers = gate.data_ptr(), up.data_ptr()
    _library().silu_mul(*pointers, gate.stride(0), *gate.shape, torch.get_num_threads(), out.data_ptr())
    return out


def rotate_and_store(
    heads: Tensor,
    norms: Tensor | None,
    eps: float,
    angles: tuple[Tensor, Tensor],
    entry: Tensor,
    cache: tuple[Tensor, Tensor],
) -> None:
    """Queries of `heads` [N, H + 2 K, D] are normed and turned in place, keys likewise and values into the cache.

    `norms`: weights [H + K, D] of the norms of queries and keys, None for a family without them; `angles`: cosine and
    sine [N, D]; `entry`: int64 [N], where a token's first head goes in the cache [slots, K, C, D] seen as
    [slots * K * C, D], -1 for a token that is not kept.
    """
    keys, values = cache
    num_kv, context, size = keys.shape[1:]
    n, num_all = heads.shape[:2]
    shape = n, num_all - 2 * num_kv, num_kv, size
    weights = None if norms is None else norms.data_ptr()
    where = angles[0].data_ptr(), angles[1].data_ptr(), entry.data_ptr(), context, torch.get_num_threads()
    _library().rotate_and_store(heads.data_ptr(), *shape, weights, eps, *where, keys.data_ptr(), values.data_ptr())


def rotate_heads(heads: Tensor, num_turned: int, angles: tuple[Tensor, Tensor]) -> None:
    """Turns the first `num_turned` heads of each token of `heads` [B, P, heads, D] in place; `angles`: cosine and sine
    of the P places, [P, D]."""
    cos, sin = angles
    batch, places, num_heads, size = heads.shape
    shape = batch * places, num_heads, num_turned, size
    where = cos.data_ptr(), sin.data_ptr(), places
    _library().rotate_heads(heads.data_ptr(), *shape, *where, torch.get_num_threads())


def attend(heads: Tensor, first: Tensor, length: Tensor, cache: tuple[Tensor, Tensor], out: Tensor) -> None:
    """Attention of the first R tokens of rotated `heads` [N, H + 2 K, D] to their slots, into `out` [N, H, D].

    Token r sees `length[r]` entries from `first[r]` on, both int64 [R], counted as in `rotate_and_store`.
    """
    keys, values = cache
    num_kv, context, size = keys.shape[1:]
    num_heads = heads.shape[1] - 2 * num_kv
    shape = heads.stride(0), len(first), num_heads, num_kv, size
    stored = keys.data_ptr(), values.data_ptr(), 1 / math.sqrt(size)
    seen = first.data_ptr(), length.data_ptr(), context
    _library().attend(heads.data_ptr(), *shape, *seen, *stored, torch.get_num_threads(), out.data_ptr())


def attend_causally(heads: Tensor, slot: int, past: int, cache: tuple[Tensor, Tensor], out: Tensor) -> None:
    """Attention of the tokens of one sequence, rotated `heads` [N, H + 2 K, D], to what is in its slot: `past` others
    and themselves, each to its own end; into `out` [N, H, D]."""
    keys, values = (stored[slot].transpose(0, 1) for stored in cache)
    _attend_together(heads, keys, values, (past + 1, 1), 1 / math.sqrt(heads.shape[2]), out)


def attend_all(heads: Tensor, scale: float) -> Tensor:
    """Attention of each of an image's patches to all of them: `heads` [P, 3 H, D], queries, keys and values, rotated;
    [P, H * D]."""
    query, keys, values = heads.chunk(3, dim=1)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    _attend_together(query, keys, values, (len(heads), 0), scale, out)
    return out.flatten(1)


def _attend_together(
    query: Tensor, keys: Tensor, values: Tensor, seen: tuple[int, int], scale: float, out: Tensor
) -> None:
    """query [N, H or more, D], keys and values [at least as many as are seen, K, D], out [N, H, D]. `seen`: by the
    first token, and how many more by each next one."""
    shape = query.stride(0), *out.shape[:2], keys.shape[1], out.shape[2]
    stored = keys.data_ptr(), *keys.stride()[:2], values.data_ptr(), *values.stride()[:2]
    threads = torch.get_num_threads()
    _library().attend_together(query.data_ptr(), *shape, *seen, *stored, scale, threads, out.data_ptr())


def _library() -> ctypes.CDLL:
    found = library()
    assert found is not None, "ask fits() first"
    return found
