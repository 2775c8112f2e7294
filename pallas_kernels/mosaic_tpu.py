"""What the Mosaic TPU kernels share: block sizes, feature layout, page copies and the online softmax of one block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.pages import NOT_JOINED, QUANTIZED_MAX, KVPages, is_quantized, quantize_rows
from pallas_kernels.spec import AttentionSpec

LANES = 128
LOG2_E = 1.4426950408889634
"""Softmax runs on powers of two: scores times log2(e) take one multiplication, which the scale shares."""

MASKED = -1e30
"""Score of a key that a query does not see; finite, so that a row without any visible key stays free of NaN."""

BLOCK_BYTES = 2 << 20
"""Bytes of one block of pages. Two blocks are in flight or in use at a time; what is in flight must cover the bandwidth
times the latency of a copy, about 1.6 TB/s (v6e) to 3.7 TB/s (one core of v7x) times 0.6 us, with room to spare."""

UNROLLED_ROWS = 256
"""Query rows over which KV heads are taken together. By the compiler's schedule for v6e, a block of 2 MiB takes 4,962
cycles with 8 heads of 8 rows one after another and 1,273 with all of them together; its copy takes about 2,240."""

MAX_TABLE_ENTRIES = 1 << 17
"""Page table entries that fit into scalar memory (1 MiB a core) beside everything else: 512 KiB."""

VMEM_LIMIT = 48 << 20
"""Vector memory a kernel may take; the smallest chip among the targets, v7x, has 64 MiB a core."""


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


def sublanes(dtype: Any) -> int:
    """Rows of a register tile of this type: 8 for 4 bytes, 16 for 2, 32 for 1."""
    return 32 // np.dtype(dtype).itemsize


def write_rows(dtype: Any, page_size: int) -> int:
    """Rows that a write of one position reads, changes and writes back: a tile, or the page where it is smaller."""
    return min(sublanes(dtype), page_size)


def pages_per_block(pages: KVPages, max_pages: int, most_tokens: int) -> int:
    """Pages of one block: as many as BLOCK_BYTES hold, at most `most_tokens` positions or the table's, in whole lanes.

    Scores have positions on lanes, so that a block holds a multiple of 128 positions.
    """
    token_bytes = pages.kv_heads * round_up(pages.width, LANES) * np.dtype(pages.data.dtype).itemsize
    tokens = min(most_tokens, BLOCK_BYTES // token_bytes, round_up(max_pages * pages.page_size, LANES))
    unit = int(np.lcm(pages.page_size, LANES))
    return max(tokens // unit, 1) * unit // pages.page_size


@dataclass(frozen=True)
class Features:
    """Which lanes of a page row serve as keys and which as values.

    Keys of a multiple of 128 features, and values too, are sliced on lane tiles. Otherwise slicing would shift lanes in
    every row of the cache; instead queries are padded with zeros to the whole row, so that the row serves as key as it
    is, and the sum runs over the whole row, of which the values' lanes are kept at the end.
    shared: values are the first lanes of the keys.
    """

    k_dim: int
    v_dim: int
    shared: bool = False

    @property
    def sliced(self) -> bool:
        """Whether keys and values each fill whole lane tiles."""
        return self.k_dim % LANES == 0 and self.v_dim % LANES == 0

    @property
    def width(self) -> int:
        """Features of a page row."""
        return self.k_dim if self.shared else self.k_dim + self.v_dim

    @property
    def value_start(self) -> int:
        """First feature of the value in a page row."""
        return 0 if self.shared else self.k_dim

    @property
    def key_width(self) -> int:
        """Features of the row that scores are taken over."""
        return self.k_dim if self.sliced else self.width

    @property
    def sum_start(self) -> int:
        """First feature of the row that is summed up."""
        return self.value_start if self.sliced else 0

    @property
    def sum_width(self) -> int:
        """Features of the row that are summed up."""
        return self.v_dim if self.sliced else self.width

    @property
    def kept(self) -> slice:
        """Of the summed features, those of the values."""
        return slice(None) if self.sliced else slice(self.value_start, self.value_start + self.v_dim)


def features_of(spec: AttentionSpec, width: int) -> Features:
    """The feature layout of rows of this width."""
    return Features(spec.key_width(width), spec.value_width(width), spec.values_in_keys)


def compute_dtype(q_dtype: Any, page_dtype: Any) -> Any:
    """Type of the matrix products' operands: the queries' type, float32 if the pages are float32. Sums are float32."""
    return jnp.dtype(q_dtype) if is_quantized(page_dtype) else jnp.promote_types(q_dtype, page_dtype)


def pages_reason(pages: KVPages) -> str | None:
    """Why the TPU kernels cannot take pages of this shape, in a sentence; None when they can."""
    if pages.apart:
        return NOT_JOINED
    dtype = np.dtype(pages.data.dtype).name
    if dtype not in ("bfloat16", "float32", *QUANTIZED_MAX):
        return f"The TPU kernels take bfloat16, float32, int8 and float8_e4m3fn pages, but these are {dtype}."
    if pages.page_size % 16:
        return f"The TPU kernels copy whole tiles of 16 positions, but page_size is {pages.page_size}."
    if pages.width % LANES:
        wide = round_up(pages.width, LANES)
        return (
            f"Page rows have {pages.width} features, no multiple of {LANES}, and XLA would copy the whole pool to lay "
            f"it out anew around every call: pad keys and values to {wide // 2} features each, for "
            f"{wide / pages.width:.2f} times the memory and bandwidth."
        )
    return None


def attention_reason(q: Any, pages: KVPages, page_table: Any, most_tokens: int) -> str | None:
    """Why the TPU attention kernels cannot take these shapes, in a sentence; None when they can.

    most_tokens: positions of a block, as for `pages_per_block`.
    """
    reason = pages_reason(pages)
    if reason is not None:
        return reason
    if np.dtype(q.dtype).name not in ("bfloat16", "float32"):
        return f"The TPU kernels take bfloat16 and float32 queries, but these are {np.dtype(q.dtype).name}."
    if page_table.size > MAX_TABLE_ENTRIES:
        return (
            f"The page table has {page_table.size} entries, but the scalar memory of a TPU core holds "
            f"{MAX_TABLE_ENTRIES}: use larger pages, fewer sequences or a shorter context."
        )
    needed = vmem_bytes(pages, page_table.shape[1], most_tokens)
    if needed > VMEM_LIMIT // 2:
        return f"Two blocks of pages need {needed >> 20} MiB of vector memory, but the limit is {VMEM_LIMIT >> 21} MiB."
    return None


def vmem_bytes(pages: KVPages, max_pages: int, most_tokens: int) -> int:
    """Bytes of vector memory that the two blocks of pages take, scales included."""
    count = pages_per_block(pages, max_pages, most_tokens)
    rows = count * pages.kv_heads * round_up(pages.page_size, sublanes(pages.data.dtype))
    data = rows * round_up(pages.width, LANES) * np.dtype(pages.data.dtype).itemsize
    scales = 0
    if pages.scales is not None:
        scales = count * 2 * round_up(pages.kv_heads, 8) * round_up(pages.page_size, LANES) * 4
    return 2 * (data + scales)


def page_bytes(pages: KVPages) -> int:
    """Bytes that copying one page moves, with the lanes that a row or a scale row is padded to."""
    data = pages.kv_heads * pages.page_size * round_up(pages.width, LANES) * np.dtype(pages.data.dtype).itemsize
    return data + page_scale_bytes(pages)


def page_scale_bytes(pages: KVPages) -> int:
    """Bytes that copying the scales of one page moves; a tile has as many rows as heads, in powers of two up to 8."""
    if pages.scales is None:
        return 0
    tile = min(8, 1 << (pages.kv_heads - 1).bit_length())
    return 2 * round_up(pages.kv_heads, tile) * round_up(pages.page_size, LANES) * 4


def write_bytes(pages: KVPages) -> int:
    """Bytes that writing one position moves to the pool: its tile of rows, and the page's scales."""
    dtype = np.dtype(pages.data.dtype)
    rows = pages.kv_heads * write_rows(dtype, pages.page_size)
    return rows * round_up(pages.width, LANES) * dtype.itemsize + page_scale_bytes(pages)


