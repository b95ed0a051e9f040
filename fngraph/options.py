"""`Options`: what `graphify` was asked for, checked where it is written; stages carry it along.

The names stand once, in `OptionsDict`: `graphify` takes them as `**options: Unpack[OptionsDict]`,
so that an unknown one is an error to a type checker, and at run time here.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import torch

from fngraph.core import BatchDescriptor, Field, Limits, Mode, adapter_counts
from fngraph.core.compiling import LEVELS
from fngraph.core.resolution import OLD_FLAGS, check_cut
from fngraph.core.sizes import check_rounding
from fngraph.core.text import did_you_mean, nearest, shown, with_suggestions
from fngraph.errors import BackendError, CaptureError, DonationError, TreeError
from fngraph.fx.donation.table import COPY_LIMIT
from fngraph.graphs.recorder import Recorder
from fngraph.graphs.recorders import check_name
from fngraph.ops.choice import Choices, check_choices
from fngraph.ops.primitives import PRIMITIVES
from fngraph.passes.running.frame import Pass
from fngraph.passes.shipped import PassList, passes_of


class ResolveDict(TypedDict, total=False):
    """What `fg.resolve` is told of the model; see there."""

    pooling: bool
    encoder_decoder: bool
    layerwise: bool
    state_blocks: int | None
    cut: str
    align: str
    beyond: str
    eager: bool


@with_suggestions
@dataclasses.dataclass(frozen=True)
class Verify:
    """Which steps run a second time through bare `forward`, and what comes of a difference.

        fg.graphify(forward, ..., verify=fg.Verify(1e-3, on_difference="raise"))

    With "warn" a call takes copies and goes on. A thread compares them beside calls that follow;
    the next one warns, or who reads `step.stats` or `step.differences`, which wait for it. Held
    leaves may be written meanwhile by `step.rebind`, which waits too; after any other write that
    step is counted as `unverified`, and later ones are compared in their calls. Those are also so
    compared that processes meet in, that draw random numbers, or whose held leaves are inference
    tensors.

    Attributes:
        share: of the steps, 0 to 1, one in each window of 1 / share; 0: none.
        within: what results and state may be off by, in parts of the largest element of a row (what
            lies along the last dim), by dtype; those left out as `fngraph.shadow.compared` has it.
            A float is for all dtypes of floats.
        on_difference: "warn", once a step; or "raise" a `DifferenceError` from the very call, which
            then takes as long as bare `forward` and waits for the device. It is counted and kept.
        keep: how many differences `step.differences` keeps, with a copy of the batch and of what it
            needs of the state, each; the first ones.

    Raises:
        TypeError: values that mean nothing.
    """

    share: float = 0.0
    within: Mapping[torch.dtype, float] | float = dataclasses.field(default_factory=dict)
    on_difference: str = "warn"
    keep: int = 2

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float):
            raise TypeError(f"verify={self.share!r}: expected a share of the steps, 0 to 1")
        if not 0 <= self.share <= 1:
            raise TypeError(f"verify={self.share!r}: a share of the steps is 0 to 1; 1e-3 is usual")
        if self.on_difference not in ("warn", "raise"):
            raise TypeError(f'on_difference={self.on_difference!r}: "warn" or "raise"')
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 0:
            raise TypeError(f"keep={self.keep!r}: a number of differences")
        by = self.within if isinstance(self.within, Mapping) else {torch.float32: self.within}
        is_dtype = all(isinstance(name, torch.dtype) for name in by)
        if not is_dtype or not all(isinstance(x, int | float) and x >= 0 for x in by.values()):
            raise TypeError(
                f"within={self.within!r}: expected numbers from 0 on by dtype, "
                "{torch.bfloat16: 5e-2}, or one for all"
            )
        if isinstance(self.within, Mapping):  # as it is now, whatever becomes of the caller's dict
            object.__setattr__(self, "within", dict(self.within))

    @property
    def by_dtype(self) -> Mapping[torch.dtype, float]:
        """`within`, by dtype."""
        if isinstance(self.within, Mapping):
            return self.within
        floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
                  torch.complex128)  # fmt: skip
        return dict.fromkeys(floats, float(self.within))


def verify_of(given: float | Verify) -> Verify:
    """What `verify=` says, in full.

    Raises:
        TypeError: a value that means nothing.
    """
    return given if isinstance(given, Verify) else Verify(given)


def check_record(record: Any) -> None:
    """Raise `TypeError` unless it is a number of steps."""
    if not _is_count(record) or record < 0:
        raise TypeError(f"record={record!r}: expected how many of the last steps to keep; 0: none")


class OptionsDict(ResolveDict, total=False):
    """The options of `graphify`; see there."""

    modes: Mode | str | None
    limits: Limits | None
    sizes: Sequence[int] | None
    query_lens: Iterable[int]
    backends: Mapping[str, Choices] | None
    recorder: str | None
    outputs: str
    key_reqs: int | Iterable[int] | None
    max_keys: int
    adapters: int | Iterable[int]
    fields: Iterable[Field]
    cost: Callable[[BatchDescriptor], float] | None
    allow_copies: bool | int | None
    on_ambient: str
    memory_budget: int | None
    on_failure: str
    generators: Iterable[torch.Generator]
    guards: bool
    compile: str
    compile_sizes: Iterable[int]
    cache: bool
    passes: PassList
    megakernel: bool
    verify: float | Verify
    record: int


class CaptureDict(TypedDict, total=False):
    """The options of `capture`; see `Compiled.capture`."""

    recorder: str | Recorder | None
    outputs: str | None
    progress: bool | str
    lazy: bool
    memory_budget: int | None
    on_failure: str | None
    guards: bool | None
    verify: float | Verify | None
    record: int | None


@dataclasses.dataclass(frozen=True)
class Rules:
    """How keys are kept.

    Attributes:
        memory_budget: bytes that the pool and all graphs may take together; None: anything.
        on_failure: of a key that cannot be captured: "raise", or serve it "eager".

    Raises:
        CaptureError: values that mean nothing.
    """

    memory_budget: int | None = None
    on_failure: str = "raise"

    def __post_init__(self) -> None:
        if self.on_failure not in ("raise", "eager"):
            raise CaptureError(f'on_failure={self.on_failure!r}: "raise" or "eager"')
        budget = self.memory_budget
        if budget is not None and (type(budget) is not int or budget < 0):
            raise CaptureError(f"memory_budget={budget!r}: a number of bytes, 2 << 30, or None")


@dataclasses.dataclass(frozen=True)
class Options:
    """What `graphify` was asked for; see there for what each name means.

    Attributes:
        modes: None: the default. Backends may lower them.
        backends: primitive name to backends; a primitive left out takes its default.
        adapters: counts of active adapters that get keys of their own.
        compile: the level of compilation; pieces that call primitives may change it.
        passes: over the traced graph, in order; None: those of the level.
        allow_copies: bytes of the largest donated leaf that may be copied; or False, True.
        resolve: further arguments of `fngraph.core.resolve`, such as pooling=True.

    Raises:
        ModesError, BackendError, DonationError, CaptureError, TreeError, TypeError: an option that
            means nothing.
    """

    modes: Mode | None = None
    limits: Limits | None = None
    sizes: tuple[int, ...] | None = None
    query_lens: tuple[int, ...] = (1,)
    backends: Mapping[str, Choices] = dataclasses.field(default_factory=dict)
    recorder: str | None = None
    outputs: str = "own"
    key_reqs: int | tuple[int, ...] | None = None
    max_keys: int = 16
    adapters: tuple[int, ...] = (0,)
    fields: tuple[Field, ...] = ()
    cost: Callable[[BatchDescriptor], float] | None = None
    allow_copies: bool | int = COPY_LIMIT
    on_ambient: str = "recapture"
    memory_budget: int | None = None
    on_failure: str = "raise"
    generators: tuple[torch.Generator, ...] = ()
    guards: bool = False
    compile: str = "none"
    compile_sizes: tuple[int, ...] = ()
    cache: bool = True
    passes: tuple[Pass, ...] | None = None
    megakernel: bool = True
    verify: float | Verify = 0.0
    record: int = 0
    resolve: ResolveDict = dataclasses.field(default_factory=ResolveDict)

    def __post_init__(self) -> None:
        for name, choices in self.backends.items():
            check_choices(name, choices)  # unknown names fail here, where they are written
        if self.on_ambient not in ("recapture", "error"):
            raise TypeError(f'on_ambient={self.on_ambient!r}: "recapture" or "error"')
        if not isinstance(self.allow_copies, int) or self.allow_copies < 0:
            raise DonationError(
                f"allow_copies={self.allow_copies!r}: True, False or a number of bytes"
            )
        named = {**vars(self), **{name: [x] for name, x in self.resolve.items()}}
        for name, (fits, said) in _SAID.items():
            value = named.get(name, [])
            for one in value if isinstance(value, tuple | list) else [value]:
                if not fits(one):
                    raise TypeError(f"{name}{shown(one)}: expected {said}")
        if self.max_keys < 1:
            raise TypeError(f"max_keys={self.max_keys}: at least 1")
        check_cut(self.resolve.get("cut", "yes"))
        check_rounding(self.resolve.get("align", "uniform"), self.resolve.get("beyond", "cut"))
        check_level(self.compile, self.compile_sizes)
        check_outputs(self.outputs)
        check_name(self.recorder)
        verify_of(self.verify)
        check_record(self.record)
        Rules(self.memory_budget, self.on_failure)

    @property
    def passes_in_order(self) -> tuple[Pass, ...]:
        """What was asked for, or else what the level has."""
        return passes_of(None, self.compile) if self.passes is None else self.passes

    def rules(self, memory_budget: int | None, on_failure: str | None) -> Rules:
        """How keys are kept by a capture that was told these; None: as `graphify` was told."""
        budget = self.memory_budget if memory_budget is None else memory_budget
        return Rules(budget, on_failure or self.on_failure)


def parse_options(given: Mapping[str, Any]) -> Options:
    """`graphify`'s options as users write them, an `OptionsDict`.

    Raises:
        ModesError, BackendError, DonationError, CaptureError, TreeError, TypeError: an option that
            means nothing, or is none.
    """
    check_names("graphify", given, OptionsDict, ("donate", "stage"))
    options = dict(given)
    resolve: Any = {n: options.pop(n) for n in ResolveDict.__annotations__ if n in options}
    asked = options.pop("passes", None)
    level = options.get("compile", "none")
    check_level(level, ())
    passes = None if asked is None else passes_of(asked, level)
    modes, backends = options.pop("modes", None), options.pop("backends", None)
    adapters = options.pop("adapters", 0)
    if not isinstance(backends, Mapping | None):
        raise BackendError(
            f'backends={backends!r}: pass them by primitive, backends={{"attention": {backends!r}}}'
        )
    if not isinstance(adapters, int | Iterable) or isinstance(adapters, str):
        raise TypeError(f"adapters{shown(adapters)}: expected {_SAID['adapters'][1]}")
    if options.get("allow_copies", COPY_LIMIT) is None:
        options["allow_copies"] = COPY_LIMIT
    if isinstance(reqs := options.get("key_reqs"), Iterable) and not isinstance(reqs, str):
        options["key_reqs"] = tuple(reqs)
    for name in ("sizes", "query_lens", "fields", "generators", "compile_sizes"):
        given = options.get(name, ())
        if given is None and name == "sizes":
            continue
        if not isinstance(given, Iterable):
            raise TypeError(f"{name}{shown(given)}: expected several, {name}=(...)")
        if name in options:
            options[name] = tuple(given)
    return Options(
        modes=None if modes is None else Mode.parse(modes),
        backends=dict(backends or {}),
        adapters=adapter_counts(adapters, powers=True)
        if isinstance(adapters, int)
        else tuple(adapters),
        resolve=resolve,
        passes=passes,
        **options,
    )


def check_names(verb: str, given: Iterable[str], known: type, others: Sequence[str] = ()) -> None:
    """Raise `TypeError` for a name that the `TypedDict` `known` does not have.

    Args:
        others: arguments that `verb` takes besides, which may be meant too.
    """
    names = (*known.__annotations__, *others)
    for name in given:
        if name not in known.__annotations__:
            advice = OLD_FLAGS.get(name) or f".{did_you_mean(name, names) or _as_backend(name)}"
            raise TypeError(f"{verb}() takes no option {name!r}{advice}")


def _as_backend(name: str) -> str:
    """What to say of a primitive's name, which is no option."""
    near = nearest(name, [primitive.name for primitive in PRIMITIVES.values()])
    return f' Did you mean backends={{"{near}": ...}}?' if near is not None else ""


