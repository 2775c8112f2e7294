"""What lives on the device between steps, and what each step is given: frozen pytrees of arrays."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer.models import DecoderConfig
from pallas_kernels import KVPages, empty_pages
from pallas_kernels.dispatch import current_platform
from pallas_kernels.pages import better_apart


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """The cache. Donate it to every step: the pages are updated in place.

    kv: per layer, pages of rows of page_row_dim features (see KVPages).
    page_table: i32[slots, max_pages], the page of positions column * page_size .. of each slot; 0 where there is none.
    lengths: i32[slots], positions cached.
    """

    kv: tuple[KVPages, ...]
    page_table: jax.Array
    lengths: jax.Array

    @property
    def num_slots(self) -> int:
        """Sequences that the state can hold."""
        return self.page_table.shape[0]

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self.kv[0].page_size


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TableUpdates:
    """Changes of the page table, applied before a step: page_table[slots[i], columns[i]] = pages[i].

    slots, columns, pages: i32[U]; padding has slots[i] = number of slots.
    """

    slots: jax.Array
    columns: jax.Array
    pages: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillBatch:
    """Consecutive new positions of N sequences, flat.

    token_ids: i32[T]; row i owns query_starts[i] .. query_starts[i + 1], the rest is padding.
    query_starts: i32[N + 1], rising.
    slots: i32[N]; padding rows have slots[i] = number of slots.
    starts: i32[N], positions of each row that are cached already.
    updates: see TableUpdates.
    """

    token_ids: jax.Array
    query_starts: jax.Array
    slots: jax.Array
    starts: jax.Array
    updates: TableUpdates


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixedBatch:
    """A prefill that takes decodes along, so that the weights are read once for both.

    prefill: see PrefillBatch, with the table updates of the decodes too; behind its last row, token_ids[
        query_starts[N] + i] is the new token of decode_slots[i].
    decode_slots: i32[D], none of the prefill's; padding, at the end and without a token, has the number of slots.
    wanted: i32[R], the flat tokens whose logits are wanted; padding, at the end, is T or more.
    """

    prefill: PrefillBatch
    decode_slots: jax.Array
    wanted: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeBatch:
    """One new position of B sequences.

    token_ids: i32[B]. slots: i32[B]; padding rows have slots[i] = number of slots. updates: see TableUpdates.
    """

    token_ids: jax.Array
    slots: jax.Array
    updates: TableUpdates


def init_state(
    config: DecoderConfig, *, num_slots: int, num_pages: int, page_size: int, max_context: int
) -> EngineState:
    """An empty cache: `num_pages` pages (page 0 is for padding and never holds a sequence) shared by `num_slots` slots.

    Raises ValueError when a size is below 1.
    """
    if num_slots < 1 or max_context < 1:
        raise ValueError(f"num_slots and max_context must be at least 1, not {num_slots} and {max_context}.")
    dtype, width = jnp.dtype(config.page_dtype), page_row_dim(config)
    apart = better_apart() and config.row_dim == 2 * config.head_dim
    sizes = (num_pages, config.num_kv_heads, page_size, width, dtype)
    kv = tuple(empty_pages(*sizes, apart=apart) for _ in range(config.num_layers))
    max_pages = -(-max_context // page_size)
    return EngineState(kv, jnp.zeros((num_slots, max_pages), jnp.int32), jnp.zeros((num_slots,), jnp.int32))


def page_row_dim(config: DecoderConfig) -> int:
    """Features of a page row on the platform in force: on TPU a multiple of 128, else what key and value have.

    A key and a value side by side must fill whole groups of 128 lanes there; XLA would lay out other pools anew around
    every kernel. Heads of 80 and 96 features are padded to 128, which costs 1.60 and 1.33 times the memory and
    bandwidth of the pool; 64, 128 and 256 cost nothing. The latent rows of DeepSeek, 576 features, are padded to 640.
    """
    parts = config.row_dim // config.head_dim
    step = 128 // parts if current_platform() == "tpu" else 1
    return parts * (-(-config.head_dim // step) * step)
