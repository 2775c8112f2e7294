"""Every request's timeline and every round's, put together from the events that serving tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

from jaxinfer.core.observer import (
    Event,
    PoolUsage,
    RequestQueued,
    RoundFinished,
    SequenceFinished,
    SequenceId,
    SequencePreempted,
)


class Span(NamedTuple):
    """One round's work for one sequence: see `SequenceStep`; start and end are those of the round on the device."""

    kind: Literal["prefill", "decode"]
    slot: int
    start: float
    end: float
    cached_tokens: int
    computed_tokens: int
    sampled: bool


class Preemption(NamedTuple):
    """A sequence lost this slot at this time."""

    time: float
    slot: int


@dataclass(frozen=True, slots=True)
class SequenceTimeline:
    """What became of one sequence, in seconds of the scheduler's clock.

    Attributes:
        sequence: which.
        arrival: when its request came.
        num_prompt_tokens: length of the prompt.
        spans: its prefill chunks and decodes, in order.
        preemptions: when it had to give up its slot.
        finished_at, reason: its end; None while it goes on.
    """

    sequence: SequenceId
    arrival: float
    num_prompt_tokens: int
    spans: tuple[Span, ...]
    preemptions: tuple[Preemption, ...]
    finished_at: float | None
    reason: Literal["stop", "length", "abort"] | None

    @property
    def token_times(self) -> tuple[float, ...]:
        """When each of its tokens came."""
        return tuple(span.end for span in self.spans if span.sampled)

    @property
    def complete(self) -> bool:
        """Whether it ended by itself."""
        return self.reason in ("stop", "length")

    @property
    def queue_s(self) -> float | None:
        """From arrival to its first work."""
        return self.spans[0].start - self.arrival if self.spans else None

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token."""
        return next((span.end - self.arrival for span in self.spans if span.sampled), None)

    @property
    def itls_s(self) -> tuple[float, ...]:
        """Every time between two of its tokens."""
        return tuple(later - earlier for earlier, later in pairwise(self.token_times))

    @property
    def tpot_s(self) -> float | None:
        """Mean time for a token after the first; None for zero or one token."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def e2e_s(self) -> float | None:
        """From arrival to the last token: TTFT + (N - 1) x TPOT."""
        times = self.token_times
        return times[-1] - self.arrival if times else None


@dataclass(frozen=True, slots=True)
class RoundTimeline:
    """One round: see `RoundFinished`.

    Attributes:
        decodes: sequences that decoded.
        prefill_rows, prefill_tokens: sequences that were prefilled, and their tokens computed.
        pages_out, pages_in, page_copies: pages moved to host memory, back from there, and copied inside the pool.
    """

    host_start: float
    dispatched: float
    start: float
    end: float
    host_end: float
    decodes: int
    prefill_rows: int
    prefill_tokens: int
    waiting: int
    running: int
    pages: PoolUsage
    host_pages: int = 0
    pages_out: int = 0
    pages_in: int = 0
    page_copies: int = 0

    @property
    def device_s(self) -> float:
        """From the device's beginning of the round until its tokens were back."""
        return self.end - self.start

    @property
    def host_s(self) -> float:
        """Scheduling and handing over before, making outputs after; hidden behind the device in part or whole."""
        return (self.dispatched - self.host_start) + (self.host_end - self.end)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Everything that happened: sequences in order of arrival, rounds in order of time."""

    sequences: tuple[SequenceTimeline, ...]
    rounds: tuple[RoundTimeline, ...]

    @property
    def begin(self) -> float:
        """The first arrival or round."""
        return min((*(s.arrival for s in self.sequences), *(r.host_start for r in self.rounds)), default=0.0)

    @property
    def end(self) -> float:
        """The last round's end or sequence's end."""
        ends = (s.finished_at for s in self.sequences if s.finished_at is not None)
        return max((*ends, *(r.host_end for r in self.rounds)), default=self.begin)


@dataclass(slots=True)
class _Record:
    """A SequenceTimeline in the making."""

    arrival: float
    num_prompt_tokens: int
    spans: list[Span] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    finished: SequenceFinished | None = None

    def timeline(self, sequence: SequenceId) -> SequenceTimeline:
        return SequenceTimeline(
            sequence=sequence,
            arrival=self.arrival,
            num_prompt_tokens=self.num_prompt_tokens,
            spans=tuple(self.spans),
            preemptions=tuple(self.preemptions),
            finished_at=None if self.finished is None else self.finished.time,
            reason=None if self.finished is None else self.finished.reason,
        )


class TimelineRecorder:
    """An observer that keeps everything. A request id that is used again starts a new timeline.

    Sequences whose queueing it has not seen are passed over, so that it may start at any moment.
    """

    def __init__(self) -> None:
        self._current: dict[SequenceId, _Record] = {}
        self._all: list[tuple[SequenceId, _Record]] = []
        self._rounds: list[RoundTimeline] = []

    def __call__(self, event: Event, /) -> None:
        """Take one event."""
        match event:
            case RequestQueued():
                self._queue(event)
            case RoundFinished():
                self._round(event)
            case SequencePreempted():
                if event.sequence in self._current:
                    self._current[event.sequence].preemptions.append(Preemption(event.time, event.slot))
            case SequenceFinished():
                if event.sequence in self._current:
                    self._current[event.sequence].finished = event

    def reset(self) -> None:
        """Forget everything, after a warm-up for instance."""
        self._current.clear()
        self._all.clear()
        self._rounds.clear()

    def timeline(self) -> Timeline:
        """What has happened so far."""
        sequences = sorted(self._all, key=lambda item: item[1].arrival)
        return Timeline(tuple(record.timeline(sequence) for sequence, record in sequences), tuple(self._rounds))

    def _queue(self, event: RequestQueued) -> None:
        for sequence in _sequences(event):
            record = _Record(event.arrival, event.num_prompt_tokens)
            self._current[sequence] = record
            self._all.append((sequence, record))

    def _round(self, event: RoundFinished) -> None:
        for step in event.steps():
            record = self._current.get(step.sequence)
            if record is not None:
                record.spans.append(
                    Span(
                        step.kind,
                        step.slot,
                        event.start,
                        event.end,
                        step.cached_tokens,
                        step.computed_tokens,
                        step.sampled,
                    )
                )
        work = event.work
        self._rounds.append(
            RoundTimeline(
                host_start=event.host_start,
                dispatched=event.dispatched,
                start=event.start,
                end=event.end,
                host_end=event.host_end,
                decodes=len(work.decodes),
                prefill_rows=len(work.prefills),
                prefill_tokens=work.num_tokens - len(work.decodes),
                waiting=event.waiting,
                running=event.running,
                pages=event.pages,
                host_pages=event.host_pages,
                pages_out=len(work.page_outs),
                pages_in=len(work.page_ins),
                page_copies=len(work.page_copies),
            )
        )


def _sequences(event: RequestQueued) -> Iterator[SequenceId]:
    return (SequenceId(event.request_id, index) for index in range(event.num_sequences))
