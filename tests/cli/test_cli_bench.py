"""`jaxinfer bench steps` and `jaxinfer bench kernels`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jaxinfer.cli import _bench, main
from jaxinfer.engine import device_rates, kernel_times
from jaxinfer.engine.step_times import StepTime
from jaxinfer.runtime.cost import StepCost

STEPS = ("--batch", "1,2", "--context", "16", "--prefill", "32", "--rounds", "4")
RATES = device_rates.DeviceRates(20e9, 200e9, "a guess")


@pytest.fixture
def quick_rates(monkeypatch):
    """No measuring of the machine."""
    monkeypatch.setattr(device_rates, "measure_rates", lambda dtype: RATES)


@pytest.fixture
def small_table(monkeypatch):
    """One shape of each operation, small enough to take no time."""
    shapes = [
        next(s for s in kernel_times.shapes_for("cpu") if s.operation == name) for name in kernel_times.OPERATIONS
    ]
    small = tuple(dataclasses.replace(shape, tokens=2, context=min(shape.context, 32)) for shape in shapes)
    monkeypatch.setattr(kernel_times, "shapes_for", lambda platform: small)
    return small


@pytest.mark.slow
@pytest.mark.parametrize("source", ["--model", "--config"])
def test_steps(capsys, tiny_model, source):
    path = tiny_model if source == "--model" else str(Path(tiny_model) / "config.json")
    assert main(["bench", "steps", source, path, *STEPS, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["model"] == path
    assert result["dtype"] == "float32"
    assert result["bandwidth"] > 0
    assert "read" in result["bandwidth_measured_as"]
    steps = {(step["kind"], step["batch"], step["tokens"], step["context"]): step for step in result["steps"]}
    assert set(steps) == {("prefill", 1, 32, 0), ("decode", 1, 1, 16), ("decode", 2, 1, 16)}
    for step in steps.values():
        assert 0 < step["min_s"] <= step["median_s"] <= step["max_s"]
        assert step["floor_ratio"] == pytest.approx(step["median_s"] / step["floor_s"])
        assert step["stream_floor_ratio"] == pytest.approx(step["stream_s"] / step["floor_s"])
        assert step["floor_s"] == pytest.approx(
            max(step["bytes"] / result["bandwidth"], step["flops"] / result["flops_per_s"])
        )
    assert steps["decode", 1, 1, 16]["repeats"] == 4


def test_the_table_of_steps_is_not_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    seconds = (0.0512, 0.0498, 0.0734)
    cost = StepCost(538_000_000, 2_200_000_000)
    _bench._print_steps([StepTime("decode", 8, 1, 128, seconds, cost, 0.0161, "bandwidth", 0.0322)])
    row = capsys.readouterr().out.strip().splitlines()[-1].split()
    times = ["51.20", "49.80", "73.40", "156.2", "16.10", "bandwidth", "3.18", "32.20", "2.00"]
    assert row == ["decode", "8", "1", "128", *times]


def test_what_steps_cannot_time_is_one_sentence(refusal, tiny_model, tmp_path):
    config = Path(tiny_model) / "config.json"
    assert "not both" in refusal("bench", "steps", "--config", str(config), "--model", tiny_model)
    longest = json.loads(config.read_text())["max_position_embeddings"]
    told = refusal("bench", "steps", "--config", str(config), "--prefill", "32", "--context", str(longest + 1))
    assert str(longest + 1) in told
    assert str(longest) in told
    told = refusal("bench", "steps", "--config", str(config), "--prefill", "32", "--batch", "1000000000")
    assert "smaller batch" in told
    (tmp_path / "config.json").write_text("[")
    assert "not JSON" in refusal("bench", "steps", "--config", str(tmp_path / "config.json"))
    assert "No such file" in refusal("bench", "steps", "--config", str(tmp_path / "none.json"))


def test_kernels(capsys, quick_rates, small_table):
    assert main(["bench", "kernels", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bandwidth"] == RATES.bandwidth
    assert [kernel["operation"] for kernel in result["kernels"]] == list(kernel_times.OPERATIONS)
    for kernel, shape in zip(result["kernels"], small_table, strict=True):
        assert kernel["lowering"] == "xla"
        assert "cpu" in kernel["reason"]
        assert kernel["seconds"] > 0
        assert kernel["bytes"] == shape.cost.bytes
        assert kernel["fraction"] == pytest.approx(kernel["floor_s"] / kernel["seconds"])
    assert main(["bench", "kernels", "--attention", "xla"]) == 0
    shown = capsys.readouterr().out
    assert "20.0 GB/s (a guess)" in shown
    assert "xla: It was asked for." in shown
    assert all(shape.name in shown for shape in small_table)


def test_a_kernel_that_cannot_run_here_is_refused(refusal):
    told = refusal("bench", "kernels", "--attention", "pallas_mosaic_gpu")
    assert "needs a cuda device" in told


def test_fewer_tokens_than_prompts(refusal, tiny_model):
    arguments = ("--prefill", "3", "--prefill-rows", "4", "--context", "8")
    assert "A prefill of 3 tokens cannot be of 4 prompts" in refusal(
        "bench", "steps", "--model", tiny_model, *arguments
    )
