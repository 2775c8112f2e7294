"""Decides, round by round, which sequences run and which pages they use."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal

from jaxinfer.core.pool import BlockPool
from jaxinfer.core.request import FinishReason, Request, RequestRefused, Sequence
from jaxinfer.core.step import PrefillRow, SampledToken, SlotSetup, StepResult, StepWork, TableUpdate
from jaxinfer.core.stop import banned_until_min_tokens, finish_by_token


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of scheduling.

    Attributes:
        max_slots: most sequences on the device at once.
        page_size: positions in a page.
        num_pages: pages in the pool, the padding page included.
        max_context: most tokens of a sequence, prompt and output together.
        max_batched_tokens: most positions computed in one round; at least max_slots, so that prefill always advances.
        mode: "continuous" admits a sequence whenever there is room; "static" admits the next wave only when the
            previous one has wholly finished.
        max_prefill_rows: most sequences prefilled in one round; None for as many as there are slots.
    """

    max_slots: int
    page_size: int
    num_pages: int
    max_context: int
    max_batched_tokens: int
    mode: Literal["continuous", "static"] = "continuous"
    max_prefill_rows: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_slots", 1), ("page_size", 1), ("num_pages", 2), ("max_context", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}.")
        if self.max_batched_tokens < self.max_slots:
            raise ValueError(
                f"max_batched_tokens must be at least max_slots ({self.max_slots}), not {self.max_batched_tokens}."
            )
        if self.mode not in ("continuous", "static"):
            raise ValueError(f"mode must be 'continuous' or 'static', not {self.mode!r}.")
        if self.max_prefill_rows is not None and self.max_prefill_rows < 1:
            raise ValueError(f"max_prefill_rows must be at least 1, not {self.max_prefill_rows}.")


@dataclass(frozen=True, slots=True)
class SequenceProgress:
    """What one committed round gave one sequence: perhaps a token, perhaps entries about prompt tokens."""

    sequence: Sequence
    token: SampledToken | None
    prompt_logprobs: SequenceOf[SampledToken]


@dataclass(slots=True)
class _Round:
    """A StepWork in the making, with what is left of the round's limits."""

    tokens_left: int
    rows_left: int
    table_updates: list[TableUpdate] = field(default_factory=list)
    slot_setups: list[SlotSetup] = field(default_factory=list)
    prefills: list[PrefillRow] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)

    @property
    def can_prefill(self) -> bool:
        return self.tokens_left > 0 and self.rows_left > 0

    def work(self) -> StepWork:
        return StepWork(tuple(self.table_updates), tuple(self.slot_setups), tuple(self.prefills), tuple(self.decodes))


