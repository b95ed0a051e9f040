"""A decoder's layers as one launch: found, put between what is ahead and behind, for which keys."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toys
from one_launch_cases import NAMES, SMALL, batch_of, family_and_config, found_in, greedy, traced
from torch import Tensor, fx

import fngraph as fg
from fngraph import one_launch
from fngraph.compile.disk import Disk
from fngraph.core.program import run_program
from fngraph.fx.nodes import op_name, results_of
from fngraph.fx.pieces.around import split_around
from fngraph.fx.pieces.code import direct
from fngraph.models.families import decoder, gemma3, llama, qwen2, qwen3
from fngraph.models.families.rope import rotation, turn_by
from fngraph.ops.megakernel import image
from fngraph.stages import Lowered
from fngraph.step.capture import kind


@pytest.mark.parametrize("compile_", ["none", "pieces"])
@pytest.mark.parametrize("name", NAMES)
def test_a_decoder_is_found(name: str, compile_: str) -> None:
    """Whatever the level, with what the kernel is made for."""
    family, config = family_and_config(name)
    stage, *_ = traced(
        family, config, compile=compile_, passes="all" if compile_ == "none" else None
    )
    found = found_in(stage)
    assert not isinstance(found, str), found
    made = found.decoder
    assert (made.width, made.mlp, made.vocab) == (
        config.dim, config.mlp_dim, config.vocab_size,
    )  # fmt: skip
    assert (made.heads, made.kv_heads, made.head_dim) == (
        config.num_heads, config.num_kv_heads, config.head_dim,
    )  # fmt: skip
    assert (made.layers, made.eps) == (3, config.norm_eps)
    assert made.normed == (family is qwen3)
    assert made.chosen and len(found.reads) == made.operands
    assert found.reads[-1].name == "logits_indices" or found.reads[-1].op == "placeholder"


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_program_around_it_is_forward(name: str, shared: bool) -> None:
    """With the traced ops in the kernel's place: logits, tokens, the cache, bit for bit; also of a
    value that is read ahead of the layers and behind them."""
    family, config = family_and_config(name)
    forward = greedy(family.forward)
    if shared:

        def forward(params: Any, cache: Any, batch: llama.Batch) -> Any:
            tokens = batch.token_ids + 1
            batch = dataclasses.replace(batch, token_ids=tokens)
            logits, cache = family.forward(params, cache, batch)
            return tokens[batch.logits_indices] + logits.argmax(-1), logits, cache

    stage, params, cache = traced(family, config, forward)
    found = found_in(stage)
    results = [results_of(stage.graph.gm.graph)[i] for i in stage.outputs]
    around = split_around(stage.graph, found.nodes, found.reads, found.logits, results)
    assert not isinstance(around, str), around
    assert [one.name for one in around.program.instructions] == ["piece 0", "run 0", "piece 1"]

    bare_cache = tuple(tuple(x.clone() for x in kv) for kv in cache)
    batch = batch_of(37)
    tokens, logits, _ = forward(params, bare_cache, batch)
    leaves = fg.core.trees.flatten((params, cache, batch))[0]
    inputs = [x for x in leaves if isinstance(x, Tensor)] + list(stage.constants.values())
    ahead, behind = ([_ran(part.gm) for part in x] for x in (around.ahead, around.behind))
    fns = [*ahead, _ran(fx.GraphModule({}, around.run)), *behind]
    got = run_program(around.program, fns, inputs)
    assert torch.equal(got[0], tokens)
    assert torch.equal(got[1], logits)
    for one, other in zip(cache, bare_cache):
        assert all(torch.equal(a, b) for a, b in zip(one, other))


def _ran(gm: fx.GraphModule) -> Any:
    forward = direct(gm)
    return lambda *tensors: forward(1, 1, *tensors)


WHY = {
    "no passes": ("llama", {}, {"passes": ()}, "q is more than columns of a product"),
    "window": ("llama", {"window": 32, "window_layers": (0, 1, 2)}, {}, "window"),
    "columns": ("llama", {"mlp_dim": 1056}, {}, "1056 columns of mlp are no multiple of 512"),
    "words": ("llama", {"vocab_size": 516}, {}, "no multiple of 8"),
    "heads": ("llama", {"head_dim": 32, "num_heads": 16}, {}, "heads of 32"),
    "share": ("llama", {"num_heads": 16, "num_kv_heads": 1}, {}, "more than 8 of 16 heads"),
    "wide": ("llama", {"dim": 9216}, {}, "9216 columns of the model are more than 8192"),
    "parts": ("llama", {"mlp_dim": 8704}, {}, "8704 columns of mlp have no parts of 8"),
    "biases": ("qwen2", {"qkv_bias": True}, {}, "come from no norm and product"),
    "gemma": ("gemma3", {}, {}, "."),
}


@pytest.mark.parametrize("case", WHY)
def test_what_is_no_such_decoder_says_why(case: str) -> None:
    """And the stages go on without it."""
    name, sizes, options, why = WHY[case]
    config: Any = {**SMALL, "head_dim": 64, **sizes}
    if name == "gemma3":
        config |= {"scale": 0.125, "window_theta": 1e4}
    family: Any = {"llama": llama, "qwen2": qwen2, "gemma3": gemma3}[name]
    made = getattr(family, "Config", llama.Config)(**config)
    stage, *_ = traced(family, made, **options)
    assert isinstance(found := found_in(stage), str)
    assert re.search(why, found), found
    lowered = stage.split().lower()
    assert isinstance(lowered.one_launch, str)
    assert lowered.compile().executable.one_launch is None


def test_a_value_within_that_others_read_is_in_the_way() -> None:
    """The kernel keeps the residual stream to itself."""
    family, config = family_and_config("llama")

    def step(params: Any, cache: Any, batch: llama.Batch) -> Any:
        size = {"rope_dim": config.head_dim}
        hidden, cache = decoder.transformer(params, cache, batch, llama.attention, **size)
        return decoder.left(params, hidden, batch), hidden, cache

    stage, *_ = traced(family, config, step)
    assert "is read by" in found_in(stage)


ATTENTION, LINEAR, PAIR = "fngraph::attention", "fngraph::fused_linear", "fngraph::paired_linears"
OTHER = "another"  # tensor of the same kind
EDITS = [  # op, which of its calls, argument, new value, what is said
    (ATTENTION, 1, "q", "k", "k is more than|do not lie one behind the other"),
    (ATTENTION, 1, "scale", 0.25, "differs in its scale"),
    (ATTENTION, 1, "eps", 0.5, "differs in its eps"),
    (ATTENTION, 1, "cos", "sin", "differs in its cos"),
    (ATTENTION, 1, "sin", "cos", "differs in its sin"),
    (ATTENTION, 1, "slot_mapping", OTHER, "differs in its slot_mapping"),
    (ATTENTION, 1, "seq_lens", OTHER, "differs in its seq_lens"),
    (ATTENTION, 1, "query_start_loc", OTHER, "differs in its query_start_loc"),
    (ATTENTION, 1, "block_tables", OTHER, "differs in its block_tables"),
    (ATTENTION, 1, "window", 8, "attention has window"),
    (ATTENTION, 1, "softcap", 8.0, "attention has softcap"),
    (ATTENTION, 1, "sinks", OTHER, "attention has sinks"),
    (ATTENTION, 1, "k_scale", OTHER, "attention has k_scale"),
    (ATTENTION, 1, "v_scale", OTHER, "attention has v_scale"),
    (ATTENTION, 1, "out_scale", OTHER, "attention has out_scale"),
    (ATTENTION, 1, "causal", False, "not causal"),
    (ATTENTION, 1, "centred", True, "norms add 1"),
    (ATTENTION, 1, "cos", None, "does not turn"),
    (ATTENTION, 1, "q_norm", OTHER, "one of q and k has a norm"),
    (ATTENTION, 1, "out", OTHER, "memory that was there"),
    (PAIR, 0, "more", OTHER, "no sum, norm and gate"),  # behind attention
    (PAIR, 0, "gated", False, "no sum, norm and gate"),
    (PAIR, 0, "centred", True, "adds 1"),
    (PAIR, 0, "eps", 0.5, "for eps"),
    (PAIR, 1, "more", OTHER, "the sum behind the mlp of layer 0"),  # behind a gate
    (PAIR, 1, "gated", True, "behind layer 0 there is no sum, norm and product"),
    (PAIR, 1, "centred", True, "adds 1"),
    (PAIR, 1, "eps", 0.5, "for eps"),
    (LINEAR, 0, "more", OTHER, "a norm and a product is another"),  # ahead of all
    (LINEAR, 0, "gated", True, "a norm and a product is another"),
    (LINEAR, 0, "norm", None, "a norm and a product is another"),
    (LINEAR, 0, "centred", True, "adds 1"),
    (LINEAR, 0, "eps", 0.5, "for eps"),
    (LINEAR, 1, "more", OTHER, "the sum behind the mlp of layer 2"),  # the last product
    (LINEAR, 1, "gated", True, "no product and sum"),
    (LINEAR, 1, "norm", OTHER, "no product and sum"),
    (LINEAR, 2, "norm", None, "a norm and a product is another"),  # the head
    (LINEAR, 2, "eps", 0.5, "for eps"),
]


@pytest.fixture(scope="module")
def small() -> Any:
    family, config = family_and_config("llama")
    return traced(family, config)[0]


@pytest.mark.parametrize(
    ("op", "which", "name", "value", "why"), EDITS, ids=lambda x: str(x)[:24].replace("::", " ")
)
def test_an_argument_that_is_another(
    small: Any, op: str, which: int, name: str, value: Any, why: str
) -> None:
    """Each that the kernel does not look at, or takes to be alike everywhere."""
    graph = fx.Graph()
    result = graph.graph_copy(small.graph.gm.graph, {})
    graph.output(result)
    call = [n for n in graph.nodes if op_name(n) == op][which]
    names = [a.name for a in call.target._schema.arguments]
    if value == OTHER:
        like = call.args[names.index(name)]
        other = next(n for n in graph.nodes if n.op == "placeholder" and n is not like)
        value = other if name != "more" else next(n for n in graph.nodes if op_name(n) == LINEAR)
    elif isinstance(value, str):
        value = call.args[names.index(value)]
    call.update_arg(names.index(name), value)
    found = one_launch.decoder_in(graph)
    assert isinstance(found, str)
    assert re.search(why, found), found


def of(forward: Any, config: Any = None, **options: Any) -> Any:
    """What the stages say of a forward over the small llama."""
    config = config or family_and_config("llama")[1]
    stage, *_ = traced(llama, config, forward, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_launch.Decoder, "refusal_on", lambda self, device: None)
        return stage.split().lower().one_launch


def layers_by(x_of: Any, rows_of: Any = lambda batch: batch.logits_indices) -> Any:
    """A forward whose layers begin with what `x_of` gives, and the rest of what that gives."""

    def step(params: Any, cache: Any, batch: llama.Batch) -> Any:
        x, more = x_of(params, batch)
        config = params.config
        rope = rotation(batch.positions, config.head_dim, config.rope_theta, x.dtype, None)
        x, cache = decoder.all_layers(params, x, rope, cache, batch, llama.attention)
        return decoder.logits(params, x[rows_of(batch)]), more, cache

    return step


def _written(params: Any, batch: Any) -> Any:
    x = params.embed[batch.token_ids].clone()
    x.mul_(2)
    return x + 1, x.float().sum(1)


def _behind(params: Any, batch: Any) -> Any:
    """A value of its own that is wanted behind the layers alone."""
    return params.embed[batch.token_ids], batch.positions * 2 + 1


def test_what_goes_ahead_and_behind_by_its_order() -> None:
    """No effects may change places with others; what has none may."""
    found = of(layers_by(_behind))
    assert isinstance(found, one_launch.Layers)
    assert repr(found) == "Layers(3 layers and the head, in one launch)"
    assert "writes or draws ahead" in of(layers_by(_written))
    generator = torch.Generator()

    def drawn(params: Any, batch: Any) -> Any:
        noise = torch.rand(batch.positions.shape, generator=generator)
        return params.embed[batch.token_ids], noise

    assert "writes or draws ahead" in of(layers_by(drawn), generators=(generator,))


def test_rows_of_logits_that_are_computed() -> None:
    """They are the kernel's last operand, made ahead of it."""
    found = of(layers_by(_behind, lambda batch: batch.query_start_loc[1:].long() - 1))
    assert isinstance(found, one_launch.Layers)
    assert [one.name for one in found.around.program.instructions][:2] == ["piece 0", "run 0"]


