"""A transformers causal LM as a pure function: forward(params, cache, batch) -> (logits, cache).

Of a vision-language model it is its language model. A picture is a run of one token in a prompt,
and `Pictured` has the rows that its tower made of it; `Placed` are batches without.

Shape letters: T query tokens, R requests, B blocks per request, V vocab; K kv heads, D head dim, E
model dim, N rows of a token, 1 and those of its deepstack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

import fngraph as fg
from fngraph.errors import AddressError, FnGraphError, ModelError
from fngraph.integrations.transformers.attention import NAME, Attending, Layer, routed
from fngraph.integrations.transformers.fixed import Fixed, fixing
from fngraph.torch_facts.tracing import FakeTensorMode

KV = tuple[Tensor, Tensor]  # one layer's (k, v), each (num_blocks, block_size, K, D)
Forward = Callable[[dict[str, Tensor], tuple[KV, ...], "Batch"], tuple[Tensor, tuple[KV, ...]]]


@fg.struct
class Batch:
    """One step's tokens, R requests of one or more tokens each, laid end to end."""

    token_ids: Tensor = fg.buffer("T", "int64")
    positions: Tensor = fg.buffer("T", "int64")
    slot_mapping: Tensor = fg.buffer("T", "int64", pad=-1)
    seq_lens: Tensor = fg.buffer("R", "int32", pad=0)
    query_start_loc: Tensor = fg.buffer("R + 1", "int32", pad="stride")
    block_tables: Tensor = fg.buffer("R B", "int32", pad=0)
    logits_indices: Tensor = fg.buffer("R", "int64", pad=0, min=0)
    spec: fg.BatchSpec = fg.host()


@fg.struct
class Places:
    """Where tokens are beside their number in the text."""

    places: Tensor = fg.buffer("T 3", "int64")  # time, row and column


@fg.struct
class Placed(Batch, Places):
    """A step's tokens, with three positions each."""


@fg.struct
class Rows:
    """What the tokens of pictures take."""

    takes: Tensor = fg.buffer("T", "bool", pad=False)  # whether a token is a picture's
    rows: Tensor = fg.buffer("T N E", "float32")  # of these tokens; else they are not read


@fg.struct
class Pictured(Placed, Rows):
    """A step's tokens, some of which are pictures'."""


