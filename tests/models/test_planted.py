"""Each impurity, planted in the layers of Llama themselves, is caught while it is traced.

A plant replaces one line of `models/families/decoder.py`, once. The error must name that line,
and nothing may have been captured by then: `trace` is all that runs.
"""

from __future__ import annotations

import random
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import fngraph as fg
from fngraph import errors
from fngraph.models import llama
from fngraph.models.families import decoder

CONFIG = llama.Config(11, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, dim=8, mlp_dim=12)
SOURCE = Path(decoder.__file__).read_text()
EMBED = "x_TE = entered(params, batch)"
KEPT = "kept.append(own)"
LAST = "return left(params, x_TE, batch, norm), cache"
PLANTS: dict[str, tuple[str, str, type[Exception]]] = {
    # what it was not given
    "global": (EMBED, f"{EMBED} * GLOBAL", errors.ClosureError),
    "default argument": (EMBED, f"{EMBED} * by_default()", errors.ClosureError),
    "module attribute": (EMBED, f"{EMBED} * MODULE.weight", errors.ClosureError),
    "leak": (KEPT, f"{KEPT}; LEAKS.append(x_TE)", errors.LeakError),
    # values on the host
    "item": (EMBED, f"{EMBED} * batch.token_ids.max().item()", errors.HostSyncError),
    "tolist": (EMBED, f"{EMBED} * len(batch.token_ids.tolist())", errors.HostSyncError),
    "numpy": (EMBED, f"{EMBED} * batch.token_ids.numpy()[0]", errors.HostSyncError),
    "if tensor": (EMBED, f"{EMBED} * (1 if batch.token_ids[0] > 3 else 2)", errors.HostSyncError),
    "nonzero": (EMBED, f"{EMBED} * len(batch.token_ids.nonzero())", errors.HostSyncError),
    "boolean mask": (EMBED, f"{EMBED}; x_TE[batch.token_ids > 3].sum()", errors.HostSyncError),
    "swallowed": (EMBED, f"{EMBED}; attempt(lambda: x_TE[0, 0].item())", errors.HostSyncError),
    # sizes and counts
    "branch on T": (EMBED, f"{EMBED}; x_TE *= 1 if x_TE.shape[0] > 3 else 2", errors.BranchError),
    "range of T": (EMBED, f"{EMBED} * len(range(batch.token_ids.shape[0]))", errors.BranchError),
    "len of a batch": (EMBED, f"{EMBED} * len(batch.token_ids)", errors.BranchError),
    "spec": (EMBED, f"{EMBED}; x_TE = x_TE * batch.spec.num_tokens", errors.HostFieldError),
    # writes
    "write to held": (EMBED, f"params.embed.mul_(1); {EMBED}", errors.MutationError),
    "write to a view": (EMBED, f"params.embed[0].zero_(); {EMBED}", errors.MutationError),
    "write to staged": (EMBED, f"batch.token_ids.add_(1); {EMBED}", errors.MutationError),
    # draws
    "rand": (EMBED, f"{EMBED} * torch.rand(())", errors.RandomError),
    "dropout": (EMBED, f"x_TE = torch.dropout({EMBED[7:]}, 0.5, True)", errors.RandomError),
    "random": (EMBED, f"{EMBED} * random.random()", errors.RandomError),
    # rows
    "mean": (EMBED, f"{EMBED}; x_TE = x_TE - x_TE.mean(0)", errors.RowsError),
    "softmax": (EMBED, f"x_TE = {EMBED[7:]}.softmax(0)", errors.RowsError),
    "flip": (EMBED, f"x_TE = {EMBED[7:]}.flip(0)", errors.RowsError),
    "last row": (EMBED, f"{EMBED}; x_TE = x_TE + x_TE[-1]", errors.RowsError),
    "times T": (EMBED, f"{EMBED} * batch.token_ids.shape[0]", errors.RowsError),
    "expert's share": (EMBED, f"{EMBED}; x_TE = x_TE / (x_TE.T @ x_TE).sum()", errors.RowsError),
    # ambient state, operators
    "dtype": (EMBED, f"torch.set_default_dtype(torch.float64); {EMBED}", errors.AmbientError),
    "seed": (EMBED, f"torch.manual_seed(0); {EMBED}", errors.PurityError),
    "cond": (EMBED, f"{EMBED}; torch.cond(x_TE[0, 0] > 0, torch.sin, torch.cos, (x_TE,))",
             errors.OperatorError),
    # what comes out
    "number": (LAST, f"{LAST}, 3", errors.OutputError),
    "alias of held": (LAST, f"{LAST}, params.embed[0]", errors.OutputError),
    "alias of staged": (LAST, f"{LAST}, batch.seq_lens", errors.OutputError),
    "cache not returned": (LAST, LAST.removesuffix(", cache"), errors.DonationError),
    "cache of another shape": (LAST, LAST.replace(", cache", ", cache[:-1]"), errors.DonationError),
}  # fmt: skip


def planted(old: str, new: str) -> tuple[Any, int]:
    """The model with one line replaced, as a module of the same file, and that line's number."""
    assert SOURCE.count(old) == 1
    module = types.ModuleType("fngraph.models.families.decoder")
    module.__file__ = decoder.__file__
    weight = torch.nn.Linear(1, 1).weight
    vars(module).update(
        GLOBAL=torch.ones(()), MODULE=types.SimpleNamespace(weight=weight[0, 0]), LEAKS=[],
        by_default=by_default, random=random, attempt=attempt, torch=torch,
    )  # fmt: skip
    exec(compile(SOURCE.replace(old, new), decoder.__file__, "exec"), vars(module))
    return module, SOURCE[: SOURCE.index(old)].count("\n") + 1


ONE = torch.ones(())


def by_default(x: torch.Tensor = ONE) -> torch.Tensor:
    return x


def attempt(fn: Any) -> Any:
    try:
        return fn()
    except Exception:
        return 1


def trace(module: Any) -> Any:
    """The trace of its forward, over the model's own parameters."""
    params = llama.init_params(CONFIG)
    cache = llama.init_cache(params.config, 18, block_size=4)
    limits = fg.Limits(max_tokens=32, max_reqs=8, B=6)

    def forward(params: Any, cache: Any, batch: llama.Batch) -> Any:
        return module.decode(params, cache, batch, llama.attention, rope_dim=CONFIG.head_dim)

    made = fg.graphify(forward, donate="cache", stage="batch", limits=limits)
    return made.trace(params, cache)


def test_the_model_as_it_is_passes():
    module, _ = planted(EMBED, EMBED)
    assert not trace(module).notes


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", PLANTS)
def test_a_plant_is_caught_in_the_trace(name: str):
    old, new, error = PLANTS[name]
    module, line = planted(old, new)
    torch.manual_seed(12)
    with pytest.raises(error) as caught:
        trace(module)
    text = str(caught.value)
    if error is errors.AmbientError or name == "seed":  # seen at the end, of `forward` as a whole
        assert "tests/models/test_planted.py:" in text, text
    elif error is errors.LeakError:
        assert "models/families/decoder.py:" in text, text
    elif name != "random" and error not in (errors.OutputError, errors.DonationError):
        assert f"models/families/decoder.py:{line}" in text, text
    assert isinstance(caught.value, errors.FnGraphError)
