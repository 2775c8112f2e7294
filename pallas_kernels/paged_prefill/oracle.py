"""Paged prefill from its definition: float32 numpy, one token at a time."""

from __future__ import annotations

import numpy as np

from pallas_kernels.kv_write import oracle as kv_write_oracle
from pallas_kernels.paged_decode.oracle import attend
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec


def paged_prefill(
    q: np.ndarray,
    k: np.ndarray | None,
    v: np.ndarray | None,
    pages: KVPages,
    page_table: np.ndarray,
    query_starts: np.ndarray,
    lengths: np.ndarray,
    spec: AttentionSpec,
    *,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, KVPages]:
    """Reference of `paged_prefill`; numpy in, (f32[T, H, v_dim], pages) out. Reads visible positions only."""
    tokens, q_heads, _ = q.shape
    rows, positions = token_positions(tokens, query_starts, lengths)
    if k is not None:
        at = np.maximum(positions, 0)
        page_ids = np.where(positions >= 0, page_table[rows, at // pages.page_size], 0)
        pages = kv_write_oracle.kv_write(k, v, pages, page_ids, at % pages.page_size)
    out = np.zeros((tokens, q_heads, spec.value_width(pages.width)), np.float32)
    for token in range(tokens):
        if positions[token] >= 0:
            out[token] = attend(q[token], pages, page_table[rows[token]], int(positions[token]), spec, sinks)
    return out, pages


def token_positions(tokens: int, query_starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and position of each flat token; padding tokens have row 0 and position -1."""
    rows, positions = np.zeros(tokens, np.int32), np.full(tokens, -1, np.int32)
    for row, length in enumerate(lengths):
        begin, end = int(query_starts[row]), int(query_starts[row + 1])
        rows[begin:end] = row
        positions[begin:end] = np.arange(length - (end - begin), length)
    return rows, positions
