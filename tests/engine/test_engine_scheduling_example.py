"""The scheduling example: what static waves, chunked prefill and a warm prefix do, tick by tick.

Pages of 4 tokens, 2 requests at once, 8 tokens a tick, the known maximum of pages reserved at admission. A comes at
tick 0 with 8 input and 4 output tokens, B at 1 with 8 and 3, C at 2 with 4 and 2; A and B share their first 4 tokens.
They come to hold 11, 10 and 5 positions: 3, 3 and 2 pages.

Static waves. A is alone when the first wave starts: A1 at 0, then a token a tick, A4 at 3. B and C are the next.
  chunks, no cache:     4: B's 8 tokens fill the tick, B1. 5: B2, C's 4 tokens, C1. 6: B3 C2. Pages at 6: 3 + 2.
  chunks, warm page:    4: 4 of B and 4 of C, B1 C1. 5: B2 C2. 6: B3. Pages at 5: 3 + 2.
  no chunks, no cache:  4: B1. 5: C1, B waits for the prompt. 6: B2 C2. 7: B3. Pages at 6: 3 + 2.
  no chunks, warm page: 4: both prompts, B1 C1. 5: B2 C2. 6: B3. Pages at 5: 3 + 2.
Continuous. A1 at 0; B enters at 1; C must wait for one of the two slots.
  chunks, no cache:     1: A2 and 7 of B's 8 tokens. 2: A3 B1. 3: A4 B2, pages 3 + 3. 4: B3, C enters, C1. 5: C2.
  chunks, warm page:    1: A2 and 4 tokens, B1. 2: A3 B2, pages 3 + 3, one of them shared. 3: A4 B3. 4: C1. 5: C2.
  no chunks, no cache:  1: B1, A waits. 2: A2 B2, pages 3 + 3. 3: A3 B3. 4: C1, A waits. 5: A4 C2.
  no chunks, warm page: the same ticks; at 2 one of the 3 + 3 pages is shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from fake_runner import FakeLimits, FakeRunner, FakeTokenizer

from jaxinfer.core.observer import RoundFinished
from jaxinfer.core.request import Request
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.scheduler import Scheduler, SchedulerConfig
from jaxinfer.core.step import SampledToken, StepResult
from jaxinfer.engine import Engine

# (mode, chunked prefill, warm prefix cache): first ticks of A, B, C; last ticks of A, B, C; most pages held at once
TABLE = {
    ("static", True, False): ((0, 4, 5), (3, 6, 6), 5),
    ("static", True, True): ((0, 4, 4), (3, 6, 5), 5),
    ("static", False, False): ((0, 4, 5), (3, 7, 6), 5),
    ("static", False, True): ((0, 4, 4), (3, 6, 5), 5),
    ("continuous", True, False): ((0, 2, 4), (3, 4, 5), 6),
    ("continuous", True, True): ((0, 1, 4), (3, 3, 5), 5),
    ("continuous", False, False): ((0, 1, 4), (5, 3, 5), 6),
    ("continuous", False, True): ((0, 1, 4), (5, 3, 5), 5),
}
OUTPUTS = {"A": 4, "B": 3, "C": 2}
ARRIVALS = {0: "A", 1: "B", 2: "C"}
combinations = pytest.mark.parametrize(("mode", "chunked", "cache"), TABLE)


def prompts(scale: int) -> dict[str, tuple[int, ...]]:
    """The prompts, each token `scale` times for pages that are as much larger; the ids fit the smallest vocabulary."""
    shared = [3, 4, 5, 6]
    plain = {"A": [*shared, 7, 8, 9, 10], "B": [*shared, 11, 12, 13, 14], "C": [15, 16, 17, 18]}
    return {name: tuple(token for token in ids for _ in range(scale)) for name, ids in plain.items()}


@dataclass
class Ticks:
    """When each request got tokens, and the most pages held."""

    tokens: dict[str, list[int]]
    peak_pages: int = 0

    def summary(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        ordered = [self.tokens[name] for name in "ABC"]
        return tuple(ticks[0] for ticks in ordered), tuple(ticks[-1] for ticks in ordered), self.peak_pages


def params(name: str) -> SamplingParams:
    return SamplingParams(max_tokens=OUTPUTS[name], temperature=0, ignore_eos=True)


def on_the_scheduler(mode: Any, chunked: bool, cache: bool) -> tuple[Ticks, dict[str, int], Scheduler]:
    """The ticks, and the positions that each request cached."""
    config = SchedulerConfig(
        max_slots=2,
        page_size=4,
        num_pages=9,
        max_context=16,
        max_batched_tokens=8,
        mode=mode,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=cache,
        reserve_full=True,
    )
    scheduler = Scheduler(config)
    cached: dict[str, int] = {}

    def add(name: str, prompt: tuple[int, ...], tokens: int) -> None:
        chosen = SamplingParams(max_tokens=tokens)
        scheduler.add(Request(name, prompt, chosen, seed=0, eos_ids=(), arrival=0.0))

    def run() -> list[str]:
        work = scheduler.schedule()
        owners = {slot: owner.request_id for slot, owner in scheduler.owners(work).items()}
        for row in work.prefills:
            cached[owners[row.slot]] = row.start + len(row.token_ids)
        for slot in work.decodes:
            cached[owners[slot]] += 1
        ticks.peak_pages = max(ticks.peak_pages, scheduler.pool.usage.active)
        progress = scheduler.commit(work, StepResult(dict.fromkeys(owners, SampledToken(99))))
        scheduler.check_integrity()
        return [item.sequence.request.request_id for item in progress if item.token is not None]

    ticks = Ticks({name: [] for name in "ABC"})
    add("warm", prompts(1)["A"][:4], 1)
    run()
    ticks.peak_pages = 0
    tick = 0
    while tick < 3 or scheduler.has_unfinished:
        if tick in ARRIVALS:
            add(ARRIVALS[tick], prompts(1)[ARRIVALS[tick]], OUTPUTS[ARRIVALS[tick]])
        for name in run():
            ticks.tokens[name].append(tick)
        tick += 1
    return ticks, cached, scheduler


@combinations
def test_on_the_scheduler(mode, chunked, cache):
    ticks, cached, scheduler = on_the_scheduler(mode, chunked, cache)
    assert ticks.summary() == TABLE[mode, chunked, cache]
    assert {name: len(tokens) for name, tokens in ticks.tokens.items()} == OUTPUTS
    del cached["warm"]
    assert cached == {"A": 11, "B": 10, "C": 5}
    assert scheduler.pool.usage.active == 0
    warm = Request("again", prompts(1)["A"][:5], SamplingParams(max_tokens=1), 0, (), 0.0)
    scheduler.add(warm)
    scheduler.schedule()
    assert warm.sequences[0].prefix_tokens == (4 if cache else 0)


def on_an_engine(runner: Any, tokenizer: Any, scale: int, mode: Any, chunked: bool, cache: bool):
    """The ticks, and the ids of each request."""
    ticks = Ticks({name: [] for name in "ABC"})

    def observe(event: Any) -> None:
        if isinstance(event, RoundFinished):
            ticks.peak_pages = max(ticks.peak_pages, event.pages.active)

    engine = Engine(
        runner,
        tokenizer,
        mode=mode,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=cache,
        reserve_full=True,
        async_scheduling=False,  # the table is of rounds that wait for each other
        observer=observe,
    )
    engine.add_request("warm", prompts(scale)["A"][: 4 * scale], SamplingParams(max_tokens=1))
    engine.step()
    ticks.peak_pages = 0
    ids: dict[str, tuple[int, ...]] = {}
    tick = 0
    while tick < 3 or engine.has_unfinished:
        if tick in ARRIVALS:
            name = ARRIVALS[tick]
            engine.add_request(name, prompts(scale)[name], params(name))
        for output in engine.step():
            new = output.outputs[0].token_ids
            if len(new) > len(ids.get(output.request_id, ())):
                ticks.tokens[output.request_id].append(tick)
            ids[output.request_id] = new
        engine.scheduler.check_integrity()
        tick += 1
    assert engine.scheduler.pool.usage.active == 0
    return ticks, ids


@combinations
def test_on_the_engine(mode, chunked, cache):
    limits = FakeLimits(max_slots=2, num_pages=9, max_context=16, max_batched_tokens=8, max_prefill_rows=2)
    runner = FakeRunner(limits)
    ticks, _ = on_an_engine(runner, FakeTokenizer(), 1, mode, chunked, cache)
    assert ticks.summary() == TABLE[mode, chunked, cache]
    assert {name: runner.max_cached[prompt] for name, prompt in prompts(1).items()} == {"A": 11, "B": 10, "C": 5}


class IdTokenizer(FakeTokenizer):
    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids))


def test_on_a_model(build_runner):
    """The same table from a real model, with pages of 8 and everything else twice as long; the ids never change."""
    runner = build_runner(
        "qwen2", max_slots=2, page_size=8, num_pages=9, max_context=32, max_batched_tokens=16, max_prefill_rows=2
    )
    results = {}
    for combination, expected in TABLE.items():
        runner.reset()
        ticks, results[combination] = on_an_engine(runner, IdTokenizer(), 2, *combination)
        assert ticks.summary() == expected, combination
    assert len({tuple(sorted(ids.items())) for ids in results.values()}) == 1
