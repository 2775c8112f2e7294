"""The GPU kernels on the GPU: each against the float32 oracle, then its time against the chip's measured limits.

`check_kernels` and `time_kernels` need a Hopper GPU; `python -m bench._device_kernels` prints both as a table.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cases
from pallas_kernels.kv_write import oracle as kv_write_oracle
from pallas_kernels.kv_write import pallas_mosaic_gpu as kv_write_gpu
from pallas_kernels.kv_write import specs as kv_write_specs
from pallas_kernels.paged_decode import oracle as decode_oracle
from pallas_kernels.paged_decode import pallas_mosaic_gpu as decode_gpu
from pallas_kernels.paged_decode import specs as decode_specs
from pallas_kernels.paged_prefill import oracle as prefill_oracle
from pallas_kernels.paged_prefill import pallas_mosaic_gpu as prefill_gpu
from pallas_kernels.paged_prefill import specs as prefill_specs
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SPEC = AttentionSpec(HEAD_DIM**-0.5)
# A read that fits the L2 cache would time the cache: calls in a row read different pages until this much has passed.
COLD_BYTES = 512 * 2**20
DECODE_SHAPES = ((1, 512), (1, 4096), (16, 512), (16, 4096), (64, 512), (64, 2048), (64, 4096))
PREFILL_SHAPES = ((2048, 0), (8192, 0), (512, 4096))


@dataclass(frozen=True)
class KernelCheck:
    """One case on the chip: `error` is the largest difference from the oracle, relative to its largest value."""

    name: str
    ok: bool
    error: float
    note: str = ""


@dataclass(frozen=True)
class KernelTiming:
    """One kernel's time. `rate` is bytes or operations per second, `fraction` its part of the measured limit."""

    name: str
    seconds: float
    rate: float
    unit: str
    fraction: float


@dataclass(frozen=True)
class Limits:
    """What this chip reached in plain XLA programs: bytes copied (read + written) and bf16 operations per second."""

    bytes_per_second: float
    operations_per_second: float


# --- correctness -----------------------------------------------------------------------------------------------------


def check_kernels(deadline: float | None = None) -> Iterator[KernelCheck]:
    """Run every case of the three operations that is quick for the oracle; stops at `deadline` (time.monotonic)."""
    checks: list[Callable[[], KernelCheck]] = [
        *(functools.partial(_check_attention, "paged_decode", case) for case in decode_specs.CASES),
        *(functools.partial(_check_attention, "paged_prefill", case) for case in prefill_specs.CASES),
        *(functools.partial(_check_write, case) for case in kv_write_specs.CASES),
    ]
    for check in checks:
        if deadline is not None and time.monotonic() > deadline:
            yield KernelCheck("remaining cases", False, 0.0, "not run: out of time")
            return
        yield check()


def _check_attention(operation: str, case: cases.AttentionCase) -> KernelCheck:
    name = f"{operation} {case.name}"
    module, oracle = (decode_gpu, decode_oracle) if operation == "paged_decode" else (prefill_gpu, prefill_oracle)
    arguments = cases.build_arguments(case, seed=3)
    *arrays, spec = cases.on_device(arguments).positional(case.spec)
    sinks = None if arguments.sinks is None else jnp.asarray(arguments.sinks)
    reason = module.unsupported(*arrays, spec, sinks=sinks)
    if reason is not None:
        return KernelCheck(name, True, 0.0, reason)
    got, pages = jax.jit(functools.partial(getattr(module, operation), spec=spec, sinks=sinks))(*arrays)
    if pages.scales is not None:
        # Compiled and numpy division may round to different neighbours: attend over the pages as written.
        arguments = dataclasses.replace(arguments, k=None, v=None, pages=jax.tree.map(np.asarray, pages))
    want, _ = getattr(oracle, operation)(*arguments.positional(case.spec), sinks=arguments.sinks)
    return _compared(name, np.asarray(got, np.float32), want, 1e-4 if case.dtype == "float32" else 1e-2)


