"""Triton's recurrent kernels compile for an H100, without one: the interpreter checks no types."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fngraph import ops
from fngraph.core import HostBounds
from fngraph.ops.triton import launching as triton_launch

ROOT = Path(__file__).parents[2]
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
SHARED = 227 * 1024  # bytes that a program may have
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run_alone(file: str, cache: Path, *args: str) -> str:
    """What `file` prints in a Python of its own, with nothing compiled beforehand."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    ran = subprocess.run([sys.executable, file, *args], capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def compile_for_h100(kernel: Any, reads: Any, writes: Any, numbers: Any, **options: Any) -> int:
    """As a launch would; the bytes of shared memory."""
    made: int = compiled_for_h100(kernel, reads, writes, numbers, **options).metadata.shared
    return made


def spilled(made: Any, folder: Path) -> int:
    """Bytes of memory that each thread of a compiled kernel keeps registers in."""
    from triton import knobs

    file = folder / "kernel.cubin"
    file.write_bytes(made.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", told))


def compiled_for_h100(kernel: Any, reads: Any, writes: Any, numbers: Any, **options: Any) -> Any:
    """As a launch would."""
    import triton
    from triton.backends.compiler import GPUTarget

    tuning = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
    signature, constants, hints = {}, {}, {}
    given = dict(zip(kernel.arg_names, (*reads, *writes, *numbers))) | options
    for i, name in enumerate(kernel.arg_names):
        x = given[name]
        any_number = isinstance(x, int) and name in (kernel.do_not_specialize or ())
        if name in options or (isinstance(x, int) and x == 1 and not any_number):
            signature[name], constants[(i,)] = "constexpr", x
            continue
        number = "fp32" if isinstance(x, float) else "i32"
        signature[name] = POINTERS[x.dtype] if isinstance(x, Tensor) else number
        if isinstance(x, Tensor) or (isinstance(x, int) and x % 16 == 0 and not any_number):
            hints[(i,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, hints)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=tuning)
    assert not made_up(made), (kernel.fn.__name__, options)
    assert not unrounded(made), (kernel.fn.__name__, options)
    return made


def unrounded(made: Any) -> list[str]:
    """Products in half precision that are added to before they are rounded.

    LLVM makes `bfloat` of float32 arithmetic that is rounded at once, and of a product and a sum
    of those one instruction, which leaves the product's rounding out; so does ptxas where the
    product's has no `.rn`. Sums in float32 may be so.
    """
    told = made.asm["ptx"]
    sums = " ".join(re.findall(r"\b(?:add|sub)\.b?f16\S*\s+%\w+,(.*);", told))
    free = re.findall(r"\bmul\.b?f16\S*\s+(%\w+),", told)
    added = [x for x in free if re.search(rf"{x}\b", sums)]
    return re.findall(r"fma\.rn\.\S*f16\S* .*", told) + added


def made_up(made: Any) -> list[str]:
    """Instructions that read numbers in fp8 out of none of a kernel's arguments.

    ptxas 12.8 takes the upper half of a word that is known to be 0, `mov.b32 {_, %rs}, 0`, for
    another number. A load whose mask is known to be false gives such words, and so wrong results.
    """
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"F2FP\.F16\.E4M3\.UNPACK_B R\d+, [-+0-9.].*", told)


def kernels(dtype: torch.dtype, query_len: int) -> list[str]:
    """What the backends launch for models' shapes, compiled; their names."""
    from fngraph.ops.triton.recurrent import (
        convolution as triton_convolution,
        linear as triton_linear,
    )

    names = []

    def launch(kernel: Any, grid: Any, *given: Any, **options: Any) -> None:
        assert compile_for_h100(kernel, *given, **options) <= SHARED
        names.append(kernel.fn.__name__)

    for module in (triton_linear, triton_convolution):
        module.launch = launch  # type: ignore[attr-defined]
    T, R, f32 = 32, 2, torch.float32
    x = lambda *shape, dtype=dtype: torch.zeros(shape, dtype=dtype)  # noqa: E731
    starts = torch.tensor([0, 16, 32], dtype=torch.int32)
    meta = ops.StateMeta(torch.arange(R), starts[1:], starts)
    host = HostBounds(max_query_len=query_len)
    delta = ops.GatedDeltaConfig(32, 16, 128, 128, dtype, f32, "cuda", 0.1)
    q, v, g = x(T, 16, 128), x(T, 32, 128), x(T, 32, dtype=f32)
    state = x(R, 32, 128, 128, dtype=f32)
    triton_linear.gated_delta(ops.GatedDeltaArgs(q, q, v, g, g, state, meta, v, delta), host)
    space = ops.SSDConfig(64, 64, 1, 128, dtype, f32, "cuda")
    v, dt, b, state = x(T, 64, 64), x(T, 64), x(T, 1, 128), x(R, 64, 64, 128, dtype=f32)
    triton_linear.ssd(ops.SSDArgs(v, dt, x(64), b, b, state, meta, v, space), host)
    conv = ops.CausalConvConfig(8192, 4, dtype, dtype, "cuda")
    y, taps, state = x(T, 8192), x(8192, 4), x(R, 8192, 3)
    triton_convolution.run(ops.CausalConvArgs(y, taps, state, meta, y, conv), host)
    return names


@pytest.mark.sampled(0)
@needs_triton
def test_every_kernel_compiles_and_fits(tmp_path):
    chunks = ["recurrent_kernel", "chunk_kernel", "scan_kernel"]
    decode = ["recurrent_kernel"] * 2
    names = [*decode, "conv_kernel", *chunks, *chunks, "conv_kernel"]
    assert run_alone(__file__, tmp_path).splitlines() == [" ".join(names)] * 2


if __name__ == "__main__":
    assert not triton_launch.interpreted()
    for dtype in (torch.bfloat16, torch.float32):
        print(*kernels(dtype, 1), *kernels(dtype, 16))
