"""Greedy text about pictures, with graphs for all of it: encoder, prefill and decode on one pool.

    graphs = make_graphs(tower, params, cache, max_len=4096)
    tokens = describe(graphs, cache, prompt, pictures, max_new=64)

Pictures run as packs of the encoder's graphs, the prompt in chunks as PIECEWISE graphs with the
pictures' rows beside its tokens, and each further token as a FULL graph that takes no rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fngraph as fg
from fngraph.models.families import qwen3_vl
from fngraph.models.generate import BLOCK_SIZE, alone, ladder
from fngraph.models.serving.blocks import blocks_for
from fngraph.models.vision import prompts, qwen3_vl as vision
from fngraph.models.vision.grids import Picture


class Graphs(NamedTuple):
    """What runs pictures, prompts and further tokens of one model."""

    encoder: fg.Encoder
    prefill: fg.Step
    decode: fg.Step
    config: qwen3_vl.Config
    max_len: int  # tokens of a prompt and its text
    chunk: int  # tokens of a prompt in one step


def make_graphs(
    tower: vision.Params, params: qwen3_vl.Params, cache: Any, *, max_len: int, chunk: int = 512,
    max_tokens: int = 8192, recorder: Any = None, **options: Any,
) -> Graphs:  # fmt: skip
    """Everything captured, for one request at a time.

    Args:
        cache: of at least `max_len` tokens, in blocks of `BLOCK_SIZE`.
        max_tokens: output tokens of the encoder's largest graph.
        recorder: as `fg.graphify_encoder`'s.
        options: of all three, as `fg.graphify` takes them: guards, backends, compile, ...

    Raises:
        SpecError: a tower of another model, or a cache that is too small.
        FnGraphError: as `fg.graphify_encoder` and `fg.graphify`.
    """
    c = params.config
    check_parts(tower.config, c, cache, max_len)
    model = vision.encoder(tower.config, max_tokens=max_tokens)
    encoder = fg.graphify_encoder(model, tower, recorder=recorder, **options).capture()

    def captured(forward: Any, modes: str, sizes: Sequence[int], **dims: int) -> fg.Step:
        fast = fg.graphify(
            forward, modes=modes, stage="batch", donate="cache", sizes=sizes, **options
        )
        limits = fg.Limits(sizes[-1], 1, B=blocks_for(max_len, BLOCK_SIZE), **dims)
        bound = fast.bind(params)
        return bound.capture(cache, limits, recorder=encoder.recorder, progress=False)

    rows = {"N": 1 + c.deepstack, "E": c.dim}
    prefill = captured(qwen3_vl.forward_pictures, "PIECEWISE", ladder(chunk), **rows)
    decode = captured(qwen3_vl.forward, "FULL_DECODE_ONLY", (1,))
    return Graphs(encoder, prefill, decode, c, max_len, chunk)


def check_parts(tower: vision.Config, config: qwen3_vl.Config, cache: Any, max_len: int) -> None:
    """Refuse a tower and a cache that are not for this model, or not for so many tokens.

    Raises:
        SpecError: either.
    """
    made, taken = (tower.out_dim, len(tower.deepstack)), (config.dim, config.deepstack)
    if made != taken:
        raise fg.errors.SpecError(
            f"the tower makes rows of {made[0]} numbers and {made[1]} of deepstack, and the "
            f"language model takes {taken[0]} and {taken[1]}. Load both from one folder"
        )
    (num_blocks, size), needed = cache[0][0].shape[:2], blocks_for(max_len, BLOCK_SIZE)
    if num_blocks < needed or size != BLOCK_SIZE:
        raise fg.errors.SpecError(
            f"the cache has {num_blocks} blocks of {size} tokens, and max_len={max_len} takes "
            f"{needed} of {BLOCK_SIZE}. Pass init_cache(config, {needed}, block_size={BLOCK_SIZE})"
        )


def describe(
    graphs: Graphs, cache: Any, prompt: Sequence[int], pictures: Sequence[Picture], max_new: int,
    *, stop: Collection[int] = (),
) -> tuple[int, ...]:  # fmt: skip
    """The new tokens of one request.

    Args:
        cache: the one that `make_graphs` was given. What is in it is written over.
        prompt: tokens; those of pictures as `prompts.positions` has them.
        pictures: in the order in which they come.
        stop: tokens that end the text; the one that does is its last.

    Raises:
        SpecError: tokens that are not those of the pictures, none, or a text beyond `max_len`.
        FnGraphError: as an encoder and a step.
    """
    c, marks = graphs.config, prompts.Marks(graphs.config.image_token, graphs.config.video_token)
    if not prompt:
        raise fg.errors.SpecError("the prompt is empty. Pass at least one token")
    if len(prompt) + max_new > graphs.max_len:
        raise fg.errors.SpecError(
            f"the prompt has {len(prompt)} tokens, and max_new={max_new} more are beyond "
            f"max_len={graphs.max_len}. Pass max_new={max(graphs.max_len - len(prompt), 0)}, or "
            "make_graphs(..., max_len=) more"
        )
    at_S3 = prompts.positions(prompt, pictures, marks)
    device = cache[0][0].device
    takes_S, rows_SNE = prompt_rows(graphs.encoder(pictures), prompt, marks, c, device)
    num_blocks = blocks_for(graphs.max_len, BLOCK_SIZE)
    tokens, computed, following = list(prompt), 0, int(at_S3.max()) + 1
    while computed < len(prompt):
        part = slice(computed, min(computed + graphs.chunk, len(prompt)))
        batch = alone(
            tokens[: part.stop], computed, num_blocks, device, qwen3_vl.PictureBatch,
            positions=at_S3[part], takes=takes_S[part], rows=rows_SNE[part],
        )  # fmt: skip
        logits_RV, cache = graphs.prefill(cache, batch)
        computed = part.stop
    while len(tokens) < len(prompt) + max_new:
        tokens.append(int(logits_RV.argmax()))
        if tokens[-1] in stop or len(tokens) == len(prompt) + max_new:
            break
        at_13 = torch.full((1, 3), following)
        batch = alone(tokens, computed, num_blocks, device, qwen3_vl.Batch, positions=at_13)
        logits_RV, cache = graphs.decode(cache, batch)
        computed, following = computed + 1, following + 1
    return tuple(tokens[len(prompt) :])


def prompt_rows(
    outputs: Sequence[tuple[Tensor, Sequence[Tensor]]], prompt: Sequence[int],
    marks: prompts.Marks, config: qwen3_vl.Config, device: torch.device | str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Whether each token of a prompt is a picture's, (S,) bool, and its rows (S, N, E) float32.

    Args:
        outputs: of the tower, for each picture in order: its rows and its deepstack.
    """
    takes_S = torch.tensor([token in marks for token in prompt]).to(device)
    rows_SNE = torch.zeros(len(prompt), 1 + config.deepstack, config.dim, device=device)
    if outputs:
        made = [torch.stack([first, *deep], 1) for first, deep in outputs]
        rows_SNE[takes_S] = torch.cat(made).float()
    return takes_S, rows_SNE
