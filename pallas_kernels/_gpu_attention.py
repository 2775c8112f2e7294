"""What the Mosaic GPU attention kernels share: operand tiles in shared memory, and the arithmetic of a block of scores.

The functions on arrays are plain `jax.numpy`; inside a kernel the same code runs on warpgroup registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pages import NOT_JOINED, KVPages, is_quantized
from pallas_kernels.spec import AttentionSpec

LOG2E = math.log2(math.e)
# Stands for "no score yet": far below any score in base 2, yet finite, so that differences of maxima stay numbers.
LOWEST = -1e30
WARPGROUP_ROWS = 64
SHARED_MEMORY_BYTES = 227 * 1024
MULTIPROCESSORS = 132

LANE = plgpu.LoweringSemantics.Lane
OLDEST_JAX = (0, 11)
# Stores that may have bank conflicts need saying so since 0.12.
_STORE_IS_CHECKED = jax.__version_info__ >= (0, 12)
# Names of chips with compute capability 9.0, for compiles without the chip.
_HOPPER_NAMES = ("H100", "H200", "H800", "H20", "GH200")


@dataclass(frozen=True)
class Operands:
    """How rows of pages become matrix operands.

    k_dim, v_dim: features of a key and of a value.
    dtype: 16-bit type the tensor cores multiply.
    page_dtype: type of the pages' data.
    query_terms, page_terms: 16-bit terms that sum to one query or one page element: 2 for float32 (16 mantissa bits),
    else 1.
    """

    k_dim: int
    v_dim: int
    dtype: Any
    page_dtype: Any
    query_terms: int
    page_terms: int

    @property
    def converts(self) -> bool:
        """Whether a tile passes through registers before the tensor cores can read it."""
        return jnp.dtype(self.page_dtype) != jnp.dtype(self.dtype)

    @property
    def quantized(self) -> bool:
        """Whether the pages carry scales."""
        return is_quantized(self.page_dtype)

    def products(self) -> list[tuple[int, int]]:
        """Pairs (query term, page term) to multiply; the product of the two small terms is below the accuracy kept."""
        pairs = [(a, b) for a in range(self.query_terms) for b in range(self.page_terms)]
        return [(a, b) for a, b in pairs if a + b < 2]

    def raw_bytes(self, tile: int) -> int:
        """Bytes of one tile of keys and values as it lies in the pages, scales included."""
        item = jnp.dtype(self.page_dtype).itemsize
        return tile * (self.k_dim + self.v_dim) * item + (8 * tile if self.quantized else 0)

    def converted_bytes(self, tile: int) -> int:
        """Bytes of the converted copy of one tile, 0 where none is needed."""
        return tile * (self.k_dim + self.v_dim) * 2 * self.page_terms if self.converts else 0


def operands_of(q_dtype: Any, pages: KVPages, spec: AttentionSpec) -> Operands:
    """Operands for queries of `q_dtype` against these pages."""
    v_dim = spec.value_width(pages.width)
    page_dtype = jnp.dtype(pages.data.dtype)
    half = page_dtype if page_dtype in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)) else jnp.dtype(jnp.bfloat16)
    return Operands(
        k_dim=pages.width - v_dim,
        v_dim=v_dim,
        dtype=half,
        page_dtype=page_dtype,
        query_terms=2 if jnp.dtype(q_dtype) == jnp.float32 else 1,
        page_terms=2 if page_dtype == jnp.float32 else 1,
    )


def unsupported_here() -> str | None:
    """Why no Mosaic GPU kernel of this package runs with this jax on this chip; None when they do.

    The chip is the one that is compiled for: that of the abstract mesh, else the first device. wgmma exists on
    compute capability 9.0 alone, neither before nor after.
    """
    if jax.__version_info__ < OLDEST_JAX:
        return f"The Mosaic GPU kernels need jax 0.11 or newer, but this is {jax.__version__}."
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.platform in ("cuda", "gpu"):
        kind = abstract.device_kind or ""
        hopper = any(name in kind.upper() for name in _HOPPER_NAMES)
    elif abstract is None and jax.default_backend() == "gpu":
        device = jax.devices()[0]
        kind, hopper = device.device_kind, getattr(device, "compute_capability", "").startswith("9.")
    else:
        return None
    return None if hopper else f"The Mosaic GPU kernels use Hopper's tensor-core instructions, which {kind} lacks."


def unsupported_attention(q: Any, pages: KVPages, spec: AttentionSpec) -> str | None:
    """Why neither attention kernel can take these queries and pages; None when it can."""
    here = unsupported_here()
    if here is not None:
        return here
    if pages.apart:
        return NOT_JOINED
    if spec.values_in_keys:
        return "The Mosaic GPU kernels read keys and values from lanes of their own, but here values lie in keys."
    q_dtype, page_dtype = jnp.dtype(q.dtype), jnp.dtype(pages.data.dtype)
    v_dim = spec.value_width(pages.width)
    k_dim = pages.width - v_dim
    if page_dtype.name not in ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn"):
        return (
            f"The Mosaic GPU kernel has no path for {page_dtype.name} pages; use bfloat16, float16, float32, int8 or "
            "float8_e4m3fn."
        )
    if q_dtype.name not in ("bfloat16", "float16", "float32"):
        return f"The Mosaic GPU kernel has no path for {q_dtype.name} queries; use bfloat16, float16 or float32."
    halves = {name for name in (q_dtype.name, page_dtype.name) if name in ("bfloat16", "float16")}
    if len(halves) > 1 or (q_dtype.name == "float16" and page_dtype.name != "float16"):
        return (
            f"The Mosaic GPU kernel cannot multiply {q_dtype.name} queries with {page_dtype.name} pages; give both one "
            "type."
        )
    if k_dim != v_dim:
        return f"The Mosaic GPU kernel needs keys and values of one width, not {k_dim} and {v_dim}."
    if k_dim % 16 or k_dim > 256:
        return f"The Mosaic GPU kernel needs a head width that is a multiple of 16 up to 256, not {k_dim}."
    if pages.page_size % 8:
        return f"The Mosaic GPU kernel needs a page size that is a multiple of 8, not {pages.page_size}."
    if is_quantized(page_dtype) and pages.page_size % 32:
        return (
            "The Mosaic GPU kernel copies the scales of 32 positions at once, so quantized pages need a page size that "
            f"is a multiple of 32, not {pages.page_size}."
        )
    return None


# --- shared memory ---------------------------------------------------------------------------------------------------


def swizzle_bytes(row_bytes: int, widest: int = 128) -> int:
    """Widest swizzle, in bytes, that divides a row."""
    return next(width for width in (128, 64, 32) if row_bytes % width == 0 and width <= widest)


def swizzled_memory(shape: tuple[int, ...], dtype: Any, widest: int = 128) -> Any:
    """Shared memory in tiles of 8 rows, swizzled so that both the copy engine and registers meet no bank conflicts."""
    item = jnp.dtype(dtype).itemsize
    swizzle = swizzle_bytes(shape[-1] * item, widest)
    transforms = (plgpu.TilingTransform((8, swizzle // item)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def operand_memory(shape: tuple[int, ...], dtype: Any, tile: int) -> Any:
    """Shared memory of a 16-bit matrix operand; weights are multiplied one swizzle of positions at a time."""
    return swizzled_memory(shape, dtype, widest=2 * tile)


def tile_memory(operands: Operands, tile: int, stages: int) -> dict[str, Any]:
    """Shared memory of a ring of `stages` tiles of keys and values: 'k', 'v', and 'scales' for quantized pages.

    Where the pages' type is no matrix operand, the ring is plain and 'terms' holds one tile's keys as such, and after
    them its values.
    """
    k_shape, v_shape = (stages, tile, operands.k_dim), (stages, tile, operands.v_dim)
    if not operands.converts:
        return {
            "k": operand_memory(k_shape, operands.dtype, tile),
            "v": operand_memory(v_shape, operands.dtype, tile),
        }
    memory = {
        "k": plgpu.SMEM(k_shape, operands.page_dtype),
        "v": plgpu.SMEM(v_shape, operands.page_dtype),
        "terms": operand_memory((operands.page_terms, tile, operands.k_dim), operands.dtype, tile),
    }
    if operands.quantized:
        memory["scales"] = plgpu.SMEM((stages, 2, tile), jnp.float32)
    return memory


def rows_per_copy(page_size: int, tile: int) -> int:
    """Positions of one copy: as many as neither cross a page's border nor a tile's."""
    return math.gcd(page_size, tile)


# --- arithmetic ------------------------------------------------------------------------------------------------------


def split_terms(x: jax.Array, terms: int, dtype: Any) -> list[jax.Array]:
    """`terms` arrays of `dtype` that sum to x as nearly as that many can."""
    parts = []
    rest = x
    for _ in range(terms - 1):
        parts.append(rest.astype(dtype))
        rest = rest - parts[-1].astype(x.dtype)
    return [*parts, rest.astype(dtype)]


def base2_scores(products: jax.Array, spec: AttentionSpec) -> jax.Array:
    """q.k in float32 to scores whose power of two is the softmax numerator: scale and soft-cap applied."""
    if spec.softcap is None:
        return products * (spec.scale * LOG2E)
    # tanh by one power of two: the hardware's own tanh keeps 11 bits, too few for a cap of 50.
    power = jnp.exp2(products * (spec.scale / spec.softcap * 2 * LOG2E))
    return (1.0 - 2.0 / (power + 1.0)) * (spec.softcap * LOG2E)


def along_rows(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One value for each row, repeated over the columns."""
    return lax.broadcast_in_dim(values, shape, (0,))