def array_bytes(array: Any) -> int:
    """Bytes of an array."""
    return int(np.prod(array.shape)) * np.dtype(array.dtype).itemsize


def pool_arrays(pages: KVPages) -> list[jax.Array]:
    """The pool's arrays as kernel arguments, bound to HBM: XLA copies a small pool to vector memory otherwise."""
    arrays = [pages.data] if pages.scales is None else [pages.data, pages.scales]
    return [pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in arrays]


def join_rows(k: jax.Array, v: jax.Array | None, pages: KVPages) -> tuple[jax.Array, jax.Array | None]:
    """New keys and values [T, Hkv, .] as page rows [T, Hkv, width] in the pages' type, with scales f32[T, 2, Hkv].

    v is None where values lie in keys.
    """
    if v is None:
        if pages.scales is None:
            return k.astype(pages.data.dtype), None
        rows, scales = quantize_rows(k, pages.data.dtype)
        return rows, jnp.stack([scales, scales], axis=1)
    if pages.scales is None:
        return jnp.concatenate([k, v], axis=-1).astype(pages.data.dtype), None
    (keys, key_scales), (values, value_scales) = (quantize_rows(x, pages.data.dtype) for x in (k, v))
    return jnp.concatenate([keys, values], axis=-1), jnp.stack([key_scales, value_scales], axis=1)