def _check_write(case: kv_write_specs.WriteCase) -> KernelCheck:
    arguments = kv_write_specs.build_arguments(case, seed=3)
    want = kv_write_oracle.kv_write(*arguments)
    got = jax.jit(kv_write_gpu.kv_write)(*jax.tree.map(jnp.asarray, arguments))
    # Page 0 belongs to nobody. A quantized value may fall on the other side of a rounding border.
    limit = 1e-6 if want.scales is None else 0.08
    return _compared(
        f"kv_write {case.name}", np.asarray(got.data, np.float32)[1:], np.asarray(want.data, np.float32)[1:], limit
    )


def _compared(name: str, got: np.ndarray, want: np.ndarray, limit: float) -> KernelCheck:
    scale = max(1.0, float(np.abs(want).max(initial=0.0)))
    error = float(np.abs(got - want).max(initial=0.0)) / scale
    return KernelCheck(name, bool(np.isfinite(got).all()) and error <= limit, error)


# --- times -----------------------------------------------------------------------------------------------------------


def seconds_per_call(loop: Callable[..., Any], *arguments: Any) -> float:
    """Time of one round of `loop(rounds, *arguments)`: the difference of two lengths, so that the start cancels."""
    few, many = 4, 20

    def run(rounds: int) -> float:
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            jax.block_until_ready(loop(jnp.int32(rounds), *arguments))
            best = min(best, time.perf_counter() - start)
        return best

    run(few)
    while run(many) < 0.02:
        many *= 4
    return (run(many) - run(few)) / (many - few)


def measure_limits() -> Limits:
    """Copy bandwidth on 1 GiB and the rate of an 8192-wide bf16 product, on the spot."""

    @jax.jit
    def copy(rounds: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, rounds, lambda _, y: y + 1, x)

    @jax.jit
    def multiply(rounds: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, rounds, lambda _, y: (y @ w) * jnp.bfloat16(0.01), x)

    size = 2**28
    width = 8192
    x, w = (jax.random.normal(jax.random.key(seed), (width, width), jnp.bfloat16) for seed in range(2))
    copied = 2 * 4 * size / seconds_per_call(copy, jnp.zeros((size,), jnp.float32))
    return Limits(copied, 2 * width**3 / seconds_per_call(multiply, x, w))


def time_kernels(limits: Limits, page_sizes: tuple[int, ...] = (16, 64)) -> Iterator[KernelTiming]:
    """Each kernel at the Llama 3 8B shape: decode and kv_write against bandwidth, prefill against the matrix rate."""
    for page_size in page_sizes:
        for batch, context in DECODE_SHAPES:
            yield _time_decode(limits, batch, context, page_size, jnp.bfloat16)
    for page_dtype in (jnp.int8, jnp.float8_e4m3fn):
        yield _time_decode(limits, 64, 2048, 64, page_dtype)
    for tokens, prefix in PREFILL_SHAPES:
        yield _time_prefill(limits, tokens, prefix, 64)
    for tokens in (64, 2048):
        yield _time_write(limits, tokens, 64)


def _random_pool(pages: int, page_size: int, dtype: Any) -> KVPages:
    key = jax.random.key(0)
    shape = (pages, KV_HEADS, page_size, 2 * HEAD_DIM)
    if jnp.dtype(dtype).itemsize > 1:
        return KVPages(jax.random.normal(key, shape, dtype))
    data = jax.random.randint(key, shape, -100, 100, jnp.int8).astype(dtype)
    return KVPages(data, jnp.full((pages, 2, KV_HEADS, page_size), 0.01, jnp.float32))


