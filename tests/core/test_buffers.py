"""`fngraph.core.buffers`: dims, declarations, and the plan of what to allocate."""

import dataclasses
import re

import pytest

import fngraph as fg
from fngraph.core import Buffer, Dim, buffer, key_sizes, plan_buffers
from fngraph.core.buffers import ITEMSIZE, parse_dims
from fngraph.core.where import short_path, user_line
from fngraph.errors import FieldError


def refused(call, *args, **kwargs):
    """The whole message of the FieldError."""
    with pytest.raises(FieldError) as info:
        call(*args, **kwargs)
    assert isinstance(info.value, TypeError)
    return str(info.value)


# --- dims -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("T", 12),
        ("64", 64),
        (" R + 1 ", 6),
        ("2*T", 24),
        ("T - R", 7),
        ("T // R", 2),
        ("T % R", 2),
        ("R**2", 25),
        ("(T + R) * 3", 51),
        ("T*B + R", 197),
    ],
)
def test_a_dim_is_arithmetic_on_sizes(text, value):
    assert Dim(text)(T=12, R=5, B=16) == value


def test_a_dim_knows_its_letters():
    assert Dim("T*B + R").letters == {"T", "B", "R"}
    assert Dim("2*T + T").letters == {"T"}
    assert Dim("64").letters == frozenset()


def test_a_dim_prints_as_written_and_reads_back():
    assert str(Dim("R + 1")) == "R + 1"
    assert repr(Dim("R + 1")) == "Dim('R + 1')"
    assert eval(repr(Dim("R + 1"))) == Dim("R + 1") != Dim("R")
    assert len({Dim("T"), Dim("T"), Dim("R")}) == 2


def test_a_size_that_is_missing_is_named_with_those_that_are_known():
    assert refused(Dim("R + B"), T=3, R=2) == (
        "dim 'R + B' needs a size for 'B'; known: ['R', 'T']. "
        "Pass it in the limits: fg.Limits(..., B=64)"
    )


@pytest.mark.parametrize("text", ["", "R +", "T R", "R = 1", "for"])
def test_text_that_is_no_expression(text):
    message = f"dim {text!r} is not an expression such as 'T', 'R + 1' or 64"
    assert refused(Dim, text) == message


@pytest.mark.parametrize(
    ("text", "value"), [("T + 1.5", 1.5), ("True", True), ("'T'", "T"), ("T*None", None)]
)
def test_constants_are_ints(text, value):
    assert refused(Dim, text) == f"dim {text!r} has the constant {value!r}; sizes are ints"


@pytest.mark.parametrize(
    "text",
    ["T / 2", "-T", "T << 1", "T | 1", "max(T, R)", "T.real", "T if R else 1", "T < R", "[T]"],
)
def test_a_dim_holds_nothing_but_arithmetic(text):
    assert refused(Dim, text) == f"dim {text!r} may hold letters, ints and + - * // % ** only"


def test_no_builtin_is_in_reach_of_a_dim():
    says = "they are single capitals: T tokens, R requests"
    for name in ("open", "t", "seq"):
        assert f"dim {name!r} has the letter {name!r}; {says}" in refused(buffer, name, "int64")
        assert says in refused(Dim, name)


def test_a_pad_of_integers_is_one():
    for pad in (0.5, float("inf"), 1.0):
        assert f"pad={pad!r} of int64: a whole number" in refused(buffer, "T", "int64", pad=pad)
    assert buffer("T", "float32", pad=0.5) and buffer("T", "bool", pad=True)


def test_a_dim_that_fails_points_at_the_users_line():
    with pytest.raises(ZeroDivisionError) as info:
        Dim("T // R")(T=1, R=0)
    assert user_line(info.tb).startswith(f"{short_path(__file__)}:")


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("T", ["T"]),
        ("R B", ["R", "B"]),
        ("R + 1", ["R + 1"]),
        ("R+1", ["R + 1"]),
        ("  R +1   2*B 64 ", ["R + 1", "2 * B", "64"]),
        ("T//2 R%3 B-1", ["T // 2", "R % 3", "B - 1"]),
        ("", []),
    ],
)
def test_a_space_separates_dims_and_operators_bind(text, dims):
    assert [dim.text for dim in parse_dims(text)] == dims


# --- declarations ---------------------------------------------------------------------------------


def declared(dims, dtype, **pad):
    """What a struct finds in a field of `fg.buffer`."""
    return buffer(dims, dtype, **pad).metadata["fngraph"]


def test_a_declaration_is_a_dataclass_field_that_holds_the_buffer():
    assert isinstance(buffer("T", "int64"), dataclasses.Field)
    assert declared("R B", "int32") == Buffer((Dim("R"), Dim("B")), "int32", 0, pad_given=False)
    assert declared("T", "int32", pad=0) == Buffer((Dim("T"),), "int32", 0, pad_given=True)
    assert declared("T", "float32", pad=-1.5).pad == -1.5
    assert declared("R + 1", "int32", pad="stride").pad == "stride"
    assert str(declared("R B", "int32")) == "int32[R, B]"
    assert str(declared("", "bool", pad=True)) == "bool[]"