@dataclass(frozen=True)
class PageBlocks:
    """Double-buffered copies of blocks of pages from the pool to vector memory, inside a kernel.

    pool, scales: the pool in HBM. buffer: [2, pages, Hkv, page_size, width].
    scale_buffer: [2, pages, 2, Hkv, page_size]; spread: [2, Hkv, 1, tokens], the scales of the block in use.
    semaphores: one for each buffer. table: the flat page table in scalar memory, `columns` entries a row.
    """

    pool: Any
    scales: Any
    buffer: Any
    scale_buffer: Any
    spread: Any
    semaphores: Any
    table: Any
    columns: int

    @property
    def pages(self) -> int:
        """Pages of a block."""
        return self.buffer.shape[1]

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self.buffer.shape[3]

    @property
    def tokens(self) -> int:
        """Positions of a block."""
        return self.pages * self.page_size

    def page_id(self, row: Any, column: Any) -> Any:
        """The page that holds column `column` of a sequence."""
        return self.table[row * self.columns + column]

    def _each_copy(self, row: Any, first: Any, end: Any, slot: Any, act: Callable[[Any], None]) -> None:
        """`act` on the copies of the pages of columns first .. min(first + pages, end) into buffer `slot`."""

        def one(index: Any, carry: None) -> None:
            page = self.page_id(row, first + index)
            semaphore = self.semaphores.at[slot]
            act(pltpu.make_async_copy(self.pool.at[page], self.buffer.at[slot, index], semaphore))
            if self.scales is not None:
                act(pltpu.make_async_copy(self.scales.at[page], self.scale_buffer.at[slot, index], semaphore))
            return carry

        lax.fori_loop(0, jnp.minimum(end - first, self.pages), one, None)

    def start(self, row: Any, first: Any, end: Any, slot: Any) -> None:
        """Start copying columns first .. min(first + pages, end) of a sequence into buffer `slot`."""
        self._each_copy(row, first, end, slot, lambda copy: copy.start())

    def wait(self, row: Any, first: Any, end: Any, slot: Any) -> None:
        """Wait for the copies that `start` began with the same arguments."""
        self._each_copy(row, first, end, slot, lambda copy: copy.wait())

    def rows(self, slot: Any, head: Any, dtype: Any) -> jax.Array:
        """The page rows [tokens, width] of one head, in `dtype`."""
        pages = self.buffer[slot, :, head]
        if pages.dtype != dtype:
            pages = pages.astype(jnp.float32).astype(dtype)
        return pages.reshape(self.tokens, pages.shape[-1])

    def spread_scales(self, slot: Any) -> None:
        """Lay the scales of the block's pages side by side, in `spread`; nothing for pages without scales."""
        if self.scales is not None:
            for which in range(2):
                pieces = [self.scale_buffer[slot, page, which] for page in range(self.pages)]
                self.spread[which] = jnp.concatenate(pieces, axis=-1)[:, None]


@dataclass(frozen=True)
class Visible:
    """What is visible of a block that starts at position `base`.

    keys: bool[rows, tokens], which positions each query row sees. begin, end: the positions that any row sees.
    """

    keys: jax.Array
    base: Any
    begin: Any
    end: Any

    def cleared(self, values: jax.Array) -> jax.Array:
        """Values [tokens, features] with zeros at positions that no row sees.

        What lies there may be NaN, and a weight of zero times NaN would spoil the sum.
        """
        position = self.base + lax.broadcasted_iota(jnp.int32, values.shape, 0)
        return jnp.where((position >= self.begin) & (position < self.end), values, jnp.zeros_like(values))


