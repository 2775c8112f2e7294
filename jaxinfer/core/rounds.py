"""Rounds in the making and in flight, and what is counted of them."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from jaxinfer.core.page_cache import PageMoves
from jaxinfer.core.request import Sequence
from jaxinfer.core.step import PrefillRow, SampledToken, SlotSetup, StepWork, TableUpdate


@dataclass(slots=True)
class SchedulerCounts:
    """What happened since the scheduler was made.

    Attributes:
        preemptions: sequences that lost slot and pages.
        prefix_queries: known tokens of the sequences that were looked up in the prefix cache.
        prefix_hits: those of them that were found.
        page_copies: pages that a sequence began with a copy of.
        pages_out: evicted pages that moved to host memory.
        pages_in: pages that came back from there.
    """

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    page_copies: int = 0
    pages_out: int = 0
    pages_in: int = 0


@dataclass(frozen=True, slots=True)
class SequenceProgress:
    """What one committed round gave one sequence: perhaps a token, perhaps entries about prompt tokens.

    A sequence that failed in the round has neither, and finish_reason "abort".
    """

    sequence: Sequence
    token: SampledToken | None
    prompt_logprobs: SequenceOf[SampledToken]


@dataclass(frozen=True, slots=True)
class Part:
    """What a round does for one sequence: compute up to position `end`; a sequence preempted since has left it."""

    sequence: Sequence
    end: int
    num_preemptions: int

    @property
    def has_left(self) -> bool:
        """Whether the sequence was preempted since."""
        return self.sequence.num_preemptions != self.num_preemptions


@dataclass(slots=True)
class Round:
    """A StepWork in the making, with what is left of the round's limits, and then the record of what was asked."""

    tokens_left: int
    rows_left: int
    entered: list[Sequence] = field(default_factory=list)
    parts: dict[int, Part] = field(default_factory=dict)  # by slot
    table_updates: list[TableUpdate] = field(default_factory=list)
    slot_setups: list[SlotSetup] = field(default_factory=list)
    prefills: list[PrefillRow] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    being_written: set[bytes] = field(default_factory=set)  # names of the pages that this round fills

    @property
    def can_prefill(self) -> bool:
        """Whether there is room for another prefill."""
        return self.tokens_left > 0 and self.rows_left > 0

    @property
    def sequences(self) -> Iterator[Sequence]:
        """Those it was scheduled for, some of them twice."""
        yield from self.entered
        yield from (part.sequence for part in self.parts.values())

    def work(self, moves: PageMoves) -> StepWork:
        """What the device is asked for."""
        return StepWork(
            tuple(self.table_updates),
            tuple(self.slot_setups),
            tuple(self.prefills),
            tuple(self.decodes),
            tuple(moves.outs),
            tuple(moves.copies),
            tuple(moves.ins),
        )


@dataclass(frozen=True, slots=True)
class InFlight:
    """A round that was scheduled and is not committed yet."""

    work: StepWork
    round: Round
