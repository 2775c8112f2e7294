"""Attention cases for tests, benchmarks and compile checks: shapes, and arrays whose unused parts are poisoned."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np

from pallas_kernels.kv_write import oracle as kv_write_oracle
from pallas_kernels.pages import KVPages, is_quantized, pool_shape
from pallas_kernels.spec import AttentionSpec


@dataclass(frozen=True)
class AttentionCase:
    """One shape of paged attention.

    lengths: visible positions of each sequence after this call, 0 for an empty row.
    chunks: query tokens of each sequence in a prefill call; None for decode, where each sequence has one.
    dtype: of queries and of new keys and values. page_dtype: of the pool, None for `dtype`.
    apart: whether the pages have keys and values apart.
    latent_values: features of a value, which are the first of its key's head_dim; None for values of their own.
    write: whether the call writes the new keys and values; False means that they are in the pages already.
    padding: flat tokens past the last chunk (prefill).
    max_context: columns of the page table times page size, 0 for just what the longest sequence needs.
    slow: too large for interpret mode in a quick test run.
    """

    name: str
    lengths: tuple[int, ...]
    chunks: tuple[int, ...] | None = None
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float32"
    page_dtype: str | None = None
    apart: bool = False
    latent_values: int | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    write: bool = True
    padding: int = 0
    max_context: int = 0
    slow: bool = False

    def __post_init__(self) -> None:
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"Case {self.name}: {self.q_heads} query heads are no multiple of {self.kv_heads} KV heads."
            )
        if self.chunks is not None and len(self.chunks) != len(self.lengths):
            raise ValueError(f"Case {self.name}: {len(self.chunks)} chunks for {len(self.lengths)} sequences.")
        if self.chunks is not None and any(c > n for c, n in zip(self.chunks, self.lengths, strict=True)):
            raise ValueError(f"Case {self.name}: a chunk is longer than its sequence.")

    @property
    def spec(self) -> AttentionSpec:
        """The static options of the call."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        latent = self.latent_values
        return AttentionSpec(scale, latent, self.window, self.softcap, values_in_keys=latent is not None)

    @property
    def row_width(self) -> int:
        """Features of a page row."""
        return self.head_dim * (2 if self.latent_values is None else 1)

    @property
    def pool_shape(self) -> tuple[int, ...]:
        """Shape of the pages' data."""
        return pool_shape(self.num_pages, self.kv_heads, self.page_size, self.row_width, self.apart)

    @property
    def pool_dtype(self) -> np.dtype:
        """Type of the pages' data."""
        return dtype_of(self.page_dtype or self.dtype)

    @property
    def new_counts(self) -> tuple[int, ...]:
        """Query tokens of each sequence."""
        return tuple(min(1, n) for n in self.lengths) if self.chunks is None else self.chunks

    @property
    def tokens(self) -> int:
        """Rows of the query array: sequences in decode, flat tokens with padding in prefill."""
        return len(self.lengths) if self.chunks is None else sum(self.chunks) + self.padding

    @property
    def max_pages(self) -> int:
        """Columns of the page table."""
        return -(-max(*self.lengths, self.max_context, 1) // self.page_size)

    @property
    def used_pages(self) -> int:
        """Pages that hold at least one position of a sequence."""
        return sum(-(-n // self.page_size) for n in self.lengths)

    @property
    def num_pages(self) -> int:
        """Pages of the pool: the used ones, page 0 and a few that nobody owns."""
        return self.used_pages + 4


@dataclass(frozen=True)
class AttentionArguments:
    """The arrays of one call, in the order of the operations' parameters; None where the operation has no such one."""

    q: Any
    k: Any
    v: Any
    pages: KVPages
    page_table: Any
    query_starts: Any
    lengths: Any
    sinks: Any

    def positional(self, spec: AttentionSpec) -> tuple[Any, ...]:
        """Positional arguments of `paged_decode` or `paged_prefill`; `sinks` goes by keyword."""
        starts = () if self.query_starts is None else (self.query_starts,)
        return (self.q, self.k, self.v, self.pages, self.page_table, *starts, self.lengths, spec)


def dtype_of(name: str) -> np.dtype:
    """numpy type by name, the extended float types included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def abstract_arguments(case: AttentionCase, sharding: jax.sharding.Sharding | None = None) -> AttentionArguments:
    """The case's shapes and types alone, for compiling without data."""

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    dtype, rows = dtype_of(case.dtype), len(case.lengths)
    scales = (case.num_pages, 2, case.kv_heads, case.page_size)
    new = array((case.tokens, case.kv_heads, case.head_dim), dtype) if case.write else None
    return AttentionArguments(
        q=array((case.tokens, case.q_heads, case.head_dim), dtype),
        k=new,
        v=new if case.latent_values is None else None,
        pages=KVPages(
            array(case.pool_shape, case.pool_dtype),  # pyright: ignore[reportArgumentType]  # a shape stands in for the array
            array(scales, np.float32) if is_quantized(case.pool_dtype) else None,  # pyright: ignore[reportArgumentType]
        ),
        page_table=array((rows, case.max_pages), np.int32),
        query_starts=None if case.chunks is None else array((rows + 1,), np.int32),
        lengths=array((rows,), np.int32),
        sinks=array((case.q_heads,), np.float32) if case.sinks else None,
    )


def build_arguments(case: AttentionCase, seed: int = 0) -> AttentionArguments:
    """numpy arrays of the case. Pages are dealt in random order; whatever no query may see holds NaN or, in int8 pages,
    the largest values with NaN scales: the padding page, pages nobody owns, the rest of each last page, positions
    before every query's window and, when the call writes, the positions that it is to write. Padding tokens are NaN.
    """
    random = np.random.default_rng(seed)
    dtype, pages_of = dtype_of(case.dtype), _deal_pages(case, random)
    new_shape = (case.tokens, case.kv_heads, case.head_dim)
    q = random.normal(size=(case.tokens, case.q_heads, case.head_dim)) * 2
    k, v = random.normal(size=new_shape), random.normal(size=new_shape)
    pool = _poisoned_pool(case)
    written, ids, offsets = [], [], []
    for row, (length, count) in enumerate(zip(case.lengths, case.new_counts, strict=True)):
        first_query = length - count
        first_seen = 0 if case.window is None else max(0, first_query - case.window + 1)
        for position in range(first_seen, first_query if case.write else length):
            written.append(random.normal(size=(2, case.kv_heads, case.head_dim)))
            ids.append(pages_of[row, position // case.page_size])
            offsets.append(position % case.page_size)
    if written:
        old = np.stack(written).astype(dtype)
        values = old[:, 1] if case.latent_values is None else None
        pool = kv_write_oracle.kv_write(old[:, 0], values, pool, np.array(ids), np.array(offsets))
    starts = None
    if case.chunks is not None:
        starts = np.cumsum([0, *case.chunks]).astype(np.int32)
        for array in (q, k, v):
            array[starts[-1] :] = np.nan
    else:
        empty = np.array(case.lengths) == 0
        for array in (q, k, v):
            array[empty] = np.nan
    return AttentionArguments(
        q=q.astype(dtype),
        k=k.astype(dtype) if case.write else None,
        v=v.astype(dtype) if case.write and case.latent_values is None else None,
        pages=pool,
        page_table=pages_of,
        query_starts=starts,
        lengths=np.array(case.lengths, np.int32),
        sinks=random.normal(size=case.q_heads).astype(np.float32) if case.sinks else None,
    )


def _deal_pages(case: AttentionCase, random: np.random.Generator) -> np.ndarray:
    """A page table in random page order; columns past a sequence's end name the padding page."""
    free = list(random.permutation(np.arange(1, case.num_pages)))
    table = np.zeros((len(case.lengths), case.max_pages), np.int32)
    for row, length in enumerate(case.lengths):
        for column in range(-(-length // case.page_size)):
            table[row, column] = free.pop()
    return table


def _poisoned_pool(case: AttentionCase) -> KVPages:
    """A pool in which any position read without being written shows in the result."""
    poison = 127 if case.pool_dtype == np.int8 else np.nan
    data = np.full(case.pool_shape, poison, np.float32).astype(case.pool_dtype)
    scales = None
    if is_quantized(case.pool_dtype):
        scales = np.full((case.num_pages, 2, case.kv_heads, case.page_size), np.nan, np.float32)
    return KVPages(data, scales)  # pyright: ignore[reportArgumentType]  # numpy arrays stand in for device arrays


def on_device(arguments: AttentionArguments) -> AttentionArguments:
    """The same arguments as jax arrays."""
    fields = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}
    return AttentionArguments(**jax.tree.map(jax.numpy.asarray, fields))
