"""`prefill_step`, `decode_step` and `mixed_step`: the whole model as pure functions of parameters, state and batch.

They are not jitted here. Jit them as `jax.jit(prefill_step, static_argnums=0, donate_argnums=2)`, or call them inside a
program of your own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models import Decoder, DecoderConfig
from jaxinfer.runtime.parallel import attend_by_heads
from jaxinfer.runtime.state import DecodeBatch, EngineState, MixedBatch, PrefillBatch, TableUpdates
from pallas_kernels import AttentionSpec, KVPages
from pallas_kernels.dispatch import current_platform
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.ragged import page_places, token_positions

Params = dict[str, Any]
FEW_WANTED = 8
"""Rows of logits that cost a CPU next to nothing beside reading the head's weights; elsewhere any number does."""

# Jitted inside the step, they are traced once for all layers of a kind instead of once a layer.
_paged_decode = jax.jit(paged_decode, static_argnames=("spec", "impl"))
_paged_prefill = jax.jit(paged_prefill, static_argnames=("spec", "impl"))


def prefill_step(
    config: DecoderConfig, params: Params, state: EngineState, batch: PrefillBatch
) -> tuple[jax.Array, EngineState]:
    """Compute and cache the new positions of every row.

    Returns logits f32[N, vocab] of each row's last position (padding rows: of no meaning), and the new state.
    """
    hidden, state = prefill_hidden(config, params, state, batch)
    last = jnp.maximum(batch.query_starts[1:] - 1, 0)
    return logits_of(config, params, hidden[last]), state


def prefill_hidden(
    config: DecoderConfig, params: Params, state: EngineState, batch: PrefillBatch
) -> tuple[jax.Array, EngineState]:
    """As `prefill_step`, but returns the final hidden states [T, hidden] of all positions instead of logits."""
    page_table = _updated_table(state, batch.updates)
    rows = _rows_of(page_table, batch.slots)
    counts = jnp.diff(batch.query_starts)
    lengths = batch.starts + counts

    def attend(layer: int, *arrays: Any) -> tuple[jax.Array, KVPages]:
        spec = attention_spec(config, layer)
        kernel = attend_by_heads(partial(_paged_prefill, spec=spec, impl=config.attention))
        return _in_page_width(kernel, spec, *arrays, rows, batch.query_starts, lengths)

    positions = token_positions(batch.token_ids.shape[0], batch.query_starts, lengths)[1]
    hidden, kv = _apply(config, params, batch.token_ids, positions, state.kv, attend)
    new_lengths = state.lengths.at[batch.slots].set(lengths, mode="drop")
    return hidden, EngineState(kv, page_table, new_lengths)


def decode_step(
    config: DecoderConfig, params: Params, state: EngineState, batch: DecodeBatch
) -> tuple[jax.Array, EngineState]:
    """Compute and cache one new position of every row: token_ids[i] at the position after those cached for slots[i].

    Returns logits f32[B, vocab] (padding rows: of no meaning), and the new state.
    """
    page_table = _updated_table(state, batch.updates)
    rows = _rows_of(page_table, batch.slots)
    positions = state.lengths.at[batch.slots].get(mode="fill", fill_value=-1)
    lengths = positions + 1

    def attend(layer: int, *arrays: Any) -> tuple[jax.Array, KVPages]:
        spec = attention_spec(config, layer)
        kernel = attend_by_heads(partial(_paged_decode, spec=spec, impl=config.attention))
        return _in_page_width(kernel, spec, *arrays, rows, lengths)

    hidden, kv = _apply(config, params, batch.token_ids, positions, state.kv, attend)
    new_lengths = state.lengths.at[batch.slots].set(lengths, mode="drop")
    return logits_of(config, params, hidden), EngineState(kv, page_table, new_lengths)


def mixed_step(
    config: DecoderConfig, params: Params, state: EngineState, batch: MixedBatch
) -> tuple[jax.Array, EngineState]:
    """`prefill_step` and `decode_step` of different slots in one pass over the weights.

    Returns logits f32[R, vocab] of the wanted tokens (padding: of no meaning), and the new state.
    """
    hidden, state = mixed_hidden(config, params, state, batch)
    return wanted_logits(config, params, hidden, batch.wanted), state


def mixed_hidden(
    config: DecoderConfig, params: Params, state: EngineState, batch: MixedBatch
) -> tuple[jax.Array, EngineState]:
    """As `mixed_step`, but returns the final hidden states [T, hidden] of all tokens instead of logits."""
    prefill, decode_slots = batch.prefill, batch.decode_slots
    if not decode_slots.shape[0]:
        return prefill_hidden(config, params, state, prefill)
    page_table = _updated_table(state, prefill.updates)
    tokens, rows = prefill.token_ids.shape[0], prefill.slots.shape[0]
    lengths = prefill.starts + jnp.diff(prefill.query_starts)
    decode_lengths = state.lengths.at[decode_slots].get(mode="fill", fill_value=-1) + 1
    places = decode_places(batch)
    token_rows, positions = token_positions(tokens, prefill.query_starts, lengths)
    token_rows = token_rows.at[places].set(rows + jnp.arange(places.shape[0]), mode="drop")
    positions = positions.at[places].set(decode_lengths - 1, mode="drop")
    table = _rows_of(page_table, jnp.concatenate([prefill.slots, decode_slots]))
    indices = table, token_rows, positions, prefill.query_starts, lengths, decode_lengths

    def attend(layer: int, *arrays: Any) -> tuple[jax.Array, KVPages]:
        spec = attention_spec(config, layer)
        kernel = attend_by_heads(partial(_mixed_attention, spec=spec, impl=config.attention))
        return _in_page_width(kernel, spec, *arrays, *indices)

    hidden, kv = _apply(config, params, prefill.token_ids, positions, state.kv, attend)
    new_lengths = state.lengths.at[prefill.slots].set(lengths, mode="drop")
    new_lengths = new_lengths.at[decode_slots].set(decode_lengths, mode="drop")
    return hidden, EngineState(kv, page_table, new_lengths)


