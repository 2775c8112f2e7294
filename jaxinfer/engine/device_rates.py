"""How fast this device moves bytes and multiplies, measured on the spot; a stopwatch for queued work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class DeviceRates:
    """Measured limits of one device.

    bandwidth: bytes/s. flops: FLOP/s of a product of square matrices. method: how the bandwidth was measured.
    """

    bandwidth: float
    flops: float
    method: str


def stream_seconds(step: Callable[[Any], Any], state: Any, *, at_least: float = 0.03, batches: int = 5) -> float:
    """Seconds of one `state = step(state)` when many are dispatched back to back and waited for once.

    Median of `batches` batches, each of so many steps that it lasts about `at_least` seconds: the host's start and wait
    vanish beside that. `step` may donate its argument.
    """
    state = jax.block_until_ready(step(state))
    begin = time.perf_counter()
    state = jax.block_until_ready(step(state))
    count = min(1000, 1 + int(at_least / max(time.perf_counter() - begin, 1e-6)))
    seconds = []
    for _ in range(batches):
        begin = time.perf_counter()
        for _ in range(count):
            state = step(state)
        jax.block_until_ready(state)
        seconds.append((time.perf_counter() - begin) / count)
    return statistics.median(seconds)


def measure_rates(dtype: str) -> DeviceRates:
    """Measure the default device; products are of `dtype` ("float32" or "bfloat16") and of random numbers."""
    if jax.default_backend() == "cpu":
        return DeviceRates(_read_bandwidth(), _matrix_rate(dtype, 2048), "bytes read by a matrix-vector product")
    return DeviceRates(_copy_bandwidth(), _matrix_rate(dtype, 8192), "bytes read and written by a copy of 2 GiB")


def _copy_bandwidth() -> float:
    numbers = jax.jit(lambda key: jax.random.normal(key, (2**29,), jnp.float32))(jax.random.key(0, impl="rbg"))
    # An addition moves what a copy does, and no compiler takes it away.
    copy = jax.jit(lambda x: x + 1, donate_argnums=0)
    return 2 * numbers.nbytes / stream_seconds(copy, numbers)


def _read_bandwidth() -> float:
    # A CPU's copies leave out of account that written lines are read first; what decode does is read. In float32: a
    # vector of bfloat16 is multiplied far below the speed of memory there.
    matrix, vector = jnp.ones((4096, 2**14), jnp.float32), jnp.ones((1, 4096), jnp.float32)
    product = jax.jit(lambda x, w: jnp.dot(x, w)[:, :4096])
    return matrix.nbytes / stream_seconds(lambda x: product(x, matrix), vector)


def _matrix_rate(dtype: str, side: int) -> float:
    # As in the model, products of float32 are exact on an accelerator.
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None
    x, w = (jax.random.normal(jax.random.key(seed, impl="rbg"), (side, side), jnp.dtype(dtype)) for seed in range(2))

    @jax.jit
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        # A float32 result, as in the model: a CPU has no product of bfloat16 that gives another.
        return (jnp.dot(x, w, precision=precision, preferred_element_type=jnp.float32) * side**-0.5).astype(dtype)

    return 2 * side**3 / stream_seconds(lambda x: product(x, w), x)
