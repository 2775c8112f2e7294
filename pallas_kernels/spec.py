"""What an attention kernel computes, apart from shapes: the static options shared by every lowering."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AttentionSpec:
    """Static, hashable options of paged attention.

    scale: multiplies every score q.k.
    v_dim: features of a value row; None means half of a page's row width (keys and values equally wide).
    values_in_keys: a page row is one key, whose first v_dim features are the value too (multi-head latent attention).
    window: the query at position i sees keys i - window + 1 .. i; None means every earlier key.
    softcap: scores become softcap * tanh(score / softcap), after `scale` and before the mask; None means off.
    Raises ValueError for values outside these meanings.
    """

    scale: float
    v_dim: int | None = None
    window: int | None = None
    softcap: float | None = None
    values_in_keys: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError(f"scale is {self.scale}, but must be a finite number.")
        if self.v_dim is not None and self.v_dim < 1:
            raise ValueError(f"v_dim is {self.v_dim}, but must be at least 1 or None.")
        if self.values_in_keys and self.v_dim is None:
            raise ValueError("values_in_keys needs v_dim, the features of a key that are its value too.")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}, but must be at least 1 or None.")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ValueError(f"softcap is {self.softcap}, but must be a positive number or None.")

    def value_width(self, row_width: int) -> int:
        """Features of a value inside a page row of `row_width` features."""
        width = row_width // 2 if self.v_dim is None else self.v_dim
        if self.values_in_keys and width > row_width:
            raise ValueError(f"v_dim is {width}, but the key that holds the value has {row_width} features.")
        if not self.values_in_keys and not 0 < width < row_width:
            raise ValueError(f"v_dim is {width}, but a page row of {row_width} features must hold a key beside it.")
        return width

    def key_width(self, row_width: int) -> int:
        """Features of a key inside a page row of `row_width` features."""
        value_width = self.value_width(row_width)
        return row_width if self.values_in_keys else row_width - value_width

    def split_rows(self, rows: Any) -> tuple[Any, Any]:
        """Keys [..., key_width] and values [..., value_width] of page rows [..., row_width], numpy or jax."""
        width = rows.shape[-1]
        k_dim, v_dim = self.key_width(width), self.value_width(width)
        first = 0 if self.values_in_keys else k_dim
        return rows[..., :k_dim], rows[..., first : first + v_dim]
