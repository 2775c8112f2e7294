"""The real prefill and decode steps at the Llama-3-8B shape, compiled for chips that are not attached.

Each target compiles in a process of its own, since the compilers need their environment before jax is imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LLAMA_3_8B = Path(__file__).parents[2] / "examples" / "llama-3-8b.json"
SHAPE = ("--max-slots", "64", "--max-context", "2048", "--decode-rows", "64", "--prefill-tokens", "512")
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None or sys.version_info < (3, 12),
    reason="the CUDA plugin of a jax with Mosaic GPU is not installed",
)


def compile_for(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "jaxinfer.cli", "compile", "--config", str(LLAMA_3_8B), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=dict(os.environ), check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def check_decode(report: dict[str, Any], kernel: str, most_moved: float | None = None) -> None:
    (decode,) = [bucket for bucket in report["buckets"] if bucket["kind"] == "decode"]
    assert decode["kernels"].startswith(kernel)
    assert decode["in_place"]
    assert decode["alias_bytes"] >= report["pool_bytes"]
    assert decode["temp_bytes"] < 0.05 * report["pool_bytes"]
    if most_moved is not None:
        moved, least = decode["bytes_accessed"], decode["cost"]["bytes"]
        assert 0.98 * least < moved < most_moved * least  # below the floor, the count itself would be wrong


@needs_libtpu
@pytest.mark.parametrize(("target", "devices", "most_moved"), [("v6e-4", 4, 1.20), ("v7x-1", 2, 1.45)])
def test_tensor_parallel_tpu(target: str, devices: int, most_moved: float):
    code, report = compile_for("--target", target, *SHAPE)
    assert code == 0
    assert report["fits"]
    assert report["tensor_parallel"] == devices
    check_decode(report, "pallas_mosaic_tpu", most_moved=1.10)
    for bucket in report["buckets"]:
        assert bucket["kernels"].startswith("pallas_mosaic_tpu")
        assert bucket["in_place"]
    # With a prefill of 512 tokens, decodes of all slots cost their keys and values and no weights, half of the least.
    # (Activations are moved too: v7x's prefill alone is at 1.70 of its own, smaller least.)
    (mixed,) = [bucket for bucket in report["buckets"] if bucket["kind"] == "prefill"]
    assert mixed["decodes"] == 63
    assert 0.98 < mixed["bytes_accessed"] / mixed["cost"]["bytes"] < most_moved


@needs_libtpu
def test_one_v6e_is_too_small_and_says_by_how_much():
    code, report = compile_for("--target", "v6e-1", *SHAPE)
    assert code == 1
    assert not report["fits"]
    check_decode(report, "pallas_mosaic_tpu", most_moved=1.10)
    # Whatever is missing is what the largest pool lacks.
    page_bytes = report["pool_bytes"] // 2049
    assert 0 < -report["spare_bytes"] <= (2049 - report["most_pages"]) * page_bytes
    assert -report["spare_bytes"] > (2049 - report["most_pages"] - 1) * page_bytes


@needs_libtpu
def test_int8_pages_halve_the_pool():
    code, report = compile_for("--target", "v6e-1", "--kv-dtype", "int8", *SHAPE[:-1], "512", "--page-size", "128")
    assert code == 0
    assert report["pool_bytes"] < 0.53 * 16 * 2**30
    check_decode(report, "pallas_mosaic_tpu")


@needs_cuda
@pytest.mark.parametrize("target", ["h100", "h200"])
def test_hopper(target: str):
    code, report = compile_for("--target", target, *SHAPE)
    assert code == 0
    check_decode(report, "pallas_mosaic_gpu")
    for bucket in report["buckets"]:
        assert bucket["kernels"].startswith("pallas_mosaic_gpu")
        assert bucket["in_place"]


@needs_cuda
def test_chip_without_a_kernel_says_so():
    code, report = compile_for("--target", "a100", *SHAPE[:-2], "--prefill-tokens", "32")
    assert code == 0
    assert report["buckets"][0]["kernels"].startswith("xla: pallas_mosaic_gpu cannot run here")
    check_decode(report, "xla")