def _is_count(x: Any) -> bool:
    return hasattr(x, "__index__") and not isinstance(x, bool)


_OF_RESOLVE = ("pooling", "encoder_decoder", "layerwise", "eager")
_SAID: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_keys": (_is_count, "a number of exact shapes"),
    "key_reqs": (lambda x: x is None or _is_count(x), "a number of requests, several, or None"),
    "compile_sizes": (_is_count, "numbers of tokens, compile_sizes=(1, 8)"),
    "limits": (lambda x: isinstance(x, Limits | None), "fg.Limits(max_tokens=..., ...)"),
    "query_lens": (_is_count, "numbers of tokens, query_lens=(1, 4)"),
    "adapters": (_is_count, "a number of adapters, or several, adapters=(0, 4)"),
    "generators": (lambda x: isinstance(x, torch.Generator), "a tuple of torch.Generator, (g,)"),
    "fields": (lambda x: isinstance(x, Field), "a tuple of fg.Field, (field,)"),
    "cost": (lambda x: x is None or callable(x), "a function of a key, cost=lambda key: ..."),
    "state_blocks": (lambda x: x is None or _is_count(x), "a number of blocks, or None"),
    **{
        name: (lambda x: isinstance(x, bool), "True or False")
        for name in ("guards", "cache", "megakernel", *_OF_RESOLVE)
    },
}
"""What an option, or each of several, must be, and in words."""