def along_columns(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One value for each column, repeated over the rows."""
    return lax.broadcast_in_dim(values, shape, (1,))


def softmax_step(
    scores: jax.Array, highest: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One block of online softmax in base 2.

    scores f32[rows, columns], -inf where masked; highest, total f32[rows] of the blocks before (LOWEST and 0 at first).
    Returns (weights f32[rows, columns], highest, total, factor f32[rows] that the values summed so far shrink by).
    """
    new_highest = jnp.maximum(highest, scores.max(axis=1))
    factor = jnp.exp2(highest - new_highest)
    weights = jnp.exp2(scores - along_rows(new_highest, scores.shape))
    return weights, new_highest, total * factor + weights.sum(axis=1), factor


def normalized(values: jax.Array, total: jax.Array) -> jax.Array:
    """values f32[rows, v_dim] over total f32[rows]; rows that saw nothing (total 0) become 0."""
    inverse = jnp.where(total > 0.0, 1.0 / jnp.maximum(total, 1e-38), jnp.zeros_like(total))
    return values * along_rows(inverse, values.shape)


# --- steps of a kernel -----------------------------------------------------------------------------------------------


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """Row or column numbers in the layout of the tensor cores' results."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def row_constant(rows: int, value: float) -> jax.Array:
    """f32[rows] of one value, laid out as row maxima and sums are."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def matrix_zeros(rows: int, columns: int) -> jax.Array:
    """f32[rows, columns] zeros in the layout of the tensor cores' results."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA)


def load_as(ref: Any, layout: Any) -> jax.Array:
    """A reference's content in registers of that layout, whether or not the pattern has bank conflicts."""
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]  # needed before 0.11


