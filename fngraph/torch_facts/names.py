"""Torch's private names, as the library calls them. Those of tracing, slower to load, have a file.

Each was seen in torch 2.11 (CUDA) and in 2.13 (CPU) unless its line says otherwise. Functions are
bound here, at import, since some are called at each step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import (
    OpOverload as OpOverload,  # `aten.add.Tensor`: one overload of an op
    OpOverloadPacket as OpOverloadPacket,  # `aten.add`: all of them
)
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext as DeviceContext  # torch.set_default_device's mode
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,  # a mode that sees each op
    _disable_current_modes,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import (  # trees of an op's arguments, as torch itself walks them
    tree_leaves as tree_leaves,
    tree_map as tree_map,
    tree_map_only as tree_map_only,
)

_C: Any = torch._C

# --- what is active around a call -----------------------------------------------------------------

dispatch_modes = _get_current_dispatch_mode_stack  # outermost first
dispatch_mode = _get_current_dispatch_mode  # the innermost, or None
function_modes = _get_current_function_mode_stack  # outermost first
without_modes = _disable_current_modes  # a context: ops run as if no dispatch mode were active
count_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
count_function_modes: Callable[[], int] = _C._len_torch_function_stack
are_transforms_active: Callable[[], bool] = _C._are_functorch_transforms_active
innermost_transform: Callable[[], Any] = _C._functorch.peek_interpreter_stack  # or None
level_of: Callable[[Any], int] = _C._functorch.maybe_get_level  # of a wrapper; -1: of none
# a tensor; of one that a transform which is over has wrapped: what is in it
alive: Callable[[torch.Tensor], torch.Tensor] = _C._functorch.unwrap_if_dead
current_level: Callable[[], int | None] = _C._functorch.maybe_current_level
# contexts of C++'s own, 1 us where torch.inference_mode() and torch.no_grad() take 15: the first
# puts grad mode back as well
InferenceMode: Callable[[bool], Any] = _C._InferenceMode
set_grad_mode: Callable[[bool], None] = _C._set_grad_enabled
DisableTorchFunction = _C.DisableTorchFunction  # a context: no function mode and no subclass
DisableTorchFunctionSubclass = _C.DisableTorchFunctionSubclass  # a context: modes, but no subclass
BelowAutograd = _C._AutoDispatchBelowAutograd  # a context: ops go past autograd's kernels
parse_schema: Callable[[str], Any] = _C.parse_schema  # "fngraph::f(Tensor x) -> ()"
no_torch_function = _C._disabled_torch_function_impl  # of a class: none of its own
no_torch_dispatch = _C._disabled_torch_dispatch_impl

# --- processes: looked up when they are called, since a torch may be built without ---------------


def resolve_group(name: str) -> Any:
    """A process group by the name that it has in torch.distributed, "0"."""
    return _C._distributed_c10d._resolve_process_group(name)


def default_store() -> Any:
    """Where processes met."""
    return torch.distributed.distributed_c10d._get_default_store()


def all_gather_into(out: torch.Tensor, x: torch.Tensor, group: Any) -> None:
    """Each process's x behind the other; torch 2.13 has another name for it, and warns of this."""
    dist: Any = torch.distributed
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, x, group=group)


def gather_objects(own: Any, group: Any) -> list[Any]:
    """What each process of a group has, in the order of ranks."""
    parts: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(parts, own, group=group)
    return parts


def reduce_scatter_into(out: torch.Tensor, x: torch.Tensor, group: Any) -> None:
    """A process's part of the sum of each one's x; named anew likewise. NCCL knows no complex."""
    dist: Any = torch.distributed
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    real = torch.view_as_real if x.is_complex() else lambda y: y
    scatter(real(out), real(x), group=group)


def serves_cpu(group: Any) -> bool:
    """Whether a process group takes tensors of the CPU: gloo's does, NCCL's alone does not."""
    return torch.device("cpu") in group._device_types


def timeout_s(group: Any) -> float:
    """How long a process group waits; of several backends, the CPU's."""
    device = torch.device("cpu" if serves_cpu(group) else "cuda")
    waits: float = group._get_backend(device).options._timeout.total_seconds()
    return waits


# of some tensors: `check(*others)` says in one call whether all others have their types, sizes,
# strides, dtypes, devices and dispatch keys (sparse, conjugated, negated, inference)
TensorGuards: Any = _C._dynamo.guards.TensorGuards


def dual_level() -> int:
    """How deep tangents are nested that `torch.autograd.forward_ad` makes; -1: there are none."""
    return forward_ad._current_level


def unwrapped(x: torch.Tensor) -> torch.Tensor:
    """A tensor under all transforms' wrappers."""
    while _C._functorch.is_functorch_wrapped_tensor(x):
        x = _C._functorch.get_unwrapped(x)
    return x


def is_batched(x: torch.Tensor) -> bool:
    """Whether `torch.vmap` maps over a tensor, at any level."""
    while _C._functorch.is_functorch_wrapped_tensor(x):
        if _C._functorch.is_batchedtensor(x):
            return True
        x = _C._functorch.get_unwrapped(x)
    return False


# --- switches that choose among kernels of one op -------------------------------------------------

_OF_ALL = ("_get_deterministic_algorithms", "_get_flash_sdp_enabled", "_get_math_sdp_enabled",
           "_get_math_sdp_allow_fp16_bf16_reduction", "_get_sdp_priority_order")  # fmt: skip
