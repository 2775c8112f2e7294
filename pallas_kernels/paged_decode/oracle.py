"""Paged decode from its definition: float32 numpy, one query head and one position at a time."""

from __future__ import annotations

import numpy as np

from pallas_kernels.kv_write import oracle as kv_write_oracle
from pallas_kernels.pages import KVPages
from pallas_kernels.spec import AttentionSpec


def paged_decode(
    q: np.ndarray,
    k: np.ndarray | None,
    v: np.ndarray | None,
    pages: KVPages,
    page_table: np.ndarray,
    lengths: np.ndarray,
    spec: AttentionSpec,
    *,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, KVPages]:
    """Reference of `paged_decode`; numpy in, (f32[B, H, v_dim], pages) out. Reads visible positions only."""
    batch, q_heads, _ = q.shape
    if k is not None:
        last = np.maximum(lengths - 1, 0)
        page_ids = np.where(lengths > 0, page_table[np.arange(batch), last // pages.page_size], 0)
        pages = kv_write_oracle.kv_write(k, v, pages, page_ids, last % pages.page_size)
    out = np.zeros((batch, q_heads, spec.value_width(pages.width)), np.float32)
    for row in range(batch):
        if lengths[row] > 0:
            out[row] = attend(q[row], pages, page_table[row], int(lengths[row]) - 1, spec, sinks)
    return out, pages


def attend(
    query: np.ndarray,
    pages: KVPages,
    page_row: np.ndarray,
    position: int,
    spec: AttentionSpec,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """Attention of one token's heads [H, k_dim], at `position`, over the keys it sees; f32[H, v_dim]."""
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    keys, values = read_positions(pages, page_row, range(first, position + 1), spec)
    q_heads = query.shape[0]
    group = q_heads // pages.kv_heads
    out = np.zeros((q_heads, values.shape[-1]), np.float32)
    for head in range(q_heads):
        scores = keys[:, head // group] @ query[head].astype(np.float32) * np.float32(spec.scale)
        if spec.softcap is not None:
            scores = spec.softcap * np.tanh(scores / spec.softcap)
        sink = -np.inf if sinks is None else float(sinks[head])
        highest = max(scores.max(), sink)
        weights = np.exp(scores - highest)
        out[head] = weights @ values[:, head // group] / (weights.sum() + np.exp(sink - highest))
    return out


def read_positions(
    pages: KVPages, page_row: np.ndarray, positions: range, spec: AttentionSpec
) -> tuple[np.ndarray, np.ndarray]:
    """Keys f32[n, Hkv, k_dim] and values f32[n, Hkv, v_dim] at these positions, found through the page table."""
    keys, values = [], []
    for position in positions:
        page, offset = page_row[position // pages.page_size], position % pages.page_size
        row = np.asarray(pages.data[page, ..., offset, :], np.float32)
        key, value = (row[:, 0], row[:, 1]) if pages.apart else spec.split_rows(row)
        if pages.scales is not None:
            key = key * np.asarray(pages.scales[page, 0, :, offset])[:, None]
            value = value * np.asarray(pages.scales[page, 1, :, offset])[:, None]
        keys.append(key)
        values.append(value)
    return np.stack(keys), np.stack(values)
