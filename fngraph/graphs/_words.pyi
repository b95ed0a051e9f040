"""words.c, as the package's build makes it."""

from collections.abc import Callable, Sequence

def watched(addresses: Sequence[int], /) -> Callable[[], bool]: ...