@pytest.mark.parametrize(
    "text",
    [
        'fg.buffer("T", "int64")', 'fg.buffer("R + 1", "int32", pad="stride")',
        'fg.buffer("R B", "int32", pad=0, rows="changed", min=0)',
        'fg.buffer("", "bool", pad=True)',
        'fg.buffer("T 2 * B", "float32", pad=-1.5)', "fg.host()", "fg.static(default=3)",
        "fg.static()",
    ],
)  # fmt: skip
def test_a_declaration_prints_as_the_call_that_makes_it(text):
    made = eval(text, {"fg": fg})
    assert repr(made) == text
    role = made.metadata["fngraph"]
    if isinstance(role, Buffer):
        assert repr(role) == text
    cls = type("One", (), {"x": made, "__annotations__": {"x": "object"}})
    (field,) = dataclasses.fields(fg.struct(cls))
    assert repr(field) == text and field.name == "x"


def test_what_is_left_at_its_default_is_not_printed():
    assert repr(buffer("T", "int64", rows="all", min=None)) == 'fg.buffer("T", "int64")'


def test_shape_and_rows_under_sizes():
    sizes = {"T": 40, "R": 8, "B": 16}
    blocks = declared("R + 1 2*B", "int32")
    assert blocks.shape(sizes) == (9, 32)
    assert blocks.rows(sizes) == 9
    scalar = declared("", "int64")
    assert scalar.shape(sizes) == () and scalar.rows(sizes) is None


def test_dtypes_are_torchs_own_too():
    torch = pytest.importorskip("torch")
    for name in ("int32", "float8_e4m3fn", "bool"):
        assert declared("T", getattr(torch, name)) == declared("T", name)
    assert refused(buffer, "T", torch.quint8).startswith("dtype 'quint8' is none of bool")


def test_dtypes_are_torch_names():
    for dtype, near in {"long": "", "torch.int32": " Did you mean 'int32'?"}.items():
        message = f"dtype {dtype!r} is none of {', '.join(ITEMSIZE)}.{near}"
        assert refused(buffer, "T", dtype) == message


def test_pad_rules():
    assert refused(buffer, "R + 1", "int32", pad="repeat") == (
        "pad='repeat': a number, 'stride' for query_start_loc, or 'last' for other offsets"
    )
    for dims, dtype in (("R 2", "int32"), ("R + 1", "int16"), ("T", "float32")):
        message = refused(buffer, dims, dtype, pad="last")
        assert message.startswith("pad='last' is for offsets, int32 or int64 of one dim such as")
    for dims in ("R", "T + 1", "R + 1 B", "B R + 1", ""):
        message = refused(buffer, dims, "int32", pad="stride")
        assert message == "pad='stride' is for offsets of dims 'R + 1'"


@pytest.mark.parametrize(
    ("dims", "moving"), [("B T", "T"), ("T T", "T"), ("B R + 1", "R + 1"), ("T 4 2*R", "2 * R")]
)
def test_only_the_first_dim_varies_with_the_batch(dims, moving):
    shown = "int32[" + ", ".join(dim.text for dim in parse_dims(dims)) + "]"
    assert refused(buffer, dims, "int32") == (
        f"dims {shown} vary in {moving}, which is not the first dim; descriptors are leading "
        "slices, so put T or R first"
    )


def test_a_table_may_be_told_the_rows_that_changed():
    for dims in ("R B", "R", "R 2*B"):
        assert declared(dims, "int32", rows="changed").changed
    assert not declared("T", "int32").changed and not declared("T", "int32", rows="all").changed
    for dims in ("T B", "R + 1", ""):
        assert refused(buffer, dims, "int32", rows="changed") == (
            f"rows='changed' is for a table with a row for each request, dims such as 'R B', "
            f"not {dims!r}"
        )
    assert refused(buffer, "R", "int32", rows="some") == 'rows=\'some\': "all" or "changed"'


# --- plans ----------------------------------------------------------------------------------------


DTYPES = (
    "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 uint16 uint32 uint64 "
    "complex64 complex128 float8_e4m3fn float8_e5m2"
).split()


def test_the_dtypes_are_torchs():
    assert list(ITEMSIZE) == DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_every_dtype(dtype):
    bits = re.search(r"\d+", dtype.replace("bool", "8"))
    itemsize = int(bits[0]) // 8
    assert plan_buffers({"x": declared("T 3", dtype)}, {"T": 5}).nbytes == 15 * itemsize


def test_a_plan_is_every_buffer_at_the_largest_sizes():
    top = {"T": 4, "R": 2, "B": 3}
    fields = {"batch.x": declared("T", "int64"), "batch.b": declared("R B", "int32", pad=-1)}
    plan = plan_buffers(fields, top)
    top["T"] = 99
    assert dict(plan.sizes) == {"T": 4, "R": 2, "B": 3}
    assert [(b.path, b.shape, b.nbytes) for b in plan.buffers] == [
        ("batch.x", (4,), 32),
        ("batch.b", (2, 3), 24),
    ]
    assert plan.nbytes == 56
    assert (
        plan.as_text()
        == repr(plan)
        == (
            "| leaf    | type        | allocated | pad | bytes |\n"
            "|---------|-------------|-----------|-----|------:|\n"
            "| batch.x | int64[T]    | (4,)      | 0   |    32 |\n"
            "| batch.b | int32[R, B] | (2, 3)    | -1  |    24 |"
        )
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_reqs", "reqs"), [(8, 4, 4), (8, None, 8), (40, None, 16), (40, 40, 40)]
)
def test_sizes_of_a_key_of_any_requests_hold_all_that_can_come(num_tokens, num_reqs, reqs):
    dims = {"B": 64}
    assert key_sizes(num_tokens, num_reqs, 16, dims) == {"T": num_tokens, "R": reqs, "B": 64}
    assert dims == {"B": 64}
