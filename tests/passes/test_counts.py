"""How often each pass matches on every model family, and that nothing else comes out of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fngraph as fg
from fngraph.models import generate, loading, naming
from fngraph.models.weights.fp8 import LINEAR, quantize_fp8
from fngraph.passes import PASSES
from fngraph.torch_facts.schemas import is_view
from tests.integrations.architectures import make
from tests.models import tiny
from tests.traced_once import Kept, graph_once, traced_once

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = tuple(one.name for one in PASSES if "linears" not in one.name)  # see test_linears.py
ORDER = ("no_ops", "fold_constants", "side_by_side", "norm_rope", "rope", "add_rms_norm",
         "rms_norm", "silu_mul", "rope_in_attention", "experts")  # fmt: skip
EIGHT = ("add_rms_norm_fp8", "rms_norm_fp8", "silu_mul_fp8", "quantize_once", "attention_fp8")
CLOSE = {  # of one product in place of three; in bfloat16, of matrices that are drawn wide
    (torch.float32, "cpu"): {"atol": 1e-4, "rtol": 1e-4},
    (torch.float32, "cuda"): {"atol": 1e-3, "rtol": 1e-3},
    (torch.bfloat16, "cpu"): {"atol": 0.2, "rtol": 0.1},
}
DENSE = ("llama", "qwen3")
# Layers: qwen3_moe, DeepSeek and Gemma 3 have 3, qwen3_next 4, the others 2. A first norm
# follows no addition, nor does the last, which is of chosen rows.
FAMILIES: dict[str, tuple[int, ...]] = {  # by ORDER
    "llama": (0, 1, 4, 0, 4, 3, 2, 2, 2, 0),
    "mistral": (0, 1, 4, 0, 4, 3, 2, 2, 2, 0),
    "qwen2": (0, 1, 4, 0, 4, 3, 2, 2, 2, 0),
    "gemma3_text": (0, 3, 6, 6, 0, 5, 8, 0, 3, 0),  # norms behind each part too; its gate is gelu
    "qwen3": (0, 1, 4, 4, 0, 3, 2, 2, 2, 0),
    "qwen3_moe": (26, 3, 4, 6, 0, 5, 2, 3, 3, 0),  # two layers of experts, and one mlp
    "mamba2": (0, 0, 0, 0, 0, 1, 4, 2, 0, 0),
    "deepseek_v2": (38, 3, 3, 0, 6, 5, 5, 5, 0, 0),  # its compressed keys have a norm, and no rope
    "deepseek_v3": (38, 5, 3, 0, 6, 5, 8, 5, 0, 0),  # its compressed queries have one too
    "qwen3_next": (39, 3, 5, 2, 0, 7, 5, 10, 1, 0),  # one layer of attention; three gated norms
    "bert": (5, 2, 0, 0, 0, 0, 0, 0, 0, 0),  # other norms and gates; each product has a bias
}
IN_BFLOAT16 = {  # where that is another: what is added, or gated, is in float32 there
    "qwen3_moe": (6, 4, 4, 6, 0, 5, 2, 1, 3, 6),  # and experts' shares are cast
    "mamba2": (0, 0, 0, 0, 0, 0, 5, 2, 0, 0),
    "deepseek_v2": (18, 4, 3, 0, 6, 5, 5, 3, 0, 6),
    "deepseek_v3": (18, 6, 3, 0, 6, 5, 8, 3, 0, 6),
    "qwen3_next": (9, 4, 5, 2, 0, 7, 5, 4, 1, 9),
}
THEIRS: dict[str, tuple[int, ...]] = {
    "Llama": (24, 0, 4, 0, 4, 4, 1, 2, 2, 0),
    "Qwen3": (24, 0, 4, 4, 0, 4, 1, 2, 2, 0),
    "Qwen2": (24, 0, 4, 0, 4, 4, 1, 2, 2, 0),  # q, k and v have biases
    "Gemma2": (23, 0, 4, 0, 4, 4, 5, 0, 2, 0),  # norms after additions and others; its gate is gelu
}


def counts(traced: Any, fp8: tuple[int, ...] = (0, 0, 0, 0, 0)) -> tuple[int, ...]:
    found = {one.one.name: one.matches for one in traced.passes}
    assert tuple(found) == NAMES
    assert tuple(found[name] for name in EIGHT) == fp8
    return tuple(found[name] for name in ORDER)


def new_cache(family: Any, params: Any, dtype: torch.dtype, device: Any) -> Any:
    return family.init_cache(
        params.config, 8, block_size=generate.BLOCK_SIZE, num_slots=2, dtype=dtype, device=device
    )  # fmt: skip


@pytest.mark.sampled("llama", "mamba2-torch.float32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_fused_so_often_and_computes_the_same(
    name: str, dtype: torch.dtype, folder: Callable[[str], Path], recorder_name: str, device: Any
):
    family = loading.family(folder(name))
    _, params = family.load(folder(name), dtype=dtype, device=device)
    laid = fg.ops.lay_side_by_side(params)
    batch = generate.alone(tiny.PROMPT, 0, 8, device, family.Batch)
    graphs: Kept = {}

    def run(passes: Any) -> Any:
        cache = new_cache(family, laid, dtype, device)
        fast = fg.graphify(
            family.forward, passes=passes, modes="FULL", donate="cache", stage="batch", sizes=(16,)
        )
        with graph_once(graphs, "one"):
            traced = fast.trace(laid, cache, limits=fg.Limits(16, 2, B=8))
        step = traced.split().lower().compile().capture(laid, cache, recorder=recorder_name)
        return traced, *step(cache, batch)

    traced, got, cache = run(NAMES)
    want = FAMILIES | (IN_BFLOAT16 if dtype == torch.bfloat16 else {})
    assert counts(traced) == want[name], traced.as_text()
    _, *same = run([one for one in NAMES if one != "side_by_side"])
    plain, *bare = run(())
    assert plain.passes == () and plain.as_text() == plain.graph.gm.code.strip()
    if device.type == "cpu":
        for a, b in zip(trees(tuple(same)), trees(tuple(bare)), strict=True):
            assert torch.equal(a, b)  # the very ops, in one call
    elif dtype == torch.bfloat16:  # what is rounded otherwise may choose another expert
        _, wide = family.load(folder(name), dtype=torch.float32, device=device)
        true, _ = family.forward(wide, new_cache(family, wide, torch.float32, device), batch)
        off, least = ((x.float() - true).abs().mean() for x in (got, bare[0]))
        assert name not in DENSE or off <= 1.5 * least
        return
    for a, b in zip(trees((got, cache)), trees(tuple(bare)), strict=True):
        torch.testing.assert_close(a, b, **CLOSE[dtype, device.type])


IN_FP8 = {  # by EIGHT, and by ORDER: the last norm is of a head in bfloat16, and one is the first
    "llama": ((3, 1, 2, 0), (0, 1, 4, 0, 4, 0, 1, 0, 2, 0)),
    "qwen3": ((3, 1, 2, 0), (0, 1, 4, 4, 0, 0, 1, 0, 2, 0)),
    # a router reads a norm of experts, and they are not in fp8
    "qwen3_moe": ((3, 1, 1, 0), (6, 4, 4, 6, 0, 2, 1, 0, 3, 6)),
}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("known", [False, True], ids=["by rows", "by known scales"])
@pytest.mark.parametrize("name", IN_FP8)
def test_a_family_in_fp8_rounds_in_its_norms_and_gates(
    name: str, known: bool, folder: Callable[[str], Path]
):
    family = loading.family(folder(name))
    config = dataclasses.replace(family.load(folder(name))[0], head_dim=16)
    params = family.init_params(config, dtype=torch.bfloat16)
    scales = dict.fromkeys(_linears(params), 0.05) if known else None
    params = quantize_fp8(params, input_scales=scales)
    batch = generate.alone(tiny.PROMPT, 0, 8, torch.device("cpu"), family.Batch)
    graphs: Kept = {}
    traces: Kept = {}

    def run(params: Any, passes: Any, modes: str = "FULL") -> Any:
        cache = new_cache(family, params, torch.bfloat16, "cpu")
        fast = fg.graphify(
            family.forward, passes=passes, modes=modes, donate="cache", stage="batch", sizes=(16,)
        )
        with graph_once(graphs, params is laid), traced_once(traces, (params is laid, *passes)):
            traced = fast.trace(params, cache, limits=fg.Limits(16, 2, B=8))
        step = traced.split().lower().compile().capture(params, cache, recorder="tape")
        return traced, *step(cache, batch)

    laid = fg.ops.lay_side_by_side(params)
    _, *plain = run(params, ())
    layers = config.num_layers if known else 0  # whose attention is rounded by a known scale
    fp8 = (*IN_FP8[name][0], layers)
    for modes in ("FULL", "PIECEWISE"):
        traced, *got = run(laid, NAMES, modes)
        assert counts(traced, fp8) == IN_FP8[name][1], traced.as_text()
        for a, b in zip(trees(tuple(got)), trees(tuple(plain)), strict=True):
            torch.testing.assert_close(a, b, **CLOSE[torch.bfloat16, "cpu"])
        _, *got = run(laid, [one for one in NAMES if one != "side_by_side"], modes)
        for a, b in zip(trees(tuple(got)), trees(tuple(plain)), strict=True):
            assert torch.equal(a, b)
    apart, *_ = run(params, NAMES)
    assert dict((one.one.name, one.matches) for one in apart.passes)["side_by_side"] == 0
    notes = [note for one in apart.passes for note in one.notes if "input_scale" in note]
    if known:  # q, k and v, gate and up have each a tensor of its own; down has one
        counts(apart, (0, 0, fp8[2], 0, layers))
        assert any("attn.wq.input_scale, params.layers[" in note for note in notes)
    else:
        counts(apart, fp8)
        assert not notes


def _linears(params: Any) -> list[str]:
    named = naming.named(params)
    return [x for x in named if x.rsplit(".", 1)[-1] in LINEAR and named[x].dim() == 2]


def trees(tree: Any) -> list[torch.Tensor]:
    return list(naming.named(tree).values())


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", THEIRS)
def test_a_model_of_transformers_is_fused_so_often_and_says_the_same(name: str):
    from fngraph.integrations.transformers import graphify_model

    def tokens(laid: bool, **options: Any) -> tuple[Any, Any]:
        model = make(name)
        if laid:
            state = fg.ops.lay_side_by_side(model.state_dict())
            model.load_state_dict(state, assign=True)
        fast = graphify_model(
            model, fg.Limits(8, 2, B=4), sizes=(1, 8), recorder="tape", lazy=True, **options
        )
        return fast.generate([[5, 7, 11], [3]], 12), fast.step.main.executable.maker.traced

    plain, _ = tokens(laid=False)
    fused, traced = tokens(laid=True, passes=NAMES)
    assert counts(traced) == THEIRS[name], traced.as_text()
    assert fused == plain


def test_what_a_llama_launches_before_its_first_attention(folder: Callable[[str], Path]):
    """The frequencies of its rope, 17 kernels, are a constant."""
    family = loading.family(folder("llama"))
    _, params = family.load(folder("llama"))
    cache = new_cache(family, params, torch.float32, "cpu")
    found = {}
    for passes in ((), "all"):
        fast = fg.graphify(
            family.forward, modes="FULL", passes=passes, donate="cache", stage="batch"
        )
        laid, limits = fg.ops.lay_side_by_side(params), fg.Limits(16, 2, B=8)
        first = fast.trace(laid, cache, limits=limits).split().pieces.parts[0]
        ops = [node.target for node in first.gm.graph.nodes if node.op == "call_function"]
        launched = [op for op in ops if hasattr(op, "_schema") and not is_view(op)]
        found[passes] = [op._schema.name.partition("::")[2] for op in launched]
    assert found["all"] == [
        "index", "_to_copy", "mul", "cos", "sin", "fused_linear", "new_empty"
    ]  # fmt: skip
    assert found[()].index("_to_copy") == 1 + 17
