"""Every kv_write case on every lowering that runs here, against the oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import kernel_suite as suite
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_write import specs
from pallas_kernels.kv_write.specs import WriteCase
from pallas_kernels.pages import KVPages

QUICK = {"lone_tokens", "shuffled", "bf16", "page_64", "int8", "fp8_bf16", "only_padding"}


def parameters() -> list:
    found = []
    for name in suite.LOWERINGS:
        for case in suite.layouts(name, specs.CASES):
            slow = case.slow or ((name == suite.MOSAIC_TPU or case.apart) and case.name not in QUICK)
            identity = f"{name}-{case.name}{'-apart' * case.apart}"
            found.append(pytest.param(name, case, id=identity, marks=[pytest.mark.slow] if slow else []))
    return found


@functools.cache
def compiled(name: str) -> Callable[..., KVPages]:
    return jax.jit(suite.lowering("kv_write", name))


def write(name: str, arguments: tuple) -> KVPages:
    try:
        pages = compiled(name)(*jax.tree.map(jnp.asarray, arguments))
        return jax.tree.map(np.asarray, pages)
    except Exception:
        if name == suite.MOSAIC_TPU:
            pltpu.reset_tpu_interpret_mode_state()
        raise


@pytest.mark.parametrize(("name", "case"), parameters())
def test_agrees_with_the_oracle(name: str, case: WriteCase) -> None:
    arguments = specs.build_arguments(case)
    suite.check_pages(write(name, arguments), suite.oracle("kv_write")(*arguments))


@pytest.mark.parametrize("name", suite.LOWERINGS)
def test_planted_faults_fail_the_comparison(name: str) -> None:
    case = WriteCase("faults", runs=((3, 14), (9, 1)), head_dim=64)
    k, v, pages, page_ids, offsets = specs.build_arguments(case)
    expected = suite.oracle("kv_write")(k, v, pages, page_ids, offsets)
    dropped = np.where(np.arange(case.tokens) == case.tokens - 1, 0, page_ids)
    faults = {
        "value for key": (v, k, pages, page_ids, offsets),
        "page shifted by one": (k, v, pages, page_ids % (case.num_pages - 1) + 1, offsets),
        "last token dropped": (k, v, pages, dropped, offsets),
        "offset off by one": (k, v, pages, page_ids, (offsets + 1) % case.page_size),
    }
    for arguments in faults.values():
        with pytest.raises(AssertionError, match="of the pages differ"):
            suite.check_pages(write(name, arguments), expected)