_OF_CUDA = (
    "_get_cudnn_deterministic", "_get_cudnn_benchmark", "_get_cudnn_enabled",
    "_get_mem_efficient_sdp_enabled", "_get_cudnn_sdp_enabled", "_get_fa3_sdp_enabled",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction", "_get_cublas_allow_fp16_accumulation",
    "_get_cublaslt_prefer_grouped_gemm",
)  # fmt: skip
_OF_CPU = ("_get_mkldnn_enabled", "_get_mkldnn_deterministic")


@functools.cache
def choose_attention() -> None:
    """Let torch order its attention kernels, which on CUDA it does where it first chooses among
    them: from then on "_get_sdp_priority_order" is another. Once a process."""
    with without_modes():
        x = torch.zeros(1, 1, 1, 8, dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(x, x, x)


def _cudnn_precision() -> Any:
    """Of convolutions and of recurrent nets on CUDA: one flag where they are alike, which torch
    raises of where they are not. A flag takes a quarter of the time that `get_precision` does."""
    try:
        return _C._get_cudnn_allow_tf32()
    except RuntimeError:
        return get_precision("cuda", "conv"), get_precision("cuda", "rnn")


def _mkldnn_precision() -> tuple[str, str]:
    """The same on the CPU."""
    return get_precision("mkldnn", "conv"), get_precision("mkldnn", "rnn")


def _switches(*names: str) -> dict[str, Callable[[], Any]]:
    # bool, which gives False, in place of those of torch 2.13 and 2.14
    return {n.removeprefix("_get_"): getattr(_C, n, bool) for n in names}


SWITCHES: dict[str, dict[str, Callable[[], Any]]] = {
    "cpu": {**_switches(*_OF_ALL, *_OF_CPU), "mkldnn precision": _mkldnn_precision},
    "cuda": {**_switches(*_OF_ALL, *_OF_CUDA), "cudnn precision": _cudnn_precision},
}
"""By device, what each is now. Not the preferred BLAS, which differs in rounding alone and takes as
long to ask for as five others; nor what solvers go by, which wait for the device."""
# of a backend's op, ("cuda", "matmul"); torch.get_float32_matmul_precision raises where its two
# APIs are mixed
get_precision: Callable[[str, str], str] = _C._get_fp32_precision_getter
set_precision: Callable[[str, str, str], None] = _C._set_fp32_precision_setter

# --- tensors and their memory ---------------------------------------------------------------------

conj_view: Callable[[torch.Tensor], torch.Tensor] = torch._conj  # each turns its bit around
neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
# tells autograd of writes that it does not see: who has kept these for a gradient gets an error
count_write: Callable[[Iterable[torch.Tensor]], None] = _C._increment_version
copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
# of fp8: (x, weight.t(), x_scale, weight_scale.t(), out_dtype=)
scaled_mm: Callable[..., torch.Tensor] = torch._scaled_mm
# over a bare address, as torch's own cudagraph trees use it: nobody frees it. torch 2.1 to 2.13
storage_at: Callable[[int, torch.device, int], Any] = _C._construct_storage_from_data_pointer

# --- ops --------------------------------------------------------------------------------------

# ("aten::silu_backward", "CPU"): whether there is a kernel for it
has_kernel: Callable[[str, str], bool] = _C._dispatch_has_kernel_for_dispatch_key

# --- CUDA: without Stream objects and wrappers, on the hot path; absent from CPU builds -----------

_absent: Any = None
current_device: Callable[[], int] = getattr(_C, "_cuda_getDevice", _absent)
current_stream: Callable[[int], int] = getattr(_C, "_cuda_getCurrentRawStream", _absent)
is_capturing: Callable[[], bool] = getattr(_C, "_cuda_isCurrentStreamCapturing", _absent)
launch_graph: Callable[[Any], None] = getattr(_C._CUDAGraph, "replay", _absent)  # 0.3 us less
# of torch.cuda.graph, and what a failed capture_end leaves undone up to 2.13: (device, pool)
end_allocating: Callable[[int, Any], None] = _C._cuda_endAllocateToPool
release_pool: Callable[[int, Any], None] = _C._cuda_releasePool
# a pool takes what this thread allocates, on any stream: (device, pool), until `end_allocating`
allocate_by_thread: Callable[[int, Any], None] = _C._cuda_beginAllocateCurrentThreadToPool
keep_busy: Callable[[int], None] = torch.cuda._sleep  # a kernel that spins for so many cycles

# --- attributes of torch's objects, read where the object is --------------------------------------

ATTRIBUTES = {
    "_schema": "of an OpOverload: arguments and results, what it writes, what is a view of what",
    "_overloadname": "of an OpOverload, `out` of `aten.add.out`",
    "_op": "of an OpOverload: what calling it calls",
    "_opoverload": "of a function under torch.library.custom_op: its OpOverload",
    "_dispatch_cache": "of an OpOverload, to be cleared when `py_kernels` has changed",
    "_cdata": "of a tensor, storage or generator: the address of its C++ object",
    "_version": "of a tensor: how often its memory has been written",
    "_is_zerotensor": "of a tensor: a tangent that is zero and has no memory",
    "_buffers": "of a module: its own, by attribute",
    "_parameters": "of a module: likewise",
    "_forward_pre_hooks": "of a module: what is called before its forward, by a number",
}
"""Each with its owner. What reads another one is refused by a test."""
