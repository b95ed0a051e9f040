"""The kernel's code for a decoder's shapes, by NVRTC: seconds, so it is worth keeping."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fngraph.errors import CaptureError, PackageError
from fngraph.ops.megakernel.shapes import Decoder, macros
from fngraph.torch_facts.portable import installed

WHAT = "a decoder in one launch"
SOURCE = Path(__file__).with_name("decoder.cu")  # includes the *.cuh beside it
Image = Callable[[Decoder, int, str], bytes]  # of a decoder, multiprocessors, "sm_90"


def compiled(decoder: Decoder, programs: int, capability: str) -> bytes:
    """The kernel for so many multiprocessors of "sm_90", say.

    Raises:
        CaptureError: NVRTC refuses it. PackageError: there is no NVRTC.
    """
    nvrtc = _nvrtc()
    source, names, texts = SOURCE.read_bytes(), *_beside()
    try:
        _, made = nvrtc.nvrtcCreateProgram(source, b"decoder.cu", len(names), texts, names)
    except RuntimeError as error:
        raise _missing(error) from error
    options = [x.encode() for x in _options(decoder, programs, capability)]
    try:
        (status,) = nvrtc.nvrtcCompileProgram(made, len(options), options)
        if int(status):
            log = bytearray(nvrtc.nvrtcGetProgramLogSize(made)[1])
            nvrtc.nvrtcGetProgramLog(made, log)
            said = log.decode(errors="replace").strip("\0 \n")
            raise CaptureError(f"{WHAT}: NVRTC does not compile it: {said}")
        image = bytearray(nvrtc.nvrtcGetCUBINSize(made)[1])
        nvrtc.nvrtcGetCUBIN(made, image)
    finally:
        nvrtc.nvrtcDestroyProgram(made)
    return bytes(image)


def facts_of(decoder: Decoder, programs: int, capability: str) -> dict[str, str]:
    """All that `compiled` depends on, by name.

    Raises:
        PackageError: there is no NVRTC.
    """
    # NVRTC's own version has no third number
    found = installed("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")
    packages = [" ".join(one) for one in found.items()]
    code = hashlib.sha256(SOURCE.read_bytes())
    for name, text in zip(*_beside()):
        code.update(b"\0" + name + b"\0" + text)
    return {
        "piece": WHAT, "range": str(decoder.tokens), "code": code.hexdigest(),
        "options": " ".join(_options(decoder, programs, capability)),
        "nvrtc": " ".join([version(), *packages]),
    }  # fmt: skip


def version() -> str:
    """NVRTC's, two numbers.

    Raises:
        PackageError: there is none.
    """
    try:
        _, *numbers = _nvrtc().nvrtcVersion()
    except RuntimeError as error:
        raise _missing(error) from error
    return ".".join(map(str, numbers))


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise _missing(error) from error
    return nvrtc


def _missing(error: Exception) -> PackageError:
    """A `RuntimeError` is that there is no library under the bindings."""
    return PackageError(
        f"{WHAT} needs NVRTC: pip install cuda-bindings nvidia-cuda-nvrtc ({error})"
    )


def _beside() -> tuple[list[bytes], list[bytes]]:
    """Names and texts of what the source includes."""
    files = sorted(SOURCE.parent.glob("*.cuh"))
    return [x.name.encode() for x in files], [x.read_bytes() for x in files]


def _options(decoder: Decoder, programs: int, capability: str) -> list[str]:
    own = macros(decoder, programs)
    return [f"--gpu-architecture={capability}", "--std=c++20", "-default-device", *own]
