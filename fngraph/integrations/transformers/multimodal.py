"""Prompts with pictures, for vision-language models of transformers.

A picture is a run of one token in its prompt, as long as it has output tokens; a video is one run,
or one a frame with text between them. Where each token is in time, row and column is worked out on
the host by the model's own `get_rope_index`.

Shape letters: S tokens of a prompt, P of them pictures'; T tokens of a step; N rows of a token, 1
and those of its deepstack; E model dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fngraph.encoder.graphs import Encoder
from fngraph.errors import ModelError, SpecError
from fngraph.integrations.transformers.forward import Batch, Pictured, Placed
from fngraph.integrations.transformers.vision import Picture
from fngraph.models.serving.batches import empty_batch, lay_out
from fngraph.models.serving.policy import Policy
from fngraph.models.serving.requests import Row
from fngraph.step.step import Step

APART = {"qwen2_vl": False, "qwen2_5_vl": False, "qwen3_vl": True, "qwen3_vl_moe": True}
"""The model_type of configs that are known -> whether each frame of a video is a run of its own."""

TOKENS = tuple(f"{of}_token_{n}" for of in ("image", "video", "audio") for n in ("id", "index"))


class Vlm(NamedTuple):
    """A vision-language model that is known here.

    Attributes:
        inner: the part that has the tower, the language model and `get_rope_index`.
        marks: the tokens that stand for images and for videos.
        apart: whether each frame of a video is a run of its own.
        rows: of a token, N.
        dim: of a row, E.
    """

    inner: Any
    marks: tuple[int, int]
    apart: bool
    rows: int
    dim: int


class Vision(NamedTuple):
    """How a model sees.

    Attributes:
        vlm: what is known of it.
        encoder: its tower's graphs.
        prefill: the step of batches with tokens of pictures.
    """

    vlm: Vlm
    encoder: Encoder
    prefill: Step


class Shown(NamedTuple):
    """A prompt with pictures.

    Attributes:
        pictures: images and videos, each kind in the order of its runs.
        places_S3: time, row and column of each token.
        following: of a token behind the prompt, what its place is beyond its number in the text.
        takes_S: whether a token is a picture's.
        video_P: whether that picture is a video.
    """

    pictures: tuple[Picture, ...]
    places_S3: Tensor
    following: int
    takes_S: Tensor
    video_P: Tensor


def vlm_of(model: Any) -> Vlm | None:
    """What is known of a model that sees; None: nothing, or it does not."""
    config = model.config
    if config.model_type not in APART or not hasattr(model.model, "visual"):
        return None
    deep = getattr(config.vision_config, "deepstack_visual_indexes", None) or ()
    marks = (config.image_token_id, config.video_token_id)
    dim = config.get_text_config().hidden_size
    return Vlm(model.model, marks, APART[config.model_type], 1 + len(deep), dim)


def picture_tokens(model: Any) -> frozenset[int]:
    """The tokens that stand for pictures, or for sound, of any model."""
    return frozenset(
        token for name in TOKENS if isinstance(token := getattr(model.config, name, None), int)
    )


# --- prompts --------------------------------------------------------------------------------------


def shown_in(
    vlm: Vlm | None, tokens: frozenset[int], prompts: Sequence[Sequence[int]],
    pictures: Sequence[Sequence[Picture]] | None,
) -> dict[int, Shown]:  # fmt: skip
    """The prompts that have pictures, by their numbers.

    Args:
        tokens: that stand for pictures.
        pictures: of each prompt; None: there are none.

    Raises:
        SpecError: runs of these tokens that are not those of the pictures, or lists of pictures for
            more or fewer prompts.
        ModelError: pictures for a model that takes none here.
    """
    if isinstance(pictures, Picture) or any(isinstance(some, Picture) for some in pictures or ()):
        raise SpecError("pictures: pass a list of them for each prompt, pictures=[[...], ...]")
    if pictures is not None and len(pictures) != len(prompts):
        raise SpecError(
            f"{len(prompts)} prompts, and pictures= for {len(pictures)}. Pass a list of pictures "
            "for each prompt, [] where it has none"
        )
    found = {}
    for i, prompt in enumerate(prompts):
        mine = [] if pictures is None else list(pictures[i])
        if vlm is not None:
            if mine or not tokens.isdisjoint(prompt):
                found[i] = _shown(vlm, i, list(prompt), mine)
        elif mine:
            raise ModelError(
                f"prompt {i} comes with pictures, and this model takes none here: "
                f"{', '.join(sorted(APART))} do. fg.integrations.transformers.vision_encoder may "
                "still run its tower"
            )
        elif mark := tokens & set(prompt):
            raise SpecError(
                f"prompt {i} has token {min(mark)}, which stands for a picture or sound, and this "
                f"model takes none here: {', '.join(sorted(APART))} do. Take the token out"
            )
    return found


def _shown(vlm: Vlm, i: int, prompt: list[int], pictures: list[Picture]) -> Shown:
    """Raises: SpecError."""
    merge = vlm.inner.config.vision_config.spatial_merge_size
    runs = [(token, len(list(run))) for token, run in groupby(prompt) if token in vlm.marks]
    ordered: list[Picture] = []
    for kind, mark in zip(("image", "video"), vlm.marks):
        some = [picture for picture in pictures if picture.modality == kind]
        wanted = []
        for t, h, w in (picture.grid for picture in some):
            frame = h * w // merge**2
            wanted += [frame] * t if vlm.apart else [t * frame]
        got = [length for token, length in runs if token == mark]
        if got != wanted:
            raise SpecError(
                f"prompt {i} has runs of token {mark} of the lengths {got}, and its {kind}s make "
                f"{wanted}. Write the token once for each output token, with other tokens between "
                "two runs, as the model's processor does; and pass the pictures in order"
            )
        ordered += some
    if len(ordered) != len(pictures):
        raise SpecError(f'prompt {i}: modality is "image" or "video" of each picture')
    # by one token of text longer, which says where text goes on. Their `rope_deltas` does not: a
    # video may end later than the text that follows it begins
    tokens_1S = torch.tensor([[*prompt, min({0, 1, 2} - set(vlm.marks))]])
    image_1S, video_1S = (tokens_1S == mark for mark in vlm.marks)
    sizes = {
        kind: torch.tensor([x.grid for x in ordered if x.modality == kind]) for kind in
        ("image", "video") if any(x.modality == kind for x in ordered)
    }  # fmt: skip
    seconds = [x.seconds for x in ordered if x.modality == "video"]
    places_31S, _ = vlm.inner.get_rope_index(
        tokens_1S, mm_token_type_ids=image_1S + 2 * video_1S,
        image_grid_thw=sizes.get("image"), video_grid_thw=sizes.get("video"),
        **{} if vlm.apart else {"second_per_grid_ts": torch.tensor(seconds)},
    )  # fmt: skip
    places, takes_S = places_31S[:, 0].T, (image_1S | video_1S)[0, :-1]
    return Shown(
        tuple(ordered), places[:-1], int(places[-1, 0]) - len(prompt), takes_S,
        video_1S[0, :-1][takes_S],
    )  # fmt: skip


def see(
    vision: Vision, shown: Mapping[int, Shown], seen: dict[int, Tensor], ids: Sequence[int]
) -> Mapping[int, Tensor]:  # fmt: skip
    """`seen`, after the pictures of these prompts have run, those of all that are new in one call.

    Args:
        seen: by prompt, the tower's rows (P, N, E) of its tokens of pictures.
    """
    new = [id for id in ids if id not in seen]
    outputs = iter(vision.encoder([picture for id in new for picture in shown[id].pictures]))
    for id in new:
        seen[id] = _rows(shown[id], [_stacked(next(outputs)) for _ in shown[id].pictures])
    return seen


def _stacked(output: Any) -> Tensor:
    """(tokens, N, E): a picture's rows, and those of its deepstack if there is one."""
    first, deep = output if isinstance(output, tuple) else (output, ())
    return torch.stack([first, *deep], 1)