def wanted_logits(config: DecoderConfig, params: Params, hidden: jax.Array, wanted: jax.Array) -> jax.Array:
    """Logits f32[R, vocab] of the tokens `wanted` i32[R] of hidden [T, hidden]; padding, at the end, is T or more."""
    most = wanted.shape[0]

    def of_first(count: int) -> jax.Array:
        rows = hidden.at[wanted[:count]].get(mode="clip", wrap_negative_indices=False)
        return jnp.pad(logits_of(config, params, rows), ((0, most - count), (0, 0)))

    if most <= FEW_WANTED or current_platform() != "cpu":
        return of_first(most)
    # There is room for every slot to sample, but beside a prefill mostly few do.
    few = (wanted < hidden.shape[0]).sum() <= FEW_WANTED
    return jax.lax.cond(few, lambda: of_first(FEW_WANTED), lambda: of_first(most))


def decode_places(batch: MixedBatch) -> jax.Array:
    """Where the token of each decode lies among the flat tokens, i32[D]; those of padding may lie outside."""
    return batch.prefill.query_starts[-1] + jnp.arange(batch.decode_slots.shape[0], dtype=jnp.int32)


@partial(jax.jit, static_argnames=("spec", "impl"))
def _mixed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    pages: KVPages,
    table: jax.Array,
    token_rows: jax.Array,
    positions: jax.Array,
    query_starts: jax.Array,
    lengths: jax.Array,
    decode_lengths: jax.Array,
    *,
    spec: AttentionSpec,
    impl: str,
    sinks: jax.Array | None,
) -> tuple[jax.Array, KVPages]:
    """Attention of N prefilled rows and behind them D decoding ones over `table` i32[N + D, max_pages].

    All keys and values are written before any are read: XLA would copy the pool for a write between two readers.
    """
    tokens, rows, decodes = q.shape[0], lengths.shape[0], decode_lengths.shape[0]
    pages = kv_write(k, v, pages, *page_places(table, token_rows, positions, pages.page_size), impl=impl)
    options = {"spec": spec, "sinks": sinks, "impl": impl}
    prefilled, _ = paged_prefill(q, None, None, pages, table[:rows], query_starts, lengths, **options)
    # Slices past the end would slide back; the padding keeps them in place.
    padding, first = ((0, decodes), (0, 0), (0, 0)), query_starts[-1]
    queries = jax.lax.dynamic_slice(jnp.pad(q, padding), (first, 0, 0), (decodes, *q.shape[1:]))
    decoded, _ = paged_decode(queries, None, None, pages, table[rows:], decode_lengths, **options)
    return jax.lax.dynamic_update_slice(jnp.pad(prefilled, padding), decoded, (first, 0, 0))[:tokens], pages


def logits_of(config: DecoderConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Hidden states [R, hidden] -> logits f32[R, vocab]."""
    logits: Any = Decoder(config).apply({"params": params}, hidden, method=Decoder.logits)
    return logits


def attention_spec(config: DecoderConfig, layer: int) -> AttentionSpec:
    """The kernel options of one layer."""
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    return AttentionSpec(
        scale=scale,
        v_dim=None if config.mla is None else config.value_dim,
        window=config.windows[layer],
        softcap=config.attention_softcap,
        values_in_keys=config.mla is not None,
    )


def _apply(config: DecoderConfig, params: Params, *inputs: Any) -> tuple[jax.Array, tuple[KVPages, ...]]:
    result: Any = Decoder(config).apply({"params": params}, *inputs)
    return result


def _in_page_width(
    kernel: Callable[..., tuple[jax.Array, KVPages]],
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    pages: KVPages,
    sinks: jax.Array | None,
    *indices: jax.Array,
) -> tuple[jax.Array, KVPages]:
    """The kernel on heads padded with zeros to the width that pages give them (see page_row_dim)."""
    head_dim = q.shape[-1]
    padding = ((0, 0), (0, 0), (0, spec.key_width(pages.width) - head_dim))
    if padding[-1][1]:
        q, k, v = jnp.pad(q, padding), jnp.pad(k, padding), None if v is None else jnp.pad(v, padding)
    out, pages = kernel(q, k, v, pages, sinks, *indices)
    return out[..., :head_dim], pages


def _updated_table(state: EngineState, updates: TableUpdates) -> jax.Array:
    return state.page_table.at[updates.slots, updates.columns].set(updates.pages, mode="drop")


def _rows_of(page_table: jax.Array, slots: jax.Array) -> jax.Array:
    return page_table.at[slots].get(mode="fill", fill_value=0)
