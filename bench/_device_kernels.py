"""Each attention kernel, compiled for the device that is there, against the float32 oracle on poisoned pages."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pallas_kernels import KernelUnavailable, cases
from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write import oracle as kv_write_oracle
from pallas_kernels.kv_write import specs as kv_write_specs
from pallas_kernels.paged_decode import oracle as decode_oracle
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_decode import specs as decode_specs
from pallas_kernels.paged_prefill import oracle as prefill_oracle
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.paged_prefill import specs as prefill_specs

LIMITS = {"float32": 1e-4, "bfloat16": 1e-2}
"""Largest difference from the oracle, relative to its largest value, by the type of queries, keys and values."""


@dataclass(frozen=True)
class KernelCheck:
    """One case on the chip: `error` is the largest difference from the oracle, relative to its largest value."""

    name: str
    ok: bool
    error: float
    note: str = ""


@dataclass(frozen=True)
class Check:
    """A case to be checked. Quick cases of every operation come first, so that little time tells most."""

    operation: str
    case: Any

    @property
    def name(self) -> str:
        return f"{self.operation} {self.case.name}"


def all_checks() -> list[Check]:
    """Every case of the three operations, the slow ones last."""
    by_operation = {
        "kv_write": kv_write_specs.CASES,
        "paged_decode": decode_specs.CASES,
        "paged_prefill": prefill_specs.CASES,
    }
    checks = [Check(operation, case) for operation, some in by_operation.items() for case in some]
    return sorted(checks, key=lambda check: check.case.slow)


def run_checks(checks: Sequence[Check], impl: str, at_once: int = 16) -> Iterator[Check | KernelCheck]:
    """For each case the check itself when its kernel is about to run, then what came of it.

    `impl` is the lowering to check. `at_once` cases are compiled together on all processors, then run.
    """
    for first in range(0, len(checks), at_once):
        some = checks[first : first + at_once]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiling = [_start(check, impl, pool) for check in some]
        for check, program in zip(some, compiling, strict=True):
            yield check
            yield program if isinstance(program, KernelCheck) else _outcome(check, program)


def _start(check: Check, impl: str, pool: ThreadPoolExecutor) -> Future | KernelCheck:
    """The program being compiled; a result at once when this lowering does not take the case or fails on it."""
    try:
        lowered = _lower(check, impl)
    except KernelUnavailable as reason:
        return KernelCheck(check.name, True, 0.0, str(reason))
    except Exception as error:
        return KernelCheck(check.name, False, 0.0, f"does not lower: {_first_line(error)}")
    return pool.submit(lowered.compile)


def _outcome(check: Check, compiling: Future) -> KernelCheck:
    error = compiling.exception()
    if error is not None:
        return KernelCheck(check.name, False, 0.0, f"does not compile: {_first_line(error)}")
    run = _run_write if check.operation == "kv_write" else _run_attention
    return run(check, compiling.result())


def _lower(check: Check, impl: str) -> Any:
    # From shapes alone: nothing is computed, or compiled on the way, in this thread.
    if check.operation == "kv_write":
        return jax.jit(functools.partial(kv_write, impl=impl)).lower(*kv_write_specs.abstract_arguments(check.case))
    operation: Any = paged_decode if check.operation == "paged_decode" else paged_prefill
    arguments = cases.abstract_arguments(check.case)

    def call(arrays: tuple[Any, ...], sinks: Any) -> Any:
        return operation(*arrays, check.case.spec, sinks=sinks, impl=impl)

    return jax.jit(call).lower(arguments.positional(check.case.spec)[:-1], arguments.sinks)


def _run_attention(check: Check, program: Any) -> KernelCheck:
    case = check.case
    arguments = cases.build_arguments(case, seed=3)
    got, pages = program(arguments.positional(case.spec)[:-1], arguments.sinks)
    if pages.scales is not None:
        # Compiled and numpy division may round to different neighbours: attend over the pages as written.
        arguments = dataclasses.replace(arguments, k=None, v=None, pages=jax.tree.map(np.asarray, pages))
    oracle = decode_oracle.paged_decode if check.operation == "paged_decode" else prefill_oracle.paged_prefill
    want, _ = oracle(*arguments.positional(case.spec), sinks=arguments.sinks)
    return _compared(check.name, np.asarray(got, np.float32), want, LIMITS[case.dtype])


def _run_write(check: Check, program: Any) -> KernelCheck:
    arguments: Any = kv_write_specs.build_arguments(check.case, seed=3)
    want, got = kv_write_oracle.kv_write(*arguments), program(*arguments)
    # Page 0 belongs to nobody. A quantized value may fall on the other side of a rounding border.
    limit = 1e-6 if want.scales is None else 0.08
    ours, theirs = (np.asarray(pages.data, np.float32)[1:] for pages in (got, want))
    return _compared(check.name, ours, theirs, limit)


def _compared(name: str, got: np.ndarray, want: np.ndarray, limit: float) -> KernelCheck:
    scale = max(1.0, float(np.abs(want).max(initial=0.0)))
    error = float(np.abs(got - want).max(initial=0.0)) / scale
    return KernelCheck(name, bool(np.isfinite(got).all()) and error <= limit, error)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
