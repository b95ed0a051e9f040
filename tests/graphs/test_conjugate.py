"""Conjugate and negative views: bits that a tensor carries beside its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

import fngraph as fg
from fngraph.torch_facts.names import conj_view, neg_view

MODES = ("FULL", "PIECEWISE", "NONE")
Z = torch.randn(toys.V, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))


def check(fn: Callable[..., Any], modes: str, z: Tensor) -> None:
    """`fn(params, state, batch)` equals itself over the same leaves."""
    fast = fg.graphify(
        fn, modes=modes, donate=1, stage=2, limits=toys.LIMITS, sizes=(8,), allow_copies=True,
        recorder="tape",
    )  # fmt: skip
    params, state = {"z": z}, {"kept": z.clone()}
    for batch in (toys.batch(3, 2), toys.batch(4, 1, seed=1)):
        want, after = toys.bare(fn, params, state, batch)
        got, _ = fast(params, state, batch)
        toys.assert_trees(got, want, atol=1e-6, rtol=1e-6)  # lengths round another way
        toys.assert_trees(state, after)


MADE = {
    "conj": lambda z: z.conj() * 1,
    "conj, returned": lambda z: z.conj(),
    "a product with a conjugate": lambda z: z * (z + 1).conj(),
    "imag of a conjugate": lambda z: z.conj().imag * 1,
    "imag of a conjugate, returned": lambda z: z.conj().imag,
    "conj twice": lambda z: torch.view_as_real((z.conj() + 1).conj().resolve_conj()),
    "rotary": lambda z: torch.view_as_real(
        z * torch.polar(torch.ones(4), torch.arange(4.0)).conj()
    ).flatten(1),
}


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("name", MADE)
def test_views_of_what_a_graph_computed(name: str, modes: str) -> None:
    """The recorded call reads the view with its bits."""
    fn = MADE[name]
    check(lambda p, s, b: (fn(p["z"][b.token_ids] * 2), s), modes, Z)


HELD = {
    "rows": lambda z, b: z[b.token_ids] * 1,
    "resolved": lambda z, b: z.resolve_conj()[b.token_ids] * 1,
    "imag": lambda z, b: z.imag[b.token_ids] * 1,
    "asked": lambda z, b: z[b.token_ids] * (2 if z.is_conj() else 3),
    "transposed product": lambda z, b: z[b.token_ids] @ z.mT,
}


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("name", HELD)
def test_a_held_leaf_that_is_a_conjugate_view(name: str, modes: str) -> None:
    """It is traced as what it is."""
    fn = HELD[name]
    check(lambda p, s, b: (fn(p["z"], b), s), modes, Z.conj())


@pytest.mark.parametrize("modes", MODES)
def test_a_held_leaf_that_is_a_negative_view(modes: str) -> None:
    """As `z.conj().imag` is."""
    check(lambda p, s, b: (p["z"][b.token_ids] * 2, s), modes, Z.conj().imag)


STAGED = {"conjugate": conj_view(Z), "negative": neg_view(Z.real.contiguous())}


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("name", STAGED)
def test_a_staged_leaf_that_is_a_view_with_a_bit(name: str, modes: str) -> None:
    """Dense as it is, what lies in its memory is not what it holds."""
    z = STAGED[name]
    assert z.is_contiguous() and (z.is_conj() or z.is_neg())
    fast = fg.graphify(lambda p, b: b["z"] * p, modes=modes, stage=1, recorder="tape")
    two = torch.tensor(2.0)
    for leaf in (z.resolve_conj().resolve_neg(), z):  # of one kind for the step
        torch.testing.assert_close(fast(two, {"z": leaf}), leaf * 2)


@pytest.mark.parametrize("modes", MODES)
def test_the_new_value_of_a_donated_leaf_may_be_a_conjugate(modes: str) -> None:
    """What is written is its value."""
    check(lambda p, s, b: (b.token_ids * 1, {"kept": (s["kept"] * 2).conj()}), modes, Z)


def test_specs_know_the_bits() -> None:
    """So that a trace over specs is that over the tensors."""
    assert fg.like(Z.conj()) != fg.like(Z)
    assert fg.like(Z.conj().imag).bits == (False, True)
