"""What one would use otherwise, beyond torch: JAX, transformers, and engines, where installed.

jax           `jax.jit` of a step by hand, the cache donated; weights are torch's, by dlpack
transformers  its model over its `StaticCache`, compiled as `generate` does it for each token, of
              which this is the model's call and the choice of the token, without the Python around

Engines (vLLM, SGLang, nano-vLLM) take no cache that is not theirs, so their results cannot be held
to the same tokens here: a row says whether they are there, and no more.

Shape letters: R requests, S tokens that a cache has room for, H query heads, K kv heads, D head
dim, E model dim, F mlp hidden, X experts, C chosen ones of a token.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fngraph as fg
from benchmarks.decode import plain
from benchmarks.decode.bench import Bench, Made
from benchmarks.decode.judging import Left
from benchmarks.decode.theirs import its_model


def found(name: str) -> Any:
    """The module.

    Raises:
        Left: it cannot be imported, and why.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # a library may fail in its own ways on a machine it is not for
        raise Left(f"not installed: import {name}: {type(error).__name__}: {error}") from error


# --- JAX ------------------------------------------------------------------------------------------


def jax_step(config: Any, weights: Any, cache: Any, ids: Any, positions: Any) -> Any:
    """As `plain.step`, in jax.numpy, over caches of (R, S, K, D); and the new caches."""
    jax = found("jax")
    jnp, f32 = jax.numpy, jax.numpy.float32
    R, H, K, D = len(ids), config.num_heads, config.num_kv_heads, config.head_dim

    def norm(x: Any, weight: Any) -> Any:
        wide = x.astype(f32)
        scale = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + config.norm_eps)
        return (wide * scale).astype(x.dtype) * weight

    def turned(x: Any) -> Any:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    def mixed(of: Any, y: Any) -> Any:
        X, C = config.num_experts, config.num_chosen
        share, expert = jax.lax.top_k(jax.nn.softmax((y @ of.router.T).astype(f32)), C)
        if config.normalized:
            share = share / share.sum(-1, keepdims=True)
        if R * C <= X:  # look up the weights of each; else run all experts for all
            gate, up = (jnp.einsum("te,tcfe->tcf", y, w[expert]) for w in of[1:3])
            down = of.w_down[expert]
            out = jnp.einsum("tcf,tcef->tce", jax.nn.silu(gate) * up, down)
            return jnp.einsum("tce,tc->te", out, share.astype(y.dtype))
        gate, up = (jnp.einsum("te,xfe->txf", y, w) for w in of[1:3])
        out = jnp.einsum("txf,xef->txe", jax.nn.silu(gate) * up, of.w_down)
        every = jnp.zeros((R, X), f32).at[jnp.arange(R)[:, None], expert].set(share)
        return jnp.einsum("txe,tx->te", out, every.astype(y.dtype))

    x = weights.embed[ids]
    frequency = 1 / config.rope_theta ** (jnp.arange(0, D, 2, dtype=f32) / D)
    angle = positions[:, None, None].astype(f32) * frequency
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    room, kept = cache[0][0].shape[1], []
    seen = (jnp.arange(room) <= positions[:, None])[:, None, None]
    for layer, (k_cache, v_cache) in zip(weights.layers, cache):
        heads = (norm(x, layer.attn_norm) @ layer.wqkv.T).reshape(R, H + 2 * K, D)
        q, k, v = jnp.split(heads, (H, H + K), 1)
        if layer.q_norm is not None:
            q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
        at = jnp.arange(R), positions
        k_cache, v_cache = k_cache.at[at].set(turned(k)), v_cache.at[at].set(v)
        out = jax.nn.dot_product_attention(turned(q)[:, None], k_cache, v_cache, mask=seen)
        kept.append((k_cache, v_cache))
        x = x + out.reshape(R, H * D) @ layer.wo.T
        y = norm(x, layer.mlp_norm)
        if isinstance(layer.mlp, plain.Gated):
            gate, up = jnp.split(y @ layer.mlp.w_in.T, 2, -1)
            x = x + (jax.nn.silu(gate) * up) @ layer.mlp.w_out.T
        else:
            x = x + mixed(layer.mlp, y)
    logits = norm(x, weights.norm) @ weights.head.T
    return logits.argmax(-1), logits, tuple(kept)


