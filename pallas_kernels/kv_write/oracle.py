"""Writing new keys and values into their pages, from the definition: numpy, one token at a time."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from pallas_kernels.pages import QUANTIZED_MAX, KVPages


def kv_write(k: np.ndarray, v: np.ndarray | None, pages: KVPages, page_ids: np.ndarray, offsets: np.ndarray) -> KVPages:
    """Reference of `kv_write`; numpy in and out, the given pool is left as it was. Padding (page 0) is not written."""
    data = np.array(pages.data)
    scales = None if pages.scales is None else np.array(pages.scales)
    k_dim = k.shape[-1]
    keys, values = (data[:, :, 0], data[:, :, 1]) if pages.apart else (data[..., :k_dim], data[..., k_dim:])
    for token, (page, offset) in enumerate(zip(page_ids, offsets, strict=True)):
        if page == 0:
            continue
        key = np.asarray(k[token], np.float32)
        if scales is not None:
            key, scales[page, :, :, offset] = quantize(key, data.dtype)
        keys[page, :, offset] = key.astype(data.dtype)
        if v is None:
            continue
        value = np.asarray(v[token], np.float32)
        if scales is not None:
            value, scales[page, 1, :, offset] = quantize(value, data.dtype)
        values[page, :, offset] = value.astype(data.dtype)
    return KVPages(data, scales)  # pyright: ignore[reportArgumentType]  # numpy arrays stand in for device arrays


def quantize(rows: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Each row's largest magnitude becomes the type's largest; returns rows f32 on the type's grid, and scales."""
    largest = np.float32(QUANTIZED_MAX[dtype.name])
    scales = np.abs(rows).max(axis=-1) / largest
    scaled = rows / np.where(scales == 0, 1, scales)[..., None]
    if dtype == np.int8:
        return np.clip(np.rint(scaled), -largest, largest), scales
    return np.clip(scaled, -largest, largest).astype(ml_dtypes.float8_e4m3fn).astype(np.float32), scales
