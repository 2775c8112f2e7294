"""Timing of steps and kernels: what is timed, on what data, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine import kernel_times, step_times
from jaxinfer.engine.device_rates import DeviceRates, stream_seconds
from jaxinfer.engine.kernel_times import KernelCalls, KernelShape, shapes_for
from jaxinfer.engine.step_times import StepTimer, TimerSizes, random_params
from jaxinfer.models import DecoderConfig, RopeConfig, abstract_params
from jaxinfer.runtime.cost import decode_cost, parameter_bytes, prefill_cost, weight_bytes_read
from pallas_kernels.paged_decode import oracle as decode_oracle
from pallas_kernels.paged_prefill import oracle as prefill_oracle
from pallas_kernels.spec import AttentionSpec

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_positions=128,
    norm_eps=1e-5,
    ropes=(RopeConfig(10000.0, 8),) * 2,
    windows=(None, None),
    qkv_bias=True,
)
RATES = DeviceRates(1e9, 1e12, "made up")
SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 16, "page_size": 16, "dtype": "float32"}


@pytest.fixture(scope="module")
def timer():
    return StepTimer.with_random_weights(CONFIG, TimerSizes((1, 3), (40,), (32,), (1, 3), (0, 8)))


def test_random_weights_are_the_models_tree():
    params = random_params(CONFIG.replace(dtype="bfloat16"))
    expected = abstract_params(CONFIG.replace(dtype="bfloat16"))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), expected
    )
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for path, leaf in leaves:
        values = np.asarray(leaf, np.float32)
        if path[-1].key == "scale":
            assert (values == 1).all()
        else:
            assert 0.01 < values.std() < 0.03
    drawn = [np.asarray(leaf, np.float32).tobytes() for path, leaf in leaves if path[-1].key != "scale"]
    assert len(set(drawn)) == len(drawn)


def test_only_what_is_timed_is_compiled(timer):
    programs = timer.runner.programs
    assert set(programs.decode) == {1, 3}
    assert set(programs.prefill) == {(32, 3)}


def test_every_slot_has_pages_of_its_own_with_random_numbers(timer):
    state = timer.runner.state
    table = np.asarray(state.page_table)
    assert sorted(table.ravel()) == list(range(1, timer.runner.limits.num_pages))
    for pages in state.kv:
        assert 0.8 < np.asarray(pages.data)[1:].std() < 1.2
    first, second = (np.asarray(pages.data)[1:] for pages in state.kv)
    assert not np.array_equal(first, second)


def test_a_timed_decode_runs_at_its_context_and_streams_drift_around_it(timer):
    assert len(timer.decode(3, 40, 4)) == 4
    assert np.asarray(timer.runner.state.lengths).tolist() == [41, 41, 41]
    assert timer.decode_stream(3, 40, 10) > 0
    assert np.asarray(timer.runner.state.lengths).tolist() == [45, 45, 45]
    assert timer.decode_stream(1, 40, 10_000) > 0
    assert np.asarray(timer.runner.state.lengths).tolist()[0] == 40 - 32 + step_times.MOST_STREAMED
    assert len(timer.prefill(32, 2)) == 2
    assert timer.prefill_stream(32, 2) > 0
    assert np.asarray(timer.runner.state.lengths)[0] == 32


def test_measured_steps_carry_their_cost_and_floor(timer):
    step = step_times.measure_decode(timer, RATES, 3, 40, 4)
    assert step.cost == decode_cost(CONFIG, 3, 40)
    assert step.floor_s == step.cost.bytes / 1e9
    assert step.bound == "bandwidth"
    assert step.stream_floor_ratio == step.stream_s / step.floor_s
    steps = step_times.measure_steps(timer, RATES, TimerSizes((1,), (40,), (32,), (1, 2), (0, 8)))
    assert [(step.kind, step.batch, step.tokens, step.context) for step in steps] == [
        ("prefill", 1, 32, 0),
        ("prefill", 2, 16, 0),
        ("prefill", 1, 32, 8),
        ("prefill", 2, 16, 8),
        ("decode", 1, 1, 40),
    ]


def test_a_prefill_of_several_prompts_reads_the_weights_once(timer):
    alone, three = (step_times.measure_prefill(timer, RATES, 10, 2, rows=rows, context=20) for rows in (1, 3))
    assert alone.cost == prefill_cost(CONFIG, 10, 20)
    assert three.cost.flops == 3 * alone.cost.flops
    assert three.cost.bytes == 3 * alone.cost.bytes - 2 * weight_bytes_read(CONFIG)
    assert np.asarray(timer.runner.state.lengths).tolist() == [30, 30, 30]


@pytest.mark.parametrize(("batch", "context"), [(4, 40), (1, 41), (0, 40), (1, 0)])
def test_what_a_timer_was_not_built_for_is_refused(timer, batch, context):
    with pytest.raises(ValueError, match="3 sequences of 40 positions"):
        timer.decode(batch, context, 1)


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="129 positions are asked for, but the model was made for 128"):
        TimerSizes((1,), (129,), (32,)).limits(CONFIG)
    with pytest.raises(ValueError, match="cannot have -1 positions cached"):
        TimerSizes(prefill_contexts=(0, -1)).limits(CONFIG)
    with pytest.raises(ValueError, match="smaller batch or a shorter context"):
        StepTimer.with_random_weights(CONFIG, TimerSizes((10**9,), (40,), (32,)))


def test_memory_is_weights_and_pool(monkeypatch):
    limits = TimerSizes((2,), (64,), (32,)).limits(CONFIG)
    needed = parameter_bytes(CONFIG) + limits.num_pages * 16 * CONFIG.kv_bytes_per_token
    memory = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": needed}
    monkeypatch.setattr(step_times.os, "sysconf", memory.get)
    step_times.check_memory(CONFIG, limits)
    memory["SC_PHYS_PAGES"] -= 1
    with pytest.raises(ValueError, match="GB of weights"):
        step_times.check_memory(CONFIG, limits)


def test_a_stream_counts_every_step_once():
    calls = []

    def step(state):
        calls.append(state)
        return state + 1

    assert 0 < stream_seconds(step, jnp.int32(0), at_least=0.001, batches=2) < 1
    assert [int(state) for state in calls] == list(range(len(calls)))


# --- kernels ---------------------------------------------------------------------------------------------------------


def test_costs_of_kernels_by_hand():
    decode = KernelShape("paged_decode", 3, 100, **SMALL)
    assert decode.cost.bytes == 3 * 100 * 2 * 32 * 4 + 2 * 3 * 4 * 16 * 4
    assert decode.cost.flops == 4 * 3 * 100 * 4 * 16
    quantized = dataclasses.replace(decode, page_dtype="int8")
    assert quantized.cost.bytes == 3 * 100 * 2 * (32 + 8) + 2 * 3 * 4 * 16 * 4
    prefill = KernelShape("paged_prefill", 3, 5, **SMALL)
    assert prefill.cost.flops == 4 * 4 * 16 * (6 + 7 + 8)
    assert prefill.cost.bytes == 8 * 2 * 32 * 4 + 2 * 3 * 4 * 16 * 4
    write = KernelShape("kv_write", 3, **SMALL)
    assert write.cost.bytes == 2 * 3 * 2 * 32 * 4
    with pytest.raises(ValueError, match="no operation 'paged'"):
        KernelShape("paged", 3)


@pytest.mark.parametrize("operation", ["paged_decode", "paged_prefill"])
def test_calls_attend_over_other_pages_each_time(operation):
    calls = KernelCalls(KernelShape(operation, 2, 40, **SMALL), 1e-3)
    assert calls.rounds == 4
    assert calls.copies == 4
    q, (pages, tables, *rest) = calls.arguments()
    assert np.unique(tables).size == tables.size == calls.num_pages - 1
    got = calls.run(q, pages, tables, *rest)
    oracle = {"paged_decode": decode_oracle.paged_decode, "paged_prefill": prefill_oracle.paged_prefill}[operation]
    want = np.asarray(q)
    for table in np.asarray(tables):
        numbers = [np.asarray(array) for array in rest]
        want = oracle(want, None, None, jax.tree.map(np.asarray, pages), table, *numbers, AttentionSpec(0.25))[0]
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("tokens", [3, 70])
def test_writes_go_to_other_places_each_time(tokens):
    calls = KernelCalls(KernelShape("kv_write", tokens, **SMALL), 0.4e-3)
    pages, (k, v, ids, offsets) = calls.arguments()
    before = np.array(pages.data)
    after = np.array(calls.run(pages, k, v, ids, offsets).data)
    after[0], before[0] = 0, 0  # the padding page
    changed = np.moveaxis(before != after, -2, 1).any(axis=tuple(range(2, before.ndim)))  # [pages, positions]
    assert changed.sum() == calls.rounds * tokens
    assert not changed[0].any()
    if tokens <= kernel_times.MOST_LONE_TOKENS:
        assert changed.sum(axis=1).max() == 1


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_table_has_every_operation(platform):
    assert {shape.operation for shape in shapes_for(platform)} == set(kernel_times.OPERATIONS)


def test_a_timed_kernel_says_what_ran():
    timed = kernel_times.time_kernel(KernelShape("paged_decode", 2, 40, **SMALL), RATES)
    assert timed.choice.name == "xla"
    assert timed.bound == "bandwidth"
    assert timed.floor_s == timed.shape.cost.bytes / 1e9
    assert timed.fraction == timed.floor_s / timed.seconds


# --- the check for a GPU, on the CPU ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_device_check_runs_dry(tmp_path):
    script, results = Path(__file__).parents[2] / "bench" / "device_check.py", tmp_path / "results.json"
    options = ["--dry-run-cpu", "--only", "steps", "--minutes", "8", "--json", str(results)]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    found = json.loads(results.read_text())
    assert found["device"]["bandwidth"] > 0
    assert not found["problems"]
    _, *steps = found["steps"]
    assert [(step["kind"], step["batch"]) for step in steps] == [
        ("prefill", 1),
        ("prefill", 1),
        *[("decode", batch) for _ in (16, 64) for batch in (1, 2, 4)],
    ]
    assert all(step["part_of_limit"] > 0 for step in steps)
