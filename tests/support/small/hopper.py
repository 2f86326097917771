"""Compiles Triton kernels for a Hopper GPU on a machine without one."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path


def specialised(kernel, *args, **options):
    """Return the source that Triton would compile for these arguments, and a dict of its target and options."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    bound, specialisation, rest = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *args, **options
    )
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialisation, rest)
    return ASTSource(kernel, signature, constants, attributes), {"target": target, "options": parsed.__dict__}


def compiled(kernel, *args, **options):
    """Compile a kernel; return (number of 16-byte reads, number of 16-byte writes, bytes of registers spilled to
    memory, ptx)."""
    import triton

    source, how = specialised(kernel, *args, **options)
    assembly = triton.compile(source, **how).asm
    assert assembly["cubin"]
    ptx = assembly["ptx"]
    reads, writes = (len(re.findall(rf"{kind}\.global\.v4", ptx)) for kind in ("ld", "st"))
    return reads, writes, _spilled_bytes(ptx), ptx


def _spilled_bytes(ptx):
    """Return the number of spilled bytes that Triton's assembler reports."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(path), "-o", f"{path}.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
    stores = re.findall(r"(\d+) bytes spill stores", said)
    assert stores, said
    return sum(int(number) for number in stores)
