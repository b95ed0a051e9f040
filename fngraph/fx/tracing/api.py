"""What the user's code calls of torch, before torch runs it: values, text and memory on the host.

`.numpy()`, `str(x)`, `.data = y` reach no op that a dispatch mode could see, or fail there with an
error that names no tensor of the user's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fngraph.core.where import runs_users_code, user_line
from fngraph.errors import BranchError, FnGraphError, HostSyncError, MutationError, PurityError
from fngraph.fx.leaves import Leaf
from fngraph.fx.tracing.operands import listed, operands_of, refused_by_torch
from fngraph.fx.tracing.outside import (
    MAKERS,
    Made,
    array_from_outside,
    foreign,
    is_array,
    is_literal,
    memory,
)
from fngraph.fx.tracing.refusals import TOLD, Refusals, any_array
from fngraph.fx.tracing.tried import check_traceable, said
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.names import tree_leaves, without_modes
from fngraph.torch_facts.tracing import FakeTensor

_VALUES = {"numpy", "tolist", "__array__", "__dlpack__", "__reduce_ex__", "share_memory_",
           "pin_memory", "storage", "_typed_storage"}  # fmt: skip
_TOLIST = FakeTensor.tolist.__code__
_TEXTS = {"__repr__", "__str__", "__format__"}
_MEMORY = {"data_ptr", "untyped_storage", "_version", "nbytes", "is_set_to", "const_data_ptr"}


class CallsMode(TorchFunctionMode):
    """Refuses calls that take a tensor to the host; knows the name of the call that runs.

    Attributes:
        name: what torch calls the function that the user's code is in ("__getitem__"); else "".
    """

    def __init__(self, owners: Mapping[int, Leaf], refuse: Refusals, made: Made) -> None:
        super().__init__()
        self.owners, self.refuse, self.made = owners, refuse, made
        self.name = ""
        self._of_array = False  # the last literal's data

    @property
    def shares_array(self) -> bool:
        """Whether a literal of the call that runs stays an array's memory. `torch.from_numpy`
        passes no mode, and is the only one without a name."""
        return self.name == "" or (self._of_array and self.name in ("as_tensor", "asarray"))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        frame = sys._getframe(1)  # fakes have a `tolist` of their own, which no mode sees
        if frame.f_code is _TOLIST and name == "dim" and not is_literal(args[0]):
            self.values("tolist", args)
            return 1
        if name == "unbind" and getattr(frame.f_back, "f_code", None) is _TOLIST:
            return tuple(any_array(args[0])) if not is_literal(args[0]) else func(*args)
        check = _CHECKS.get(name)
        if check is not None and (check is CallsMode.values or not _asked_by_torch()):
            done, result = check(self, name, args)
            if done:
                return result
        before, self.name = self.name, name
        refused = len(self.refuse.errors)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            shown = check_traceable(error, name, func, args, kwargs, self.refuse)
            if len(self.refuse.errors) == refused:
                self._tell(error, shown, name, (args, kwargs))
            if shown is not error:
                raise shown from None
            raise
        finally:
            self.name = before
        if name in ("shape", "size"):
            self.made.note(result, user_line())
        return result

    def _tell(self, error: Exception, shown: Exception, name: str, given: Any) -> None:
        """Have it told what was given to a call, if that is what raised an error.

        Args:
            shown: the error that `forward` is to see.
        """
        inside = error.__traceback__ and error.__traceback__.tb_next
        operands = operands_of(given, self.made)
        if operands and not isinstance(error, FnGraphError) and not runs_users_code(inside):
            told = refused_by_torch(user_line(), name, operands, said(shown))
            setattr(shown, TOLD, (str(told), f"{name.strip('_')}: {listed(operands)}"))

    def values(self, name: str, args: Any) -> tuple[bool, Any]:
        """A tensor's values on the host; those of a literal are known."""
        x = args[0]
        if is_literal(x) and name in ("numpy", "__array__"):
            with without_modes():
                return True, x.constant.numpy()
        if not isinstance(x, FakeTensor):
            self.refuse(foreign(user_line(), x, self.owners))
        else:
            self.refuse(
                HostSyncError(
                    f"{user_line()}: forward takes a tensor to the host with .{name}(), where a "
                    "graph would freeze it. Stay in torch: x.clone(), torch.where(condition, a, b)"
                )
            )
        array = any_array(x)
        done = name in ("numpy", "__array__", "tolist")
        return done, array.tolist() if name == "tolist" else array

    def text(self, name: str, args: Any) -> tuple[bool, Any]:
        """A tensor as text."""
        self.refuse(
            HostSyncError(
                f"{user_line()}: forward turns a tensor into text (str, f-string, print), which "
                "while tracing has no values in it and which a graph would not do again. Return "
                "the tensor, and print it outside"
            )
        )
        return True, "tensor"

    def behind(self, name: str, args: Any) -> tuple[bool, Any]:
        """Addresses, storages, version counters."""
        x = args[0]
        if not isinstance(x, FakeTensor):
            self.refuse(foreign(user_line(), x, self.owners))
        else:
            self.refuse(memory(user_line(), name, self.owners.get(storage_key(x))))
        return False, None

    def rebind(self, name: str, args: Any) -> tuple[bool, Any]:
        """`x.data = y`."""
        x = args[0]
        leaf = self.owners.get(storage_key(x)) if isinstance(x, FakeTensor) else None
        self.refuse(rebound(user_line(), ".data =", leaf.path if leaf else "a tensor"))
        return True, None

    def copy(self, name: str, args: Any) -> tuple[bool, Any]:
        """`copy.deepcopy(x)`: a clone."""
        x, memo = args
        memo[id(x)] = copied = x.clone()
        return True, copied

    def make(self, name: str, args: Any) -> tuple[bool, Any]:
        """`torch.tensor(data)`: of numbers, and not of what is no number yet."""
        data, line = args[-1] if name == "new_tensor" else args[0], user_line()
        self._of_array = is_array(data)
        parts = [data] if isinstance(data, torch.Tensor) else tree_leaves(data)
        error: PurityError | None = None
        if any(isinstance(x, torch.SymBool) for x in parts):
            error = BranchError(
                f"{line}: forward makes a literal of a bool that depends on T or R, which a "
                "graph would freeze. Compare and count on the device: torch.arange(x.shape[0]) > 3"
            )
        elif not isinstance(data, torch.Tensor) and any(torch.is_tensor(x) for x in parts):
            error = HostSyncError(
                f"{line}: forward makes a literal of tensors' values (torch.{name}), for which the "
                "host would have to wait. Put the tensors together: torch.stack([a, b])"
            )
        else:
            error = next((e for x in parts if (e := array_from_outside(line, x))), None)
        if error is None:
            return False, None
        self.refuse(error)
        return True, torch.ones(len(parts)) if len(parts) > 1 else torch.ones(())


def rebound(line: str, how: str, path: str) -> MutationError:
    """The error about giving a tensor other memory or another shape."""
    return MutationError(
        f"{line}: forward gives {path} other memory ({how}), which a graph cannot do again. Write "
        "into it, x.copy_(new), where it is donated; or return the new value: return out, new"
    )


_CHECKS: dict[str, Any] = (
    dict.fromkeys(_VALUES, CallsMode.values)
    | dict.fromkeys(_TEXTS, CallsMode.text)
    | dict.fromkeys(_MEMORY, CallsMode.behind)
    | dict.fromkeys(MAKERS, CallsMode.make)
    | {"data=": CallsMode.rebind, "__deepcopy__": CallsMode.copy}
)


def _name(func: Any) -> str:
    """`relu`, `shape` for its getter, `data=` for its setter."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        owner = getattr(func, "__self__", None)
        return getattr(owner, "__name__", "") + ("=" if name == "__set__" else "")
    return name


def _asked_by_torch() -> bool:
    """Whether torch's own Python, or ours, made the call."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("torch.overrides", "torch._tensor")
    ):
        frame = frame.f_back  # type: ignore[assignment]
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in ("torch", "fngraph")
