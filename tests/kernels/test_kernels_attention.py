"""Every attention case on every lowering that runs here, against the oracle."""

from __future__ import annotations

import dataclasses
import importlib

import kernel_suite as suite
import numpy as np
import pytest

from pallas_kernels.cases import AttentionCase, build_arguments
from pallas_kernels.paged_decode import specs as decode_specs
from pallas_kernels.paged_prefill import specs as prefill_specs
from pallas_kernels.pages import NOT_JOINED, is_quantized

CASES = {"paged_decode": decode_specs.CASES, "paged_prefill": prefill_specs.CASES}
# Interpret mode takes seconds a case: those that together touch every path of the TPU kernels run by default, and so do
# those again whose pages have keys and values apart.
QUICK = {
    "paged_decode": {
        "ragged",
        "bf16",
        "d96",
        "page_256",
        "window",
        "int8_bf16",
        "fp8",
        "read_only",
        "all_empty",
        "everything",
        "everything_f32",
        "latent",
    },
    "paged_prefill": {"latent", "ragged", "bf16", "d80", "window", "everything", "all_empty"},
}


def parameters() -> list:
    found = []
    for operation, cases in CASES.items():
        for name in suite.LOWERINGS:
            for case in suite.layouts(name, cases):
                slow = case.slow or ((name == suite.MOSAIC_TPU or case.apart) and case.name not in QUICK[operation])
                marks = [pytest.mark.slow] if slow else []
                found.append(
                    pytest.param(
                        operation, name, case, id=f"{operation}-{name}-{case.name}{'-apart' * case.apart}", marks=marks
                    )
                )
    return found


@pytest.mark.parametrize(("operation", "name", "case"), parameters())
def test_agrees_with_the_oracle(operation: str, name: str, case: AttentionCase) -> None:
    arguments = build_arguments(case)
    expected, expected_pages = suite.oracle(operation)(*arguments.positional(case.spec), sinks=arguments.sinks)
    out, pages = suite.run_attention(operation, name, case, arguments)
    suite.check_output(out, expected, case.dtype, is_quantized(case.pool_dtype) and case.write)
    suite.check_pages(pages, expected_pages)


FAULTY = {
    "paged_decode": AttentionCase("faults", lengths=(3, 16, 33), write=False),
    "paged_prefill": AttentionCase("faults", lengths=(9, 33), chunks=(9, 7), write=False),
}


def plant(fault: str, case: AttentionCase) -> tuple:
    """(right arguments, the same with a fault). Nothing visible to the fault is NaN: it must show in the numbers."""
    arguments = build_arguments(case)
    random = np.random.default_rng(1)
    data = np.array(arguments.pages.data)
    data[np.isnan(data)] = random.normal(size=np.isnan(data).sum())
    arguments = dataclasses.replace(arguments, pages=dataclasses.replace(arguments.pages, data=data))
    change = {
        "nothing": {},
        "value for key": {"pages": dataclasses.replace(arguments.pages, data=np.roll(data, case.head_dim, axis=-1))},
        "page shifted by one": {"page_table": np.roll(arguments.page_table, 1, axis=1)},
        "last token dropped": {"lengths": arguments.lengths - 1},
        "mask off by one": {"lengths": arguments.lengths + 1},
    }[fault]
    return arguments, dataclasses.replace(arguments, **change)


@pytest.mark.parametrize("name", suite.LOWERINGS)
@pytest.mark.parametrize("operation", FAULTY)
def test_planted_faults_fail_the_comparison(operation: str, name: str) -> None:
    case = FAULTY[operation]
    faults = ("nothing", "value for key", "page shifted by one", "last token dropped", "mask off by one")
    for fault in faults:
        right, wrong = plant(fault, case)
        expected, _ = suite.oracle(operation)(*right.positional(case.spec))
        out, _ = suite.run_attention(operation, name, case, wrong)
        if fault == "nothing":
            suite.check_output(out, expected, case.dtype, quantized=False)
        else:
            with pytest.raises(AssertionError, match="errors should be"):
                suite.check_output(out, expected, case.dtype, quantized=False)


@pytest.mark.parametrize("name", suite.LOWERINGS)
def test_a_window_off_by_one_fails_the_comparison(name: str) -> None:
    case = AttentionCase("window", lengths=(20, 33), window=8, write=False)
    right, wrong = plant("nothing", case)
    expected, _ = suite.oracle("paged_decode")(*right.positional(case.spec))
    out, _ = suite.run_attention("paged_decode", name, dataclasses.replace(case, window=9), wrong)
    with pytest.raises(AssertionError, match="errors should be"):
        suite.check_output(out, expected, case.dtype, quantized=False)


