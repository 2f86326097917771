"""The C functions of this folder, compiled on the machine on which they run.

The machine's C compiler (cc, gcc or clang) builds them at their first use, in about fifteen seconds; the library is
stored in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

log = logging.getLogger("kernels")
MAX_HEAD, MAX_GROUP = 256, 32  # same values as in shared.h and cached_attention.c
_FOLDER = Path(__file__).parent
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")
_WIDE = "-mprefer-vector-width=512"  # on x86, compilers use half of that by default
_OF_MACHINE = (
    ("-march=native", _WIDE, "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-march=native",),
    ("-mcpu=native",),
    (),
)
"""What a compiler may not know: the first that it accepts is used. Without OpenMP one thread computes."""
_COMPILE_TIMEOUT_S = 240.0

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_PIECES = (_P, _I, _I, _I, _I, _I, _P, _I, _P, _P, _I, _I, _P, _I, _I, _F, _I)
_SIGNATURES = {
    "add_rms_norm": (_P, _P, _P, _F, _I, _I, _I, _P),
    "silu_mul": (_P, _P, _I, _I, _I, _I, _P),
    "rotate_and_store": (_P, _I, _I, _I, _I, _P, _F, _P, _P, _P, _I, _I, _P, _P),
    "rotate_heads": (_P, _I, _I, _I, _I, _P, _P, _I, _I),
    "attend_together": (_P, _I, _I, _I, _I, _I, _I, _I, _P, _I, _I, _P, _I, _I, _F, _I, _P),
    "attend": (_P, _I, _I, _I, _I, _I, _P, _P, _I, _P, _P, _F, _I, _P),
    "silu_mul_backward": (_P, _P, _P, _I, _I, _I, _P, _P, _P),
    "rms_norm": (_P, _P, _P, _F, _P, _P, _I, _I, _I, _I, _P, _P, _P),
    "turn_tokens": (_P, _I, _P, _P, _I, _I, _I, _I, _I, _P),
    "rms_norm_backward": (_P, _P, _P, _P, _P, _P, _P, _I, _I, _I, _I, _P, _P),
    "gelu": (_P, _I, _I, _I, _P),
    "gelu_backward": (_P, _P, _I, _I, _I, _P),
    "distinct_rows": (_P, _I, _I, _I, _P, _I, _P, _P, _P),
    "attend_pieces": (*_PIECES, _P, _P),
    "attend_pieces_backward": (*_PIECES, _P, _P, _P, _P, _P, _P),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled functions, or None, with a line in the log, if no compiler of this machine can build them."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        log.info("no C compiler (%s): the CPU's layers are computed by torch alone, slower", ", ".join(_COMPILERS))
        return None
    try:
        functions = ctypes.CDLL(str(_build(compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: the user has no home folder
        log.warning("%s does not build kernels/cpu, torch computes instead, slower: %s", compiler, _line(error))
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = arguments, None
    return functions


def _build(compiler: str) -> Path:
    """Return the path of the library for this source, compiler and processor, after building it if necessary. Raise
    OSError or SubprocessError if that fails."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = [line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))][:1]
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_TIMEOUT_S
    ).stdout
    sources = [path.read_bytes() for path in sorted(_FOLDER.glob("*.[ch]"))]
    options = repr((_FLAGS, _OF_MACHINE)).encode()
    parts = (*sources, options, version, platform.machine().encode(), *(line.encode() for line in flags))
    name = f"kernels-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pronk"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            compiled = Path(work) / name
            _compile(compiler, compiled)
            os.replace(compiled, target)
    return target


def _compile(compiler: str, target: Path) -> None:
    for index, options in enumerate(_OF_MACHINE):
        command = [compiler, *_FLAGS, *options, *map(str, sorted(_FOLDER.glob("*.c"))), "-o", str(target), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
        if not done.returncode:
            return
        if index + 1 == len(_OF_MACHINE):
            raise subprocess.SubprocessError(done.stderr)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def supports_layer(tensor: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Tell whether this folder's functions support a layer of this shape, with such tensors, on this machine."""
    small = head_dim <= MAX_HEAD and head_dim % 8 == 0 and num_heads <= MAX_GROUP * num_kv_heads
    return small and is_supported(tensor)


def is_supported(*tensors: Tensor) -> bool:
    """Tell whether the tensors are plain float32 on a CPU and the library is available."""
    for tensor in tensors:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
        if not plain or tensor.dtype != torch.float32:
            return False
    return library() is not None


def built() -> ctypes.CDLL:
    """Return the library. Call it only if `is_supported` or `supports_layer` returned True."""
    functions = library()
    assert functions is not None, "ask is_supported() first"
    return functions