def _time_decode(limits: Limits, batch: int, context: int, page_size: int, dtype: Any) -> KernelTiming:
    columns = context // page_size
    row_bytes = 2 * HEAD_DIM * jnp.dtype(dtype).itemsize + (8 if jnp.dtype(dtype).itemsize == 1 else 0)
    moved = batch * context * KV_HEADS * row_bytes
    copies = max(1, -(-COLD_BYTES // moved))
    pages = _random_pool(copies * batch * columns + 1, page_size, dtype)
    order = np.random.default_rng(0).permutation(copies * batch * columns) + 1
    tables = jnp.asarray(order.reshape(copies, batch, columns), jnp.int32)
    lengths = jnp.full((batch,), context, jnp.int32)

    @jax.jit
    def loop(rounds: jax.Array, q: jax.Array, pages: KVPages, tables: jax.Array) -> jax.Array:
        def once(index: jax.Array, q: jax.Array) -> jax.Array:
            table = tables[index % copies]
            return decode_gpu.attend(q, pages, table, lengths, SPEC, None, None)

        return jax.lax.fori_loop(0, rounds, once, q)

    q = jax.random.normal(jax.random.key(1), (batch, HEADS, HEAD_DIM), jnp.bfloat16)
    seconds = seconds_per_call(loop, q, pages, tables)
    name = f"paged_decode batch {batch} context {context} page {page_size} {jnp.dtype(dtype).name}"
    rate = moved / seconds
    return KernelTiming(name, seconds, rate, "B/s", rate / limits.bytes_per_second)


def _time_prefill(limits: Limits, tokens: int, prefix: int, page_size: int) -> KernelTiming:
    columns = (tokens + prefix) // page_size
    pages = _random_pool(columns + 1, page_size, jnp.bfloat16)
    table = jnp.arange(1, columns + 1, dtype=jnp.int32)[None]
    starts, lengths = jnp.array([0, tokens], jnp.int32), jnp.array([tokens + prefix], jnp.int32)

    @jax.jit
    def loop(rounds: jax.Array, q: jax.Array, pages: KVPages) -> jax.Array:
        def once(_: jax.Array, q: jax.Array) -> jax.Array:
            return prefill_gpu.paged_prefill(q, None, None, pages, table, starts, lengths, SPEC)[0]

        return jax.lax.fori_loop(0, rounds, once, q)

    q = jax.random.normal(jax.random.key(1), (tokens, HEADS, HEAD_DIM), jnp.bfloat16)
    seconds = seconds_per_call(loop, q, pages)
    visible = tokens * prefix + tokens * (tokens + 1) // 2
    rate = 4 * HEADS * HEAD_DIM * visible / seconds
    name = f"paged_prefill {tokens} tokens after {prefix}"
    return KernelTiming(name, seconds, rate, "FLOP/s", rate / limits.operations_per_second)


def _time_write(limits: Limits, tokens: int, page_size: int) -> KernelTiming:
    pages = _random_pool(2048, page_size, jnp.bfloat16)
    new = jax.random.normal(jax.random.key(1), (tokens, KV_HEADS, HEAD_DIM), jnp.bfloat16)
    ids = jnp.arange(tokens, dtype=jnp.int32) % 2047 + 1
    offsets = jnp.arange(tokens, dtype=jnp.int32) % page_size

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(rounds: jax.Array, pages: KVPages) -> KVPages:
        return jax.lax.fori_loop(0, rounds, lambda _, p: kv_write_gpu.kv_write(new, new, p, ids, offsets), pages)

    held = [pages]

    def run(rounds: jax.Array) -> KVPages:
        held[0] = loop(rounds, held[0])
        return held[0]

    seconds = seconds_per_call(run)
    rate = 2 * 2 * new.size * 2 / seconds
    return KernelTiming(f"kv_write {tokens} tokens", seconds, rate, "B/s", rate / limits.bytes_per_second)


def main() -> None:
    """Print every check and every time, one a line; the checks stop after 75 seconds."""
    print(jax.__version__, jax.devices()[0].device_kind)
    failed = 0
    for check in check_kernels(time.monotonic() + 75):
        failed += not check.ok
        print("ok   " if check.ok else "WRONG", check.name, f"{check.error:.1e}", check.note, flush=True)
    print(f"{failed} failed")
    limits = measure_limits()
    print(f"copy {limits.bytes_per_second / 1e12:.2f} TB/s, matmul {limits.operations_per_second / 1e12:.0f} TFLOP/s")
    for timing in time_kernels(limits):
        print(
            f"{timing.name}: {timing.seconds * 1e6:.1f} us, {timing.rate / 1e12:.2f} T{timing.unit}, "
            f"{100 * timing.fraction:.0f}% of the measured limit",
            flush=True,
        )


if __name__ == "__main__":
    main()