def _rows(shown: Shown, each: Sequence[Tensor]) -> Tensor:
    """(P, N, E): what was made of each picture, in the order of the prompt's tokens."""
    made_PNE = each[0].new_empty(len(shown.video_P), *each[0].shape[1:])
    for kind, of_kind_P in (("image", ~shown.video_P), ("video", shown.video_P)):
        if some := [x for x, one in zip(each, shown.pictures) if one.modality == kind]:
            made_PNE[of_kind_P.to(made_PNE.device)] = torch.cat(some)
    return made_PNE


# --- batches --------------------------------------------------------------------------------------


def batch_of(
    kind: type[Batch], rows: Sequence[Row], policy: Policy,
    shown: Mapping[int, Shown] = MappingProxyType({}),
    look: Callable[[list[int]], Mapping[int, Tensor]] | None = None,
) -> Any:  # fmt: skip
    """The batch of a step: of `kind`, or `Pictured` where tokens of pictures are in it.

    Args:
        look: gives the rows of some prompts; see `see`.
    """
    batch = lay_out(rows, policy, lambda spec: empty_batch(kind, policy, spec))
    if not isinstance(batch, Placed):
        return batch
    batch.places[:] = batch.positions[:, None]
    parts, at = [], 0
    for job, new, _ in rows:
        mine, computed = slice(at, at + new), job.computed
        at += new
        if (one := shown.get(job.id)) is None:
            continue
        known = one.places_S3[computed : computed + new]
        batch.places[mine] += one.following
        batch.places[mine][: len(known)] = known
        takes = one.takes_S[computed : computed + new]
        if takes.any():
            first = int(one.takes_S[:computed].sum())
            parts.append((job.id, mine.start + takes.nonzero()[:, 0], first))
    if not parts or look is None:
        return batch
    made = look([id for id, _, _ in parts])
    (_, N, E), device = made[parts[0][0]].shape, made[parts[0][0]].device
    takes_T = torch.zeros(batch.spec.num_tokens, dtype=torch.bool)
    rows_TNE = torch.zeros(batch.spec.num_tokens, N, E, device=device)
    for id, where, first in parts:
        takes_T[where] = True
        rows_TNE[where.to(device)] = made[id][first : first + len(where)].float()
    leaves = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return Pictured(**leaves, takes=takes_T, rows=rows_TNE)
