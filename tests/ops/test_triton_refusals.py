"""What Triton's backends refuse, and how they say it."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

import fngraph as fg
from fngraph.errors import BackendError
from fngraph.ops import AttentionArgs, AttentionConfig, MLAArgs, MLAConfig, primitive
from fngraph.ops.triton import backends as triton_backends
from fngraph.ops.triton.launching import missing
from fngraph.testing.cases import case

CONFIG = AttentionConfig(4, 2, 64, 16, torch.bfloat16, torch.bfloat16, "cuda", 0.125)
LATENT = MLAConfig(16, 512, 64, 16, torch.bfloat16, torch.bfloat16, "cuda", 0.1)
LOW, F32 = torch.bfloat16, torch.float32
RECURRENT = {
    "gated_delta": fg.ops.GatedDeltaConfig(32, 16, 128, 128, LOW, F32, "cuda", 0.1),
    "ssd": fg.ops.SSDConfig(64, 64, 1, 128, LOW, F32, "cuda"),
    "causal_conv": fg.ops.CausalConvConfig(8192, 4, LOW, F32, "cuda"),
}
BACKENDS = ["triton", "triton_decode"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "why"),
    [({"dtype": torch.float64}, "float64"), ({"cache_dtype": torch.int8}, "int8"),
     ({"head_dim": 512}, "512")],
)  # fmt: skip
def test_a_configuration_that_it_has_not_is_refused_with_the_reason(backend, change, why):
    supports = primitive("attention").backend(backend).supports
    assert supports(CONFIG) is None
    assert why in supports(CONFIG._replace(**change))
    fits = {"dtype": torch.float32, "cache_dtype": torch.float8_e4m3fn, "head_dim": 256}
    assert supports(CONFIG._replace(**fits)) is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "why"),
    [({"dtype": torch.float64}, "float64"), ({"cache_dtype": torch.int8}, "int8"),
     ({"rank": 513}, "513"), ({"rope_dim": 128}, "128")],
)  # fmt: skip
def test_a_latent_configuration_that_it_has_not_is_refused_with_the_reason(backend, change, why):
    supports = primitive("mla").backend(backend).supports
    assert supports(LATENT) is None
    assert why in supports(LATENT._replace(**change))


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize(
    ("change", "why"),
    [({"dtype": torch.float64}, "float64"), ({"state_dtype": torch.int8}, "int8"),
     ({"key_dim": 257}, "257"), ({"value_dim": 300}, "300"), ({"state_dim": 512}, "512"),
     ({"head_dim": 384}, "384")],
)  # fmt: skip
def test_recurrent_state_that_it_has_not_is_refused_with_the_reason(kind, change, why):
    config, known = RECURRENT[kind], primitive(kind)
    triton = known.backend("triton")
    assert triton.supports(config) is None and triton.preferred(config)
    if set(change) <= set(config._fields):
        changed = config._replace(**change)
        assert why in triton.supports(changed)
        assert known.suited(changed).name == "reference"


@pytest.mark.parametrize("kind", RECURRENT)
def test_where_triton_cannot_run_recurrent_state_says_why(kind, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    triton_backends.loaded.cache_clear()
    args = SimpleNamespace(out=torch.zeros(2))
    with pytest.raises(BackendError, match=f"'triton' of {kind}.*(pip|TRITON_INTERPRET=1)"):
        primitive(kind).backend("triton").run(args, None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_triton_cannot_run_it_says_why_and_writes_nothing(backend, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    triton_backends.loaded.cache_clear()
    c = case((3, 5))
    before, out = c.k_cache.clone(), torch.empty_like(c.q)
    with pytest.raises(BackendError, match=f"{backend!r}.*(pip install|TRITON_INTERPRET=1)"):
        args = AttentionArgs(c.q, c.k, c.v, c.k_cache, c.v_cache, c.meta, out, CONFIG)
        primitive("attention").backend(backend).run(args, None)
    with pytest.raises(BackendError, match=f"{backend!r} of mla.*(pip install|TRITON_INTERPRET=1)"):
        latent = MLAArgs(c.q, c.k[:, 0], c.k_cache[:, :, 0], c.meta, out, LATENT)
        primitive("mla").backend(backend).run(latent, None)
    assert c.k_cache.nan_to_num().equal(before.nan_to_num())


def test_what_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert missing("cuda") is None and "CUDA" in str(missing("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert missing("cpu") is None and missing() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in str(missing("cuda"))