def signature_with_options(fn: Callable[..., Any]) -> inspect.Signature:
    """The signature of `fn`, each option with its default in place of `**options`: for `help`."""
    own = inspect.signature(fn)
    defaults = {f.name: f.default for f in dataclasses.fields(Options)}
    defaults |= {"adapters": 0, "backends": None, "allow_copies": None}
    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name],
            annotation=kind.__forward_arg__,
        )
        for name, kind in OptionsDict.__annotations__.items()
        if name in defaults
    ]  # fmt: skip
    plain = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    rest = [p for p in own.parameters.values() if p.kind is p.VAR_KEYWORD]
    return own.replace(parameters=[*plain, *options, *(p.replace(name="resolve") for p in rest)])


def check_level(level: str, sizes: Sequence[int]) -> None:
    """Raise `TypeError` unless `level` is a level of compilation, which has such sizes."""
    if level not in LEVELS:
        known = ", ".join(map(repr, LEVELS))
        raise TypeError(f"compile={level!r}: one of {known}.{did_you_mean(level, LEVELS)}")
    if sizes and level != "pieces":
        raise TypeError(
            f'compile_sizes={sizes}: only compile="pieces" has code for exact sizes, and this is '
            f'compile={level!r}. Pass compile="pieces", or leave compile_sizes out'
        )


def check_outputs(outputs: str) -> None:
    """Raise `TreeError` unless `outputs` says who owns results."""
    if outputs not in ("own", "borrow"):
        raise TreeError(
            f'outputs={outputs!r}: "own" (yours to keep) or "borrow" (views, good for one call)'
        )
