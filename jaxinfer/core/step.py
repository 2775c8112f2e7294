"""What the scheduler asks of the device in one round, and what comes back: plain integers, no arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxinfer.core.sampling_params import SamplingParams


class TableUpdate(NamedTuple):
    """Page `page_id` now holds positions column * page_size .. of the sequence in `slot`."""

    slot: int
    column: int
    page_id: int


class PageCopy(NamedTuple):
    """Page `target` becomes a copy of page `source`."""

    source: int
    target: int


class PageOut(NamedTuple):
    """The content of page `page` moves to slot `host_slot` of host memory."""

    page: int
    host_slot: int


class PageIn(NamedTuple):
    """Page `page` gets the content of slot `host_slot` of host memory."""

    host_slot: int
    page: int


@dataclass(frozen=True, slots=True)
class SlotSetup:
    """A sequence enters a slot: everything the sampler must know about it, replacing what the slot held before.

    Attributes:
        slot: slot number, 0 <= slot < max_slots.
        params: the request's generation parameters.
        seed: start of this sequence's random stream, 0 <= seed < 2**32, already different for each of n sequences.
        prompt_ids: the whole prompt (for penalties), also when it is prefilled over several rounds.
        output_ids: tokens sampled before; empty unless the sequence is computed again.
        eos_ids: ids that must not be sampled while fewer than params.min_tokens tokens are sampled
            (every end-of-sequence id and every stop id).
    """

    slot: int
    params: SamplingParams
    seed: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Consecutive known tokens of one sequence to compute: positions start .. start + len(token_ids) - 1.

    Attributes:
        slot: the sequence's slot.
        token_ids: the tokens, at least one.
        start: position of the first one; every position before it is in the cache already.
        sample: whether this row ends the known tokens, so that the next one is sampled from its last position.
        prompt_logprobs: how many most likely tokens to report for each prompt token, or None for no report.
        next_token: the known token that follows the row, None when the row ends them. With prompt_logprobs set
            the row reports on the tokens after its positions: token_ids[1:] and next_token unless that is None.
    """

    slot: int
    token_ids: tuple[int, ...]
    start: int
    sample: bool
    prompt_logprobs: int | None = None
    next_token: int | None = None


@dataclass(frozen=True, slots=True)
class StepWork:
    """One round. The device moves pages out, copies pages and brings pages in, applies table updates and slot setups,
    then decodes and prefills, and samples for both.

    Attributes:
        table_updates: new page table entries; an entry never changes while its sequence keeps the slot.
        slot_setups: sequences that entered a slot in this round.
        prefills: rows to compute, at most one per slot.
        decodes: slots that feed the token sampled last (kept on the device) at the next position and sample one more.
        page_outs: pages to be kept in host memory as they are before the round.
        page_copies: pages copied inside the pool after that, in this order.
        page_ins: pages that come back from host memory after that.
    """

    table_updates: tuple[TableUpdate, ...] = ()
    slot_setups: tuple[SlotSetup, ...] = ()
    prefills: tuple[PrefillRow, ...] = ()
    decodes: tuple[int, ...] = ()
    page_outs: tuple[PageOut, ...] = ()
    page_copies: tuple[PageCopy, ...] = ()
    page_ins: tuple[PageIn, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Positions computed in this round."""
        return len(self.decodes) + sum(len(row.token_ids) for row in self.prefills)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.decodes and not self.prefills


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, and how likely it was if its request asked for log probabilities.

    Attributes:
        id: the token.
        logprob: natural log of its probability; None when not asked for.
        top: (id, logprob) of the most likely tokens, best first, as many as asked for.
        rank: 1 for the most likely token of the vocabulary, 2 for the next; None when not asked for.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one round gave.

    Attributes:
        sampled: slot -> sampled token, for every slot in decodes and every prefill row with sample=True.
        prompt_logprobs: slot -> entries for the tokens that follow the row's positions, in order (see
            PrefillRow.next_token), for every row that asked for them.
        failed: slots whose logits were not all finite numbers; what was sampled for them means nothing.
    """

    sampled: Mapping[int, SampledToken]
    prompt_logprobs: Mapping[int, Sequence[SampledToken]] = field(default_factory=dict)
    failed: frozenset[int] = frozenset()