@dataclass(frozen=True)
class OnlineSoftmax:
    """Running softmax sums of the query rows of every head, in float32, inside a kernel.

    highest, total: [Hkv, rows, 128], the same in every lane; `highest` in powers of two. sums: [Hkv, rows, sum_width].
    """

    highest: Any
    total: Any
    sums: Any

    def reset(self, sinks: Any) -> None:
        """Start anew; `sinks` f32[Hkv, rows, 128] enters the denominator as a score of its own, None for no sinks."""
        if sinks is None:
            self.highest[...] = jnp.full_like(self.highest, MASKED)
            self.total[...] = jnp.zeros_like(self.total)
        else:
            self.highest[...] = sinks[...] * LOG2_E
            self.total[...] = jnp.ones_like(self.total)
        self.sums[...] = jnp.zeros_like(self.sums)

    def add(
        self, heads: Any, scores: jax.Array, visible: jax.Array | None, values: list[jax.Array], value_scales: Any
    ) -> None:
        """Add a block to a few heads, each step for all of them, so that none waits for another's last step.

        heads: slice of the heads. scores: f32[heads, rows, tokens], in powers of two. visible: bool[rows, tokens], None
        for all. values: [tokens, sum_width] of each head. value_scales: f32[heads, 1, tokens] or None.
        """
        if visible is not None:
            scores = jnp.where(visible[None], scores, MASKED)
        before = self.highest[heads][..., :1]
        highest = jnp.maximum(before, jnp.max(scores, axis=2, keepdims=True))
        weights = jnp.exp2(scores - highest)
        if visible is not None:
            # A row that has seen no key yet has MASKED as its highest score too.
            weights = jnp.where(visible[None], weights, 0)
        shrink = jnp.exp2(before - highest)
        total = self.total[heads][..., :1] * shrink + jnp.sum(weights, axis=2, keepdims=True)
        self.highest[heads] = jnp.broadcast_to(highest, (*highest.shape[:2], LANES))
        self.total[heads] = jnp.broadcast_to(total, (*total.shape[:2], LANES))
        if value_scales is not None:
            weights = weights * value_scales
            if visible is not None:
                # The scales of what is not visible may be NaN.
                weights = jnp.where(visible[None], weights, 0)
        sums = [product(weights[i].astype(rows.dtype), rows, 0) for i, rows in enumerate(values)]
        self.sums[heads] = self.sums[heads] * shrink + jnp.stack(sums)

    def result(self, head: Any) -> jax.Array:
        """sums / total f32[rows, sum_width]; 0 for a row that saw no key."""
        total = self.total[head][:, :1]
        return self.sums[head] / jnp.where(total == 0, 1, total)


def product(left: jax.Array, right: jax.Array, right_axis: int) -> jax.Array:
    """Matrix product over left's axis 1 and right's `right_axis`, with float32 sums, exact products for float32."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((1,), (right_axis,)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def sink_rows(sinks: jax.Array, kv_heads: int, repeat: int, rows: int) -> jax.Array:
    """f32[H] as f32[Hkv, rows, 128]: the heads of each group, all of them `repeat` times, padded with zeros."""
    grouped = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, -1), (1, repeat))
    padded = jnp.pad(grouped, ((0, 0), (0, rows - grouped.shape[1])))
    return jnp.broadcast_to(padded[..., None], (*padded.shape, LANES))


def attend_block(
    blocks: PageBlocks,
    softmax: OnlineSoftmax,
    queries: Any,
    slot: Any,
    visible: Visible | None,
    spec: AttentionSpec,
    features: Features,
) -> None:
    """Add the block in buffer `slot` to the sums of every head.

    queries: a reference [Hkv, rows, key_width]. visible: None if every query row sees the whole block.
    """
    blocks.spread_scales(slot)
    start, stop = features.sum_start, features.sum_start + features.sum_width
    dtype = compute_dtype(queries.dtype, blocks.buffer.dtype)

    def some_heads(first: Any, count: int) -> None:
        rows = [blocks.rows(slot, first + i, dtype) for i in range(count)]
        products = [
            product(queries[first + i].astype(dtype), keys[:, : features.key_width], 1) for i, keys in enumerate(rows)
        ]
        scores = jnp.stack(products)
        heads, value_scales = pl.ds(first, count), None
        if blocks.scales is not None:
            scores = scores * blocks.spread[0, heads]
            value_scales = blocks.spread[1, heads]
        if spec.softcap is None:
            scores = scores * (spec.scale * LOG2_E)
        else:
            scores = jnp.tanh(scores * (spec.scale / spec.softcap)) * (spec.softcap * LOG2_E)
        values = [each[:, start:stop] for each in rows]
        if visible is None:
            softmax.add(heads, scores, None, values, value_scales)
        else:
            softmax.add(heads, scores, visible.keys, [visible.cleared(each) for each in values], value_scales)

    for_each_group(blocks.buffer.shape[2], queries.shape[-2], some_heads)


def for_each_group(heads: int, rows: int, act: Callable[[Any, int], None]) -> None:
    """act(first head, number of heads) on all heads, each with so many query rows; with few rows, several at a time."""
    together = max(count for count in range(1, max(1, UNROLLED_ROWS // rows) + 1) if heads % count == 0)

    def turn(index: Any, carry: None) -> None:
        act(index * together, together)
        return carry

    if together == heads:
        act(0, heads)
    else:
        lax.fori_loop(0, heads // together, turn, None)


def for_each_head(heads: int, rows: int, act: Callable[[Any], None]) -> None:
    """`act` on every head, each with so many rows."""

    def some_heads(first: Any, count: int) -> None:
        for offset in range(count):
            act(first + offset)

    for_each_group(heads, rows, some_heads)