@fg.struct
class Pairs:
    """Rows of logits, as a column of a leaf."""

    pairs: Tensor = fg.buffer("R 2", "int64", pad=0, min=0)


@fg.struct
class Paired(llama.Batch, Pairs):
    """A step's tokens, with them."""


def test_rows_by_numbers_with_gaps() -> None:
    """The kernel reads one behind the other."""
    plain = layers_by(_behind, lambda batch: batch.pairs[:, 1])

    def step(params: Any, cache: Any, batch: Paired) -> Any:
        return plain(params, cache, batch)

    assert "numbers of rows of logits do not lie one behind the other" in of(step)


@pytest.mark.parametrize("which", [0, 1])
def test_angles_with_gaps(which: int) -> None:
    """Likewise, cosines and sines."""

    def step(params: Any, cache: Any, batch: llama.Batch) -> Any:
        turns = torch.arange(params.config.head_dim // 2) / 99
        angle = batch.positions[:, None, None].float() * turns
        angles = [angle.cos().bfloat16(), angle.sin().bfloat16()]
        angles[which] = torch.stack(angles, -1)[..., which]
        x = params.embed[batch.token_ids]
        x, cache = decoder.all_layers(params, x, turn_by(*angles), cache, batch, llama.attention)
        return decoder.logits(params, x[batch.logits_indices]), cache

    assert f"{('cosines', 'sines')[which]} are not a row for each token" in of(step)


def test_rows_by_narrow_numbers() -> None:
    """The kernel reads int64, which `torch.arange` gives."""
    found = of(layers_by(_behind, lambda batch: batch.query_start_loc[1:] - 1))
    assert "in another way than by int64 numbers" in found


def test_rows_that_are_not_one_a_request() -> None:
    """Two of the only token would be one."""
    found = of(layers_by(_behind, lambda batch: torch.zeros(2, dtype=torch.int64)))
    assert "logits are not a row for each token" in found


def test_a_cache_that_is_read_between_layers() -> None:
    """The kernel writes all layers at once."""

    def step(params: Any, cache: Any, batch: llama.Batch) -> Any:
        config = params.config
        x = params.embed[batch.token_ids]
        rope = rotation(batch.positions, config.head_dim, config.rope_theta, x.dtype, None)
        kept, seen = [], []
        for layer, kv in zip(params.layers, cache):
            x, kv = decoder.decoder_layer(
                config, layer, x, rope, kv, batch, llama.attention, None, decoder.rms_norm
            )
            seen.append(kv[0].float().sum())
            kept.append(kv)
        return decoder.logits(params, x[batch.logits_indices]), seen[0], tuple(kept)

    assert "reads what the layers write" in of(step)


def test_weights_that_are_made_in_the_graph() -> None:
    """Where they lie is not known before."""

    def step(params: Any, cache: Any, batch: llama.Batch) -> Any:
        layers = [dataclasses.replace(x, attn_norm=x.attn_norm * 1.5) for x in params.layers]
        params = dataclasses.replace(params, layers=tuple(layers))
        logits, cache = llama.forward(params, cache, batch)
        return logits, cache

    assert "is made in the graph" in of(step)


def by_layers(change: Any) -> Any:
    """A llama whose layers are changed within `forward`."""

    def step(params: Any, cache: Any, batch: llama.Batch) -> Any:
        params = dataclasses.replace(params, layers=change(params.layers))
        logits, cache = llama.forward(params, cache, batch)
        return logits, cache

    return step


def test_layers_that_are_not_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """By shape, or one several times, whose norms would be asked for once."""

    def of_one_norm(layers: Any) -> Any:
        return tuple(dataclasses.replace(x, mlp_norm=layers[0].mlp_norm) for x in layers)

    assert "layers share weights" in of(by_layers(of_one_norm))
    blank = llama.blank

    def uneven(config: Any) -> Any:
        params = blank(config)
        mlp = blank(dataclasses.replace(config, mlp_dim=1536)).layers[1].mlp
        other = dataclasses.replace(params.layers[1], mlp=mlp)
        return dataclasses.replace(params, layers=(params.layers[0], other, params.layers[2]))

    monkeypatch.setattr(llama, "blank", uneven)
    assert "layers are of different shapes" in of(greedy(llama.forward))


def test_numbers_that_the_kernel_does_not_read() -> None:
    """Other dtypes, and angles of a part of each head."""
    assert "is of torch.float32" in of(greedy(llama.forward), dtype=torch.float32)

    def step(params: Any, cache: Any, batch: llama.Batch) -> Any:
        return decoder.decode(params, cache, batch, llama.attention, rope_dim=32)

    assert "angles are not half as many" in of(step)


def test_a_loop_beside_the_layers() -> None:
    """It may call primitives, and is a program of its own where pieces are compiled."""

    def step(params: Any, cache: Any, batch: llama.Batch) -> Any:
        logits, cache = llama.forward(params, cache, batch)
        return fg.fori_loop(0, 3, lambda i, x: x * 2, logits), logits, cache

    assert "is a primitive or a loop beside the layers" in of(step)


def test_processes_that_meet_run_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it can be one launch may differ from one to the next."""
    monkeypatch.setattr(one_launch, "collectives_of", lambda graph: ("all_reduce",))
    assert of(greedy(llama.forward)) == "other processes are met"


def test_a_product_of_more_than_q_k_and_v(small: Any) -> None:
    """Whose last columns somebody else would want."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(small.graph.gm.graph, {}))
    call = next(n for n in graph.nodes if op_name(n) == ATTENTION)
    part = call.args[2].args[0]  # v's columns
    part.update_arg(3, part.args[3] - 64)
    assert "more than q, k and v" in one_launch.decoder_in(graph)


def test_options_that_keep_it_away() -> None:
    """A backend that was asked for runs; and nothing is looked for where nothing is asked."""
    family = llama
    assert "backend that was asked for" in of(
        greedy(family.forward), backends={"attention": "reference"}
    )
    assert of(greedy(family.forward), megakernel=False) == "megakernel=False"
    assert of(greedy(family.forward), modes="PIECEWISE") == "there are no FULL keys"


def test_which_keys_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FULL ones of a few requests, a token each; and none where the kernel cannot be made."""
    family, config = family_and_config("llama")
    stage, params, cache = traced(family, config, sizes=(1, 2, 3, 4), modes="FULL_AND_PIECEWISE")
    monkeypatch.setattr(one_launch.Decoder, "refusal_on", lambda self, device: None)
    monkeypatch.setattr(one_launch.Decoder, "most_tokens", lambda self, programs, memory: 3)
    compiled = stage.split().lower().compile()
    assert "FULL keys of 3 requests at most, a token each: OneLaunch(3 layers" in compiled.as_text()
    executable = compiled.executable
    batch = batch_of(5)
    leaves = fg.core.trees.flatten((params, cache, batch))[0]
    inputs = [x for x in leaves if isinstance(x, Tensor)] + list(stage.constants.values())
    disk, launches = Disk(tmp_path), list[Any]()
    executable = dataclasses.replace(
        executable, one_launch=dataclasses.replace(executable.one_launch, disk=disk)
    )
    monkeypatch.setattr(
        one_launch, "Launch", lambda *given: launches.append(given) or (lambda *rest: ())
    )
    ran = []
    for mode, descriptor in executable.table:
        program, fns = executable.program_of((mode, descriptor), inputs)
        assert len(fns) == len(program.instructions)
        if program is executable.one_launch.program:
            ran.append((str(mode), *descriptor[:3]))
    assert sorted(ran) == [("FULL", 1, 1, 1), ("FULL", 2, 2, 1), ("FULL", 3, 3, 1)]
    kinds = {kind(executable, key) for key in executable.table if key[0] is fg.Mode.FULL}
    assert len(kinds) == 4, "each runs once ahead of its capture: a kernel for each, and the usual"
    assert sorted(decoder.tokens for decoder, *_ in launches) == [1, 2, 3]
    for made, tensors, code in launches:
        assert code is one_launch.kept_by(disk)
        assert made == executable.one_launch.layers.decoder._replace(tokens=made.tokens)
        assert tensors[one_launch.FIRST].data_ptr() == params.layers[0].attn_norm.data_ptr()
        assert tensors[made.operands - 1].data_ptr() == batch.logits_indices.data_ptr()

    def fails(*given: Any) -> Any:
        raise fg.errors.CaptureError("no such kernel")

    monkeypatch.setattr(one_launch, "Launch", fails)
    for key in executable.table:
        assert executable.program_of(key, inputs)[0] is executable.program


@pytest.mark.parametrize(
    ("descriptor", "wanted"),
    {
        (1, 1, 1): True, (1, 1, None): True, (4, 4, 1): True, (5, 5, 1): False,
        (2, 2, None): False, (1, 4, None): False, (4, 2, 2): False, (2, 1, 2): False,
        (4, 2, None): False,
    }.items(),
)  # fmt: skip
def test_keys_of_a_token_each(descriptor: Any, wanted: bool) -> None:
    """A mixed key may bring two tokens of one request."""
    layers: Any = one_launch.Layers(None, None, 4)  # type: ignore[arg-type]
    assert layers.serves(fg.BatchDescriptor(*descriptor)) == wanted


SHAPES = {
    "1B": ((2048, 32, 8, 64, 8192, 16, 128256), 4),
    "0.6B": ((1024, 16, 8, 128, 3072, 28, 151936), 4),
    "8B": ((4096, 32, 8, 128, 14336, 32, 128256), 2),  # of its own memory three take too much
    "3B": ((3072, 24, 8, 128, 8192, 28, 128256), 3),
    "2560 columns": ((2560, 8, 2, 128, 512, 2, 5000), 3),  # a lane has 9 pairs of words at most
    "4608 columns": ((4608, 8, 2, 128, 512, 2, 5000), 1),
    "wide": ((8192, 64, 8, 64, 8192, 2, 5000), 1),
    "long": ((2048, 32, 8, 128, 24576, 2, 5000), 1),  # too much memory again
    "many kv heads": ((1024, 64, 64, 64, 1024, 2, 5000), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_how_many_tokens_fit(name: str) -> None:
    """On a device of 132 multiprocessors with 227 KiB each."""
    shape, most = SHAPES[name]
    made = one_launch.Decoder(*shape, 16, False, 1e-5, 1e-5, 1.0, (1, 1, 1))
    assert made.most_tokens(132, 227 * 1024) == most
    if name == "8B":
        assert made._replace(tokens=2).shared(132) == 230352
    assert not made.most_tokens(made.kv_heads - 1, 227 * 1024)


@pytest.mark.parametrize(("most", "said"), [(1, "up to 1 request,"), (3, "up to 3 requests,")])
def test_what_is_predicted_of_its_keys(
    most: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted as if there were no launch of all, which a note says."""
    stage, *_ = traced(*family_and_config("llama"))
    monkeypatch.setattr(one_launch.Decoder, "refusal_on", lambda self, device: None)
    monkeypatch.setattr(one_launch.Decoder, "most_tokens", lambda self, programs, memory: most)
    (note,) = stage.split().lower().launch_model(toys.CONSTANTS, 9).notes
    assert said in note and "kernel by kernel" in note
    stage, *_ = traced(*family_and_config("llama"), megakernel=False)
    assert not stage.split().lower().launch_model(toys.CONSTANTS, 9).notes


def test_compiled_pieces_are_those_that_a_key_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the one launch, those ahead and behind, for its sizes; nothing is compiled here."""
    family, config = family_and_config("llama")
    stage, *_ = traced(family, config, compile="pieces", passes=None,
                         sizes=(1, 2, 4), modes="FULL_AND_PIECEWISE")  # fmt: skip
    monkeypatch.setattr(one_launch.Decoder, "refusal_on", lambda self, device: None)
    monkeypatch.setattr(one_launch.Decoder, "most_tokens", lambda self, programs, memory: 2)
    asked = {}

    def compiled(self: Any, name: str, piece: Any, plan: Any, limits: Any, exact: Any, sizes: Any):
        asked[name] = limits.max_tokens, set(sizes)
        return SimpleNamespace(name=name, key=piece.key)

    monkeypatch.setattr(Lowered, "_compiled", compiled)
    executable, own = stage.split().lower().compile().executable, "piece 0 of one launch"
    for key in executable.table:
        names = {one.name for one in executable.compiled_of(key)}
        serves = key[0] is fg.Mode.FULL and key[1].num_tokens <= 2
        assert names and names <= set(asked), (key, names)
        assert (own in names, "piece 0" in names) == (serves, not serves)
    assert asked[own] == (2, {(1, 1), (2, 2)})


def test_code_is_kept_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For who comes later; another for other tokens, devices, sources and versions of NVRTC."""
    ran: list[tuple[Any, ...]] = []
    version = [0, 13, 0]

    def compiled(*given: Any) -> bytes:
        ran.append(given)
        return str(given).encode()

    monkeypatch.setattr(one_launch, "compiled", compiled)
    monkeypatch.setattr(image, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=lambda: version))
    made = one_launch.Decoder(*SHAPES["1B"][0], 16, False, 1e-5, 1e-5, 1.0, (1, 1, 1))
    disk = Disk(tmp_path / "cache")

    def later(made: Any = made, *rest: Any) -> int:
        """How often it was compiled by now, where a process begins and asks twice."""
        kept = one_launch.kept_by.__wrapped__(disk)
        given = made, *(rest or (132, "sm_90"))
        assert kept(*given) == kept(*given) == str(given).encode()
        return len(ran)

    assert [later(), later()] == [1, 1]
    assert later(made._replace(tokens=2)) == 2
    assert later(made, 78, "sm_90") == 3
    assert later(made, 132, "sm_100") == 4
    version[1] = 14
    assert later() == 5
    for file in image.SOURCE.parent.glob("*.cu*"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(image, "SOURCE", tmp_path / "decoder.cu")
    assert later() == 5
    for n, name in enumerate(("decoder.cu", "attention.cuh"), 6):
        (tmp_path / name).write_text("// other code")
        assert [later(), later()] == [n, n]
    assert "-DTOKENS=2" in image.facts_of(made._replace(tokens=2), 132, "sm_90")["options"]
    assert {entry.facts["name"] for entry in disk.entries()} == {"a decoder in one launch"}
    disk.path(disk.entries()[0].digest).write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="is not used"):
        later()
    assert len(ran) == 8
    without = one_launch.kept_by.__wrapped__(None)
    assert without(made, 132, "sm_90") == without(made, 132, "sm_90")
    assert len(ran) == 9


def test_a_cpu_has_no_use_for_it() -> None:
    """The reason stands in `Lowered`, and a step's program is the usual one."""
    family, config = family_and_config("llama")
    stage, *_ = traced(family, config, modes="FULL")
    lowered = stage.split().lower()
    assert "weights are on cpu" in lowered.one_launch
    assert lowered.compile().executable.one_launch is None
