"""Every quantized_matmul case on every lowering that runs here, against the oracle; rounding; dispatch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import kernel_suite as suite
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import KernelUnavailable
from pallas_kernels.quantized_matmul import (
    QuantizedWeight,
    WeightFormat,
    dequantized,
    quantize,
    quantized_matmul,
    specs,
    table_rows,
)
from pallas_kernels.quantized_matmul import pallas_mosaic_tpu as tpu
from pallas_kernels.quantized_matmul.oracle import quantized_matmul as oracle
from pallas_kernels.quantized_matmul.oracle import written_out
from pallas_kernels.quantized_matmul.specs import MatmulCase

REFUSED_BY_TPU = {"odd_outputs", "odd_inputs", "table_q8_0", "table_q4_1", "smollm2_down"}
QUICK_ON_TPU = {"int8_bf16", "q8_0", "q4_1", "int4", "table", "int4_group_64"}
# Relative to the largest output; bfloat16 rounds the weights and the result.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1.2e-2}


def parameters() -> list:
    found = []
    for name in suite.LOWERINGS:
        for case in specs.CASES:
            slow = case.slow or (name == suite.MOSAIC_TPU and case.name not in QUICK_ON_TPU)
            if name != suite.MOSAIC_TPU or case.name not in REFUSED_BY_TPU:
                marks = [pytest.mark.slow] if slow else []
                found.append(pytest.param(name, case, id=f"{name}-{case.name}", marks=marks))
    return found


@functools.cache
def compiled(name: str) -> Callable[..., jax.Array]:
    multiply = suite.lowering("quantized_matmul", name)
    return jax.jit(functools.partial(multiply, out_dtype=jnp.float32))


def multiplied(name: str, x: np.ndarray, weight: QuantizedWeight) -> np.ndarray:
    try:
        return np.asarray(compiled(name)(*jax.tree.map(jnp.asarray, (x, weight))))
    except Exception:
        if name == suite.MOSAIC_TPU:
            pltpu.reset_tpu_interpret_mode_state()
        raise


def check(actual: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    assert actual.shape == expected.shape
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error <= TOLERANCE[dtype], f"off by {error:.3g} of the largest output"


@pytest.mark.parametrize(("name", "case"), parameters())
def test_agrees_with_the_oracle(name: str, case: MatmulCase) -> None:
    x, weight = specs.build_arguments(case)
    check(multiplied(name, x, weight), oracle(x, weight), case.dtype)


@pytest.mark.parametrize("name", suite.LOWERINGS)
def test_planted_faults_fail_the_comparison(name: str) -> None:
    case = MatmulCase("faults", 3, WeightFormat(4, 32, offsets=True), outputs=128)
    x, weight = specs.build_arguments(case)
    expected = oracle(x, weight)
    assert weight.offsets is not None
    groups = np.arange(weight.groups)
    faults: dict[str, QuantizedWeight] = {
        "scales of the next group": dataclasses.replace(weight, scales=weight.scales[groups - 1]),
        "offsets of the next group": dataclasses.replace(weight, offsets=weight.offsets[groups - 1]),
        "no offsets": dataclasses.replace(weight, offsets=None),
        "values shifted by one input": dataclasses.replace(weight, values=np.roll(weight.values, 1, 0)),
        "nibbles swapped": dataclasses.replace(
            weight, values=weight.values.reshape(256, -1, 2)[..., ::-1].reshape(256, -1)
        ),
        "one output's scale of another": dataclasses.replace(weight, scales=np.roll(weight.scales, 1, 1)),
    }
    for wrong in faults.values():
        with pytest.raises(AssertionError, match="of the largest output"):
            check(multiplied(name, x, wrong), expected, case.dtype)


@pytest.mark.parametrize("case", specs.CASES, ids=lambda case: case.name)
def test_tpu_kernel_says_what_it_cannot_run(case: MatmulCase) -> None:
    reason = tpu.unsupported(*specs.abstract_arguments(case))
    assert (reason is not None) == (case.name in REFUSED_BY_TPU), reason


def test_auto_takes_xla_here_and_an_impossible_choice_is_refused() -> None:
    x, weight = jax.tree.map(jnp.asarray, specs.build_arguments(specs.CASES[0]))
    check(np.asarray(quantized_matmul(x, weight)), oracle(np.asarray(x), weight), "float32")
    assert quantized_matmul(x.astype(jnp.bfloat16), weight).dtype == jnp.bfloat16
    with pytest.raises(KernelUnavailable, match="pallas_mosaic_tpu needs a tpu device"):
        quantized_matmul(x, weight, impl="pallas_mosaic_tpu")


@pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_is_to_the_nearest(bits: int, axis: int, library: Any) -> None:
    random = np.random.default_rng(1)
    array = random.normal(size=(64, 64)).astype(np.float32)
    for offsets in (False, True):
        weight = quantize(library.asarray(array), WeightFormat(bits, 32, offsets=offsets), axis)
        error = np.abs(np.asarray(dequantized(jax.tree.map(jnp.asarray, weight))) - array)
        steps = np.repeat(np.asarray(weight.scales), 32, 0)
        steps = steps if axis == 0 else steps.T
        assert (error <= 0.5001 * steps).all(), f"{(error / steps).max():.3f} steps"
        assert weight.axis == axis


def test_groups_reach_from_their_smallest_weight_to_their_largest() -> None:
    array = np.linspace(1, 16, 16, dtype=np.float32)[:, None]
    weight = quantize(array, WeightFormat(4, 16, offsets=True))
    assert np.array_equal(written_out(weight), array)
    assert np.asarray(weight.values).astype(int).min() == -8
    zeros = quantize(np.zeros((16, 2), np.float32), WeightFormat(8, 16))
    assert np.array_equal(written_out(zeros), np.zeros((16, 2)))


def test_rows_of_a_table_are_its_weights() -> None:
    for name in ("table", "table_q8_0", "table_q4_1"):
        (case,) = (case for case in specs.CASES if case.name == name)
        _, weight = specs.build_arguments(case)
        ids = np.array([3, 0, 500, 3])
        rows = table_rows(jax.tree.map(jnp.asarray, weight), jnp.asarray(ids), jnp.float32)
        np.testing.assert_allclose(np.asarray(rows), written_out(weight).T[ids], rtol=1e-6, atol=1e-6)


def test_formats_are_checked() -> None:
    with pytest.raises(ValueError, match="4 or 8 bits, not 5"):
        WeightFormat(5)
    with pytest.raises(ValueError, match="at least one input, not 0"):
        WeightFormat(8, 0)
    assert WeightFormat(4, 32).group_of(80) == 16
    assert WeightFormat(8).group_of(80) == 80