def params_of(model: Any, ropes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Parameters and buffers by name, a tied one once, in place; `ropes` as they are unscaled."""
    held = {n: p.detach() for n, p in (*model.named_parameters(), *model.named_buffers())}
    for path, rope in ropes.items():
        held.pop(f"{path}.original_inv_freq", None)  # at times the very tensor that inv_freq is
        held[f"{path}.inv_freq"] = rope.original_inv_freq
    return held


def refuse_moved(model: Any, params: Mapping[str, Tensor]) -> None:
    """Raise where the model's weights are not those that graphs read.

    Raises:
        AddressError: one that has been replaced, by name.
    """
    for name, now in model.named_parameters():
        held = params.get(name)
        if held is not None and (held.data_ptr(), held.dtype) != (now.data_ptr(), now.dtype):
            raise AddressError(
                f"{name} of {type(model).__name__} is other memory than when graphify_model took "
                "it, which graphs still read. Write in place, weight.copy_(new), or call "
                "graphify_model again"
            )


def pure_forward(model: Any, longest: int, fixed: Fixed, kind: type[Batch] = Batch) -> Forward:
    """`model` without its memory: the logits (R, V) of rows `logits_indices`, and the cache.

    Args:
        kind: of its batches.
    """

    def forward(
        params: dict[str, Tensor], cache: tuple[KV, ...], batch: Batch
    ) -> tuple[Tensor, tuple[KV, ...]]:
        with routed(model), fixing(model, fixed), taking(model, batch):
            return logits_of(model, params, batch, Attending(batch, cache, longest)), cache

    forward.__annotations__["batch"] = kind
    return forward


@contextlib.contextmanager
def taking(model: Any, batch: Any) -> Iterator[None]:
    """For the duration, the language model inside `model` takes the batch's rows, if it has any:
    the first of each token in place of its embedding, the others after the first layers."""
    if not isinstance(batch, Pictured):
        yield
        return
    language, takes_1T1 = model.model.language_model, batch.takes[None, :, None]

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x_1TE = kwargs["inputs_embeds"]
        first, *deep = batch.rows.to(x_1TE.dtype).unbind(1)
        given = kwargs | {"inputs_embeds": torch.where(takes_1T1, first[None], x_1TE)}
        if deep:
            given |= {"deepstack_visual_embeds": deep, "visual_pos_masks": takes_1T1}
        return args, given

    def add(x_1TE: Tensor, takes_1T1: Tensor, row_TE: Tensor) -> Tensor:  # theirs picks rows out
        return x_1TE + torch.where(takes_1T1, row_TE[None], 0)

    hook = language.register_forward_pre_hook(before, with_kwargs=True)
    try:
        if batch.rows.shape[1] > 1:
            language._deepstack_process = add
        yield
    finally:
        hook.remove()
        vars(language).pop("_deepstack_process", None)


def logits_of(model: Any, params: dict[str, Tensor], batch: Any, attending: Attending) -> Tensor:
    """The logits (R, V). One row of T tokens; which belong together, only attention knows."""
    positions = batch.positions[None]
    if isinstance(batch, Placed):  # theirs are of the text, of time, rows and columns
        positions = torch.cat([positions, batch.places.T])[:, None]
    kwargs = {
        "input_ids": batch.token_ids[None],
        "position_ids": positions,
        # nothing is padding; without it the positions would be searched for packed sequences
        "attention_mask": torch.ones_like(batch.token_ids)[None],
        "use_cache": False,
        "logits_to_keep": batch.logits_indices,
        NAME: attending,
    }
    return functional_call(model, params, (), kwargs).logits[0]


def attention_layers(
    model: Any, params: dict[str, Tensor], limits: fg.Limits, longest: int, fixed: Fixed
) -> list[Layer]:
    """Every attention call of one forward in order, from a run on fake tensors.

    Raises:
        PurityError: what a graph cannot hold, with the line in the model's file.
        ModelError: layers that do not attend through transformers' interface.
    """

    def dry(params: dict[str, Tensor], batch: Batch) -> Tensor:
        with routed(model), fixing(model, fixed):
            return logits_of(model, params, batch, noted)

    noted = Attending(None, None, longest)
    try:
        with FakeTensorMode() as mode, torch.no_grad():
            fakes: dict[str, Tensor] = {n: mode.from_tensor(p) for n, p in params.items()}
            dry(fakes, _example(next(iter(fakes.values())).device))
    except FnGraphError:
        raise
    except Exception as error:
        _trace(fg.graphify(dry, stage="batch"), params, limits)
        raise ModelError(f"{type(model).__name__} cannot be traced: {error}") from error
    expected, found = model.config.get_text_config().num_hidden_layers, len(noted.modules)
    if found < expected:
        raise ModelError(
            f"{type(model).__name__} has {expected} layers, and {found} of them "
            "attend through transformers' AttentionInterface. The others have a state that a paged "
            "cache does not hold (Mamba, convolution, linear attention), or attention of their own"
        )
    return noted.layers


def _trace(dry: Any, params: dict[str, Tensor], limits: fg.Limits) -> None:
    """Raise what fngraph says of a function that fails on fake tensors, if it says anything."""
    try:
        dry.trace(params, limits=limits)
    except FnGraphError:
        raise
    except Exception:
        return


def _example(device: torch.device) -> Any:
    shapes = {"token_ids": 5, "positions": 5, "logits_indices": 2}
    values = {n: torch.zeros(k, dtype=torch.int64, device=device) for n, k in shapes.items()}
    return type("Example", (), values)


def init_cache(
    layers: Sequence[Layer], num_blocks: int, block_size: int, device: torch.device
) -> tuple[KV, ...]:
    """An empty paged cache."""

    def zeros(layer: Layer) -> Tensor:
        shape = (num_blocks, block_size, layer.num_kv_heads, layer.head_dim)
        return torch.zeros(shape, dtype=layer.dtype, device=device)

    return tuple((zeros(layer), zeros(layer)) for layer in layers)
