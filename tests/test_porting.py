"""docs/porting.md: each port runs as it stands there, and does what plain PyTorch does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fngraph as fg

PAGE = Path(__file__).parent.parent / "docs/porting.md"
Names = dict[str, Any]


def ran(title: str) -> Names:
    """What the code below a title leaves behind."""
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: Names = {"__name__": "user"}
    torch.manual_seed(0)
    exec(compile(code, f"{PAGE.name}: {title}", "exec", dont_inherit=True), names)
    return names


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def gpt(n: Names) -> None:
    """Each text alone, by causal attention over all of it, without a cache."""
    model = n["model"]
    assert sorted(len(text) for text in n["texts"]) == [9, 11, 12]
    for text, prompt in zip(n["texts"], (3, 1, 4)):
        ids = torch.tensor(text[:-1])
        x = model.embed(ids) + model.places.weight[: len(ids)]
        for block in model.blocks:
            q, k, v = block.qkv(block.norm1(x)).view(len(ids), 3, n["H"], -1).permute(1, 2, 0, 3)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block.out(y.transpose(0, 1).reshape(len(ids), -1))
            x = x + block.mlp(block.norm2(x))
        logits = model.norm(x) @ model.embed.weight.T
        assert logits.argmax(-1)[prompt - 1 :].tolist() == text[prompt:]
        same(n["logits"][n["texts"].index(text)], logits[-1])
    assert {mode for (_, mode) in ran_as(n["fast"])} == {"FULL"}


def ran_as(fast: Any) -> list[tuple[str, str]]:
    """Padded sizes and modes of a function's steps."""
    return re.findall(r"\| +\d+ \| +(\d+) \| +\d+ \| (\w+) +\|", fast.stats.as_text())


@torch.no_grad()
def gru(n: Names) -> None:
    """Each request alone, of a sequence."""
    h = torch.zeros(3, 16)
    for i in range(5):
        h = n["tracker"].cell(n["x"][i], h)
    same(n["scores"], n["tracker"].head(h))
    same(n["state"][[4, 1, 7]], h)
    assert not n["state"][[2, 3, 5, 6, 8]].any()


@torch.no_grad()
def unet(n: Names) -> None:
    """The same steps of the module itself, over the same noise."""
    unet, noise = n["unet"], torch.randn(n["STEPS"], 2, 1, 16, 16)
    fast = plain = torch.randn(2, 1, 16, 16)
    for t in reversed(range(n["STEPS"])):
        fast = n["denoise"](n["params"], n["buffers"], fast, torch.tensor(t), noise[t])
        plain = unet(plain, torch.tensor(t), noise[t])
    same(fast, plain)
    assert not torch.equal(fast, unet(fast, torch.tensor(3), noise[0]))
    assert "float32[2, 1, 16, 16], int64[], float32[2, 1, 16, 16] |    40 |        1" in (
        n["denoise"].stats.as_text()
    )


@torch.no_grad()
def encoder_decoder(n: Names) -> None:
    """Each source alone, cut to its length."""
    for r in range(3):
        length, row = n["lengths"][r : r + 1], torch.tensor([1])
        cache = {name: torch.zeros_like(x[:2]) for name, x in n["cache"].items()}
        ids = n["sources"][r : r + 1].clone()
        ids[0, length:] = 39  # what is beyond its length is seen by nobody
        cache = n["encoder"](cache, ids, length, row)
        token = torch.zeros(1, dtype=torch.int64)
        for i in range(6):
            batch = n["Batch"](token, torch.tensor([i]), row, fg.BatchSpec(1, 1, query_len=1))
            logits, cache = n["decoder"](cache, batch)
            token = logits.argmax(-1)
            assert token.item() == n["written"][i][r]
        same(n["logits"][r], logits[0])
    same(n["cache"]["memory"][n["rows"][2]][:8], cache["memory"][1][:8])


def training(n: Names) -> None:
    """torch.optim.Adam on the module, from the same weights and the same data."""
    torch.manual_seed(0)
    first, norm, last = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 3)
    fresh = nn.Sequential(first, norm, nn.ReLU(), last)
    optimizer = torch.optim.Adam(fresh.parameters(), lr=n["LR"])
    for x, y in zip(n["x"], n["y"]):
        optimizer.zero_grad()
        loss = F.cross_entropy(fresh(x), y)
        loss.backward()
        optimizer.step()
    same(n["loss"], loss.detach())
    for name, value in fresh.state_dict().items():
        same(n["net"].state_dict()[name], value)
    assert n["net"][1].num_batches_tracked == 20


PORTS: dict[str, Callable[[Names], None]] = {
    "A GPT with a KV cache": gpt,
    "A GRU with a state for each request": gru,
    "A UNet that denoises": unet,
    "An encoder and a decoder": encoder_decoder,
    "A training step": training,
}


@pytest.mark.parametrize("title", PORTS)
def test_a_port_does_what_the_module_does(title: str, capsys) -> None:
    PORTS[title](ran(title))


def test_every_port_is_tried() -> None:
    assert re.findall(r"^## (.*)", PAGE.read_text(), re.MULTILINE) == list(PORTS)
