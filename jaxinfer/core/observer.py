"""What serving tells whoever watches it: events, from which timelines, traces, reports and metrics are made.

The scheduler tells of requests queued, sequences preempted and sequences finished; whoever runs the rounds (the engine
on a device, the simulator on a clock) tells of each round. All times are seconds of one clock, the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

from jaxinfer.core.step import StepWork


class SequenceId(NamedTuple):
    """One completion: its request, and its number among the request's n."""

    request_id: str
    index: int


class PoolUsage(NamedTuple):
    """Pages of the pool without the padding page: held by sequences, kept only as cache, and free."""

    active: int
    cached: int
    free: int


class Load(NamedTuple):
    """What a scheduler has at one moment: see RoundFinished."""

    waiting: int
    running: int
    pages: PoolUsage
    host_pages: int


@dataclass(frozen=True, slots=True)
class RequestQueued:
    """A request was accepted.

    Attributes:
        time: when the scheduler took it.
        arrival: when it came, perhaps a little earlier; latencies count from here.
        request_id: the request.
        num_prompt_tokens: length of its prompt.
        max_new_tokens: most tokens that each of its sequences may sample.
        num_sequences: its n.
    """

    time: float
    arrival: float
    request_id: str
    num_prompt_tokens: int
    max_new_tokens: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class SequencePreempted:
    """A running sequence lost its slot and pages and waits again.

    Attributes:
        time: when.
        sequence: which.
        slot: the slot it lost.
    """

    time: float
    sequence: SequenceId
    slot: int


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """A sequence ended.

    Attributes:
        time: when.
        sequence: which.
        reason: "stop", "length" or "abort".
        num_output_tokens: tokens it sampled in all.
    """

    time: float
    sequence: SequenceId
    reason: Literal["stop", "length", "abort"]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """What one round did for one sequence.

    Attributes:
        kind: "prefill" for known tokens, "decode" for the token sampled last.
        sequence: which.
        slot: where it ran.
        cached_tokens: positions that the cache had when the sequence entered the slot in this round, 0 in later rounds.
        computed_tokens: positions computed.
        sampled: whether it got a new token.
    """

    kind: Literal["prefill", "decode"]
    sequence: SequenceId
    slot: int
    cached_tokens: int
    computed_tokens: int
    sampled: bool


@dataclass(frozen=True, slots=True)
class RoundFinished:
    """One round ran. Comes after the preemptions and finishes that the round brought.

    Attributes:
        host_start: when the host began to schedule the round.
        dispatched: when the host had handed the work to the device and went on.
        start: when the device began: at the hand-over, or when the round before it was done if that was later.
        end: when its tokens were back; the time of every token it gave.
        host_end: when the host had made outputs of them.
        work: what was computed.
        owners: slot -> sequence, for every slot with work, without sequences that were ended while the round ran.
        waiting, running: sequences without and with a slot once the round was scheduled.
        pages: the pool then, the pages taken for the round included.
        host_pages: pages that host memory kept then.
        failed: slots that got no token because their logits were not finite numbers.
    """

    host_start: float
    dispatched: float
    start: float
    end: float
    host_end: float
    work: StepWork
    owners: Mapping[int, SequenceId]
    waiting: int
    running: int
    pages: PoolUsage
    host_pages: int = 0
    failed: frozenset[int] = frozenset()

    def steps(self) -> Iterator[SequenceStep]:
        """What the round did, sequence by sequence, decodes first."""
        for slot in self.work.decodes:
            if slot in self.owners:
                yield SequenceStep("decode", self.owners[slot], slot, 0, 1, slot not in self.failed)
        entered = {setup.slot for setup in self.work.slot_setups}
        for row in self.work.prefills:
            if row.slot in self.owners:
                cached = row.start if row.slot in entered else 0
                sampled = row.sample and row.slot not in self.failed
                yield SequenceStep("prefill", self.owners[row.slot], row.slot, cached, len(row.token_ids), sampled)


Event: TypeAlias = RequestQueued | SequencePreempted | SequenceFinished | RoundFinished


class Observer(Protocol):
    """Takes every event as it happens; it must be quick and must not raise. A list's `append` is one."""

    def __call__(self, event: Event, /) -> None:
        """Take one event."""
        ...


def unobserved(event: Event, /) -> None:
    """The observer that passes over everything."""


class Observers:
    """Several observers as one: each is told of every event, in their order. More may be added while events come."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def add(self, observer: Observer) -> None:
        """Tell one more of everything from now on."""
        self._observers = (*self._observers, observer)

    def __call__(self, event: Event, /) -> None:
        """Take one event."""
        for observer in self._observers:
            observer(event)