def store(ref: Any, value: jax.Array) -> None:
    """Registers to a reference, whether or not the pattern has bank conflicts."""
    if _STORE_IS_CHECKED:
        plgpu.store(ref, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]  # new in 0.12
    else:
        ref[...] = value


def convert(
    raw: Any, terms: list[Any], operands: Operands, keep: Callable[[jax.Array], jax.Array] | None = None
) -> None:
    """Rewrite a tile of page rows as 16-bit terms, a few columns at a time so that registers suffice.

    keep: row numbers -> whether to keep or to zero them; None keeps all. Scales stay out of it: they are applied to
    scores and weights, which are fewer.
    """
    rows, columns = raw.shape
    width = 64 if columns % 64 == 0 else columns
    for start in range(0, columns, width):
        part = pl.ds(start, width)
        values = load_as(raw.at[:, part], plgpu.Layout.WGMMA)
        if jnp.dtype(values.dtype) == jnp.float8_e4m3fn:
            # The hardware turns float8 into float16 alone; every step is exact.
            values = values.astype(jnp.float16).astype(jnp.float32)
        for term, value in zip(terms, split_terms(values, operands.page_terms, operands.dtype), strict=True):
            if keep is not None:
                value = jnp.where(keep(iota((rows, width), 0)), value, jnp.zeros((rows, width), value.dtype))
            term[:, part] = value
    plgpu.commit_smem()


def clear_rows(ref: Any, keep: Callable[[jax.Array], jax.Array]) -> None:
    """Zero the rows of a value tile that no query may see: their weight is 0, but 0 times NaN would be NaN."""
    shape = ref.shape
    kept = keep(iota(shape, 0))
    ref[...] = jnp.where(kept, load_as(ref, plgpu.Layout.WGMMA), jnp.zeros(shape, ref.dtype))
    plgpu.commit_smem()


def score_products(query: list[Any], keys: list[Any], operands: Operands) -> jax.Array:
    """f32[rows, tile]: query tiles [rows, k_dim] times transposed key tiles [tile, k_dim], all in shared memory."""

    def multiply(accumulator: Any) -> jax.Array:
        for query_term, page_term in operands.products():
            plgpu.wgmma(accumulator, query[query_term], transposed(keys[page_term]))
        return accumulator[...]

    shape = (query[0].shape[0], keys[0].shape[0])
    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def transposed(ref: Any) -> Any:
    """The transposed view of a shared-memory matrix."""
    return ref.transpose((1, 0))


def add_weighted_values(
    values: jax.Array, weights: jax.Array, value_tiles: list[Any], operands: Operands, interpret: bool
) -> jax.Array:
    """values f32[rows, v_dim] plus weights f32[rows, tile] (from registers) times value tiles [tile, v_dim].

    Interpret mode knows no register operand of the tensor cores, so there the same product is a plain dot.
    """
    parts = split_terms(weights, operands.query_terms, operands.dtype)
    if interpret:
        for weight_term, page_term in operands.products():
            tile = value_tiles[page_term][...]
            values += lax.dot(parts[weight_term].astype(jnp.float32), tile.astype(jnp.float32), precision="highest")
        return values

    def multiply(accumulator: Any) -> None:
        for weight_term, page_term in operands.products():
            plgpu.wgmma(accumulator, parts[weight_term], value_tiles[page_term])

    start: Any = plgpu.WGMMAAccumulatorRef.init(values)
    return pl.run_state(multiply)(start)