class Donated:
    """A jitted step that gives up its cache and takes the new one."""

    def __init__(self, bench: Bench, weights: Any, num_reqs: int) -> None:
        self.jax = found("jax")
        step = functools.partial(jax_step, bench.config)
        self.step, self.weights = self.jax.jit(step, donate_argnums=1), weights
        shape = (num_reqs, bench.context, bench.config.num_kv_heads, bench.config.head_dim)
        zeros = functools.partial(self.jax.numpy.zeros, shape, self.jax.numpy.bfloat16)
        self.cache = tuple((zeros(), zeros()) for _ in bench.memory)
        self.positions = self.array(bench.positions(num_reqs))
        self.logits: Any = None

    def array(self, x: Tensor) -> Any:
        """JAX's, of int32: it has no int64 unless it is told."""
        return self.jax.numpy.asarray(x.int().cpu().numpy())

    def __call__(self, ids: Any) -> Any:
        ids = self.array(ids) if isinstance(ids, Tensor) else ids
        ids, self.logits, self.cache = self.step(self.weights, self.cache, ids, self.positions)
        return ids

    def wait(self) -> None:
        """Till it has done all; the cache is the last that a step writes."""
        self.jax.block_until_ready((self.cache, self.logits))

    def views(self) -> Any:
        """Its cache as torch sees it, where it lies."""
        return [(torch.from_dlpack(k), torch.from_dlpack(v)) for k, v in self.cache]


def jax(bench: Bench) -> Callable[[int], Made]:
    """Weights are torch's own memory; the cache is JAX's, since it takes what is donated."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # read when it is imported
    library = found("jax")
    kinds = {device.platform for device in library.devices()}
    if bench.device.startswith("cuda") and not kinds & {"gpu", "cuda"}:
        raise Left(f"jax is here without a GPU: it has {', '.join(sorted(kinds))}")
    weights = fg.core.trees.map_leaves(library.numpy.from_dlpack, plain.weights_of(bench.params))

    def at(num_reqs: int) -> Made:
        step = Donated(bench, weights, num_reqs)
        step(bench.positions(num_reqs) * 0)  # compiles

        def wait() -> None:
            bench.wait()  # what torch writes there
            step.wait()

        logits = lambda: torch.from_dlpack(step.logits)  # noqa: E731
        more = {"attention": "jax.nn.dot_product_attention"}
        return Made(step, logits, step.views, wait, on_stream=False, more=more)

    return at


# --- transformers ---------------------------------------------------------------------------------


def transformers(bench: Bench) -> Callable[[int], Made]:
    """Its model with our weights, and its static cache over the bench's memory."""
    library = found("transformers")
    family, most = bench.model.family, 2 * bench.context
    model = its_model(library, family, bench.params, most, bench.device)
    run: Any = model
    if bench.device.startswith("cuda"):  # as generate: on a CPU it compiles nothing
        run = model.get_compiled_call(library.CompileConfig())

    def at(num_reqs: int) -> Made:
        cache = library.StaticCache(config=model.config, max_cache_len=bench.context)
        lengths = torch.zeros(len(cache.layers), dtype=torch.int64, device=bench.device)
        pairs = bench.contiguous(num_reqs)
        for i, (layer, (k, v)) in enumerate(zip(cache.layers, pairs)):
            layer.lazy_initialization(k[:, :, :0], v[:, :, :0])
            layer.keys, layer.values, layer.cumulative_length = k, v, lengths[i]
            for x in (layer.keys, layer.values, layer.cumulative_length):
                torch._dynamo.mark_static_address(x)  # as its own initialization does
        positions = bench.positions(num_reqs)[:, None]
        last: list[Any] = []

        def step(ids: Tensor) -> Tensor:
            lengths.fill_(bench.context - 1)  # each layer counts on from there
            torch.compiler.cudagraph_mark_step_begin()
            out = run(
                input_ids=ids[:, None], position_ids=positions, past_key_values=cache,
                logits_to_keep=1, return_dict=True,
            )  # fmt: skip
            last[:] = [out.logits[:, -1]]
            return last[0].argmax(-1)

        for _ in range(4):  # compiles, and captures
            step(positions[:, 0] * 0)
        views = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in pairs]
        more = {"attention": "SDPA, transformers'"}
        return Made(step, lambda: last[0], lambda: views, bench.wait, more=more)

    return at


def engine(name: str) -> Callable[[Bench], Callable[[int], Made]]:
    """Whether it is there."""

    def open_(bench: Bench) -> Callable[[int], Made]:
        version = getattr(found(name), "__version__", "of no version")
        raise Left(f"{name} {version} is installed; it is not driven from here")

    return open_


WAYS = {
    "jax": jax, "transformers": transformers, "vllm": engine("vllm"), "sglang": engine("sglang"),
    "nano-vllm": engine("nanovllm"),
}  # fmt: skip
