"""What the kernel tests share: the lowerings that run here, their arguments, and the comparison with the oracle."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cases import AttentionArguments, AttentionCase, on_device
from pallas_kernels.kv_write.specs import WriteCase
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec

XLA, MOSAIC_TPU = "xla", "pallas_mosaic_tpu"
LOWERINGS = (XLA, MOSAIC_TPU)
_Case = TypeVar("_Case", AttentionCase, WriteCase)

# Absolute error of outputs of order one: at least this share of them lies below this bound.
OUTPUT_QUANTILES = {
    "float32": ((0.5, 1e-6), (0.99, 5e-6), (1.0, 3e-5)),
    "bfloat16": ((0.5, 2e-3), (0.99, 1e-2), (1.0, 3e-2)),
}
# The last bit of a new row may round either way where its quotient falls between two values; float8 has three bits.
QUANTIZED_QUANTILES = {
    "float32": ((0.5, 5e-6), (0.99, 3e-2), (1.0, 1.5e-1)),
    "bfloat16": ((0.5, 3e-3), (0.99, 3e-2), (1.0, 1.5e-1)),
}


def layouts(name: str, cases: Iterable[_Case]) -> Iterator[_Case]:
    """The cases, and once more with pages that have keys and values apart where a lowering takes such."""
    for case in cases:
        yield case
        if name == XLA and getattr(case, "latent_values", None) is None:
            yield dataclasses.replace(case, apart=True)


def oracle(operation: str) -> Callable[..., Any]:
    """The float32 reference of an operation."""
    return getattr(importlib.import_module(f"pallas_kernels.{operation}.oracle"), operation)


def lowering(operation: str, name: str) -> Callable[..., Any]:
    """One lowering of an operation; the TPU's runs in interpret mode, with race detection."""
    function = getattr(importlib.import_module(f"pallas_kernels.{operation}.{name}"), operation)
    if name != MOSAIC_TPU:
        return function

    def interpreted(*arguments: Any, **options: Any) -> Any:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
            return jax.block_until_ready(function(*arguments, **options))

    return interpreted


@functools.cache
def compiled(operation: str, name: str, spec: AttentionSpec) -> Callable[..., Any]:
    """The jitted lowering of an attention operation, sinks last; kept, so that equal shapes compile once."""
    function = lowering(operation, name)
    return jax.jit(lambda *arguments: function(*arguments[:-1], spec, sinks=arguments[-1]))


def run_attention(operation: str, name: str, case: AttentionCase, arguments: AttentionArguments) -> Any:
    """(out, pages) as numpy arrays of one lowering under jit."""
    if name == MOSAIC_TPU and arguments.pages.width % 128:
        return _run_padded(operation, case, arguments)
    device = on_device(arguments)
    try:
        out, pages = compiled(operation, name, case.spec)(*device.positional(case.spec)[:-1], device.sinks)
        return np.asarray(out), jax.tree.map(np.asarray, pages)
    except Exception:
        if name == MOSAIC_TPU:
            pltpu.reset_tpu_interpret_mode_state()
        raise


def _run_padded(operation: str, case: AttentionCase, arguments: AttentionArguments) -> Any:
    """Heads padded to whole lane tiles, as the TPU kernels ask their callers to, and cut again."""
    width, padded = case.head_dim, -(-case.head_dim // 64) * 64
    last = (0, padded - width)

    def pad(array: Any) -> Any:
        return None if array is None else np.pad(array, (*((0, 0),) * (array.ndim - 1), last))

    data = arguments.pages.data
    pages = KVPages(np.concatenate([pad(data[..., :width]), pad(data[..., width:])], -1), arguments.pages.scales)  # pyright: ignore
    wide = dataclasses.replace(arguments, q=pad(arguments.q), k=pad(arguments.k), v=pad(arguments.v), pages=pages)
    scaled = dataclasses.replace(case, scale=case.spec.scale, head_dim=padded)
    out, pages = run_attention(operation, MOSAIC_TPU, scaled, wide)
    data = np.concatenate([pages.data[..., :width], pages.data[..., padded : padded + width]], -1)
    return out[..., :width], KVPages(data, pages.scales)  # pyright: ignore


def check_output(actual: np.ndarray, expected: np.ndarray, dtype: str, quantized: bool) -> None:
    """Fail unless the errors' quantiles lie within the type's tolerances."""
    assert actual.shape == expected.shape
    assert actual.dtype == jnp.dtype(dtype)
    error = np.abs(actual.astype(np.float32) - expected)
    assert not np.isnan(error).any(), f"{np.isnan(error).mean():.1%} of the outputs are NaN"
    for share, bound in (QUANTIZED_QUANTILES if quantized else OUTPUT_QUANTILES)[dtype]:
        found = float(np.quantile(error, share)) if error.size else 0.0
        assert found <= bound, f"{share:.0%} of the errors should be at most {bound}, but reach {found:.3g}"


def check_pages(actual: KVPages, expected: KVPages) -> None:
    """Fail unless every page but the padding page is as expected, bit by bit where pages are not quantized."""
    mine, right = (np.asarray(pages.data)[1:] for pages in (actual, expected))
    assert mine.dtype == right.dtype
    mine_bits, right_bits = (x.view(np.dtype(f"u{x.dtype.itemsize}")) for x in (mine, right))
    if expected.scales is None:
        assert np.array_equal(mine_bits, right_bits), f"{(mine_bits != right_bits).mean():.2%} of the pages differ"
        return
    np.testing.assert_allclose(np.asarray(actual.scales)[1:], np.asarray(expected.scales)[1:], rtol=1e-6)
    # One step of int8 is one; neighbouring float8 values of a sign have neighbouring bits.
    steps = np.abs(mine.view(np.int8).astype(np.int16) - right.view(np.int8))
    assert steps.max() <= 1, f"quantized values differ by up to {steps.max()} steps"
    assert (steps == 0).mean() > 0.99, f"{(steps != 0).mean():.2%} of the quantized values differ"
