"""`Decoder`: what the kernel of all layers is compiled for, and which shapes it takes."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch

from fngraph.ops.triton.launching import processors, shared_bytes

WARPS, RING = 8, 32  # of a program; loads of 16 bytes that each lane has on the way
MOST_TOKENS = 4  # each has two rows of a tile's 16; of the second 8 a lane would hold as much again
# pairs of words of all tokens' sums, of 1024 columns each, that a lane has in registers at a time:
# with 9, three requests of a model of 3072 columns, it was faster than a chain; more was not tried
MOST_SUMS = 9
FIRST = 7  # operands before those of the first layer


class Decoder(NamedTuple):
    """What the kernel is compiled for, and numbers that it is called with.

    Attributes:
        width: of the residual stream.
        heads, kv_heads, head_dim: of attention.
        mlp: columns of the gate.
        layers: how many there are.
        vocab: words of the vocabulary.
        block: tokens of a block of the cache.
        normed: whether heads of q and k have norms.
        eps: of the norms, and `head_eps` of those of heads.
        scale: of scores.
        weights: how many of them make up the matrix of q, k and v, that of gate and up, and the
            head, which lie side by side.
        chosen: whether the last operand says of which token each row of logits is, int64.
        tokens: of a step, each of another request, in order.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    layers: int
    vocab: int
    block: int
    normed: bool
    eps: float
    head_eps: float
    scale: float
    weights: tuple[int, ...]
    chosen: bool = False
    tokens: int = 1

    @property
    def in_layer(self) -> int:
        """Operands of a layer."""
        return sum(self.weights[:2]) + 6 + 2 * self.normed

    @property
    def operands(self) -> int:
        """How many there are."""
        return FIRST + self.layers * self.in_layer + 1 + self.weights[2] + self.chosen

    def refusal(self) -> str | None:
        """Why no kernel is compiled for these shapes, or None."""
        inputs = {self.width: "the model", self.heads * self.head_dim: "attention", self.mlp: "mlp"}
        rows = (self.width, self.mlp, self.vocab)
        for columns, whose in inputs.items():
            if columns % (64 * WARPS):
                return f"{columns} columns of {whose} are no multiple of {64 * WARPS}"
            loads = columns // (32 * WARPS)  # of 8 rows: more than the ring are read by parts
            if loads > RING and not any(loads % n == 0 for n in range(8, RING + 1, 2)):
                return f"{columns} columns of {whose} have no parts of 8 to {RING} loads"
        if any(n % 8 for n in rows):
            return f"one of {rows} rows is no multiple of 8"
        if self.width > 32 * RING * WARPS:
            return f"{self.width} columns of the model are more than {32 * RING * WARPS}"
        if self.head_dim not in (64, 128):
            return f"heads of {self.head_dim} are neither of 64 nor of 128"
        if self.heads > 8 * self.kv_heads:
            return f"more than 8 of {self.heads} heads share one of {self.kv_heads} kv heads"
        return None

    def refusal_on(self, device: torch.device) -> str | None:
        """Why it cannot run on a device, or None."""
        if why := why_not_on(device):
            return why
        if not self.most_tokens(processors(device), shared_bytes(device)):
            return "multiprocessors are fewer than its kv heads, or have too little shared memory"
        return None

    def most_tokens(self, programs: int, memory: int) -> int:
        """The most of a step that a device can have, of so many multiprocessors and bytes of their
        own memory; 0: none."""
        pairs = -(-self.width // 1024)  # of a token
        fit = [n for n in range(1, MOST_TOKENS + 1)
               if n * self.kv_heads <= programs and n * pairs <= MOST_SUMS
               and self._replace(tokens=n).shared(programs) <= memory]  # fmt: skip
        return max(fit, default=0)

    def shared(self, programs: int) -> int:
        """Bytes of `Shared` in attention.cuh."""

        def rows(n: int) -> int:
            return -(-n // (8 * programs)) * 8

        own, sharing = rows(self.width), self.heads // self.kv_heads
        qkv = rows((self.heads + 2 * self.kv_heads) * self.head_dim)
        parts = 2 * WARPS * max(128, own, qkv, 2 * rows(self.mlp))
        columns = max(self.width, self.mlp, self.heads * self.head_dim)
        of_token = 4 * (parts + 2 * WARPS + own) + 2 * columns + 8
        keys = 2 * WARPS * 16 * (self.head_dim + 8)
        staged = 2 * (2 * keys + sharing * (self.head_dim + 8) + 2 * self.head_dim)
        return self.tokens * of_token + staged + 4 * 2 * WARPS * 8 + 80 * self.layers


def why_not_on(device: torch.device) -> str | None:
    """Why no decoder can be one launch on a device, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"it runs on NVIDIA GPUs, and the weights are on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        return "it runs on compute capability 9.0 and later, and {}.{} is here".format(*capability)
    if not (importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings")):
        return "cuda.bindings is not installed: pip install cuda-bindings"
    return None


def macros(decoder: Decoder, programs: int) -> list[str]:
    """What `decoder.cu` is compiled by."""
    values = {
        "PROGRAMS": programs, "TOKENS": decoder.tokens, "WIDTH": decoder.width,
        "HEADS": decoder.heads, "KV_HEADS": decoder.kv_heads, "HEAD": decoder.head_dim,
        "MLP": decoder.mlp, "LAYERS": decoder.layers, "VOCAB": decoder.vocab,
        "BLOCK": decoder.block, "NORMED": int(decoder.normed),
        "WARPS": WARPS, "RING": RING,
    }  # fmt: skip
    return [f"-D{name}={value}" for name, value in values.items()]
