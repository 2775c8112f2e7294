"""The sizes an engine is built for, and the batch shapes (buckets) compiled for them."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from jaxinfer.core.scheduler_config import SchedulerConfig


@dataclass(frozen=True)
class RunnerLimits:
    """What the device is prepared for; nothing larger can be asked of it later.

    max_slots: sequences that run at once.
    page_size: positions of a page.
    num_pages: pages of the pool, padding page 0 included.
    max_context: positions of one sequence, prompt and output together.
    max_batched_tokens: tokens computed in one round, those of decodes included.
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
    mixed_rows: decodes that a prefill has room for beside its own rows, their tokens among its tokens; 0 for none.
    least_mixed: decodes from which on they run together with a prefill; fewer run as a decode of their own.
    most_mixed: tokens of the largest prefill with such room.
    """

    decode_rows: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]
    mixed_rows: int = 0
    least_mixed: int = 1
    most_mixed: int = sys.maxsize

    def decode(self, rows: int) -> int:
        """The bucket for a decode of `rows` sequences."""
        return self.decode_rows[bisect.bisect_left(self.decode_rows, rows)]

    def prefill_for(self, tokens: int, rows: int) -> tuple[int, int]:
        """The bucket for a prefill of `tokens` tokens of `rows` sequences."""
        return next(self._holding(tokens, rows))

    def mixes(self, decodes: int, tokens: int, rows: int) -> bool:
        """Whether so many decodes run in one program with a prefill of `tokens` tokens of `rows` sequences."""
        bucket = next(self._holding(decodes + tokens, rows), None)
        return bucket is not None and self.least_mixed <= decodes <= self.mixed_in(bucket[0])

    def mixed_in(self, tokens: int) -> int:
        """Decodes that the prefill bucket of `tokens` tokens has room for."""
        return self.mixed_rows if tokens <= self.most_mixed else 0

    def _holding(self, tokens: int, rows: int) -> Iterator[tuple[int, int]]:
        return (bucket for bucket in self.prefill if bucket[0] >= tokens and bucket[1] >= rows)


SMALLEST_PREFILL = 32
HALVED_ROWS, HALVED_TOKENS = 16, 64
"""From here on there is a decode batch, or a number of prefill tokens, halfway between two powers of two."""
MOST_MIXED_ON_CPU = 192
"""Tokens of the largest prefill there that takes decodes along: of larger ones reading the weights is a small part, and
the room for decodes would make every start longer."""


def buckets_for(limits: RunnerLimits, platform: str) -> Buckets:
    """Powers of two up to the limits; of the larger ones, where padding costs most, those halfway between as well.

    platform: "cpu", "cuda", "rocm" or "tpu", where the batches run.

    A prefill has room for as many sequences as may come, since those that do not come cost next to nothing. So it has
    for decodes, which then read no weights of their own; but on a CPU attention works as long for those that do not
    come, and a GPU cuts the contexts of those that do into fewer parts: there, at least half must come. On a CPU, where
    the weights are little of what a large prefill takes, only small ones have that room.
    """
    most_mixed = MOST_MIXED_ON_CPU if platform == "cpu" else sys.maxsize
    alone = min(limits.max_batched_tokens, limits.max_context * limits.max_prefill_rows)
    mixed = min(limits.max_batched_tokens, limits.max_context * limits.max_prefill_rows + limits.max_slots - 1)
    most = mixed if mixed <= most_mixed else alone
    tokens = _sizes(min(SMALLEST_PREFILL, most), most, HALVED_TOKENS)
    return Buckets(
        decode_rows=_sizes(1, limits.max_slots, HALVED_ROWS),
        prefill=tuple((size, limits.max_prefill_rows) for size in tokens),
        mixed_rows=limits.max_slots if limits.max_slots > 1 else 0,
        least_mixed=1 if platform == "tpu" else -(-limits.max_slots // 2),
        most_mixed=most_mixed,
    )


def _sizes(smallest: int, largest: int, halved_from: int) -> tuple[int, ...]:
    """smallest, doubled again and again, and at the end exactly `largest`; from `halved_from` on 1.5 times each too."""
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        if halved_from <= size and 3 * size // 2 < largest:
            sizes.append(3 * size // 2)
        size *= 2
    return (*sizes, largest)
