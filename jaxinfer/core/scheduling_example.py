"""Three requests that show what static waves, chunked prefill and a prefix cache do to a schedule, tick by tick.

Pages hold 4 tokens, 2 requests are active at most, a tick computes 8 tokens at most. A comes at tick 0 with 8 input and
4 output tokens, B at 1 with 8 and 3, C at 2 with 4 and 2; A and B share their first 4 tokens. Capacity for the known
maximum is reserved at admission, pages are taken as tokens come. With the prefix cache, the shared page is warm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from jaxinfer.core.observer import PoolUsage
from jaxinfer.core.scheduler import SchedulerConfig
from jaxinfer.core.simulator import Simulator, one_tick
from jaxinfer.core.timeline import SequenceTimeline, Span, Timeline, TimelineRecorder
from jaxinfer.core.workload import Workload, WorkloadRequest

_SHARED = (1, 2, 3, 4)
WARM_UP = Workload((WorkloadRequest("warm", 0, _SHARED, 1),))
REQUESTS = Workload(
    (
        WorkloadRequest("A", 0, (*_SHARED, 11, 12, 13, 14), 4),
        WorkloadRequest("B", 1, (*_SHARED, 21, 22, 23, 24), 3),
        WorkloadRequest("C", 2, (31, 32, 33, 34), 2),
    )
)


@dataclass(frozen=True)
class ExampleRun:
    """The example under one combination of policies.

    mode, chunked_prefill, prefix_cache: the combination. timeline: what happened, a tick a second. peak_pages: most
    pages held at once. pages_at_end: after the last request.
    """

    mode: Literal["continuous", "static"]
    chunked_prefill: bool
    prefix_cache: bool
    timeline: Timeline
    peak_pages: int
    pages_at_end: PoolUsage

    @property
    def title(self) -> str:
        """The combination in words."""
        batching = "continuous batching" if self.mode == "continuous" else "static waves"
        chunks = "chunked prefill" if self.chunked_prefill else "whole prefill"
        return f"{batching}, {chunks}, {'warm prefix cache' if self.prefix_cache else 'no prefix cache'}"


def example_config(mode: Literal["continuous", "static"], chunked_prefill: bool, prefix_cache: bool) -> SchedulerConfig:
    """The example's scheduler under one combination."""
    return SchedulerConfig(
        max_slots=2,
        page_size=4,
        num_pages=9,
        max_context=16,
        max_batched_tokens=8,
        mode=mode,
        enable_chunked_prefill=chunked_prefill,
        enable_prefix_caching=prefix_cache,
        reserve_full=True,
    )


def run_example(mode: Literal["continuous", "static"], chunked_prefill: bool, prefix_cache: bool) -> ExampleRun:
    """Simulate one combination."""
    recorder = TimelineRecorder()
    simulator = Simulator(example_config(mode, chunked_prefill, prefix_cache), one_tick, recorder, start=-1.0)
    simulator.run(WARM_UP)  # tick -1; without the prefix cache nothing is left of it
    recorder.reset()
    simulator.run(REQUESTS)
    timeline = recorder.timeline()
    peak = max(round_.pages.active for round_ in timeline.rounds)
    return ExampleRun(mode, chunked_prefill, prefix_cache, timeline, peak, simulator.scheduler.pool.usage)


def run_all() -> tuple[ExampleRun, ...]:
    """Every combination."""
    modes: tuple[Literal["static", "continuous"], ...] = ("static", "continuous")
    return tuple(run_example(*combination) for combination in product(modes, (False, True), (False, True)))


def tick_rows(run: ExampleRun) -> Iterator[tuple[str, ...]]:
    """A row for each tick: the tick, what A, B and C do, tokens computed, pages held and pages kept as cache."""
    for round_ in run.timeline.rounds:
        cells = (_cell(sequence, round_.start) for sequence in run.timeline.sequences)
        tokens = round_.decodes + round_.prefill_tokens
        yield f"{round_.start:.0f}", *cells, str(tokens), str(round_.pages.active), str(round_.pages.cached)


def first_and_last_tick(sequence: SequenceTimeline) -> tuple[int, int]:
    """The ticks in which a sequence got its first and its last token."""
    ticks = [int(span.start) for span in sequence.spans if span.sampled]
    return ticks[0], ticks[-1]


def _cell(sequence: SequenceTimeline, tick: float) -> str:
    span = next((span for span in sequence.spans if span.start == tick), None)
    if span is not None:
        return _work(span)
    if tick < sequence.arrival:
        return ""
    if sequence.finished_at is not None and tick >= sequence.finished_at:
        return "done"
    return "waits" if not sequence.spans or tick < sequence.spans[0].start else "pauses"


def _work(span: Span) -> str:
    token = " -> token" if span.sampled else ""
    if span.kind == "decode":
        return f"decode{token}"
    cached = f" ({span.cached_tokens} cached)" if span.cached_tokens else ""
    return f"prefill {span.computed_tokens}{cached}{token}"
