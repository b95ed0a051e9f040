"""The one-thread kernel that hands a predicate to a conditional node: found, linked, launched.

Only device code can set what a conditional node goes by, through a function of the device runtime,
`libcudadevrt.a`, which comes with CUDA's runtime. The kernel is written down as PTX and linked by
nvJitLink; so neither nvcc nor NVRTC is asked for. Once a process and device: 15 ms.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fngraph.errors import CaptureError, PackageError
from fngraph.torch_facts.driver import checked, driver_for, relaxed

NAME = "fngraph_set_condition"
ARCHIVE = "libcudadevrt.a"
WHAT = "a conditional node of a CUDA graph"
PTX = f"""
.version 6.3
.target sm_75
.address_size 64

.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);

.visible .entry {NAME} (.param .u64 handle, .param .u64 predicate)
{{
    .reg .pred %p;
    .reg .b16 %h;
    .reg .b32 %value;
    .reg .b64 %handle, %at;

    ld.param.u64 %handle, [handle];
    ld.param.u64 %at, [predicate];
    cvta.to.global.u64 %at, %at;
    ld.global.u8 %h, [%at];
    setp.ne.s16 %p, %h, 0;
    selp.u32 %value, 1, 0, %p;
    {{
        .param .b64 a;
        .param .b32 b;
        st.param.b64 [a], %handle;
        st.param.b32 [b], %value;
        call.uni cudaGraphSetConditional, (a, b);
    }}
    ret;
}}
"""
"""A byte other than 0 is true. Every compiler of CUDA 12 and 13 makes code for this PTX of 2018."""


def launch(index: int, stream: int, handle: int, predicate: int) -> None:
    """Launch it on `stream` of device `index`: `handle`'s node goes by the byte at `predicate`.

    Raises:
        PackageError: cuda.bindings, nvJitLink or `libcudadevrt.a` is missing.
        CaptureError: the kernel cannot be linked or loaded.
    """
    driver = driver_for(WHAT)
    values = (handle, predicate), (ctypes.c_uint64, ctypes.c_void_p)
    one = (1, 1, 1)
    launched = driver.cuLaunchKernel(
        load(index), *one, *one, 0, driver.CUstream(init_value=stream), values, 0
    )
    checked(driver, launched, f"cannot launch {NAME}")


@functools.cache
def load(index: int) -> Any:
    """The kernel on that device, which must be the current one; its module stays loaded.

    Raises:
        PackageError, CaptureError: see `launch`.
    """
    driver = driver_for(WHAT)
    image = linked("sm_{}{}".format(*torch.cuda.get_device_capability(index)))
    try:
        with relaxed(driver):
            (module,) = checked(driver, driver.cuModuleLoadData(image), f"cannot load {NAME}")
            found = driver.cuModuleGetFunction(module, NAME.encode())
    except RuntimeError as error:
        raise CaptureError(f"{WHAT}: {error}") from error
    return checked(driver, found, f"cannot find {NAME}")[0]


@functools.cache
def linked(arch: str) -> bytes:
    """The kernel for `arch`, "sm_90", as an image that a module is loaded from.

    Raises:
        PackageError: nvJitLink or `libcudadevrt.a` is missing. CaptureError: it does not link.
    """
    archive = found_archive()
    try:
        from cuda.bindings import nvjitlink

        handle = nvjitlink.create(1, [f"-arch={arch}"])
    except (ImportError, RuntimeError) as error:  # the second: no library under the bindings
        raise PackageError(
            f"{WHAT} needs cuda.bindings with nvJitLink: pip install cuda-bindings "
            f"{wheel('nvjitlink')} ({error})"
        ) from error
    source = PTX.encode()
    kinds = nvjitlink.InputType
    try:
        nvjitlink.add_data(handle, kinds.PTX, source, len(source), NAME)
        nvjitlink.add_file(handle, kinds.LIBRARY, str(archive))
        nvjitlink.complete(handle)
        image = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, image)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        said = log.decode(errors="replace").strip("\0 \n")
        raise CaptureError(f"{WHAT}: {NAME} does not link with {archive}: {said}") from error
    finally:
        nvjitlink.destroy(handle)
    return bytes(image)


def found_archive() -> Path:
    """`libcudadevrt.a`, of CUDA's runtime that torch has brought along or that is installed.

    Raises:
        PackageError: it is nowhere; says where it was looked for.
    """
    places = list(_places())
    for place in places:
        if (place / ARCHIVE).is_file():
            return place / ARCHIVE
    looked = ", ".join(str(place) for place in places)
    raise PackageError(
        f"{WHAT} needs {ARCHIVE}, which comes with CUDA's runtime: pip install "
        f"{wheel('cuda-runtime')}, or set CUDA_HOME. It is in none of {looked}"
    )


def _places() -> Iterator[Path]:
    """Folders where the archive may be; first what pip installs with torch, of torch's CUDA."""
    spec = importlib.util.find_spec("nvidia")  # a namespace: a folder for each site-packages
    for root in (spec and spec.submodule_search_locations) or ():
        yield Path(root, f"cu{_major()}", "lib")  # CUDA 13
        yield Path(root, "cuda_runtime", "lib")  # CUDA 12
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    homes += [str(Path(nvcc).resolve().parent.parent)] if nvcc else []
    for home in (*filter(None, homes), sys.prefix):  # the last: conda's
        for part in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            yield Path(home, part)
    yield from (Path("/usr/lib", part) for part in ("x86_64-linux-gnu", "aarch64-linux-gnu"))


def _major() -> int:
    """Of the CUDA that torch is built for; 13 where it is built without."""
    return int((torch.version.cuda or "13").partition(".")[0])


def wheel(part: str) -> str:
    """The package of a part of CUDA: with no number in its name from 13 on."""
    return f"nvidia-{part}" if _major() >= 13 else f"nvidia-{part}-cu{_major()}"
