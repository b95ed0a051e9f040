"""Where the user's own code is: the file and line that an error should point at."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from fngraph.errors import FnGraphError

_OTHERS = {"torch", "fngraph", "optree", "einops", "functorch", "numpy", *sys.stdlib_module_names}


def user_line(traceback: TracebackType | None = None) -> str:
    """`file:line` of the innermost frame that is not ours, torch's or another library's.

    The frames are those of the current call, or of where a traceback began.
    """
    for frame, line in _raised(traceback) if traceback else _calling(sys._getframe(1)):
        if is_user(frame):
            return f"{short_path(frame.f_code.co_filename)}:{line}"
    return "<no user frame>"


def users_level() -> int:
    """`stacklevel` by which `warnings.warn`, called next to this, names the user's innermost line;
    1 without any."""
    frames = enumerate(_calling(sys._getframe(1)), 1)
    return next((level for level, (frame, _) in frames if is_user(frame)), 1)


def users_part(error: Exception) -> Exception:
    """An error whose traceback has the frames of the user's code alone, as `jax` has it.

    Where he has none in it and the error is not ours, or the environment's FNGRAPH_TRACEBACK is
    "all", it is as it was.
    """
    frames: list[TracebackType] = []
    traceback = error.__traceback__
    while traceback is not None:
        frames += [traceback] if is_user(traceback.tb_frame) else []
        traceback = traceback.tb_next
    told = isinstance(error, FnGraphError)  # whose text says where
    if not (frames or told) or os.environ.get("FNGRAPH_TRACEBACK") == "all":
        return error
    kept = None
    for one in reversed(frames):
        kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    if frames and HIDDEN not in getattr(error, "__notes__", ()):
        error.add_note(HIDDEN)
    return error.with_traceback(kept)


HIDDEN = "frames of torch and fngraph are left out; FNGRAPH_TRACEBACK=all shows them"


def runs_users_code(traceback: TracebackType | None) -> bool:
    """Whether an error has come through code of the user's, from where a traceback begins."""
    return any(is_user(frame) for frame, _ in _raised(traceback))


def is_user(frame: FrameType) -> bool:
    """Whether a frame runs code that is not ours, torch's, Python's or generated."""
    return _is_users(frame.f_code.co_filename, frame.f_globals.get("__name__", ""))


@functools.lru_cache(1024)  # a trace asks it of every frame under each op
def _is_users(filename: str, module: str) -> bool:
    generated = filename.startswith(("<eval_with_key", "<string", "<frozen"))
    generated |= ":codegen(" in filename  # AOTAutograd's
    if module.startswith("fngraph.models."):  # written as a user would
        return not generated
    return not generated and module.partition(".")[0] not in _OTHERS


def _calling(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _raised(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    if traceback is not None:
        yield from _raised(traceback.tb_next)
        yield traceback.tb_frame, traceback.tb_lineno


def defined_at(fn: Any) -> str:
    """`file:line` of a function's definition; of a callable object, its class's name."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is None:
        return type(fn).__name__
    return f"{short_path(code.co_filename)}:{code.co_firstlineno}"


def short_path(filename: str) -> str:
    """Relative to the working directory where the file is below it, as a person would write it."""
    return filename.removeprefix(f"{os.getcwd()}/")  # noqa: PTH109 - for each op, and far quicker
