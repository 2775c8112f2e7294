"""Named cases of `kv_write`: runs of consecutive positions, as prefill writes them, and lone tokens, as decode does."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from pallas_kernels.cases import dtype_of
from pallas_kernels.pages import KVPages, is_quantized, pool_shape


@dataclass(frozen=True)
class WriteCase:
    """One shape of `kv_write`.

    runs: (first position, tokens) of each sequence's run. padding: tokens aimed at page 0 after them.
    apart: whether the pages have keys and values apart.
    shuffle: tokens in random order, so that neighbours in a page come far apart.
    """

    name: str
    runs: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float32"
    page_dtype: str | None = None
    apart: bool = False
    padding: int = 0
    shuffle: bool = False
    slow: bool = False

    @property
    def tokens(self) -> int:
        """Flat tokens, padding included."""
        return sum(count for _, count in self.runs) + self.padding

    @property
    def pool_dtype(self) -> np.dtype:
        """Type of the pages' data."""
        return dtype_of(self.page_dtype or self.dtype)

    @property
    def num_pages(self) -> int:
        """Pages of the pool, with page 0 and a few that nothing is written to."""
        return sum(-(-(first + count) // self.page_size) for first, count in self.runs) + 4


CASES = (
    WriteCase("lone_tokens", runs=((0, 1), (15, 1), (16, 1), (40, 1))),
    WriteCase("runs", runs=((0, 40), (5, 3), (13, 21), (16, 16)), padding=5),
    WriteCase("shuffled", runs=((0, 20), (13, 21)), shuffle=True, padding=3),
    WriteCase("bf16", runs=((0, 33), (7, 1), (20, 30)), head_dim=128, dtype="bfloat16", padding=2),
    WriteCase("f32_into_bf16", runs=((3, 20),), page_dtype="bfloat16"),
    WriteCase("d80", runs=((3, 20),), head_dim=80, dtype="bfloat16"),
    WriteCase("d256", runs=((3, 20),), head_dim=256),
    WriteCase("one_head", runs=((3, 20), (9, 1)), kv_heads=1, dtype="bfloat16"),
    WriteCase("page_64", runs=((3, 100), (63, 2)), page_size=64, dtype="bfloat16"),
    WriteCase("page_256", runs=((250, 10), (63, 2)), page_size=256),
    WriteCase("int8", runs=((0, 40), (5, 3), (31, 2)), page_size=32, page_dtype="int8", padding=2),
    WriteCase("int8_page_16", runs=((0, 20), (5, 3)), page_dtype="int8"),
    WriteCase("fp8_bf16", runs=((0, 40), (31, 2)), page_size=32, dtype="bfloat16", page_dtype="float8_e4m3fn"),
    WriteCase("only_padding", runs=(), padding=4),
    WriteCase("long", runs=((100, 500), (0, 130)), page_size=64, dtype="bfloat16", slow=True),
)


def build_arguments(case: WriteCase, seed: int = 0) -> tuple[np.ndarray, np.ndarray, KVPages, np.ndarray, np.ndarray]:
    """numpy k, v, pages, page_ids, offsets. The pool holds random values, padding tokens NaN; pages in random order."""
    random = np.random.default_rng(seed)
    free = list(random.permutation(np.arange(1, case.num_pages)))
    ids, offsets = [], []
    for first, count in case.runs:
        owned = [free.pop() for _ in range(-(-(first + count) // case.page_size))]
        ids += [owned[position // case.page_size] for position in range(first, first + count)]
        offsets += [position % case.page_size for position in range(first, first + count)]
    ids, offsets = np.array(ids + [0] * case.padding, np.int32), np.array(offsets + [0] * case.padding, np.int32)
    new = random.normal(size=(2, case.tokens, case.kv_heads, case.head_dim))
    new[:, ids == 0] = np.nan
    if case.shuffle:
        order = random.permutation(case.tokens)
        ids, offsets, new = ids[order], offsets[order], new[:, order]
    shape = pool_shape(case.num_pages, case.kv_heads, case.page_size, 2 * case.head_dim, case.apart)
    data = (random.normal(size=shape) * 20).astype(case.pool_dtype)
    scales = None
    if is_quantized(case.pool_dtype):
        scales = random.uniform(size=(case.num_pages, 2, case.kv_heads, case.page_size)).astype(np.float32)
    pages = KVPages(data, scales)  # pyright: ignore[reportArgumentType]  # numpy arrays stand in for device arrays
    k, v = new.astype(dtype_of(case.dtype))
    return k, v, pages, ids, offsets


def abstract_arguments(case: WriteCase, sharding: jax.sharding.Sharding | None = None) -> tuple:
    """Shapes and types of `build_arguments`, for compiling without data."""
    arrays = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, build_arguments(case)))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays)
