"""Parts of a tensor onto the devices of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import jax

Index = tuple[slice, ...]


def sharded_array(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, read: Callable[[Index], np.ndarray]
) -> jax.Array:
    """An array of a sharding, each distinct part of it that this process holds read once.

    read: the part at an index, slices with start and stop for every axis.
    """
    import jax  # only this function needs it

    parts: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def part(index: Index | None) -> np.ndarray:
        bounds = tuple(one.indices(size)[:2] for one, size in zip(index or (), shape, strict=True))
        if bounds not in parts:
            # A copy: a view would keep the whole file's pages for as long as the device uses it.
            parts[bounds] = np.array(read(tuple(slice(*bound) for bound in bounds)), order="C")
        return parts[bounds]

    return jax.make_array_from_callback(shape, sharding, part)
