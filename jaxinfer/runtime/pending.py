"""Rounds on the device: arrays that are still being computed, and how to read tokens from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxinfer.core.step import SampledToken, StepResult
from jaxinfer.runtime import sampler


class _Entries:
    """Log probabilities of some rows, copied to the host."""

    def __init__(self, choice: sampler.Sampled) -> None:
        arrays = (choice.ids, choice.logprobs, choice.ranks, choice.top_ids, choice.top_logprobs)
        self._ids, self._logprobs, self._ranks, self._top_ids, self._top_logprobs = map(np.asarray, arrays)

    def token(self, row: int, count: int) -> SampledToken:
        """Row `row` with its `count` most likely tokens."""
        ids, logprobs = self._top_ids[row, :count].tolist(), self._top_logprobs[row, :count].tolist()
        top = tuple(zip(ids, logprobs, strict=True))
        return SampledToken(int(self._ids[row]), float(self._logprobs[row]), top, int(self._ranks[row]))


@dataclass(frozen=True)
class SampledBatch:
    """The rows of one sampling: row i belongs to slots[i]; `logprobs` says how many likely tokens a slot wants."""

    choice: sampler.Sampled
    slots: tuple[int, ...]
    sampling: frozenset[int]
    logprobs: dict[int, int]

    def tokens(self) -> dict[int, SampledToken]:
        """By slot, without the rows that sample nothing."""
        rows = {slot: row for row, slot in enumerate(self.slots) if slot in self.sampling}
        ids = np.asarray(self.choice.ids).tolist()
        tokens = {slot: SampledToken(ids[row]) for slot, row in rows.items()}
        asked = self.logprobs.keys() & rows.keys()
        if asked:
            entries = _Entries(self.choice)
            tokens |= {slot: entries.token(rows[slot], self.logprobs[slot]) for slot in asked}
        return tokens

    def failed(self) -> set[int]:
        """The slots whose logits were not all finite."""
        finite = np.asarray(self.choice.finite).tolist()
        return {slot for slot, flag in zip(self.slots, finite, strict=False) if not flag}


@dataclass(frozen=True)
class ScoredPart:
    """Log probabilities of some prompt tokens of one row, with the `count` most likely tokens of each."""

    choice: sampler.Sampled
    rows: range
    count: int

    def tokens(self) -> list[SampledToken]:
        """In the order of the prompt."""
        entries = _Entries(self.choice)
        return [entries.token(row, self.count) for row in self.rows]


@dataclass(frozen=True)
class PendingStep:
    """A round on the device. Its result may also be asked for after later rounds were dispatched."""

    batches: tuple[SampledBatch, ...]
    scores: dict[int, list[ScoredPart]]

    def result(self) -> StepResult:
        """What the round gave; waits for it."""
        sampled: dict[int, SampledToken] = {}
        failed: set[int] = set()
        for batch in self.batches:
            sampled |= batch.tokens()
            failed |= batch.failed()
        scored = {slot: [token for part in parts for token in part.tokens()] for slot, parts in self.scores.items()}
        return StepResult(sampled, scored, frozenset(failed))
