"""Split: cut at primitives, equal pieces shared, sizes made anew inside each piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys

import fngraph as fg
from fngraph.models.families import llama

MODES = ["NONE", "PIECEWISE", "FULL"]


def splitted(fn: Any, params: Any, state: Any) -> Any:
    """`fn(p, s, b)`, traced and split."""
    made = fg.graphify(fn, donate=1, stage=2, limits=toys.LIMITS)
    return made.trace(params, state, batch=toys.batch(2)).split()


def kinds(split: Any) -> str:
    """ "pcp": piece, cut, piece."""
    return "".join("c" if step.cut else "p" for step in split.program.instructions)


# --- sharing --------------------------------------------------------------------------------------


def test_equal_pieces_are_shared_whatever_the_depth():
    counts = set()
    for layers in (2, 3, 6):
        split = splitted(toys.attend, toys.attention_params(layers), toys.attention_cache(layers))
        assert kinds(split) == "pc" * layers + "p" and len(split.cuts) == layers
        counts.add((len(split.distinct), split.program.kinds))
    assert counts == {(3, 4)}  # first, middle, last; and attention


def test_a_llama_has_four_kinds_whatever_its_depth():
    for layers in (2, 5):
        config = llama.Config(
            vocab_size=32, num_layers=layers, num_heads=2, num_kv_heads=1, head_dim=4, dim=8,
            mlp_dim=8,
        )  # fmt: skip
        params, cache = llama.init_params(config), llama.init_cache(config, 4)
        made = fg.graphify(llama.forward, donate="cache", stage="batch")
        split = made.trace(params, cache, limits=toys.LIMITS).split()
        assert split.program.kinds == 4 and kinds(split) == "pc" * layers + "p"
        compiled = split.lower().compile()
        assert (
            len(set(compiled.executable.fns)) == 3 + layers
        )  # pieces shared; a cut has its own arguments


def test_pieces_that_differ_in_anything_are_not_shared():
    """Two middle pieces each: different op, scalar, shape, dtype, and order of arguments."""

    def model(middle: Any) -> Any:
        def fn(p: Any, s: Any, b: Any) -> Any:
            x = toys.double(p["w"][b.token_ids])
            for i in range(2):
                x = toys.double(middle(p, x, i))
            return x * 1, s

        return fn

    same = lambda p, x, i: x * p["m"][i]  # noqa: E731
    different = {
        "op": lambda p, x, i: (x.tanh() if i else x.sigmoid()) * p["m"][i],
        "scalar": lambda p, x, i: x * p["m"][i] + i,
        "shape": lambda p, x, i: x * p["m"][0, : 1 + 7 * i],
        "dtype": lambda p, x, i: x * (p["m"][0].double() if i else p["m"][0]).float(),
        "order": lambda p, x, i: x - p["m"][i] if i else p["m"][i] - x,
        "dim": lambda p, x, i: x.cumsum(i) + x,
    }
    params = {"w": torch.rand(toys.V, toys.E), "m": torch.rand(2, toys.E)}
    # a slice p["m"][i] has the number i in it, so pass rows as leaves of their own
    rows = {"w": params["w"], "m": list(params["m"])}
    split = splitted(model(same), rows, toys.tally_state())
    assert len(split.distinct) == 3  # first, middle, last
    for what, middle in different.items():
        split = splitted(model(middle), params, toys.tally_state())
        assert len(split.distinct) == 4, what


def test_pieces_that_share_storage_differently_are_not_shared():
    def fn(p: Any, s: Any, b: Any) -> Any:
        x = toys.double(p["w"][b.token_ids])
        x = toys.double(s["total"].add_(1)[b.token_ids] + s["total"][b.token_ids] + x)
        x = toys.double(s["other"].add_(1)[b.token_ids] + s["total"][b.token_ids] + x)
        return x, s

    state = {"total": torch.zeros(toys.V, toys.E), "other": torch.zeros(toys.V, toys.E)}
    split = splitted(fn, toys.tally_params(), state)
    assert len(split.distinct) == 3


def test_shared_pieces_compute_with_their_own_weights():
    params, cache = toys.attention_params(5), toys.attention_cache(5)
    batch = toys.batch(3, 1, 5)
    want, after = toys.bare(toys.attend, params, cache, batch)
    for modes in MODES:
        fast = fg.graphify(
            toys.attend, modes=modes, donate=1, stage=2, limits=toys.LIMITS, sizes=toys.SIZES
        )
        fresh = toys.attention_cache(5)
        got, _ = fast(params, fresh, batch)
        toys.assert_trees((got, fresh), (want, after), atol=1e-5, rtol=1e-5)


# --- sizes ----------------------------------------------------------------------------------------


def sized(p: Any, s: Any, b: Any) -> Any:
    """Sizes that are computed before a cut and used behind it."""
    T, R = b.token_ids.shape[0], b.seq_lens.shape[0]
    twice, both = 2 * T, T + R
    x = toys.double(p["w"][b.token_ids])
    y = toys.double(torch.arange(twice).float().view(T, 2))
    z = x.new_zeros(both).view(-1)[:R] + toys.double(b.seq_lens.float())
    return (x.view(T, 2, -1).reshape(T, -1), y.reshape(twice), z, x.new_ones(R + 1)), s


def test_sizes_never_cross_a_cut():
    split = splitted(sized, toys.tally_params(), toys.tally_state())
    for piece in split.distinct:
        placeholders = [n for n in piece.gm.graph.nodes if n.op == "placeholder"]
        assert [n.name for n in placeholders[:2]] == ["num_tokens", "num_reqs"]
        for node in placeholders[2:]:
            assert isinstance(node.meta["val"], torch.Tensor)
        (output,) = (n for n in piece.gm.graph.nodes if n.op == "output")
        assert all(isinstance(n.meta["val"], torch.Tensor) for n in output.args[0])
    assert all(isinstance(x, torch.Tensor) for cut in split.cuts for x in cut.example[:2])


@pytest.mark.parametrize("modes", MODES)
def test_sizes_are_those_of_each_call(modes: str):
    params, state = toys.tally_params(), toys.tally_state()
    fast = fg.graphify(sized, modes=modes, donate=1, stage=2, limits=toys.LIMITS, sizes=toys.SIZES)
    for batch in (toys.batch(3, 2), toys.batch(1), toys.batch(1, 1), toys.batch(9, 1, 4)):
        want, _ = toys.bare(sized, params, state, batch)
        got, _ = fast(params, state, batch)
        toys.assert_trees(got, want)


def test_a_piece_is_a_function_of_sizes_and_tensors():
    def fn(p: Any, s: Any, b: Any) -> Any:
        x = b.token_ids + torch.arange(b.token_ids.shape[0])
        return fg.trust_rows(x + b.seq_lens.shape[0]), s

    split = splitted(fn, {}, {})
    (piece,) = split.distinct
    for T, R in ((1, 1), (3, 2), (7, 7)):
        (out,) = piece.gm(T, R, torch.zeros(T, dtype=torch.int64))
        assert torch.equal(out, torch.arange(T) + R)


# --- where the cuts are ---------------------------------------------------------------------------


def no_cut(p: Any, s: Any, b: Any) -> Any:
    return p["w"][b.token_ids] * 2, s


def first_op(p: Any, s: Any, b: Any) -> Any:
    toys.DOUBLE.op(p["w"], s["total"], 3.0)
    return s["total"][b.token_ids] + 1, s


def last_op(p: Any, s: Any, b: Any) -> Any:
    toys.DOUBLE.op(p["w"] + 1, s["total"], 3.0)
    return p["w"][b.token_ids] * 2, s


def last_op_is_the_output(p: Any, s: Any, b: Any) -> Any:
    return toys.double(p["w"][b.token_ids]), s


def only_cuts(p: Any, s: Any, b: Any) -> Any:
    toys.DOUBLE.op(p["w"], s["total"], 3.0)
    toys.DOUBLE.op(s["total"], s["again"], 0.5)
    return None, s


def consecutive(p: Any, s: Any, b: Any) -> Any:
    x = p["w"][b.token_ids]
    y, z, w = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    toys.DOUBLE.op(x, y, 2.0)
    toys.DOUBLE.op(y, z, 3.0)
    toys.DOUBLE.op(z, w, 4.0)
    return w + 1, s


def views_between(p: Any, s: Any, b: Any) -> Any:
    x = p["w"][b.token_ids]
    out = x.new_zeros(2, x.shape[0], x.shape[1])
    toys.DOUBLE.op(x, out[0], 2.0)
    toys.DOUBLE.op(x, out[1], 3.0)
    return out[0] + out[1], s


def kept_across(p: Any, s: Any, b: Any) -> Any:
    """A tensor made first and read last, and one that is written behind the cut."""
    x, y = p["w"][b.token_ids], p["w"][b.token_ids] + 5
    a = toys.double(x)
    y.add_(a)
    c = toys.double(a)
    return x + y + c, s


def unused_work(p: Any, s: Any, b: Any) -> Any:
    x = p["w"][b.token_ids]
    x.tanh().exp()  # nobody reads it
    toys.double(x * 7)  # a cut whose output nobody reads, but it may write elsewhere
    return x * 2, s


CUTS = {
    no_cut: "p", first_op: "cp", last_op: "pcp", last_op_is_the_output: "pc", only_cuts: "cc",
    consecutive: "pcccp", views_between: "pcpcp", kept_across: "pcpcp", unused_work: "pcp",
}  # fmt: skip


def cut_state() -> dict[str, Any]:
    return {"total": torch.zeros(toys.V, toys.E), "again": torch.zeros(toys.V, toys.E)}


@pytest.mark.parametrize("fn", CUTS)
def test_steps_are_pieces_and_cuts_in_order(fn: Any):
    assert kinds(splitted(fn, toys.tally_params(), cut_state())) == CUTS[fn]


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("fn", CUTS)
def test_cuts_anywhere_compute_the_function(fn: Any, modes: str):
    params, state = toys.tally_params(), cut_state()
    fast = fg.graphify(fn, modes=modes, donate=1, stage=2, limits=toys.LIMITS, sizes=toys.SIZES)
    for batch in (toys.batch(3, 2), toys.batch(1), toys.batch(9, 1, 4), toys.decode(3, 0)):
        want, after = toys.bare(fn, params, state, batch)
        got, back = fast(params, state, batch)
        assert back is state
        toys.assert_trees((got, state), (want, after))


def test_work_that_nobody_reads_is_dropped_but_primitives_are_not():
    split = splitted(unused_work, toys.tally_params(), cut_state())
    code = "\n".join(p.gm.code for p in split.distinct)
    assert "tanh" not in code and "exp" not in code and len(split.cuts) == 1


def test_a_cut_knows_which_arguments_vary():
    split = splitted(toys.attend, toys.attention_params(1), toys.attention_cache(1))
    (cut,) = split.cuts
    # q k v | caches | slot_mapping seq_lens query_start_loc block_tables | out
    rows = [str(d) if d is not None else None for d in cut.row_dims]
    assert rows == ["T", "T", "T", None, None, "T", "R", "R + 1", "R", "T"]
    assert cut.op == "fngraph::attention"
    # scale window softcap causal sinks k_scale v_scale, cos sin q_norm k_norm eps centred out_scale
    plain = (toys.D**-0.5, None, None, True, None, None, None)
    assert cut.template[10:] == (*plain, None, None, None, None, 0.0, False, None)


@pytest.mark.parametrize("modes", MODES)
def test_piecewise_gives_a_primitive_its_true_rows(modes: str):
    def fn(p: Any, s: Any, b: Any) -> Any:
        return toys.double(p["w"][b.token_ids]) + 1, s

    params, state = toys.tally_params(), toys.tally_state()
    fast = fg.graphify(fn, modes=modes, donate=1, stage=2, limits=toys.LIMITS, sizes=(16,))
    fast(params, state, toys.batch(5))
    toys.DOUBLE_ROWS.clear()
    fast(params, state, toys.batch(3, 2, 1))
    assert toys.DOUBLE_ROWS == {"NONE": [6], "PIECEWISE": [6], "FULL": []}[modes]


def test_a_split_prints():
    split = splitted(toys.attend, toys.attention_params(2), toys.attention_cache(2))
    assert repr(split) == "Split(5 instructions: 2 cuts, 3 distinct pieces)"
    lines = split.as_text().splitlines()
    assert len(lines) == 2 + 5 and "attention 0" in lines[3] and "piece 2" in lines[6]
