"""The most memory that a process has while it loads its part of a folder (`benchmarks ranks`)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import fngraph as fg
from benchmarks.device import wait
from benchmarks.ranks.sharing import without_stands
from fngraph.models import loading, naming
from fngraph.models.families import llama

CLEAR = Path("/proc/self/clear_refs")  # Linux's


def save(folder: Path, params: llama.Params) -> None:
    """A folder as others save a Llama, of params that are whole."""
    config, state = params.config, {}
    for name, x in naming.named(params).items():
        (theirs,) = loading.sources_of(llama.FORMAT.names, name, x)
        state[theirs] = x.clone().cpu()
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    said = {
        "model_type": "llama", "vocab_size": config.vocab_size, "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim, "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(said))


def memory_row(folder: Path, mesh: fg.Mesh) -> dict[str, Any]:
    """What loading this process's part takes, beyond what was there before."""
    on_gpu = mesh.device.startswith("cuda")
    before = 0
    if on_gpu:
        wait(mesh.device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    if CLEAR.exists():
        CLEAR.write_text("5")  # the peak begins here
    host, began = resident("VmRSS"), time.perf_counter()
    _, params = llama.load(folder, mesh=mesh)
    wait(mesh.device)
    took, peak = time.perf_counter() - began, resident("VmHWM")
    part = sum(x.nbytes for x in naming.named(without_stands(params)).values())
    row: dict[str, Any] = {"part MB": part / 1e6, "load s": took}
    if on_gpu:
        most = torch.cuda.max_memory_allocated() - before
        row |= {"device peak MB": most / 1e6, "of part": most / part}
    if host is not None and peak is not None:
        row["host peak MB"] = (peak - host) / 1e6
    return row


def resident(what: str) -> int | None:
    """Bytes, by the kernel's word for them; None where there is no Linux."""
    if not CLEAR.exists():
        return None
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))
