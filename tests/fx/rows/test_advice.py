"""What a message says is in the caller's own names, and never in those of an example."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rows_messages import CASES
from torch import Tensor

import fngraph as fg
from fngraph.errors import FnGraphError

ROOT = Path(__file__).parents[3] / "fngraph"
NAMES = {  # an example's field to the caller's
    "token_ids": "words", "slot_mapping": "places", "seq_lens": "reach", "query_start_loc": "begin",
    "block_tables": "pages",
}  # fmt: skip
OURS = re.compile(rf"\b({'|'.join(NAMES)}|slots?|logits_indices|logits|params|cache)\b")


def declared(pad: int) -> Any:
    """A batch of the caller's own, whose places are padded with `pad`."""

    @fg.struct
    class Turn:
        words: Tensor = fg.buffer("T", "int64")
        places: Tensor = fg.buffer("T", "int64", pad=pad)
        reach: Tensor = fg.buffer("R", "int32")
        begin: Tensor = fg.buffer("R + 1", "int32", pad="stride")
        pages: Tensor = fg.buffer("R 2", "int32")
        counts: fg.BatchSpec = fg.host()

    return Turn(
        torch.arange(5), torch.arange(5), torch.tensor([3, 2], dtype=torch.int32),
        torch.tensor([0, 3, 5], dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32),
        fg.BatchSpec(5, 2),
    )  # fmt: skip


@dataclasses.dataclass
class Renamed:
    """The caller's batch, to a program that knows the example's."""

    turn: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.turn, NAMES.get(name, name))


def told(program: Any, pad: int) -> str:
    """All that is said of a program over the renamed batch."""

    def forward(weights: Any, turn: Any) -> Any:
        return program(weights["w"][turn.words], weights, Renamed(turn))

    weights = {"w": torch.randn(11, 8)}
    return fg.check(forward, weights, declared(pad), stage="turn").as_text()


REFUSED = [  # "distances" are refused by the example's limits, two more where slots may be -1
    (name, pad) for name in CASES for pad in (-1, 0)
    if name != "distances" and not (pad == 0 and name in ("negative pad", "unpooled"))
]  # fmt: skip


@pytest.mark.parametrize("name, pad", REFUSED)
def test_no_field_is_named_that_is_not_there(name: str, pad: int) -> None:
    text = told(CASES[name][0], pad)
    assert "Error" in text
    said = re.sub(r"\S*\.py:\d+", "", text)
    assert OURS.search(said) is None, said
    fields = set(re.findall(r"turn\.(\w+)", said))
    assert fields <= {f.name for f in dataclasses.fields(declared(0))} | {"valid"}
    if "turn.valid" in said:
        assert pad == 0 and "turn.valid, a field to add" in said
    assert "<true rows" not in said


def test_what_tells_true_rows_is_said_of_the_batch_that_is_there() -> None:
    def over(dim: str) -> Any:
        return lambda x, p, b: (x if dim == "T" else b.block_tables + 1).sum(0)

    assert "valid = turn.places >= 0; torch.where(valid[:, None], x, 0)" in told(over("T"), -1)
    new = 'valid = turn.valid, a field to add: valid: torch.Tensor = fg.buffer("{}", "bool"), all'
    assert new.format("T") in told(over("T"), 0)
    assert new.format("R") in told(over("R"), -1)  # its places are of tokens


def test_a_field_of_bools_by_that_name_is_taken() -> None:
    @fg.struct
    class Turn:
        x: Tensor = fg.buffer("T 8", "float32")
        valid: Tensor = fg.buffer("T", "bool")
        counts: fg.BatchSpec = fg.host()

    turn = Turn(torch.ones(3, 8), torch.ones(3, dtype=torch.bool), fg.BatchSpec(3, 3))
    with pytest.raises(FnGraphError, match=r"valid = t\.valid; torch\.where"):
        fg.graphify(lambda w, t: (t.x @ w).exp().sum(0), stage="t")(torch.ones(8, 2), turn)
    fast = fg.graphify(lambda w, t: torch.where(t.valid[:, None], t.x @ w, 0).sum(0), stage="t",
                       sizes=(4,))  # fmt: skip
    assert fast(torch.ones(8, 2), turn).tolist() == [24, 24]


GAIN = torch.ones(8)


@pytest.mark.parametrize(
    "forward, says",
    [
        (
            lambda w, turn: w["w"][turn.words] * GAIN,
            "argument: forward(w, turn) with the tensor in w",
        ),
        (lambda turn: turn.words * GAIN[0], "one more argument of forward(turn)"),
    ],
)
def test_a_tensor_that_was_not_passed_goes_into_the_callers_signature(forward, says) -> None:
    given = [{"w": torch.randn(11, 8)}, declared(0)][-forward.__code__.co_argcount :]
    with pytest.raises(FnGraphError, match=re.escape(says)):
        fg.graphify(forward, stage="turn")(*given)


EXAMPLES = r"return logits|\b(params|cache), \w+\)|\((params|cache)[,)]|(params|cache)=\1"


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a file that are no docstrings."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value


def test_no_message_has_a_field_of_an_example_in_it() -> None:
    """Where no program above gets to. Ops name their own arguments."""
    apart = {"ops", "integrations", "models"}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in apart
        for line, text in strings(path)
        if re.search(r"\bbatch\.(?!spec\b)[a-z_]+\b(?!\()", text) or re.search(EXAMPLES, text)
    ]  # fmt: skip
    assert not found, "\n".join(found)
