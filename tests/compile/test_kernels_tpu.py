"""The TPU kernels through the real compiler of each chip, no chip needed: libtpu alone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)
SCRIPT = Path(__file__).with_name("tpu_kernel_figures.py")
ROOT = SCRIPT.parents[2]
CHIPS = ("v5e", "v6e", "v5p", "v7x")
OPERATIONS = ("paged_decode", "kv_write", "paged_prefill")
WIDTHS_TO_PAD = {"d80", "d96", "everything_f32"}
READ_ONLY = {"read_only", "read_only_int8", "latent_read_only"}


def compiled(chip: str, *names: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), chip, *names], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("chip", CHIPS)
def test_decode_of_llama_3_8b_moves_little_beyond_the_pages_it_reads(chip: str) -> None:
    """64 sequences of 2,048 positions, every page of which is visible, so that the pool is the floor of bytes."""
    sizes = ("16", "64", "128")
    for found in compiled(chip, *(f"paged_decode/llama_3_8b:{size}" for size in sizes)):
        assert found["kernels"] == 1
        assert found["alias_bytes"] >= found["pool_bytes"]
        assert found["temp_bytes"] <= 0.05 * found["pool_bytes"]
        assert found["pool_copies"] == 0
        assert found["pool_bytes"] * 0.98 <= found["bytes_accessed"] <= 1.05 * found["pool_bytes"]


@pytest.mark.parametrize("chip", ["v6e"])
def test_prefill_of_llama_3_8b_writes_the_pool_in_place(chip: str) -> None:
    (found,) = compiled(chip, "paged_prefill/llama_3_8b")
    assert found["kernels"] == 2
    assert found["alias_bytes"] >= found["pool_bytes"]
    assert found["pool_copies"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_case_compiles(chip: str, operation: str) -> None:
    for found in compiled(chip, operation):
        if found["case"] in WIDTHS_TO_PAD:
            assert "pad keys and values to 128 features" in found["refused"]
        else:
            assert "error" not in found, found
            assert found["kernels"] == (2 if operation == "paged_prefill" and found["case"] not in READ_ONLY else 1)
            assert found["alias_bytes"] >= found["pool_bytes"]
            assert found["pool_copies"] == 0