def test_the_oracle_agrees_with_dense_attention() -> None:
    """The oracle itself against one einsum over a sequence that is contiguous in its pages."""
    case = AttentionCase("dense", lengths=(20,), chunks=(20,), q_heads=4, kv_heads=2, window=7, softcap=3.0, sinks=True)
    arguments = build_arguments(case)
    out, _ = suite.oracle("paged_prefill")(*arguments.positional(case.spec), sinks=arguments.sinks)
    k, v = (np.repeat(x.astype(np.float64), 2, axis=1) for x in (arguments.k, arguments.v))
    scores = 3 * np.tanh(np.einsum("ihd,jhd->hij", arguments.q, k) * case.spec.scale / 3)
    i, j = np.indices((20, 20))
    scores = np.where((j <= i) & (j > i - 7), scores, -np.inf)
    weights = np.exp(scores)
    weights /= weights.sum(-1, keepdims=True) + np.exp(arguments.sinks)[:, None, None]
    np.testing.assert_allclose(out, np.einsum("hij,jhd->ihd", weights, v), atol=1e-5)


@pytest.mark.parametrize("name", [suite.MOSAIC_TPU, "pallas_mosaic_gpu"])
def test_pallas_kernels_say_that_they_need_keys_and_values_joined(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels._gpu_attention.unsupported_here", lambda: None)
    monkeypatch.setattr("pallas_kernels.kv_write.pallas_mosaic_gpu.unsupported_here", lambda: None)
    case = AttentionCase("apart", lengths=(20, 5), chunks=(7, 5), apart=True, head_dim=128, dtype="bfloat16")
    arguments = build_arguments(case)
    reading = dataclasses.replace(arguments, k=None, v=None)  # what is written is refused for itself
    decode = dataclasses.replace(reading, query_starts=None, q=arguments.q[:2])
    calls = {
        "paged_decode": decode.positional(case.spec),
        "paged_prefill": reading.positional(case.spec),
        "kv_write": (arguments.k, arguments.v, arguments.pages, arguments.lengths, arguments.lengths),
    }
    for operation, call in calls.items():
        module = importlib.import_module(f"pallas_kernels.{operation}.{name}")
        assert module.unsupported(*call) == NOT_JOINED, operation


@pytest.mark.parametrize("page_dtype", [None, "int8"])
def test_the_oracle_finds_the_same_keys_and_values_in_pages_that_have_them_apart(page_dtype: str | None) -> None:
    joined = AttentionCase("joined", lengths=(20, 5), chunks=(7, 5), page_dtype=page_dtype)
    found = {}
    for case in (joined, dataclasses.replace(joined, apart=True)):
        out, pages = suite.oracle("paged_prefill")(*build_arguments(case).positional(case.spec))
        found[case.apart] = out, pages.data
    width = joined.head_dim
    np.testing.assert_array_equal(found[True][0], found[False][0])
    np.testing.assert_array_equal(found[True][1][:, :, 0], found[False][1][..., :width])
    np.testing.assert_array_equal(found[True][1][:, :, 1], found[False][1][..., width:])


def test_the_oracle_takes_values_from_the_beginning_of_keys() -> None:
    """Against one einsum; a value from the key's end, or a key without its end, is seen."""
    case = AttentionCase("dense", lengths=(20,), chunks=(20,), q_heads=4, kv_heads=1, head_dim=64, latent_values=48)
    arguments = build_arguments(case)
    out, _ = suite.oracle("paged_prefill")(*arguments.positional(case.spec))
    rows = arguments.k[:, 0].astype(np.float64)

    def dense(keys: slice, values: slice) -> np.ndarray:
        scores = np.einsum("ihd,jd->hij", arguments.q[..., keys], rows[:, keys]) * case.spec.scale
        weights = np.exp(np.where(np.tri(20, dtype=bool), scores, -np.inf))
        return np.einsum("hij,jd->ihd", weights / weights.sum(-1, keepdims=True), rows[:, values])

    np.testing.assert_allclose(out, dense(slice(0, 64), slice(0, 48)), atol=1e-5)
    assert np.abs(out - dense(slice(0, 64), slice(16, 64))).max() > 0.1
    assert np.abs(out - dense(slice(0, 48), slice(0, 48))).max() > 0.1
