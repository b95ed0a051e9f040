"""All layers of a decoder and its head in one launch, for a token of each of a few requests: a
megakernel.

A step of few tokens is a chain of some hundred short kernels, and each begins when the one before
has ended: of a 0.6B's layer bytes explain a third of the time. Here programs stay on the device
for the whole step. There is one a multiprocessor, each has its share of every product's rows, and
asks for the weights of the next product before the input of that is there, since nothing writes
them; see `decoder.cu`.

    x, cos, sin, slot_mapping, seq_lens, query_start_loc, block_tables,
    norm, qkv, (q_norm, k_norm,) k_cache, v_cache, out, mlp_norm, gate and up, down     a layer
    norm, head(, chosen)                                        ->  (tokens, vocab) logits

It rounds to bfloat16 where the ops round that it stands for, but for the norm's scale, which it
applies to the sums, as `fused_linear` does for few rows. Programs wait for one another, so all of
them must be on the device at once: it is launched as a cooperative kernel. CUDA C++, compiled by
NVRTC for the shapes of a model, on GPUs of compute capability 9.0 and later.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fngraph.errors import CaptureError
from fngraph.ops.megakernel.image import WHAT, Image, compiled
from fngraph.ops.megakernel.shapes import FIRST, WARPS, Decoder
from fngraph.ops.side_by_side import as_one, why_apart
from fngraph.ops.triton.launching import processors, shared_bytes
from fngraph.torch_facts.driver import checked, driver_for, relaxed


class Operands(NamedTuple):
    """A decoder's tensors that stay where they are.

    Attributes:
        layers: of each, those that the kernel's `Layer` points to, in its order.
        norm, head: behind the layers.
    """

    layers: tuple[tuple[Tensor | None, ...], ...]
    norm: Tensor
    head: Tensor


def parted(decoder: Decoder, tensors: Sequence[Tensor]) -> Operands:
    """Operands as the kernel reads them.

    Raises:
        CaptureError: it cannot read them where they lie.
    """
    in_qkv, in_gate, in_head = decoder.weights
    left = iter(tensors)

    def take(n: int) -> list[Tensor]:
        return [next(left) for _ in range(n)]

    step = tuple(take(FIRST))
    layers = []
    for i in range(decoder.layers):
        (norm,), qkv = take(1), take(in_qkv)
        q_norm, k_norm = take(2) if decoder.normed else (None, None)
        (k, v, out, mlp_norm), gate_up, (down,) = take(4), take(in_gate), take(1)
        whole = _whole(f"q, k and v of layer {i}", qkv)
        gates = _whole(f"the gate of layer {i}", gate_up)
        layers.append((norm, whole, q_norm, k_norm, out, mlp_norm, gates, down, k, v))
    (norm,), head, chosen = take(1), take(in_head), take(decoder.chosen)
    made = Operands(tuple(layers), norm, _whole("the head", head))
    named = [("the step", x) for x in (*step, *chosen)]
    named += [("the last norm", norm), ("the head", made.head)]
    named += [(f"layer {i}", x) for i, of in enumerate(layers) for x in of if x is not None]
    for where, x in named:
        if not x.is_contiguous() or (x.dtype == torch.bfloat16 and x.data_ptr() % 16):
            raise CaptureError(
                f"{WHAT}: a tensor of {where}, {tuple(x.shape)}, has gaps or does not begin at a "
                "multiple of 16 bytes"
            )
    return made


def _whole(what: str, parts: Sequence[Tensor]) -> Tensor:
    if why := why_apart(parts):
        raise CaptureError(
            f"{WHAT}: weights of {what} do not lie side by side: {why}. Bind "
            "fg.ops.lay_side_by_side(params)"
        )
    return as_one(parts)


class _Step(ctypes.Structure):
    """The kernel's `Step`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "layers", "x", "cos", "sin", "norm", "head", "logits", "slot", "chosen",
            "seq_len", "start", "table", "words", "number",
        )),
        ("blocks", ctypes.c_int), ("eps", ctypes.c_float), ("head_eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]  # fmt: skip


class Launch:
    """A decoder's launches over tensors that stay where they are, as an instruction of a program:
    `fn(sizes, host, *tensors) -> (logits,)`.

    What its programs tell one another lies in memory of its own: so launches of one object must
    follow one another, as those of one graph do.

    Args:
        tensors: as `parted` takes them; those of the step itself are looked at in each call.
        image: what gives the kernel's code: `compiled`, or what keeps that.

    Raises:
        CaptureError: they do not lie as the kernel reads them, or it cannot be made.
        PackageError: NVRTC is missing.
    """

    def __init__(
        self, decoder: Decoder, tensors: Sequence[Tensor], image: Image | None = None
    ) -> None:
        operands = parted(decoder, tensors)
        device = operands.head.device
        self.decoder = decoder
        self._kernel = _loaded(decoder, _index(device), image or compiled)
        self._norm, self._head = operands.norm, operands.head
        pointers = [[0 if t is None else t.data_ptr() for t in of] for of in operands.layers]
        self._layers = torch.tensor(pointers, dtype=torch.int64, device=device)
        self._words = torch.zeros(self._kernel.words, dtype=torch.int64, device=device)
        self._number = torch.tensor([1, 0], dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # a graph's stream does not wait for it

    def __call__(self, sizes: Any, host: Any, *tensors: Tensor) -> tuple[Tensor]:
        """One step of a token of each request.

        Raises:
            CaptureError: it cannot be launched.
        """
        x, cos, sin, slots, seq_lens, starts, table = tensors[:FIRST]
        chosen = tensors[self.decoder.operands - 1] if self.decoder.chosen else None
        logits = x.new_empty(self.decoder.tokens, self.decoder.vocab)
        read = (x, cos, sin, self._norm, self._head, logits, slots, chosen, seq_lens, starts, table)
        given = (self._layers, *read, self._words, self._number)
        step = _Step(
            *(None if t is None else t.data_ptr() for t in given),
            table.shape[1], self.decoder.eps, self.decoder.head_eps,
            self.decoder.scale * math.log2(math.e),
        )  # fmt: skip
        _launch(self._kernel, x.device, step)
        return (logits,)

    def __repr__(self) -> str:
        return f"Launch({self.decoder.layers} layers)"


class _Kernel(NamedTuple):
    """On a device: the function, bytes of shared memory that it takes, words that it writes."""

    function: Any
    shared: int
    words: int


def _launch(kernel: _Kernel, device: torch.device, step: _Step) -> None:
    """One program a multiprocessor, all of them at once, on the current stream.

    Raises:
        CaptureError: it cannot be launched.
    """
    driver = driver_for(WHAT)
    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    config.gridDimX, config.blockDimX = processors(device), WARPS * 32
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.sharedMemBytes = kernel.shared
    config.hStream = driver.CUstream(init_value=torch.cuda.current_stream(device).cuda_stream)
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    value = driver.CUlaunchAttributeValue()
    value.cooperative = 1
    attribute.value = value
    config.attrs, config.numAttrs = [attribute], 1
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(step))
    with torch.cuda.device(device):
        launched = driver.cuLaunchKernelEx(config, kernel.function, ctypes.addressof(arguments), 0)
    try:
        checked(driver, launched, "cannot launch it")
    except RuntimeError as error:
        raise CaptureError(
            f"{WHAT}: {error}. graphify(..., megakernel=False) goes without"
        ) from error


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _loaded(decoder: Decoder, index: int, image: Image) -> _Kernel:
    """The kernel on that device; its module stays loaded.

    Raises:
        CaptureError, PackageError: see `compiled`; or it does not fit.
    """
    driver = driver_for(WHAT)
    device = torch.device("cuda", index)
    capability = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    code = image(decoder, processors(device), capability)
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

    def number(name: bytes) -> int:
        at, size = checked(driver, driver.cuModuleGetGlobal(module, name), "cannot find a number")
        value = ctypes.c_longlong()
        read = driver.cuMemcpyDtoH(ctypes.addressof(value), at, size)
        checked(driver, read, "cannot read a number")
        return value.value

    try:
        with torch.cuda.device(device), relaxed(driver):
            (module,) = checked(driver, driver.cuModuleLoadData(code), "cannot load it")
            found = driver.cuModuleGetFunction(module, b"megakernel")
            (function,) = checked(driver, found, "cannot find it")
            kernel = _Kernel(function, number(b"shared_bytes"), number(b"words_of_step"))
            if kernel.shared > (most := shared_bytes(device)):
                raise RuntimeError(f"it takes {kernel.shared} bytes of a multiprocessor's {most}")
            taken = driver.cuFuncSetAttribute(function, attribute, kernel.shared)
            checked(driver, taken, "cannot take its memory")
    except RuntimeError as error:
        raise CaptureError(f"{WHAT}: {error}") from error
    return kernel
