"""The product with a quantized weight on Hopper GPUs (Mosaic GPU): tiles of the weight come by TMA, each read once.

A tile of integers passes through registers, where it is scaled and rounded to 16 bits, into shared memory for the
tensor cores. Two int4 share a byte: those of even and of odd columns are multiplied apart, and interleaved at the end.
Blocks cover a few columns and part of the inputs, so that all multiprocessors read; XLA adds the parts up.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _gpu_attention as gpu
from pallas_kernels.quantized_matmul.weights import QuantizedWeight, offset_product

ROWS = gpu.WARPGROUP_ROWS
"""Rows of x that the tensor cores take at a time, and the most that the kernel takes."""
TILE = 64
"""Inputs of a tile."""
COLUMNS = 128
"""Bytes of a tile's rows: as many outputs in int8, twice as many in int4."""
CHUNK = 64
"""Columns converted at a time, so that registers suffice."""
STAGES = 6
"""Tiles on their way or in use. With those of a second block they are 96 KiB, above what covers a copy's latency."""
LEAST_TILES = 4
"""Tiles of a block below which splitting the inputs further costs more than it gains."""


@dataclass(frozen=True)
class Plan:
    """How a call is cut.

    stored_rows: rows of x in whole tiles of 8. column_blocks: of outputs. splits: of inputs. tiles: of inputs in all.
    """

    stored_rows: int
    column_blocks: int
    splits: int
    tiles: int

    @property
    def tiles_per_split(self) -> int:
        """Most tiles of inputs of one block."""
        return -(-self.tiles // self.splits)


def unsupported(x: Any, weight: QuantizedWeight) -> str | None:
    """Why this lowering cannot run these shapes and types, as a sentence; None when it can."""
    here = gpu.unsupported_here()
    if here is not None:
        return here
    if jnp.dtype(x.dtype).name not in ("bfloat16", "float16"):
        return f"The Mosaic GPU kernel multiplies bfloat16 and float16, but x is {jnp.dtype(x.dtype).name}."
    if x.shape[0] > ROWS:
        return f"x has {x.shape[0]} rows, but the kernel serves products of at most {ROWS}, bound by the weight."
    if weight.axis == 1:
        return "The Mosaic GPU kernel reads weights [inputs, outputs], but this is a table [outputs, inputs]."
    outputs = COLUMNS * (8 // weight.bits)
    if weight.inputs % TILE or weight.outputs % outputs:
        return (
            f"The Mosaic GPU kernel needs multiples of {TILE} inputs and {outputs} outputs, not {weight.inputs} and "
            f"{weight.outputs}."
        )
    if weight.groups > 1 and (weight.group % 16 or (TILE % weight.group and weight.group % TILE)):
        return f"The Mosaic GPU kernel needs groups of 16, 32 or a multiple of {TILE} inputs, not {weight.group}."
    scales = jnp.dtype(weight.scales.dtype).name
    if weight.groups > 1 and scales not in ("float32", "bfloat16"):
        return f"The Mosaic GPU kernel reads float32 and bfloat16 scales, but these are {scales}."
    return None


def plan_of(rows: int, weight: QuantizedWeight) -> Plan:
    """Splits fill twice the multiprocessors, as far as every block keeps a few tiles."""
    column_blocks, tiles = weight.outputs * weight.bits // 8 // COLUMNS, weight.inputs // TILE
    wanted = -(-2 * gpu.MULTIPROCESSORS // column_blocks)
    splits = max(1, min(wanted, tiles // LEAST_TILES))
    return Plan(-(-rows // 8) * 8, column_blocks, -(-tiles // -(-tiles // splits)), tiles)


def quantized_matmul(
    x: jax.Array, weight: QuantizedWeight, *, out_dtype: jax.typing.DTypeLike, interpret: Any = None
) -> jax.Array:
    """`pallas_kernels.quantized_matmul.quantized_matmul` by Mosaic GPU; `interpret` takes `InterpretGPUParams()`."""
    plan = plan_of(x.shape[0], weight)
    inputs = {"x": jnp.pad(x, ((0, plan.stored_rows - x.shape[0]), (0, 0))), "values": _as_bytes(weight.values)}
    if weight.groups > 1:
        inputs |= _scale_inputs(weight)
    parts = 8 // weight.bits
    shape = (parts, plan.splits, plan.stored_rows, weight.outputs // parts)
    kernel = plgpu.kernel(
        functools.partial(
            _run_block, plan=plan, weight=_shape_of(weight), dtype=x.dtype, interpret=interpret is not None
        ),
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        # The last axis runs fastest: neighbouring blocks read neighbouring columns.
        grid=(plan.splits, plan.column_blocks),
        grid_names=("split", "column"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=gpu.LANE),
        interpret=interpret,
    )
    sums = kernel(inputs).sum(1)
    product = jnp.moveaxis(sums, 0, -1).reshape(plan.stored_rows, weight.outputs)[: x.shape[0]]
    if weight.groups == 1:
        product = product * weight.scales.astype(jnp.float32)
    if weight.offsets is not None:
        product = product + offset_product(x, weight)
    return product.astype(out_dtype)


@dataclass(frozen=True)
class _Shape:
    """What a block must know of a weight. parts: values of a byte. group: None where scales wait for the sum."""

    parts: int
    group: int | None

    @property
    def tile_groups(self) -> int:
        """Groups that a tile's inputs lie in."""
        return 1 if self.group is None else max(1, TILE // self.group)


def _shape_of(weight: QuantizedWeight) -> _Shape:
    return _Shape(8 // weight.bits, weight.group if weight.groups > 1 else None)


def _as_bytes(values: jax.Array) -> jax.Array:
    """int8 as it is; int4 [inputs, outputs] as int8[inputs, outputs / 2], even columns in the low halves."""
    if values.dtype == jnp.int8:
        return values
    return lax.bitcast_convert_type(values.reshape(values.shape[0], -1, 2), jnp.int8)


def _scale_inputs(weight: QuantizedWeight) -> dict[str, jax.Array]:
    """Scales by columns of bytes: for int4 pairs of bfloat16 as integers, or float32 of even and odd columns apart."""
    scales = weight.scales
    if weight.bits == 8:
        return {"scales_0": scales.astype(jnp.float32)}
    if scales.dtype == jnp.bfloat16:
        return {"pairs": lax.bitcast_convert_type(scales.reshape(weight.groups, -1, 2), jnp.int32)}
    return {"scales_0": scales[:, 0::2], "scales_1": scales[:, 1::2]}


def _run_block(inputs: dict[str, Any], out: Any, *, plan: Plan, weight: _Shape, dtype: Any, interpret: bool) -> None:
    """One block: the products of (split of the inputs, columns)."""
    split, column = lax.axis_index("split"), lax.axis_index("column")
    begin = split * plan.tiles_per_split
    tiles = jnp.minimum(plan.tiles - begin, plan.tiles_per_split)
    columns = pl.ds(column * COLUMNS, COLUMNS)
    scale_names = [name for name in inputs if name not in ("x", "values")]

    def walk(memory: dict[str, Any], operands: Any, ready: Any) -> tuple[jax.Array, ...]:
        def fetch(index: Any, slot: Any) -> None:
            tile, barrier = begin + index, ready.at[slot]
            rows = pl.ds(tile * TILE, TILE)
            plgpu.copy_gmem_to_smem(inputs["values"].at[rows, columns], memory["values"].at[slot], barrier)
            stored = pl.ds(0, plan.stored_rows)
            plgpu.copy_gmem_to_smem(inputs["x"].at[stored, rows], memory["x"].at[slot, stored], barrier)
            for name in scale_names:
                assert weight.group is not None
                groups = pl.ds(lax.div(tile * TILE, jnp.int32(weight.group)), weight.tile_groups)
                plgpu.copy_gmem_to_smem(inputs[name].at[groups, columns], memory[name].at[slot], barrier)

        def step(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            slot = lax.rem(index, jnp.int32(STAGES))
            plgpu.barrier_wait(ready.at[slot])
            for start in range(0, COLUMNS, CHUNK):
                chunk = pl.ds(start, CHUNK)
                stored = gpu.load_as(memory["values"].at[slot, :, chunk], plgpu.Layout.WGMMA)
                scales = {name: memory[name].at[slot, :, chunk] for name in scale_names}
                for part, values in enumerate(_scaled(stored, scales, weight)):
                    gpu.store(operands.at[part, :, chunk], values.astype(dtype))
            plgpu.commit_smem()
            x = memory["x"].at[slot]
            found = tuple(_add_product(sums[part], x, operands.at[part], interpret) for part in range(weight.parts))
            pl.when(index + STAGES < tiles)(lambda: fetch(index + STAGES, slot))
            return found

        for stage in range(STAGES):
            pl.when(stage < tiles)(functools.partial(fetch, jnp.int32(stage), stage))
        zeros = tuple(gpu.matrix_zeros(ROWS, COLUMNS) for _ in range(weight.parts))
        return lax.fori_loop(0, tiles, step, zeros)

    memory = {
        "values": plgpu.SMEM((STAGES, TILE, COLUMNS), jnp.int8),
        "x": gpu.swizzled_memory((STAGES, ROWS, TILE), dtype),
    }
    memory |= {name: plgpu.SMEM((STAGES, weight.tile_groups, COLUMNS), inputs[name].dtype) for name in scale_names}
    sums = pl.run_scoped(
        walk,
        memory,
        gpu.swizzled_memory((weight.parts, TILE, COLUMNS), dtype),
        plgpu.Barrier(num_arrivals=len(memory), num_barriers=STAGES),
    )

    def store(result: Any) -> None:
        for part in range(weight.parts):
            result[...] = sums[part]
            plgpu.commit_smem()
            rows = pl.ds(0, plan.stored_rows)
            plgpu.copy_smem_to_gmem(result.at[rows], out.at[part, split, :, columns])
            plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(store, gpu.swizzled_memory((ROWS, COLUMNS), jnp.float32))


def _scaled(stored: jax.Array, scales: dict[str, Any], weight: _Shape) -> list[jax.Array]:
    """The values f32[TILE, CHUNK] of each part of the bytes, times the scales of their groups."""
    values = [stored]
    if weight.parts == 2:
        wide = stored.astype(jnp.int32)
        values = [(wide << 28) >> 28, wide >> 4]
    exact = [each.astype(jnp.float32) for each in values]
    if weight.group is None:
        return exact
    row = gpu.iota(stored.shape, 0)
    spread: list[jax.Array] = []
    for group in range(weight.tile_groups):
        # The first rows of a tile belong to its first group.
        here = [gpu.along_columns(vector, stored.shape) for vector in _scale_vectors(scales, group)]
        spread = (
            here
            if group == 0
            else [jnp.where(row >= group * weight.group, h, s) for h, s in zip(here, spread, strict=True)]
        )
    return [each * scale for each, scale in zip(exact, spread, strict=True)]


def _scale_vectors(scales: dict[str, Any], group: int) -> list[jax.Array]:
    """f32[CHUNK] of a tile's group for each part."""
    loaded = {name: gpu.load_as(ref.at[group], plgpu.Layout.WGMMA.reduce(0)) for name, ref in scales.items()}
    if "pairs" not in loaded:
        return list(loaded.values())
    # A bfloat16 is the upper half of a float32.
    pairs = loaded["pairs"]
    return [lax.bitcast_convert_type(each, jnp.float32) for each in (pairs << 16, pairs & jnp.int32(-65536))]


def _add_product(sums: jax.Array, x: Any, operand: Any, interpret: bool) -> jax.Array:
    """sums f32[ROWS, COLUMNS] plus x [ROWS, TILE] times the operand [TILE, COLUMNS], both in shared memory."""

    def multiply(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, x, operand)

    def product(accumulator: Any) -> jax.Array:
        multiply(accumulator)
        return accumulator[...]

    if interpret:
        # Interpret mode knows no accumulator that starts with a value.
        return sums + pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((ROWS, COLUMNS), jnp.float32))
    start: Any = plgpu.WGMMAAccumulatorRef.init(sums)
    return pl.run_state(multiply)(start)
