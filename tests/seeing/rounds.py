"""Events written down by hand."""

from __future__ import annotations

from jaxinfer.core.observer import PoolUsage, RequestQueued, RoundFinished, SequenceFinished, SequenceId
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.step import PrefillRow, SlotSetup, StepWork

HOST = 0.25
"""Seconds that the host takes before and after each round."""


def queued(name: str, arrival: float, prompt: int, n: int = 1) -> RequestQueued:
    return RequestQueued(arrival, arrival, name, prompt, 16, n)


def finished(name: str, time: float, tokens: int, reason="length", index: int = 0) -> SequenceFinished:
    return SequenceFinished(time, SequenceId(name, index), reason, tokens)


def setup(slot: int) -> SlotSetup:
    return SlotSetup(slot, SamplingParams(), 0, (1,))


def prefill(slot: int, tokens: int, start: int = 0, sample: bool = True) -> PrefillRow:
    return PrefillRow(slot, tuple(range(tokens)), start, sample)


def round_of(
    start,
    end,
    owners,
    *,
    prefills=(),
    decodes=(),
    entered=(),
    waiting=0,
    active=1,
    cached=0,
    moves=((), (), ()),
    host=0,
) -> RoundFinished:
    return RoundFinished(
        host_start=start - HOST,
        dispatched=start,
        start=start,
        end=end,
        host_end=end + HOST,
        work=StepWork((), tuple(setup(slot) for slot in entered), tuple(prefills), tuple(decodes), *moves),
        owners={slot: SequenceId(name, 0) for slot, name in owners.items()},
        waiting=waiting,
        running=len(owners),
        pages=PoolUsage(active, cached, 10 - active - cached),
        host_pages=host,
    )
