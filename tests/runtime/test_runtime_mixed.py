"""Decodes that run in one program with a prefill sample what they sample in a program of their own, and so does it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from engine_tools import poison

from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.step import PrefillRow, SlotSetup, StepResult, StepWork, TableUpdate

SLOTS, ROWS, PAGE, CONTEXT, BUDGET = 12, 3, 8, 256, 192
COLUMNS = CONTEXT // PAGE
SIZES = {
    "max_slots": SLOTS,
    "page_size": PAGE,
    "num_pages": 1 + SLOTS * COLUMNS,
    "max_context": CONTEXT,
    "max_batched_tokens": BUDGET,
    "max_prefill_rows": ROWS,
}


@pytest.fixture
def runner(build_runner, monkeypatch):
    runner = build_runner("qwen2", **SIZES)
    monkeypatch.setattr(runner, "buckets", dataclasses.replace(runner.buckets, least_mixed=1))
    return runner


def rounds(seed: int, tokens: int, decoding: int) -> list[StepWork]:
    """Prompts; then some decode beside a prefill of others, of `tokens` in all; then those that sampled decode."""
    numbers = np.random.default_rng(seed)
    slots = numbers.permutation(SLOTS).tolist()
    most = min(ROWS, SLOTS - decoding, tokens - decoding)
    decodes, prefilled = slots[:decoding], slots[decoding : decoding + int(numbers.integers(1, most + 1))]
    pages = numbers.permutation(np.arange(1, SIZES["num_pages"])).reshape(SLOTS, COLUMNS)
    first = {slot: int(numbers.integers(1, 20)) for slot in slots}
    cuts = np.sort(numbers.choice(np.arange(1, tokens - decoding), len(prefilled) - 1, replace=False))
    counts = np.diff([0, *cuts, tokens - decoding])

    def row(slot: int, count: int, start: int, sample: bool) -> PrefillRow:
        ids = tuple(numbers.integers(3, 140, count).tolist())
        scored = 1 if slot % 3 == 0 else None
        return PrefillRow(slot, ids, start, sample, scored, None if sample else 7)

    params = SamplingParams(logprobs=1, max_tokens=9)
    setups = tuple(SlotSetup(slot, params, slot, (3,)) for slot in slots)
    both = tuple(
        row(slot, int(count), first[slot], bool(numbers.random() < 0.7))
        for slot, count in zip(prefilled, counts, strict=True)
    )
    prompts = tuple(row(slot, first[slot], 0, slot in decodes) for slot in slots)
    sampling = [*decodes, *(each.slot for each in both if each.sample)]

    def begin(setups: tuple[SlotSetup, ...], prefills: tuple[PrefillRow, ...]) -> StepWork:
        table = [
            TableUpdate(each.slot, column, int(pages[each.slot, column]))
            for each in setups
            for column in range(COLUMNS)
        ]
        return StepWork(slot_setups=setups, table_updates=tuple(table), prefills=prefills)

    return [
        *(begin(setups[i : i + ROWS], prompts[i : i + ROWS]) for i in range(0, SLOTS, ROWS)),
        StepWork(decodes=tuple(decodes), prefills=both),
        StepWork(decodes=tuple(sampling)),
    ]


def results(runner, works: list[StepWork]) -> list[StepResult]:
    poison(runner)
    return [runner.execute(work) for work in works]


def cached(runner) -> list[np.ndarray]:
    """What the pages hold, NaN where nothing was written; without the padding page."""
    return [np.asarray(pages.data)[1:] for pages in runner.state.kv]


def alike(one: StepResult, other: StepResult) -> None:
    assert one.sampled.keys() == other.sampled.keys()
    assert one.failed == other.failed == frozenset()
    pairs = [(one.sampled[slot], other.sampled[slot]) for slot in one.sampled]
    assert one.prompt_logprobs.keys() == other.prompt_logprobs.keys()
    for slot, tokens in one.prompt_logprobs.items():
        pairs += zip(tokens, other.prompt_logprobs[slot], strict=True)
    for token, expected in pairs:
        assert token.id == expected.id
        assert token.logprob == pytest.approx(expected.logprob, abs=1e-4)


@pytest.mark.parametrize("tokens", [12, 31, 32, 33, 64, 65, 127, 128, 191, 192])
@pytest.mark.parametrize("decoding", [1, 6, 11])
def test_together_as_one_after_the_other(runner, monkeypatch, tokens, decoding):
    works = rounds(tokens, tokens, decoding)
    alone = runner.buckets
    monkeypatch.setattr(runner, "buckets", dataclasses.replace(alone, least_mixed=SLOTS + 1))
    expected, expected_cache = results(runner, works), cached(runner)
    monkeypatch.setattr(runner, "buckets", alone)
    decoded: list[int] = []
    decode = type(runner)._decode
    monkeypatch.setattr(runner, "_decode", lambda slots, updates: decoded.append(1) or decode(runner, slots, updates))
    for found, wanted in zip(results(runner, works), expected, strict=True):
        alike(found, wanted)
    for pages, wanted_pages in zip(cached(runner), expected_cache, strict=True):
        np.testing.assert_allclose(pages, wanted_pages, atol=1e-4)
    assert len(decoded) == 1, "only the last round is a decode of its own"


def test_a_broken_sequence_harms_no_other(runner):
    """Its cached keys are not numbers any more; it fails whether it decodes or is prefilled."""
    works = rounds(0, 40, 4)
    *before, work, _ = works
    expected = results(runner, [*before, work])[-1]
    for broken in (work.decodes[1], work.prefills[0].slot):
        results(runner, before)
        page = int(runner.state.page_table[broken, 0])
        kv = tuple(dataclasses.replace(pages, data=pages.data.at[page].set(jnp.nan)) for pages in runner.state.kv)
        runner.state = dataclasses.replace(runner.state, kv=kv)
        found = runner.execute(work)
        assert found.failed == {broken}
        for slot in found.sampled.keys() - {broken}:
            assert found.sampled[slot].id == expected.sampled[slot].id
