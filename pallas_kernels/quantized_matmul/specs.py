"""Named cases of `quantized_matmul`: rows of x from one to a small prefill, the formats of files and of rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import dtype_of
from pallas_kernels.quantized_matmul.weights import QuantizedWeight, WeightFormat, quantize


@dataclass(frozen=True)
class MatmulCase:
    """One shape of `quantized_matmul`.

    rows, inputs, outputs: x is [rows, inputs]. table: the weight is [outputs, inputs], else [inputs, outputs].
    dtype: of x. slow: too large for interpret mode in a quick test run.
    """

    name: str
    rows: int
    weight_format: WeightFormat
    inputs: int = 256
    outputs: int = 512
    table: bool = False
    dtype: str = "float32"
    slow: bool = False


_INT8 = WeightFormat(8)
_INT8_32 = WeightFormat(8, 32)
_INT8_16 = WeightFormat(8, 16)
_INT4 = WeightFormat(4, 32, offsets=True, scale_dtype="bfloat16")

CASES = (
    MatmulCase("one_row", 1, _INT8),
    MatmulCase("int8_bf16", 8, _INT8, dtype="bfloat16"),
    MatmulCase("int8_offsets", 3, WeightFormat(8, offsets=True)),
    MatmulCase("q8_0", 5, _INT8_32),
    MatmulCase("q6_k", 2, _INT8_16, dtype="bfloat16"),
    MatmulCase("q5_1", 2, WeightFormat(8, 32, offsets=True)),
    MatmulCase("q4_0", 4, WeightFormat(4, 32), dtype="bfloat16"),
    MatmulCase("q4_1", 7, WeightFormat(4, 32, offsets=True)),
    MatmulCase("int4", 1, _INT4, dtype="bfloat16"),
    MatmulCase("int4_group_64", 16, WeightFormat(4, 64, scale_dtype="bfloat16"), dtype="bfloat16"),
    MatmulCase("int4_whole", 3, WeightFormat(4)),
    MatmulCase("q8_0_bf16", 33, _INT8_32, inputs=768, dtype="bfloat16"),
    MatmulCase("q4_1_bf16", 8, WeightFormat(4, 32, offsets=True), dtype="bfloat16"),
    MatmulCase("group_128", 8, WeightFormat(8, 128), inputs=512, dtype="bfloat16"),
    MatmulCase("table", 3, _INT8, table=True),
    MatmulCase("table_bf16", 8, _INT8, table=True, dtype="bfloat16"),
    MatmulCase("table_q8_0", 3, _INT8_32, table=True),
    MatmulCase("table_q4_1", 3, WeightFormat(4, 32, offsets=True), table=True),
    MatmulCase("odd_outputs", 3, _INT4, inputs=96, outputs=33),
    MatmulCase("odd_inputs", 3, _INT8, inputs=75, outputs=64),
    MatmulCase("several_blocks", 64, _INT4, inputs=4096, outputs=512, dtype="bfloat16", slow=True),
    MatmulCase("several_blocks_int8", 9, _INT8, inputs=4096, outputs=1024, slow=True),
    MatmulCase("smollm2_down", 8, _INT4, inputs=1536, outputs=576, slow=True),
)
"""The formats q8_0, q6_k, q5_1, q4_0 and q4_1 are those of GGUF files, see `jaxinfer.runtime.quantizing`."""

LLAMA_SHAPES = {"q": (4096, 4096), "kv": (4096, 2048), "gate": (4096, 14336), "down": (14336, 4096)}
"""(inputs, outputs) of the projections of a layer of Llama-3-8B."""
_LLAMA_FORMATS = {"int8": _INT8, "q8_0": _INT8_32, "int4": _INT4}
LLAMA_3_8B = (
    *(
        MatmulCase(f"llama_{name}_{kind}", 16, found, *shape, dtype="bfloat16", slow=True)
        for name, shape in LLAMA_SHAPES.items()
        for kind, found in _LLAMA_FORMATS.items()
    ),
    MatmulCase("llama_head_int8", 16, _INT8, 4096, 128256, table=True, dtype="bfloat16", slow=True),
)


def build_arguments(case: MatmulCase, seed: int = 0) -> tuple[np.ndarray, QuantizedWeight]:
    """numpy x and weight. Some groups hold only zeros, and the groups' ranges differ widely."""
    random = np.random.default_rng(seed)
    array = random.normal(size=(case.inputs, case.outputs)) * np.exp(random.normal(size=(case.inputs, 1)))
    array = array + 0.3 if case.weight_format.offsets else array
    array[: case.inputs // 4, 0] = 0
    axis = 1 if case.table else 0
    weight = quantize((array.T if case.table else array).astype(np.float32), case.weight_format, axis)
    x = random.normal(size=(case.rows, case.inputs)) / np.sqrt(case.inputs)
    return x.astype(dtype_of(case.dtype)), weight


def abstract_arguments(case: MatmulCase, sharding: jax.sharding.Sharding | None = None) -> tuple[Any, Any]:
    """Shapes and types of `build_arguments`, for compiling without data."""
    axis = 1 if case.table else 0
    shape = (case.outputs, case.inputs) if case.table else (case.inputs, case.outputs)
    weight = jax.eval_shape(lambda: quantize(jnp.zeros(shape), case.weight_format, axis))
    x = jax.ShapeDtypeStruct((case.rows, case.inputs), dtype_of(case.dtype))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), (x, weight))
