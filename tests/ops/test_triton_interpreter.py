"""Triton's kernels under its interpreter: those of their tests that fit a CPU.

Triton decides on import whether it interprets, so they run in a Python of their own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SAMPLE = "strided or nothing_but_padding or mixed or quantising or no_number or no_row or as_near"
SAMPLE += " or 2-one_shot or 4-two_shot"
FILES: dict[str, tuple[Any, ...]] = {
    "a few of each": (40, "-k", SAMPLE, "test_triton_attention.py", "test_triton_latent.py",
                      "test_triton_recurrent.py", "test_triton_fused.py", "test_triton_fp8.py",
                      "test_triton_skinny.py", "test_triton_skinny_fp8.py",
                      "test_triton_wide.py", "test_triton_grouped.py", "test_triton_reducing.py",
                      "test_triton_row_max.py", "test_triton_own_rows.py"),
    "over processes": (7, "test_triton_reducing.py"),
    "attention": (85, "test_triton_first_use.py", "test_triton_attention.py",
                  "test_triton_levels.py", "test_triton_splits.py",
                  "test_triton_split_edges.py"),
    "latent": (50, "test_triton_latent.py", "test_triton_latent_levels.py"),
    "recurrent": (98, "test_triton_recurrent.py", "test_triton_recurrent_levels.py",
                  "test_empty.py"),
    "fused, of few rows, and staging": (460, "test_triton_fused.py", "test_triton_fp8.py",
                                        "test_triton_skinny.py", "test_triton_skinny_fp8.py",
                                        "test_triton_varlen.py", "test_triton_wide.py",
                                        "test_triton_grouped.py", "test_triton_row_max.py",
                                        "test_triton_own_rows.py",
                                        "../graphs/test_staging.py"),
}  # fmt: skip  # how many tests there are at least, and pytest's arguments


@pytest.mark.sampled("a few")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("kernels", FILES)
def test_the_kernels_are_right_under_the_interpreter(kernels):
    least, *arguments = FILES[kernels]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "default"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=env, cwd=HERE, check=False,
    )  # fmt: skip
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert passed and int(passed[1]) > least
