"""Where the tokens of a ragged batch belong: row i owns the flat tokens query_starts[i] .. query_starts[i + 1] - 1."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token_positions(tokens: int, query_starts: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The row and the position of each of `tokens` flat tokens, i32[tokens] each.

    query_starts: i32[N + 1]. lengths: i32[N], positions of every row with these tokens, which are its last. Tokens past
    query_starts[N] are padding: their position is -1, and their row any of the rows.
    """
    index = jnp.arange(tokens, dtype=jnp.int32)
    rows = jnp.searchsorted(query_starts[1:], index, side="right", method="compare_all").astype(jnp.int32)
    rows = jnp.minimum(rows, lengths.shape[0] - 1)
    positions = lengths[rows] - query_starts[rows + 1] + index
    return rows, jnp.where(index < query_starts[-1], positions, -1)


def page_places(
    page_table: jax.Array, rows: jax.Array, positions: jax.Array, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Page and offset, i32[T] each, of positions i32[T] of rows i32[T] of the table; page 0 at position -1."""
    columns = jnp.minimum(positions // page_size, page_table.shape[1] - 1)
    return jnp.where(positions >= 0, page_table[rows, columns], 0), positions % page_size
