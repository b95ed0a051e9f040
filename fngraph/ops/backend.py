"""A backend: one way to run a primitive, maybe with a plan that it makes on the host before a step.

Users write them, so a mistake in one is refused by its name, when it is made or registered.

Some libraries schedule a batch on the CPU and leave the result in device memory, where a captured
graph reads it. So a plan has one set of buffers for each key that is captured in one graph, made
before its capture, and one more for all eager calls.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NoReturn, Protocol

from torch import Tensor

from fngraph.core import BatchDescriptor, HostBounds, Support
from fngraph.core.text import did_you_mean, with_suggestions
from fngraph.errors import BackendError


class Run(Protocol):
    """What a backend does on the device."""

    def __call__(self, args: Any, /, host: HostBounds | None) -> None:
        """Write the output of one call.

        Args:
            args: the primitive's arguments by name, as `fg.ops.AttentionArgs` has attention's.
            host: the bounds of the step, or of the key that is captured; None in bare `forward`.
        """


class Bound(Protocol):
    """`Run` over arguments that are known beforehand."""

    def __call__(self, *, host: HostBounds | None) -> None:
        """Write the output of one call."""


@with_suggestions
@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """One way to run a primitive.

        def run(args: fg.ops.AttentionArgs, host: fg.HostBounds | None) -> None: ...
        fg.ops.ATTENTION.register(fg.ops.Backend("mine", run, lambda config: fg.Support.ALWAYS))

    Attributes:
        name: what users write in `graphify(backends={"attention": name})`.
        run: `run(args, host)` with the primitive's arguments in one tuple; writes `args.out` in
            full for the rows it is given and returns nothing; may neither sync with the host
            nor, where `support` is not NEVER, launch what depends on values in device memory.
            None: it is not shipped, but a name with a level, to study.
        support: configuration to the level at which its graphs can be captured.
        supports: configuration to None, or the reason why it cannot be run.
        options: what it can of what a configuration `asks` beyond the common; what is not listed
            is refused, so that a backend never meets an option that it has not heard of.
        needs: what it takes to run it, in words.
        missing: None, or the reason why it cannot be run on this machine at all.
        plan: host-side work before each step; None: it has none.
        bind: `bind(args)` returns `run(host=bounds)` over tensors that stay at their addresses, as
            they do between the graphs of PIECEWISE: what it does more cheaply the second time. It
            stands for `run` with all of the primitive's options. None: `run` it is.
        preferred: the configurations for which it is taken where none is named, if it can run.
        own_uniform: whether it runs batches that are known to be uniform in another way than
            others, and faster: they get keys of their own in every mode that captures them, FULL
            too.
    """

    name: str
    run: Run | None
    support: Callable[[Any], Support]
    supports: Callable[[Any], str | None] = lambda config: None
    options: tuple[str, ...] = ()
    needs: str = "torch"
    missing: Callable[[], str | None] = lambda: None
    plan: Plan | None = None
    bind: Callable[[Any], Bound] | None = None
    preferred: Callable[[Any], bool] = lambda config: False
    own_uniform: bool = False

    def __post_init__(self) -> None:
        """Raise where an attribute is something else than it is used as.

        Raises:
            BackendError: so it is.
        """
        for name in ("run", "support", "supports", "missing", "bind", "preferred"):
            value = getattr(self, name)
            if not callable(value) and not (value is None and name in ("run", "bind")):
                shown = f"fg.Support.{value.name}" if isinstance(value, Support) else repr(value)
                raise BackendError(
                    f"backend {self.name!r}: {name}={shown} is no function; for one that always "
                    f"answers so, pass {name}=lambda config: {shown}"
                )
        if isinstance(self.options, str):
            raise BackendError(
                f"backend {self.name!r}: options={self.options!r}; pass a tuple, "
                f"options=({self.options!r},)"
            )
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise BackendError(
                f"backend {self.name!r}: plan={self.plan!r} is no fg.ops.Plan; pass "
                'plan=fg.ops.Plan(("seq_lens",), buffers, fill)'
            )
        signature = None if self.run is None else _signature(self.run)
        try:
            if signature is not None:
                signature.bind(None, host=None)
        except TypeError as error:
            raise BackendError(
                f"backend {self.name!r}: run{signature} cannot be called as "
                f"run(args, host=bounds): {error}. Write def run(args, host): ..., and read what "
                "it is given by name: args.q, args.out (fg.ops.AttentionArgs for attention)"
            ) from None

    @property
    def shipped(self) -> bool:
        """Whether it can run anywhere at all."""
        return self.run is not None

    def check_names(self, primitive: str, *, options: Sequence[str], leaves: Sequence[str]) -> None:
        """Raise where it names an option, or a leaf that its plan reads, that is none of these.

        Raises:
            BackendError: so it does; with the nearest name.
        """
        read = () if self.plan is None else self.plan.leaves
        for what, names, known in (("options", self.options, options), ("plan", read, leaves)):
            for name in names:
                if name not in known:
                    raise BackendError(
                        f"backend {self.name!r}: its {what} names {name!r}, and {primitive} has "
                        f"{', '.join(map(repr, known)) or 'none'}.{did_you_mean(name, known)}"
                    )

    def level(self, config: Any) -> Support:
        """The level at which graphs of a configuration can be captured.

        Raises:
            BackendError: `support` returned something else.
        """
        level = self.support(config)
        if not isinstance(level, Support):
            raise BackendError(
                f"backend {self.name!r}: support(config) returned {level!r}; return a level, "
                "fg.Support.NEVER or higher"
            )
        return level

    def refuse_returned(self, returned: Any) -> NoReturn:
        """Raise because `run` returned something, which nobody would read.

        Raises:
            BackendError: always.
        """
        raise BackendError(
            f"backend {self.name!r}: run returned a {type(returned).__name__}, which nobody reads. "
            "Write it into the output that run is given, args.out.copy_(...), and return nothing"
        )

    def refusal(self, config: Any) -> str | None:
        """Why it cannot run a configuration here, or None.

        Raises:
            BackendError: `supports` returned neither a str nor None.
        """
        unknown = [ask for ask in getattr(config, "asks", ()) if ask not in self.options]
        if unknown:
            return f"it has no {' and no '.join(unknown)}"
        reason = self.supports(config)
        if reason is not None and not isinstance(reason, str):
            raise BackendError(
                f"backend {self.name!r}: supports(config) returned {reason!r}; return None where "
                "it can run a configuration, else the reason as a str"
            )
        return reason or self.missing()

    def __repr__(self) -> str:
        try:
            return f"Backend({self.name!r}, {self.level(None)})"  # of a plain configuration
        except Exception:  # the user's own, which may read the configuration
            return f"Backend({self.name!r})"


def _signature(run: Run) -> inspect.Signature | None:
    """What it takes, by name, as far as it tells: some functions in C do not."""
    try:
        signature = inspect.signature(run)
    except (TypeError, ValueError):
        return None
    bare = [x.replace(annotation=x.empty) for x in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=signature.empty)


def not_installed(module: str, package: str) -> str | None:
    """None if `module` can be imported, else how to get it: what `missing` answers."""
    return None if find_spec(module) is not None else f"not installed: pip install {package}"


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The host side of a backend. Calls of one configuration and the same leaves share one plan.

    Attributes:
        leaves: names of the primitive's arguments that it reads on the host. Each must be a leaf
            of the batch as it was passed to `forward`, and come in host memory: nothing waits.
        buffers: `buffers(config, sizes, key) -> Any`: what `run` gets as `args.plan`. `sizes` are
            the letters' (T, R, B, ...) largest values; `key` is None for eager calls.
        fill: `fill(buffers, config, sizes, leaves)`: before each step, with the leaves of the
            batch (unpadded, on the CPU) and `sizes` of what runs: the key's, or the true ones.
    """

    leaves: tuple[str, ...]
    buffers: Callable[[Any, Mapping[str, int], BatchDescriptor | None], Any]
    fill: Callable[[Any, Any, Mapping[str, int], Sequence[Tensor]], None]

    def __post_init__(self) -> None:
        """Raise where `leaves` is one name.

        Raises:
            BackendError: so it is.
        """
        if isinstance(self.leaves, str):
            raise BackendError(f"Plan({self.leaves!r}, ...): pass a tuple, ({self.leaves!r},)")


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Planner:
    """A plan with the leaves that it reads and the buffers that it fills.

    Attributes:
        leaves: of the batch, by number; `paths` are their names.
        most: the sizes of all letters; of T and R, the largest of a step.
        made: buffers of each key, and of eager calls under None.
    """

    backend: str
    plan: Plan
    config: Any
    leaves: tuple[int, ...]
    paths: tuple[str, ...]
    most: Mapping[str, int]
    made: dict[BatchDescriptor | None, Any] = dataclasses.field(default_factory=dict)

    def buffers(self, key: BatchDescriptor | None) -> Any:
        """What `run` gets; made when first asked for, which is before a capture."""
        if key not in self.made:
            sizes = dict(self.most)
            if key is not None:
                sizes |= {"T": key.num_tokens, "R": key.num_reqs or self.most["R"]}
            self.made[key] = self.plan.buffers(self.config, sizes, key)
        return self.made[key]

    def fill(
        self, key: BatchDescriptor | None, sizes: Mapping[str, int], leaves: Sequence[Tensor]
    ) -> None:
        """Plan a step.

        Args:
            leaves: all of the batch.

        Raises:
            BackendError: a leaf that is on the device; it would have to be waited for.
        """
        read = [leaves[i] for i in self.leaves]
        for path, leaf in zip(self.paths, read):
            if leaf.device.type != "cpu":
                raise BackendError(
                    f"backend {self.backend!r} plans on the host and reads {path}, which is on "
                    f"{leaf.device}. Pass it in host memory: step.host_batch(spec), or x.cpu()"
                )
        self.plan.fill(self.buffers(key), self.config, sizes, read)