class Scheduler:
    """First come, first served. One round decodes every running sequence, then prefills under what is left of the
    token budget. Pages are taken as tokens come; at admission the pages a sequence can come to need are reserved, so a
    running sequence never waits for a page.

    Rounds are serial: schedule, run the work, commit (or abandon), schedule again. add, cancel and finish may come at
    any moment between. Not thread-safe.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.pool = BlockPool(config.num_pages, config.page_size)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self._clock = clock
        self._slots: list[Sequence | None] = [None] * config.max_slots
        self._free_slots = list(range(config.max_slots))  # a heap: low slots first
        self._reserved_pages = 0  # promised to running sequences and not taken yet
        self._in_flight: StepWork | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.requests)

    @property
    def reserved_pages(self) -> int:
        """Free pages that are promised to running sequences."""
        return self._reserved_pages

    def add(self, request: Request) -> None:
        """Queue a request. RequestRefused, with the numbers, if it can never be served."""
        if request.request_id in self.requests:
            raise RequestRefused(f"Request {request.request_id!r} is still being served; use another id.")
        request.max_new_tokens = self._token_limit(request)
        self.requests[request.request_id] = request
        self.waiting.extend(request.sequences)

    def cancel(self, request_id: str) -> Request | None:
        """End every unfinished sequence of a request with reason "abort"; None if no such request is unfinished."""
        request = self.requests.get(request_id)
        if request is not None:
            for sequence in request.sequences:
                self.finish(sequence, "abort")
        return request

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence and release its slot and pages.

        One that has ended already stays as it is, except that a stop string found in its last text outranks length.
        """
        if sequence.finish_reason is not None:
            if sequence.finish_reason == "length" and reason == "stop":
                sequence.finish_reason, sequence.stop_reason = reason, stop_reason
            return
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        sequence.finished_at = self._clock()
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._release(sequence)
        if sequence.request.finished:
            del self.requests[sequence.request.request_id]

    def schedule(self) -> StepWork:
        """The next round's work; empty when nothing waits or runs."""
        if self._in_flight is not None:
            raise RuntimeError("The previous round must be committed or abandoned before the next is scheduled.")
        current = _Round(self.config.max_batched_tokens, self.config.max_prefill_rows or self.config.max_slots)
        admitting = self.config.mode == "continuous" or not self.running
        for sequence in self.running:
            if sequence.decoding:
                self._decode(sequence, current)
        for sequence in self.running:
            if not sequence.decoding:
                self._prefill(sequence, current)
        if admitting:
            self._admit(current)
        self._in_flight = current.work()
        if self._in_flight.is_empty and self.requests:
            raise RuntimeError(f"{len(self.requests)} requests are unfinished, but none can go on.")
        return self._in_flight

    def commit(self, work: StepWork, result: StepResult) -> list[SequenceProgress]:
        """Record what the round gave; sequences that ended by token or length are released.

        Sequences cancelled since `schedule` are passed over.
        """
        self._land(work)
        now = self._clock()
        progress = []
        for slot in work.decodes:
            sequence = self._slots[slot]
            if sequence is not None:
                sequence.num_cached += 1
                self._append(sequence, result.sampled[slot], now)
                progress.append(SequenceProgress(sequence, result.sampled[slot], ()))
        for row in work.prefills:
            sequence = self._slots[row.slot]
            if sequence is not None:
                sequence.num_cached += len(row.token_ids)
                token = result.sampled[row.slot] if row.sample else None
                if token is not None:
                    sequence.decoding = True
                    self._append(sequence, token, now)
                progress.append(SequenceProgress(sequence, token, result.prompt_logprobs.get(row.slot, ())))
        return progress

    def abandon(self, work: StepWork) -> list[Request]:
        """Give up a round that failed: the requests it worked on are cancelled and returned, the others go on."""
        self._land(work)
        slots = (*work.decodes, *(row.slot for row in work.prefills), *(setup.slot for setup in work.slot_setups))
        owners = [self._slots[slot] for slot in slots]
        lost = list(dict.fromkeys(sequence.request for sequence in owners if sequence is not None))
        for request in lost:
            self.cancel(request.request_id)
        return lost

    def check_integrity(self) -> None:
        """RuntimeError unless pages, slots and reservations agree with the sequences; for tests and debugging."""
        self.pool.check_integrity()
        holds = [0] * self.config.num_pages
        for sequence in self.running:
            for page in sequence.pages:
                holds[page] += 1
        for page, count in enumerate(holds):
            if self.pool.reference_count(page) != count:
                raise RuntimeError(f"Page {page} has {self.pool.reference_count(page)} holds, but {count} users.")
        if self.running != [s for s in self.running if s.slot is not None and self._slots[s.slot] is s]:
            raise RuntimeError("A running sequence does not own its slot.")
        if len(self.running) + len(self._free_slots) != self.config.max_slots:
            raise RuntimeError("A slot is lost or owned twice.")
        if any(sequence.pages or sequence.slot is not None for sequence in self.waiting):
            raise RuntimeError("A waiting sequence holds a page or a slot.")
        owed = sum(self.pool.pages_for(s.request.max_positions) - len(s.pages) for s in self.running)
        if owed != self._reserved_pages or owed > self.pool.free_pages:
            raise RuntimeError(
                f"{self._reserved_pages} pages are reserved, {owed} owed and {self.pool.free_pages} free."
            )

    # Admission

    def _token_limit(self, request: Request) -> int:
        """How many tokens the request may sample, as asked and as fits; RequestRefused if it can never fit."""
        prompt, context = len(request.prompt_ids), self.config.max_context
        if prompt >= context:
            raise RequestRefused(
                f"The prompt has {prompt} tokens, but the context holds {context} including at least one new token;"
                " shorten the prompt."
            )
        asked = request.params.max_tokens
        positions = self.pool.usable_pages * self.pool.page_size
        limit = min(context - prompt, positions + 1 - prompt if asked is None else asked)
        needed = prompt + max(limit, 1) - 1
        if needed > positions:
            raise RequestRefused(
                f"The request needs {needed} cache positions ({prompt} prompt tokens and up to {max(limit, 1)} new"
                f" ones), but the whole cache has {positions}; lower max_tokens, shorten the prompt or enlarge the"
                " cache."
            )
        return limit

    def _admit(self, current: _Round) -> None:
        # A static wave is fixed when it starts, even if its prefill then takes several rounds.
        while self.waiting and (current.can_prefill or self.config.mode == "static"):
            sequence = self.waiting[0]
            needed = self.pool.pages_for(sequence.request.max_positions)
            if not self._free_slots or needed > self.pool.free_pages - self._reserved_pages:
                return
            self.waiting.popleft()
            self._reserved_pages += needed
            self._enter_slot(sequence, current)
            self._prefill(sequence, current)

    def _enter_slot(self, sequence: Sequence, current: _Round) -> None:
        slot = heapq.heappop(self._free_slots)
        self._slots[slot] = sequence
        sequence.slot = slot
        self.running.append(sequence)
        request = sequence.request
        banned = banned_until_min_tokens(request.params, request.eos_ids)
        current.slot_setups.append(
            SlotSetup(slot, request.params, sequence.seed, request.prompt_ids, tuple(sequence.output_ids), banned)
        )

    # Work of one sequence in one round

    def _decode(self, sequence: Sequence, current: _Round) -> None:
        slot = self._take_pages(sequence, sequence.num_cached + 1, current)
        current.decodes.append(slot)
        current.tokens_left -= 1

    def _prefill(self, sequence: Sequence, current: _Round) -> None:
        """Compute as much of the prompt as the round has room for."""
        if not current.can_prefill:
            return
        prompt = sequence.request.prompt_ids
        start = sequence.num_cached
        end = min(len(prompt), start + current.tokens_left)
        ends_prompt = end == len(prompt)
        slot = self._take_pages(sequence, end, current)
        report = sequence.request.params.prompt_logprobs if sequence.index == 0 else None
        next_token = None if ends_prompt else prompt[end]
        current.prefills.append(PrefillRow(slot, prompt[start:end], start, ends_prompt, report, next_token))
        current.tokens_left -= end - start
        current.rows_left -= 1
        if sequence.scheduled_at is None:
            sequence.scheduled_at = self._clock()

    def _take_pages(self, sequence: Sequence, positions: int, current: _Round) -> int:
        """Make sure the sequence has pages for this many positions; returns its slot."""
        slot = sequence.slot
        if slot is None:
            raise RuntimeError("A sequence without a slot cannot take pages.")
        missing = self.pool.pages_for(positions) - len(sequence.pages)
        if missing > 0:
            for page in self.pool.allocate(missing):
                current.table_updates.append(TableUpdate(slot, len(sequence.pages), page))
                sequence.pages.append(page)
            self._reserved_pages -= missing
        return slot

    # After the round

    def _land(self, work: StepWork) -> None:
        if work is not self._in_flight:
            raise RuntimeError("Only the round that was scheduled last can be committed or abandoned.")
        self._in_flight = None

    def _append(self, sequence: Sequence, token: SampledToken, now: float) -> None:
        sequence.output_ids.append(token.id)
        sequence.last_token_at = now
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        end = finish_by_token(sequence)
        if end is not None:
            self.finish(sequence, end.reason, end.stop_reason)

    def _release(self, sequence: Sequence) -> None:
        slot = sequence.slot
        if slot is None:
            raise RuntimeError("A sequence without a slot has nothing to release.")
        self.running.remove(sequence)
        self._reserved_pages -= self.pool.pages_for(sequence.request.max_positions) - len(sequence.pages)
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.slot = None
        sequence.decoding = False
        self._slots[slot] = None
        heapq.heappush(self._free_slots, slot)
