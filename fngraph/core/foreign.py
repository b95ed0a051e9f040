"""What is wrong with a text that should be of a file that fngraph wrote, for who reads it again."""

from __future__ import annotations


def what_is_off(dumped: str, error: Exception, version: str | None = None) -> str:
    """Why a text could not be read, in a few words that begin with "it".

    Args:
        error: what its reader ran into.
        version: which `format` the reader reads; None: of its files there is but one.
    """
    import json  # 2 ms that dispatch never needs

    if not dumped.strip():
        return "it is empty"
    try:
        found = json.loads(dumped)
    except ValueError as why:
        return f"it is no JSON ({why})"
    if not isinstance(found, dict):
        return f"it is JSON of a {type(found).__name__}"
    if version is not None and (other := found.get("format")) != version:
        if type(other) is str and other.startswith(version.rpartition(" ")[0]):
            return (
                f"it is of another version of fngraph ({other!r}, and this one reads {version!r}). "
                "Read it with that one, or write it again with this one"
            )
        if "traceEvents" in found:
            return "it is a trace, for Perfetto and TensorBoard"
        held = ", ".join(map(repr, list(found)[:4])) or "nothing"
        return f"it is JSON of something else, which holds {held}"
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return f"a part of it cannot be read ({type(error).__name__}: {error})"
