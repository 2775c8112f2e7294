"""The paged key/value pool of one layer and the quantization of its rows."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import current_platform

QUANTIZED_MAX = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Largest magnitude of each quantized page type; a row's largest feature is mapped to it."""
NOT_JOINED = "The Pallas kernels read rows of a key and its value joined, but these pages have them apart."
"""Why such a kernel cannot take pages whose keys and values lie apart."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """The KV pages of one layer, a pytree.

    data: [num_pages, kv_heads, page_size, k_dim + v_dim], "joined": a token's key in [..., :k_dim], its value in
    [..., k_dim:]; one head of 64 features fills the 128 lanes of a TPU with both. Or "apart", a page's keys and then
    its values, equally wide: [num_pages, kv_heads, 2, page_size, dim]; a CPU gathers either without cutting rows.
    Where values lie in keys (`AttentionSpec.values_in_keys`) a row is the key alone, and both scales are the key's.
    scales: f32[num_pages, 2, kv_heads, page_size] for int8 and float8_e4m3fn data (index 0 of axis 1 scales keys, 1
    values: x ~= data * scale), None otherwise.
    Page 0 is the padding page: no sequence owns it, padded work may write it, and its content, which may be NaN, never
    reaches a result.
    """

    data: jax.Array
    scales: jax.Array | None = None

    @property
    def num_pages(self) -> int:
        """Pages in the pool, padding page 0 included."""
        return self.data.shape[0]

    @property
    def kv_heads(self) -> int:
        """Key/value heads of each page."""
        return self.data.shape[1]

    @property
    def page_size(self) -> int:
        """Positions of each page."""
        return self.data.shape[-2]

    @property
    def width(self) -> int:
        """Features of a row: k_dim + v_dim, or k_dim where values lie in keys."""
        return self.data.shape[-1] * (2 if self.apart else 1)

    @property
    def apart(self) -> bool:
        """Whether a page has its keys and its values apart, not joined in rows."""
        return self.data.ndim == 5


def empty_pages(
    num_pages: int, kv_heads: int, page_size: int, width: int, dtype: jax.typing.DTypeLike, *, apart: bool = False
) -> KVPages:
    """A pool of zeros; `width` is k_dim + v_dim. int8 and float8_e4m3fn pools come with scales.

    apart: keys and values apart, not joined in rows. Raises ValueError when a size is below 1, or when an odd width is
    to be halved.
    """
    sizes = {"num_pages": num_pages, "kv_heads": kv_heads, "page_size": page_size, "width": width}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}, but must be at least 1.")
    if apart and width % 2:
        raise ValueError(f"width is {width}, but pages that have keys and values apart need an even one.")
    scales = jnp.zeros((num_pages, 2, kv_heads, page_size), jnp.float32) if is_quantized(dtype) else None
    return KVPages(jnp.zeros(pool_shape(num_pages, kv_heads, page_size, width, apart), dtype), scales)


def better_apart() -> bool:
    """Whether pages had better have keys and values apart where the code being traced will run."""
    return current_platform() == "cpu"


def pool_shape(num_pages: int, kv_heads: int, page_size: int, width: int, apart: bool) -> tuple[int, ...]:
    """The shape of a pool's `data`."""
    return (num_pages, kv_heads, *((2, page_size, width // 2) if apart else (page_size, width)))


def is_quantized(dtype: jax.typing.DTypeLike) -> bool:
    """Whether pages of this type carry scales."""
    return np.dtype(dtype).name in QUANTIZED_MAX


def quantize_rows(rows: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Quantize each row [..., features] by its own largest magnitude.

    Returns the rows in `dtype` (int8 or float8_e4m3fn, rounded to nearest even) and their scales f32[...], with
    rows ~= quantized * scales[..., None]. A row of zeros has scale 0.
    """
    largest = QUANTIZED_MAX[np.dtype(dtype).name]
    exact = rows.astype(jnp.float32)
    scales = jnp.max(jnp.abs(exact), axis=-1) / largest
    # Dividing by 1 where the scale is 0 keeps a row of zeros at zero.
    scaled = exact / jnp.where(scales == 0, 1, scales)[..., None]
    if np.dtype(dtype).name == "int8":
        scaled = jnp.round(scaled)
    return jnp.clip(scaled, -largest, largest).astype(dtype), scales
