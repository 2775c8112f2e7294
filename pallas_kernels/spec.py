"""What an attention kernel computes, apart from shapes: the static options shared by every lowering."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """Static, hashable options of paged attention.

    scale: multiplies every score q.k.
    v_dim: features of a value row; None means half of a page's row width (keys and values equally wide).
    window: the query at position i sees keys i - window + 1 .. i; None means every earlier key.
    softcap: scores become softcap * tanh(score / softcap), after `scale` and before the mask; None means off.
    Raises ValueError for values outside these meanings.
    """

    scale: float
    v_dim: int | None = None
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError(f"scale is {self.scale}, but must be a finite number.")
        if self.v_dim is not None and self.v_dim < 1:
            raise ValueError(f"v_dim is {self.v_dim}, but must be at least 1 or None.")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}, but must be at least 1 or None.")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ValueError(f"softcap is {self.softcap}, but must be a positive number or None.")

    def value_width(self, row_width: int) -> int:
        """Features of a value row inside a page row of `row_width` features (keys first, values after)."""
        width = row_width // 2 if self.v_dim is None else self.v_dim
        if not 0 < width < row_width:
            raise ValueError(f"v_dim is {width}, but a page row of {row_width} features must hold a key beside it.")
        return width
