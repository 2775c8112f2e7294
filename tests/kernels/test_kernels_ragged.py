"""Rows and positions of flat tokens, against writing them down one by one."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged import token_positions


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), min_size=1, max_size=5), st.integers(0, 4))
def test_token_positions(rows, padding):
    """rows: (new tokens, positions before them)."""
    counts = [count for count, _ in rows]
    expected = [(row, before + i) for row, (count, before) in enumerate(rows) for i in range(count)]
    starts, lengths = np.cumsum([0, *counts], dtype=np.int32), np.array([sum(row) for row in rows], np.int32)
    tokens = sum(counts) + padding
    found_rows, positions = token_positions(tokens, jnp.asarray(starts), jnp.asarray(lengths))
    assert list(zip(found_rows.tolist(), positions.tolist(), strict=True))[: sum(counts)] == expected
    assert positions[sum(counts) :].tolist() == [-1] * padding
    assert all(0 <= row < len(rows) for row in found_rows.tolist())
