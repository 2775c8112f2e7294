"""The sizes an engine is built for, and the batch shapes (buckets) compiled for them."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from jaxinfer.core.scheduler_config import SchedulerConfig


@dataclass(frozen=True)
class RunnerLimits:
    """What the device is prepared for; nothing larger can be asked of it later.

    max_slots: sequences that run at once.
    page_size: positions of a page.
    num_pages: pages of the pool, padding page 0 included.
    max_context: positions of one sequence, prompt and output together.
    max_batched_tokens: prompt tokens of one prefill, and the token budget of one round.
    max_prefill_rows: sequences of one prefill.
    vocab_size: of the model.
    window: positions that any layer of the model sees, if all its layers see only so many: pages that lie behind are
        given up while a sequence runs. None keeps all pages.
    host_pages: pages that host memory keeps for the pool to get back.
    Raises ValueError, one sentence, when they contradict each other.
    """

    max_slots: int
    page_size: int
    num_pages: int
    max_context: int
    max_batched_tokens: int
    max_prefill_rows: int
    vocab_size: int
    window: int | None = None
    host_pages: int = 0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if (name == "window" and value is None) or (name == "host_pages" and value == 0):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}.")
        if self.page_size % 8:
            raise ValueError(f"page_size must be a multiple of 8, not {self.page_size}.")
        if self.max_context < 2:
            raise ValueError("max_context must be at least 2: one prompt token and one new one.")
        if self.num_pages < 2:
            raise ValueError("num_pages must be at least 2: page 0 is for padding and holds no sequence.")
        if self.max_batched_tokens < self.max_slots:
            raise ValueError(
                f"max_batched_tokens is {self.max_batched_tokens}, but must be at least max_slots ({self.max_slots}), "
                "since every running sequence takes one token of a round."
            )

    @classmethod
    def of_scheduler(cls, config: SchedulerConfig, vocab_size: int) -> RunnerLimits:
        """What a runner is built for whose rounds such a scheduler makes."""
        return cls(
            max_slots=config.max_slots,
            page_size=config.page_size,
            num_pages=config.num_pages,
            max_context=config.max_context,
            max_batched_tokens=config.max_batched_tokens,
            max_prefill_rows=config.max_prefill_rows or config.max_slots,
            vocab_size=vocab_size,
            window=config.window,
            host_pages=config.host_pages,
        )

    @property
    def pages_per_sequence(self) -> int:
        """Columns of the page table."""
        return -(-self.max_context // self.page_size)


@dataclass(frozen=True)
class Buckets:
    """Batch shapes that are compiled; a batch runs in the smallest one that holds it.

    decode_rows: row counts of decode, rising.
    prefill: (tokens, rows) of prefill, in order of preference.
    """

    decode_rows: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]

    def decode(self, rows: int) -> int:
        """The bucket for a decode of `rows` sequences."""
        return self.decode_rows[bisect.bisect_left(self.decode_rows, rows)]

    def prefill_for(self, tokens: int, rows: int) -> tuple[int, int]:
        """The bucket for a prefill of `tokens` tokens of `rows` sequences."""
        return next(bucket for bucket in self.prefill if bucket[0] >= tokens and bucket[1] >= rows)


SMALLEST_PREFILL = 32


def buckets_for(limits: RunnerLimits) -> Buckets:
    """Powers of two up to the limits.

    A single sequence may fill any power of two; for several, whose prompts add up anyway, every other one is enough,
    which halves the programs to compile for at most twice the padding.
    """
    most = min(limits.max_batched_tokens, limits.max_context * limits.max_prefill_rows)
    single = _powers_of_two(min(SMALLEST_PREFILL, most), min(most, limits.max_context))
    prefill = {(tokens, 1) for tokens in single}
    if limits.max_prefill_rows > 1:
        several = _powers_of_two(min(SMALLEST_PREFILL, most), most)
        prefill |= {(tokens, limits.max_prefill_rows) for tokens in several[::-1][::2]}
    return Buckets(
        decode_rows=_powers_of_two(1, limits.max_slots),
        prefill=tuple(sorted(prefill)),
    )


def _powers_of_two(smallest: int, largest: int) -> tuple[int, ...]:
    """smallest, doubled again and again, and at the end exactly `largest`."""
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= 2
    return (*sizes, largest)
