"""Models from Hugging Face folders: config.json, and safetensors in one file or in shards.

`FAMILIES` says which module reads which `model_type`; a family says as a `Format`, which is data,
what its weights are called in such files. What config.json says is held to the types of its
`Config`. Nothing of transformers is needed.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fngraph as fg
from fngraph.models.weights import fp8_folders, naming, reading
from fngraph.models.weights.configs import (
    HARMLESS,
    CheckpointError as CheckpointError,
    Raw as Raw,
    Said,
    matches,
    misfits,
    read_json as read_json,
    unknown,
)
from fngraph.models.weights.files import open_tensors, renamed
from fngraph.models.weights.sharding import share_of
from fngraph.models.weights.splits import Specs

FAMILIES = {
    "bert": "fngraph.models.families.bert",
    "deepseek_v2": "fngraph.models.families.deepseek_v2",
    "deepseek_v3": "fngraph.models.families.deepseek_v3",
    "gemma3_text": "fngraph.models.families.gemma3",
    "llama": "fngraph.models.families.llama",
    "mamba2": "fngraph.models.families.mamba2",
    "mistral": "fngraph.models.families.mistral",
    "qwen2": "fngraph.models.families.qwen2",
    "qwen3": "fngraph.models.families.qwen3",
    "qwen3_moe": "fngraph.models.families.qwen3_moe",
    "qwen3_next": "fngraph.models.families.qwen3_next",
}
"""model_type of a config.json -> module."""
POOLING = {"bert"}
STORED = ("F64", "F32", "F16", "BF16")  # as safetensors calls them; others want scales of their own

Shapes = Mapping[str, tuple[int, ...]]


class Format(NamedTuple):
    """How the folders of a family are read.

    Attributes:
        read: a config from what config.json says; a KeyError names what it lacks.
        blank: the `Params` of a config, of meta tensors.
        names: our name of a weight -> its name in the files. The first star on either side is
            the layer's number; one more on theirs numbers tensors that are stacked, as experts are.
        only: what the family can do no other way, by key of config.json.
        skipped: patterns of tensors that may be there and are not read.
        layers: the kinds of layers that `layer_types` of config.json may name.
        harmless: patterns of keys of config.json that change nothing, beside `configs.HARMLESS`.
        copies: their name of a tensor -> that of another, which it has to equal where `names`
            does not ask for it, as a head does that is tied.
        wide: last names of weights that are computed with in float32, so that they may be stored
            in another dtype than the others.
        kept: those of them that stay as they are stored, whatever `dtype=` is.
        renamed: patterns of names in the files, and what stands there in the names above.
        specs: how a model of a config is split over processes; None: it cannot be.
    """

    read: Callable[[Raw], Any]
    blank: Callable[[Any], Any]
    names: Mapping[str, str]
    only: Raw
    skipped: tuple[str, ...] = ()
    layers: tuple[str, ...] = ("full_attention",)
    harmless: tuple[str, ...] = ()
    copies: Mapping[str, str] = {"lm_head.weight": "model.embed_tokens.weight"}
    wide: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    specs: Callable[[Any], Specs] | None = None


def family(folder: str | Path, *, generative: bool = False) -> ModuleType:
    """The module of the family that a folder's config.json names.

    Raises:
        CheckpointError: no config.json; a `model_type` that is not here, or writes no text.
    """
    kind = read_json(Path(folder)).get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"{folder}: model_type {kind!r} is none of {', '.join(FAMILIES)}, the families of "
            f"fngraph.models.weights.loading.FAMILIES.{fg.core.text.did_you_mean(kind, FAMILIES)}"
        )
    if generative and kind in POOLING:
        raise CheckpointError(
            f"{folder}: a model of type {kind!r} writes no text. Its sentence embeddings are what "
            f"{FAMILIES[kind]}.forward returns"
        )
    return importlib.import_module(FAMILIES[kind])


def load(
    format: Format,
    folder: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    mesh: fg.Mesh | None = None,
) -> tuple[Any, Any]:
    """The config and the weights of a folder; dtypes stay as they are stored if `dtype` is None.

    Matrices that are stored in fp8 stay so whatever `dtype` is, as `fp8.Fp8Weight`.

    Args:
        device: None: the mesh's; without one, the CPU.
        mesh: of the processes that share the model, each of which calls this. No more is read than
            what this one has, and the config is its own; see `sharding.shard`.

    Raises:
        CheckpointError: no such files; a config that the family cannot run; tensors missing,
            extra, misshapen or quantized in another way, or a tied head that is another one; or of
            several dtypes, and no `dtype`. All of one kind are listed.
        TypeError: a dtype that weights cannot have.
        fg.errors.RankError: a mesh that the model cannot be split over.
    """
    if dtype is not None:
        naming.check_dtype(dtype)
    folder = Path(folder)
    config, static = read_config(format, folder), read_scheme(folder)
    if mesh is not None and format.specs is None:
        raise fg.errors.RankError(f"{folder}: this family cannot be split. Leave mesh= out")
    share = share_of(config, format.specs(config), mesh) if mesh and format.specs else None
    device = device or (mesh.device if mesh else "cpu")
    blank = format.blank(config)
    sources = {n: sources_of(format.names, n, x) for n, x in naming.named(blank).items()}
    wanted = {n: shape for part in sources.values() for n, shape in part.items()}
    with ExitStack() as stack:
        files = renamed(open_tensors(folder, stack), format.renamed)
        shapes = {n: at.shape for n, at in files.items()}
        kinds = {n: at.kind for n, at in files.items()}
        places = fp8_folders.places_of(sources, kinds, shapes, static)
        wanted |= {n: shape for place in places.values() for n, shape in place.beside.items()}
        left = {n: s for n, s in shapes.items() if n not in wanted}
        copies = {n: of for n, of in format.copies.items() if n in left}
        skipped = (*format.skipped, *copies)
        found = {n: s for n, s in shapes.items() if n in wanted or not matches(n, skipped)}
        wrong = mismatches(wanted, found)
        in_fp8 = {place.values for place in places.values()}
        wrong += [
            f"  {n}: is stored as {kinds[n]}, only {', '.join(STORED)} can be read"
            for n in wanted
            if n in kinds and n not in in_fp8 and kinds[n] not in STORED
        ]
        if static is not None and not places:
            wrong.append("  config.json has a quantization_config, and no matrix is stored in fp8")
        get = lambda n: files[n].whole()  # noqa: E731
        ours = {n: name for name, part in sources.items() for n in part}
        equal = reading.equal_parts(share, ours, files) if share else equal_by(get)
        wrong += untied(copies, files, equal)
        if dtype is None:
            free = {*format.wide, *format.kept}
            one = [n for n in sources if n not in places and n.rsplit(".", 1)[-1] not in free]
            wrong = wrong or several_dtypes({n: kinds[n] for name in one for n in sources[name]})
        wrong = wrong or fp8_folders.wrong_in(places, get)
        if wrong := wrong or (reading.too_small(share, places) if share else []):
            raise CheckpointError(f"{folder} does not fit its config:\n" + "\n".join(wrong))

        def read(name: str, x: Tensor) -> Any:
            to = None if name.rsplit(".", 1)[-1] in format.kept else dtype
            if share is not None and name in places:
                return reading.read_fp8_part(share, name, places[name], files, device)
            if share is not None:
                stored = [files[n] for n in sources[name]]
                return reading.read_part(share, name, x, stored, device, to)
            if name in places:
                return fp8_folders.read_weight(places[name], get, device)
            parts = [get(n).to(device=device, dtype=to) for n in sources[name]]
            return parts[0] if parts[0].ndim == x.ndim else torch.stack(parts)

        params = naming.replaced(blank, read)
        if share is not None:
            config, params = share.config, dataclasses.replace(params, config=share.config)
        return config, params


def from_state(
    blank: Callable[[Any], Any],
    names: Mapping[str, str],
    config: Any,
    state: Mapping[str, Tensor],
    *,
    skipped: Iterable[str] = (),
    inside: str = "",
    copies: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """The weights of a config out of tensors by name, as a module's `state_dict()` has them.

    They are the state's own tensors, where these are on that device and of that dtype already.

    Args:
        blank, names, skipped, copies: see `Format`.
        inside: what names in files have in front that the state's have not, "model.visual.".

    Raises:
        CheckpointError: tensors missing, extra or misshapen, or a tied head that is another one;
            all are listed.
        TypeError: a dtype that weights cannot have.
    """
    given = {inside + n: x for n, x in state.items()}
    if dtype is not None:
        naming.check_dtype(dtype)
    tree = blank(config)
    sources = {n: sources_of(names, n, x) for n, x in naming.named(tree).items()}
    wanted = {n: shape for part in sources.values() for n, shape in part.items()}
    tied = {n: of for n, of in (copies or {}).items() if n in given and n not in wanted}
    skipped = (*skipped, *tied)
    found = {n: tuple(x.shape) for n, x in given.items() if n in wanted or not matches(n, skipped)}
    if wrong := [*mismatches(wanted, found), *untied(tied, given, equal_by(given.__getitem__))]:
        raise CheckpointError("a state that does not fit its config:\n" + "\n".join(wrong))

    def read(name: str, x: Tensor) -> Tensor:
        parts = [given[n].detach().to(device=device, dtype=dtype) for n in sources[name]]
        return parts[0] if parts[0].ndim == x.ndim else torch.stack(parts)

    return naming.replaced(tree, read)


def read_config(format: Format, folder: Path) -> Any:
    """The config of a folder.

    Raises:
        CheckpointError: keys that are missing, no numbers where they should be, not known, or ask
            for what the family cannot do.
    """
    raw, path = Said(read_json(folder)), folder / "config.json"
    raw.get("quantization_config")  # see `read_scheme`
    wrong = [
        f"  {key} is {raw[key]!r}, only {value!r} can be run"
        for key, value in format.only.items()
        if key in raw and raw[key] != value
    ]
    try:
        kinds = raw.get("layer_types") or ()
        strange = [kind for kind in kinds if kind not in format.layers]
        if strange:
            wrong.append(f"  layer_types has {strange[0]!r}, only {format.layers!r} can be run")
        elif kinds and len(kinds) != raw["num_hidden_layers"]:
            wrong.append(f"  layer_types has {len(kinds)}, not {raw['num_hidden_layers']} layers")
        config = None if wrong else format.read(raw)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    left = raw.leftovers((*HARMLESS, *format.harmless))
    if wrong := wrong or [*misfits(config), *unknown(left)]:
        raise CheckpointError(f"{path}:\n" + "\n".join(wrong))
    return config


def read_scheme(folder: Path) -> bool | None:
    """Whether the inputs of matrices in fp8 have known scales; None: no quantization_config.

    Raises:
        CheckpointError: it is of another kind than `fp8_folders` knows.
    """
    said = read_json(folder).get("quantization_config")
    try:
        return None if said is None else fp8_folders.is_static(said)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        told = "quantization_config cannot be run:"
        raise CheckpointError(f"{folder / 'config.json'}: {told}\n{error}") from None


def sources_of(names: Mapping[str, str], name: str, x: Tensor) -> dict[str, tuple[int, ...]]:
    """The tensors of the files that make up one of ours, in order, with their shapes."""
    ours = re.sub(r"\.\d+\.", ".*.", name)
    if ours not in names:
        raise CheckpointError(f"FORMAT.names has no {ours!r}. Add what the files call it")
    theirs = names[ours]
    for number in re.findall(r"\.(\d+)\.", name):
        theirs = theirs.replace("*", number, 1)
    if "*" not in theirs:
        return {theirs: tuple(x.shape)}
    return {theirs.replace("*", str(i)): tuple(x.shape[1:]) for i in range(x.shape[0])}


def several_dtypes(kinds: Mapping[str, str]) -> list[str]:
    """A line for each dtype that tensors are stored in, if there are several."""
    by: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        by.setdefault(kind, []).append(name)
    if len(by) < 2:
        return []
    told = (
        "  tensors are stored in several dtypes, and a step computes in one. Pass it, which casts "
        "the others: load(folder, dtype=torch.bfloat16)"
    )
    return [told, *(f"  {kind}: {len(names)}, as {names[0]}" for kind, names in by.items())]


def equal_by(get: Callable[[str], Tensor]) -> Callable[[str, str], bool]:
    """Whether two tensors are the same, of `get(name)`."""
    return lambda name, of: torch.equal(get(name), get(of))


def untied(
    copies: Mapping[str, str], there: Collection[str], equal: Callable[[str, str], bool]
) -> list[str]:
    """A line for each tensor that is not what it is a copy of; see `Format.copies`."""
    return [
        f"  {n}: is another one than {of}, to which config.json ties it. Say there "
        "tie_word_embeddings: false, or take the tensor out"
        for n, of in copies.items()
        if of in there and not equal(n, of)
    ]


def mismatches(wanted: Shapes, found: Shapes) -> list[str]:
    """A line for each tensor that is missing, extra or of another shape."""
    lines = [f"  {n}: missing, expected {s}" for n, s in wanted.items() if n not in found]
    lines += [f"  {n}: unknown, of shape {s}" for n, s in found.items() if n not in wanted]
    return lines + [
        f"  {n}: expected {s}, got {found[n]}"
        for n, s in wanted.items()
        if n in found and found[n] != s
    ]
