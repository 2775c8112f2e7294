"""Decides, round by round, which sequences run and which pages they use."""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from jaxinfer.core.admission import token_limit
from jaxinfer.core.observer import (
    Load,
    Observer,
    RequestQueued,
    SequenceFinished,
    SequenceId,
    SequencePreempted,
    unobserved,
)
from jaxinfer.core.page_cache import PageCache, Prefix, clear_pages
from jaxinfer.core.pool import PADDING_PAGE, BlockPool
from jaxinfer.core.request import DEADLINE, NON_FINITE, FinishReason, Request, RequestRefused, Sequence
from jaxinfer.core.rounds import InFlight, Part, Round, SchedulerCounts, SequenceProgress
from jaxinfer.core.scheduler_config import SchedulerConfig
from jaxinfer.core.step import PrefillRow, SampledToken, SlotSetup, StepResult, StepWork, TableUpdate
from jaxinfer.core.stop import banned_until_min_tokens, finish_by_token


class Scheduler:
    """Serves sequences in the order of their rank. One round decodes every running sequence and prefills under what is
    left of the token budget.

    Pages are taken as tokens come. A sequence that needs a page when none is free takes those of the lowest-ranked
    running sequence, which then waits again and is later computed anew, prompt and output; the lowest-ranked itself
    just skips the round. So the highest-ranked always advances. To keep this rare, a sequence is admitted only when
    the pages for its known tokens are free, and one more for each that runs.

    With prefix caching, a sequence starts behind what `PageCache` finds of its tokens. One whose next page is being
    computed in the very round (n > 1, equal prompts) is admitted a round later, when it can share it; in static waves
    it computes its own.

    Rounds are committed in the order in which they were scheduled. Up to max_rounds_in_flight may be scheduled before
    the first is committed: a round counts as computed as soon as it is scheduled, and the tokens that it samples as
    pending until they are known. A sequence that turns out to have ended is in the later rounds for nothing; rounds
    must run in order, so that what those write into its pages comes before what the pages' next user writes. add,
    cancel, finish and expire may come at any moment between. Not thread-safe.

    Args:
        config: the limits.
        clock: seconds; arrivals and deadlines are given and times recorded in it.
        observer: told of requests queued, sequences preempted and sequences finished.
        model_version: names model, weights and adapter; pages are found only under the same one.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer = unobserved,
        model_version: str = "",
    ) -> None:
        self.config = config
        self.cache = PageCache(
            config.num_pages,
            config.page_size,
            host_pages=config.host_pages,
            window=config.window,
            longest_chunk=config.max_batched_tokens,
            model_version=model_version if config.enable_prefix_caching else None,
        )
        self.counts = SchedulerCounts()
        self.requests: dict[str, Request] = {}
        self.waiting: list[Sequence] = []  # in order of rank
        self.running: list[Sequence] = []  # in order of rank
        self._clock = clock
        self._observer = observer
        self._slots: list[Sequence | None] = [None] * config.max_slots
        self._free_slots = list(range(config.max_slots))  # a heap: low slots first
        self._num_added = 0
        self._deadlines: list[tuple[float, str]] = []  # a heap
        self._in_flight: deque[InFlight] = deque()

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.requests)

    @property
    def pool(self) -> BlockPool:
        """The pages of the device."""
        return self.cache.pool

    @property
    def load(self) -> Load:
        """What waits and runs, and the pages that it takes."""
        return Load(len(self.waiting), len(self.running), self.pool.usage, self.cache.host.used_slots)

    @property
    def reserved_pages(self) -> int:
        """Pages that running sequences were admitted for and have not taken yet."""
        return sum(max(0, self._pages_promised(s) - self.cache.pages_held(s)) for s in self.running)

    def add(self, request: Request) -> None:
        """Queue a request. RequestRefused, with the numbers, if it can never be served."""
        if request.request_id in self.requests:
            raise RequestRefused(f"Request {request.request_id!r} is still being served; use another id.")
        if request.priority and self.config.policy != "priority":
            raise RequestRefused(
                f"The request has priority {request.priority}, but the policy is 'fcfs'; leave the priority out or"
                " serve with the policy 'priority'."
            )
        request.max_new_tokens = token_limit(request, self.config, self.cache)
        self.requests[request.request_id] = request
        self._num_added += 1
        names = self.cache.prompt_names(request)
        for sequence in request.sequences:
            sequence.rank = (request.priority, self._num_added, sequence.index)
            sequence.page_hashes = names.copy()
            insort(self.waiting, sequence, key=_rank)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.request_id))
        self._observer(
            RequestQueued(
                self._clock(),
                request.arrival,
                request.request_id,
                len(request.prompt_ids),
                request.max_new_tokens,
                len(request.sequences),
            )
        )

    def cancel(self, request_id: str, stop_reason: str | None = None) -> Request | None:
        """End every unfinished sequence of a request with reason "abort"; None if no such request is unfinished."""
        request = self.requests.get(request_id)
        if request is not None:
            for sequence in reversed(request.sequences):  # the end of a queue is removed fast, its start is not
                self.finish(sequence, "abort", stop_reason)
        return request

    def expire(self) -> list[Request]:
        """Cancel the requests whose deadline has passed, and return them."""
        now = self._clock()
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self.requests.get(heapq.heappop(self._deadlines)[1])
            if request is not None and request.deadline is not None and request.deadline <= now:
                self.cancel(request.request_id, DEADLINE)
                expired.append(request)
        return expired

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence and release its slot and pages.

        One that has ended already stays as it is, except that a stop string found in its last text outranks length and
        stop ids.
        """
        if sequence.finish_reason is not None:
            if sequence.finish_reason != "abort" and reason == "stop" and isinstance(stop_reason, str):
                sequence.finish_reason, sequence.stop_reason = reason, stop_reason
            return
        sequence.finished_at = self._clock()
        sequence.stop_reason = stop_reason
        sequence.finish_reason = reason  # last: it says that the sequence has ended and the rest is set
        sequence.request.num_unfinished -= 1
        if sequence.slot is None:
            del self.waiting[bisect_left(self.waiting, sequence.rank, key=_rank)]
        else:
            self._leave_slot(sequence)
        if sequence.request.finished:
            del self.requests[sequence.request.request_id]
        self._observer(SequenceFinished(sequence.finished_at, _sequence_id(sequence), reason, len(sequence.output_ids)))

    def schedule(self) -> StepWork:
        """The next round's work; empty when nothing can go on before a round in flight is committed."""
        if len(self._in_flight) >= self.config.max_rounds_in_flight:
            raise RuntimeError("The rounds in flight must be committed or abandoned before the next is scheduled.")
        self.cache.begin_round()
        current = Round(self.config.max_batched_tokens, self.config.max_prefill_rows or self.config.max_slots)
        for earlier in self._in_flight:
            current.being_written |= earlier.round.being_written
        if self.config.enable_chunked_prefill:
            self._decode_and_prefill(current)
        else:
            self._prefill_or_decode(current)
        work = current.work(self.cache.moves)
        if not work.is_empty:
            self._in_flight.append(InFlight(work, current))
            self._count_moves(work)
        elif work.page_outs or work.page_copies or work.page_ins:
            raise RuntimeError("Pages are to be moved in a round that computes nothing, and would not be.")
        elif self.requests and not self._in_flight:
            raise RuntimeError(f"{len(self.requests)} requests are unfinished, but none can go on.")
        return work

    def commit(self, work: StepWork, result: StepResult, now: float | None = None) -> list[SequenceProgress]:
        """Record what the oldest round in flight gave; sequences that ended by it, or failed, are released.

        Sequences that have ended since `schedule` are passed over. `now` is the time of the tokens, None for the
        clock's.
        """
        parts = self._land(work)
        now = self._clock() if now is None else now
        progress = []
        for slot in work.decodes:
            part = parts[slot]
            if part.sequence.finish_reason is None:
                token = self._record(part, slot, True, result, now)
                progress.append(SequenceProgress(part.sequence, token, ()))
        for row in work.prefills:
            part = parts[row.slot]
            if part.sequence.finish_reason is None:
                entries = self._new_entries(part.sequence, row, result.prompt_logprobs.get(row.slot, ()))
                token = self._record(part, row.slot, row.sample, result, now)
                progress.append(SequenceProgress(part.sequence, token, entries))
        return progress

    def abandon(self) -> list[Request]:
        """Give up the rounds in flight: the requests they worked on are cancelled and returned, the others go on."""
        sequences = [sequence for flight in self._in_flight for sequence in flight.round.sequences]
        self.cache.distrust(move.page for flight in self._in_flight for move in flight.work.page_ins)
        self._in_flight.clear()
        lost = list(dict.fromkeys(sequence.request for sequence in sequences if sequence.finish_reason is None))
        for request in lost:
            self.cancel(request.request_id)
        return lost

    def reset(self, torn: Iterable[Sequence] = ()) -> None:
        """Start again with an empty cache, after a failure at any point of a round or when the cache was lost.

        The requests that have a sequence on the device end with reason "abort", and so do `torn`: the sequences whose
        part in the round may have been recorded by half. The requests that only wait go on. Trusts nothing that a round
        changes, and may be repeated if it was itself interrupted.
        """
        torn = dict.fromkeys(torn)
        lost = dict.fromkeys(sequence.request for sequence in torn)
        for request in self.requests.values():
            if any(s.slot is not None or s.pages or s.num_pending for s in request.sequences):
                lost[request] = None
        ended = [s for request in lost for s in request.sequences if s.finish_reason is None]
        now = self._clock()
        for sequence in (*torn, *ended):
            sequence.finish_reason, sequence.stop_reason, sequence.finished_at = "abort", None, now
        self._rebuild()
        for sequence in ended:
            self._observer(SequenceFinished(now, _sequence_id(sequence), "abort", len(sequence.output_ids)))

    def owners(self, work: StepWork) -> dict[int, SequenceId]:
        """Slot -> sequence for every slot that a round in flight works on, without sequences that have ended since."""
        parts = next((flight.round.parts for flight in self._in_flight if flight.work is work), {})
        return {
            slot: _sequence_id(part.sequence) for slot, part in parts.items() if part.sequence.finish_reason is None
        }

    def check_integrity(self) -> None:
        """RuntimeError unless pages, names, slots and queues agree with the sequences; for tests and debugging."""
        self.cache.check_integrity(self.running)
        if self.running != [s for s in self.running if s.slot is not None and self._slots[s.slot] is s]:
            raise RuntimeError("A running sequence does not own its slot.")
        if len(self.running) + len(self._free_slots) != self.config.max_slots:
            raise RuntimeError("A slot is lost or owned twice.")
        if any(sequence.pages or sequence.slot is not None for sequence in self.waiting):
            raise RuntimeError("A waiting sequence holds a page or a slot.")
        self._check_queues()
        self._check_pending()
        if self.config.reserve_full and self.reserved_pages > self.pool.free_pages:
            raise RuntimeError(f"{self.reserved_pages} pages are reserved, but {self.pool.free_pages} free.")

    def _check_queues(self) -> None:
        for queue in (self.waiting, self.running):
            if queue != sorted(queue, key=_rank):
                raise RuntimeError("A queue is not in the order of rank.")
        unfinished = [s for r in self.requests.values() for s in r.sequences if s.finish_reason is None]
        if sorted(unfinished, key=_rank) != sorted([*self.waiting, *self.running], key=_rank):
            raise RuntimeError("An unfinished sequence is in no queue, or in two.")

    def _check_pending(self) -> None:
        pending: dict[Sequence, int] = {}
        for flight in self._in_flight:
            sampling = {*flight.work.decodes, *(row.slot for row in flight.work.prefills if row.sample)}
            for slot in sampling:
                sequence = flight.round.parts[slot].sequence
                pending[sequence] = pending.get(sequence, 0) + 1
        for sequence in (*self.waiting, *self.running):
            if sequence.num_pending != pending.get(sequence, 0):
                raise RuntimeError("A sequence waits for a token that no round in flight samples, or for too few.")

    # Admission

    def _admit(self, current: Round) -> None:
        # A static wave is fixed when it starts, even if its prefill then takes several rounds.
        static = self.config.mode == "static"
        while self.waiting and self._free_slots and (current.can_prefill or static):
            sequence = self.waiting[0]
            if sequence.num_pending:
                return  # preempted, and its last token is not known yet
            prefix = self._find_prefix(sequence)
            if not static and prefix.next_name in current.being_written:
                return
            if self._pages_needed(sequence, prefix) > self._pages_to_spare():
                return
            del self.waiting[0]
            self._enter_slot(sequence, prefix, current)
            self._prefill(sequence, current)

    def _find_prefix(self, sequence: Sequence) -> Prefix:
        if self._prompt_report(sequence) is not None:
            return Prefix()  # log probabilities need every position computed
        return self.cache.find(sequence)

    def _pages_needed(self, sequence: Sequence, prefix: Prefix) -> int:
        """How many pages nobody holds now its admission claims."""
        return self._pages_promised(sequence) - self.cache.pages_shared(prefix)

    def _pages_promised(self, sequence: Sequence) -> int:
        """How many pages a sequence is admitted for, those it holds included."""
        if self.config.reserve_full:
            return self.cache.most_pages(sequence.request.max_positions)
        return 0 if sequence.decoding else self.cache.most_pages(sequence.num_known)

    def _pages_to_spare(self) -> int:
        headroom = 0 if self.config.reserve_full else len(self.running)
        return self.pool.free_pages - self.reserved_pages - headroom

    def _enter_slot(self, sequence: Sequence, prefix: Prefix, current: Round) -> None:
        slot = heapq.heappop(self._free_slots)
        self._slots[slot] = sequence
        sequence.slot = slot
        current.entered.append(sequence)
        insort(self.running, sequence, key=_rank)
        self.cache.take(sequence, prefix)
        if sequence.prefix_tokens is None:
            sequence.prefix_tokens = sequence.num_cached
        if self.config.enable_prefix_caching:
            self.counts.prefix_queries += sequence.num_known
            self.counts.prefix_hits += sequence.num_cached
        request = sequence.request
        banned = banned_until_min_tokens(request.params, request.eos_ids)
        current.slot_setups.append(
            SlotSetup(slot, request.params, sequence.seed, request.prompt_ids, tuple(sequence.output_ids), banned)
        )

    # Work of a round

    def _decode_and_prefill(self, current: Round) -> None:
        admitting = self.config.mode == "continuous" or not self.running
        # Decodes come first in the budget, but pages go by rank: whoever loses its pages has no work yet in this round.
        current.tokens_left -= sum(map(_may_decode, self.running))
        self._work_through(current, decodes=True, prefills=True)
        if admitting:
            self._admit(current)

    def _prefill_or_decode(self, current: Round) -> None:
        admitting = self.config.mode == "continuous" or not self.running
        self._work_through(current, decodes=False, prefills=True)
        if admitting:
            self._admit(current)
        if not current.prefills:
            self._work_through(current, decodes=True, prefills=False)

    def _work_through(self, current: Round, *, decodes: bool, prefills: bool) -> None:
        index = 0
        while index < len(self.running):  # it loses sequences at its end while pages are short
            sequence = self.running[index]
            if decodes and _may_decode(sequence):
                self._decode(sequence, current)
            elif prefills and not sequence.decoding:
                self._prefill(sequence, current)
            index += 1

    def _decode(self, sequence: Sequence, current: Round) -> None:
        end = sequence.num_cached + 1
        if self._take_pages(sequence, end) == end:
            slot = self._show_pages(sequence, current)
            current.decodes.append(slot)
            self._advance(sequence, slot, end, True, current)

    def _prefill(self, sequence: Sequence, current: Round) -> None:
        """Compute as many of the known tokens as the round has room for."""
        if not current.can_prefill:
            return
        start, known = sequence.num_cached, sequence.num_known
        end = min(known, start + current.tokens_left)
        if end < known and not self._may_cut(known - start):
            return
        end = self._take_pages(sequence, end)
        if end <= start:
            return
        slot = self._show_pages(sequence, current)
        ends_known = end == known
        next_token = None if ends_known else sequence.known_ids(end, end + 1)[0]
        report = self._prompt_report(sequence)
        current.prefills.append(PrefillRow(slot, sequence.known_ids(start, end), start, ends_known, report, next_token))
        size = self.config.page_size
        current.being_written.update(sequence.page_hashes[start // size + 1 : end // size + 1])
        current.tokens_left -= end - start
        current.rows_left -= 1
        self._advance(sequence, slot, end, ends_known, current)
        if sequence.scheduled_at is None:
            sequence.scheduled_at = self._clock()

    def _advance(self, sequence: Sequence, slot: int, end: int, sampled: bool, current: Round) -> None:
        """Count the positions before `end` as computed and the token sampled after them, if any, as on its way."""
        current.parts[slot] = Part(sequence, end, sequence.num_preemptions)
        sequence.num_cached = end
        if sampled:
            sequence.decoding = True
            sequence.num_pending += 1

    def _may_cut(self, tokens: int) -> bool:
        """Whether that many tokens may be computed in pieces: a sequence computed again may not fit a round whole."""
        return self.config.enable_chunked_prefill or tokens > self.config.max_batched_tokens

    def _prompt_report(self, sequence: Sequence) -> int | None:
        """How many likely tokens to report for each prompt token; None once that is done or if it is not wanted."""
        request = sequence.request
        done = sequence.index > 0 or sequence.prompt_tokens_reported >= len(request.prompt_ids) - 1
        return None if done else request.params.prompt_logprobs

    def _take_pages(self, sequence: Sequence, positions: int) -> int:
        """Get pages for this many positions, if need be from sequences of lower rank; returns how many it has."""
        self.cache.drop_behind_window(sequence)
        missing = self.cache.missing_pages(sequence, positions)
        while missing > self.pool.free_pages and self.running[-1] is not sequence:
            self._preempt()
        return self.cache.take_pages(sequence, positions)

    def _show_pages(self, sequence: Sequence, current: Round) -> int:
        """Enter the pages the device does not know yet into its table; returns the sequence's slot."""
        slot = sequence.slot
        if slot is None:
            raise RuntimeError("A sequence without a slot cannot work.")
        for column in range(sequence.num_shown, len(sequence.pages)):
            if sequence.pages[column] != PADDING_PAGE:
                current.table_updates.append(TableUpdate(slot, column, sequence.pages[column]))
        sequence.num_shown = len(sequence.pages)
        return slot

    def _preempt(self) -> None:
        """Take slot and pages from the running sequence of lowest rank; its tokens stay known."""
        sequence = self.running[-1]
        slot = self._leave_slot(sequence)
        insort(self.waiting, sequence, key=_rank)
        sequence.num_preemptions += 1
        self.counts.preemptions += 1
        self._observer(SequencePreempted(self._clock(), _sequence_id(sequence), slot))

    def _count_moves(self, work: StepWork) -> None:
        self.counts.page_copies += len(work.page_copies)
        self.counts.pages_out += len(work.page_outs)
        self.counts.pages_in += len(work.page_ins)

    # After the round

    def _land(self, work: StepWork) -> dict[int, Part]:
        if work.is_empty:
            return {}
        if not self._in_flight or work is not self._in_flight[0].work:
            raise RuntimeError("Only the oldest round in flight can be committed.")
        return self._in_flight.popleft().round.parts

    def _record(self, part: Part, slot: int, sampled: bool, result: StepResult, now: float) -> SampledToken | None:
        """Take the token sampled at the end of the part, if any, and offer the pages that it filled to others."""
        sequence = part.sequence
        sequence.num_pending -= sampled
        if slot in result.failed:
            self.cache.forget(sequence)
            self.finish(sequence, "abort", NON_FINITE)
            return None
        if not part.has_left:
            self.cache.computed(sequence, part.end)
        if not sampled:
            return None
        if not sequence.output_ids and not part.has_left:
            self.cache.offer_tail(sequence)  # its prompt is complete
        token = result.sampled[slot]
        self._append(sequence, token, now)
        return token

    def _append(self, sequence: Sequence, token: SampledToken, now: float) -> None:
        sequence.output_ids.append(token.id)
        sequence.last_token_at = now
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        end = finish_by_token(sequence)
        if end is not None:
            self.finish(sequence, end.reason, end.stop_reason)

    def _new_entries(
        self, sequence: Sequence, row: PrefillRow, entries: SequenceOf[SampledToken]
    ) -> SequenceOf[SampledToken]:
        """The row's entries about prompt tokens that were not reported before the sequence was preempted."""
        new = entries[max(0, sequence.prompt_tokens_reported - row.start) :]
        sequence.prompt_tokens_reported += len(new)
        return new

    def _rebuild(self) -> None:
        """Queues, slots and pages for the sequences that have not ended, all of them waiting."""
        self._in_flight.clear()
        self.cache.reset()
        self._slots = [None] * self.config.max_slots
        self._free_slots = list(range(self.config.max_slots))
        self.running = []
        sequences = [sequence for request in self.requests.values() for sequence in request.sequences]
        for sequence in sequences:
            clear_pages(sequence)
            sequence.slot, sequence.decoding, sequence.num_pending = None, False, 0
        self.waiting = sorted((s for s in sequences if s.finish_reason is None), key=_rank)
        for request in self.requests.values():
            request.num_unfinished = sum(sequence.finish_reason is None for sequence in request.sequences)
        self.requests = {name: request for name, request in self.requests.items() if not request.finished}

    def _leave_slot(self, sequence: Sequence) -> int:
        slot = sequence.slot
        if slot is None:
            raise RuntimeError("A sequence without a slot has nothing to release.")
        self.running.remove(sequence)
        self.cache.leave(sequence)
        sequence.slot = None
        sequence.decoding = False
        self._slots[slot] = None
        heapq.heappush(self._free_slots, slot)
        return slot


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank


def _may_decode(sequence: Sequence) -> bool:
    """Whether it has a token to feed back and, whatever the pending ones turn out to be, may sample another."""
    return sequence.decoding and len(sequence.output_ids) + sequence.num_pending < sequence.request.max_new_tokens


def _sequence_id(sequence: Sequence) -> SequenceId:
    return SequenceId(sequence.request.request_id, sequence.index)
