"""Executes the scheduler's rounds on the device: plain integers in, sampled tokens out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxinfer.core.step import PrefillRow, SlotSetup, StepResult, StepWork, TableUpdate
from jaxinfer.models import DecoderConfig
from jaxinfer.runtime import programs as compiled
from jaxinfer.runtime import sampler
from jaxinfer.runtime.limits import Buckets, RunnerLimits, buckets_for
from jaxinfer.runtime.page_moves import HostPages, PageMover
from jaxinfer.runtime.pending import PendingStep, SampledBatch, ScoredPart
from jaxinfer.runtime.programs import Programs, Progress
from jaxinfer.runtime.state import EngineState, MixedBatch, PrefillBatch, TableUpdates, init_state
from jaxinfer.runtime.steps import Params
from pallas_kernels.dispatch import current_platform

TABLE_UPDATES_PER_CALL = 256
"""Page table entries that one call of `update_table` takes."""


def update_table(page_table: jax.Array, updates: TableUpdates) -> jax.Array:
    """Page table i32[slots, max_pages] with the updates; donate it."""
    return page_table.at[updates.slots, updates.columns].set(updates.pages, mode="drop")


class Runner:
    """Parameters, cache and sampler state on the device, and the programs that work on them.

    Building it allocates everything and compiles everything; `execute` allocates and compiles nothing.

    config, params: the model. limits: the sizes. on_progress: told of each compiled program. buckets: the batch shapes
    to compile; None for all that the limits allow.
    """

    def __init__(
        self,
        config: DecoderConfig,
        params: Params,
        limits: RunnerLimits,
        on_progress: Progress | None = None,
        buckets: Buckets | None = None,
    ) -> None:
        config = config.for_context(limits.max_context)
        self.config = config
        self.params = params
        self.limits = limits
        self.buckets: Buckets = buckets or buckets_for(limits, current_platform())
        self.programs: Programs = compiled.compile_programs(config, params, limits, self.buckets, on_progress)
        kv = jax.eval_shape(self._empty_state).kv
        host = HostPages(kv, limits.host_pages) if limits.host_pages else None
        moves = (self.programs.copy_pages, self.programs.gather_pages, self.programs.scatter_pages)
        self._mover = PageMover(*moves, host)
        self.reset()
        table_updates = compiled.updates_of(TABLE_UPDATES_PER_CALL)
        self._update_table = (
            jax.jit(update_table, donate_argnums=0).lower(self.state.page_table, table_updates).compile()
        )

    def reset(self) -> None:
        """Empty the cache and every slot."""
        self._mover.reset()
        self.state = self._empty_state()
        self.sampler = sampler.init_sampler(self.limits.max_slots, self.limits.vocab_size)
        self._logprobs: dict[int, int] = {}

    def _empty_state(self) -> EngineState:
        limits = self.limits
        return init_state(
            self.config,
            num_slots=limits.max_slots,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_context=limits.max_context,
        )

    def execute(self, work: StepWork) -> StepResult:
        """Run one round and wait for its result."""
        return self.dispatch(work).result()

    def dispatch(self, work: StepWork) -> PendingStep:
        """Hand one round to the device: page moves, slot setups, then decodes and prefills with what they sample, in
        one program where the buckets say so, else the decodes first.

        Returns without waiting; rounds run in the order in which they are dispatched.
        """
        kv = self._mover.move(self.state.kv, work.page_outs, work.page_copies, work.page_ins)
        self.state = dataclasses.replace(self.state, kv=kv)
        self._set_up(work.slot_setups)
        batches: list[SampledBatch] = []
        decodes, updates = work.decodes, work.table_updates
        if decodes and not (work.prefills and self._mixes(work)):
            prefilled = {row.slot for row in work.prefills}
            decode_updates = [update for update in updates if update.slot not in prefilled]
            batches.append(self._batch(self._decode(decodes, decode_updates), decodes, decodes))
            decodes, updates = (), [update for update in updates if update.slot in prefilled]
        scores: dict[int, list[ScoredPart]] = {}
        if work.prefills:
            choice, hidden = self._prefill(work.prefills, decodes, updates)
            scores = self._score(work.prefills, hidden)
            slots = [*decodes, *(row.slot for row in work.prefills)]
            sampling = [*decodes, *(row.slot for row in work.prefills if row.sample)]
            batches.append(self._batch(choice, slots, sampling))
        return PendingStep(tuple(batches), scores)

    def _mixes(self, work: StepWork) -> bool:
        tokens = sum(len(row.token_ids) for row in work.prefills)
        return self.buckets.mixes(len(work.decodes), tokens, len(work.prefills))

    def recover(self) -> bool:
        """Make the runner usable after `execute` was left by an exception; True if the cache was lost and is empty now.

        An exception between a program's call and the assignment of its results leaves only donated, deleted arrays
        behind; a program that failed on the device leaves arrays that cannot be read.
        """
        self._mover.reset()
        arrays = jax.tree.leaves((self.state, self.sampler))
        if _readable(arrays):
            return False
        for array in arrays:  # all must be gone before there is room for new ones
            array.delete()
        self.reset()
        return True

    # --- decode and prefill ------------------------------------------------------------------------------------------

    def _decode(self, slots: Sequence[int], updates: Sequence[TableUpdate]) -> sampler.Sampled:
        rows = self.buckets.decode(len(slots))
        padded = self._padded_slots(slots, rows)
        step = self.programs.decode[rows]
        logits, self.state = step(
            self.params, self.state, self.sampler.last_token, padded, self._table_updates(updates, rows)
        )
        return self._sample(logits, padded)

    def _prefill(
        self, prefills: Sequence[PrefillRow], decodes: Sequence[int], updates: Sequence[TableUpdate]
    ) -> tuple[sampler.Sampled, jax.Array]:
        """What the decoding slots and then the prefilled rows sample, and the hidden states, prefilled rows first."""
        counts = [len(row.token_ids) for row in prefills]
        prefilled = sum(counts)
        tokens, rows = self.buckets.prefill_for(prefilled + len(decodes), len(prefills))
        token_ids = np.zeros(tokens, np.int32)
        token_ids[:prefilled] = np.concatenate([row.token_ids for row in prefills])
        query_starts = np.full(rows + 1, prefilled, np.int32)
        query_starts[: len(counts) + 1] = np.cumsum([0, *counts])
        starts = np.zeros(rows, np.int32)
        starts[: len(prefills)] = [row.start for row in prefills]
        mixed_rows = self.buckets.mixed_in(tokens)
        sampled = compiled.sampled_rows(rows, mixed_rows, self.limits)
        wanted = np.full(sampled, tokens, np.int32)
        wanted[: len(decodes)] = prefilled + np.arange(len(decodes))
        wanted[len(decodes) : len(decodes) + len(prefills)] = query_starts[1 : len(prefills) + 1] - 1
        update_count = compiled.table_updates(tokens, rows + mixed_rows, self.limits.page_size)
        self._enter_table(updates[update_count:])  # pages found in the prefix cache come in any number
        prefill = PrefillBatch(
            token_ids,  # pyright: ignore[reportArgumentType]  # numpy arrays are moved by the compiled program
            query_starts,  # pyright: ignore[reportArgumentType]
            self._padded_slots([row.slot for row in prefills], rows),  # pyright: ignore[reportArgumentType]
            starts,  # pyright: ignore[reportArgumentType]
            self._table_updates(updates[:update_count], update_count),
        )
        batch = MixedBatch(prefill, self._padded_slots(decodes, mixed_rows), wanted)  # pyright: ignore[reportArgumentType]
        step = self.programs.prefill[tokens, rows]
        logits, hidden, self.state = step(self.params, self.state, self.sampler.last_token, batch)
        # A row that does not end its prompt is sampled as padding: nothing of it is kept.
        sampling = [row.slot if row.sample else self.limits.max_slots for row in prefills]
        return self._sample(logits, self._padded_slots([*decodes, *sampling], sampled)), hidden

    def _sample(self, logits: jax.Array, slots: np.ndarray) -> sampler.Sampled:
        choice, self.sampler = self.programs.sample[len(slots)](self.sampler, logits, slots)
        return choice

    def _enter_table(self, updates: Sequence[TableUpdate]) -> None:
        for first in range(0, len(updates), TABLE_UPDATES_PER_CALL):
            some = self._table_updates(updates[first : first + TABLE_UPDATES_PER_CALL], TABLE_UPDATES_PER_CALL)
            page_table = self._update_table(self.state.page_table, some)
            self.state = dataclasses.replace(self.state, page_table=page_table)

    def _padded_slots(self, slots: Sequence[int], rows: int) -> np.ndarray:
        padded = np.full(rows, self.limits.max_slots, np.int32)
        padded[: len(slots)] = slots
        return padded

    def _table_updates(self, updates: Sequence[TableUpdate], count: int) -> TableUpdates:
        table = np.zeros((3, count), np.int32)
        table[0] = self.limits.max_slots
        if updates:
            table[:, : len(updates)] = np.array(updates, np.int32).T
        return TableUpdates(table[0], table[1], table[2])  # pyright: ignore[reportArgumentType]

    # --- results -----------------------------------------------------------------------------------------------------

    def _batch(self, choice: sampler.Sampled, slots: Sequence[int], sampling: Iterable[int]) -> SampledBatch:
        wanted = {slot: self._logprobs[slot] for slot in slots if slot in self._logprobs}
        for array in (choice.ids, choice.finite):
            array.copy_to_host_async()
        return SampledBatch(choice, tuple(slots), frozenset(sampling), wanted)

    def _score(self, prefills: Sequence[PrefillRow], hidden: jax.Array) -> dict[int, list[ScoredPart]]:
        """Log probabilities of the prompt tokens of the rows that ask for them, by slot."""
        scores: dict[int, list[ScoredPart]] = {}
        begin = 0
        for row in prefills:
            if row.prompt_logprobs is not None:
                targets = row.token_ids[1:] if row.next_token is None else (*row.token_ids[1:], row.next_token)
                scores[row.slot] = list(self._score_row(hidden, begin, targets, row.prompt_logprobs))
            begin += len(row.token_ids)
        return scores

    def _score_row(self, hidden: jax.Array, begin: int, targets: Sequence[int], count: int) -> Iterator[ScoredPart]:
        done = 0
        while done < len(targets):
            # The device slides a slice that would reach past the end back to fit; so does this.
            start = min(begin + done, hidden.shape[0] - compiled.SCORED_PER_CALL)
            skipped = begin + done - start
            some = targets[done : done + compiled.SCORED_PER_CALL - skipped]
            padded = np.zeros(compiled.SCORED_PER_CALL, np.int32)
            padded[skipped : skipped + len(some)] = some
            choice = self.programs.score(self.params, hidden, np.int32(start), padded)
            yield ScoredPart(choice, range(skipped, skipped + len(some)), count)
            done += len(some)

    # --- slots -------------------------------------------------------------------------------------------------------

    def _set_up(self, setups: Sequence[SlotSetup]) -> None:
        most = self.limits.max_prefill_rows
        for first in range(0, len(setups), most):
            some = setups[first : first + most]
            slots = self._padded_slots([setup.slot for setup in some], most)
            self.sampler = self.programs.setup_slots(self.sampler, slots, _settings(some, most))
        for setup in setups:
            self._logprobs.pop(setup.slot, None)
            if setup.params.logprobs is not None:
                self._logprobs[setup.slot] = setup.params.logprobs
        facts = [fact for setup in setups for fact in _token_facts(setup)]
        for first in range(0, len(facts), compiled.FACTS_PER_CALL):
            self._add_facts(facts[first : first + compiled.FACTS_PER_CALL])

    def _add_facts(self, facts: list[_Fact]) -> None:
        table = np.zeros((5, compiled.FACTS_PER_CALL), np.float32)
        table[0] = self.limits.max_slots
        table[:, : len(facts)] = np.array(facts, np.float32).T
        slots, ids, counts = table[:3].astype(np.int32)
        self.sampler = self.programs.add_token_facts(
            self.sampler, slots, ids, counts, table[3].astype(np.uint8), table[4]
        )


def _readable(arrays: Sequence[jax.Array]) -> bool:
    """Whether all arrays exist and were computed without error; waits for those still being computed."""
    if any(array.is_deleted() for array in arrays):
        return False
    try:
        jax.block_until_ready(arrays)
    except Exception:  # whatever a device reports: the arrays are lost
        return False
    return True


_Fact = tuple[int, int, int, int, float]
"""slot, token id, count in the output, flags, bias (token ids are exact in float32 up to 2^24)"""


def _edits_logits(setup: SlotSetup) -> bool:
    params = setup.params
    penalized = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return penalized or bool(params.logit_bias) or bool(setup.eos_ids)


def _token_facts(setup: SlotSetup) -> Iterator[_Fact]:
    """What the sampler must know about single tokens; nothing for requests whose logits stay as they are."""
    if not _edits_logits(setup):
        return
    for token_id in dict.fromkeys(setup.prompt_ids):
        yield setup.slot, token_id, 0, sampler.IN_PROMPT, 0.0
    for token_id in setup.output_ids:
        yield setup.slot, token_id, 1, 0, 0.0
    for token_id in setup.eos_ids:
        yield setup.slot, token_id, 0, sampler.ENDS_OUTPUT, 0.0
    for token_id, bias in (setup.params.logit_bias or {}).items():
        yield setup.slot, token_id, 0, 0, bias


def _settings(setups: Sequence[SlotSetup], rows: int) -> sampler.SlotSettings:
    """Settings of the setups as numpy arrays [rows]; padding rows are neutral."""
    padding = rows - len(setups)

    def column(values: list[Any], dtype: Any) -> Any:
        return np.array([*values, *([0] * padding)], dtype)

    params = [setup.params for setup in setups]
    return sampler.SlotSettings(
        temperature=column([_representable(p.temperature) for p in params], np.float32),
        top_p=column([p.top_p for p in params], np.float32),
        min_p=column([p.min_p for p in params], np.float32),
        repetition_penalty=column([p.repetition_penalty for p in params], np.float32),
        presence_penalty=column([p.presence_penalty for p in params], np.float32),
        frequency_penalty=column([p.frequency_penalty for p in params], np.float32),
        top_k=column([min(max(p.top_k, 0), _LARGEST_INT) for p in params], np.int32),
        seed=column([setup.seed for setup in setups], np.uint32),
        min_tokens=column([min(p.min_tokens, _LARGEST_INT) for p in params], np.int32),
        sampled=column([len(setup.output_ids) for setup in setups], np.int32),
        edits=column([_edits_logits(setup) for setup in setups], bool),
        logprobs=column([p.logprobs is not None for p in params], bool),
    )


_LARGEST_INT = 2**31 - 1
"""Larger counts mean the same: there is no vocabulary and no context of that size."""


def _representable(temperature: float) -> float:
    """Inside the range of float32: a temperature above 0 must not become 0 or infinite there."""
    limits = np.finfo(np.float32)
    return min(max(temperature, float(limits.tiny)), float(limits.max)) if temperature > 0 else temperature
