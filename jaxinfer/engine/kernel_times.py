"""Time of the attention operations alone, at a table of shapes, against the limits measured on the same device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.device_rates import DeviceRates, stream_seconds
from jaxinfer.runtime.cost import StepCost
from pallas_kernels import AttentionSpec, Choice, KVPages
from pallas_kernels.dispatch import AUTO, choose_for
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.pages import better_apart, pool_shape

OPERATIONS = DECODE, PREFILL, WRITE = ("paged_decode", "paged_prefill", "kv_write")
MOST_LONE_TOKENS = 64
"""kv_write of so many tokens puts each in a page of its own, as decode does; of more, in runs, as prefill does."""


@dataclass(frozen=True)
class KernelShape:
    """One call of one operation.

    operation: "paged_decode", "paged_prefill" (one sequence) or "kv_write".
    tokens: new positions; in decode one for each sequence.
    context: decode: positions that each sequence sees; prefill: positions cached before; kv_write: of no meaning.
    heads, kv_heads, head_dim, page_size: the sizes. dtype: of queries, keys and values. page_dtype: of the pages, None
        for `dtype`; "int8" and "float8_e4m3fn" carry scales.
    """

    operation: str
    tokens: int
    context: int = 0
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    dtype: str = "bfloat16"
    page_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise ValueError(f"There is no operation {self.operation!r}; there are {DECODE}, {PREFILL} and {WRITE}.")

    @property
    def name(self) -> str:
        """The shape in words."""
        sizes = {
            DECODE: f"{self.tokens} x {self.context}",
            PREFILL: f"{self.tokens} after {self.context}",
            WRITE: f"{self.tokens} tokens",
        }
        return f"{self.operation} {sizes[self.operation]}, page {self.page_size} {self.pool_dtype}"

    @property
    def pool_dtype(self) -> str:
        """Type of the pages."""
        return self.page_dtype or self.dtype

    @property
    def cost(self) -> StepCost:
        """The least work of a call: keys and values once, queries and results once; causal pairs only."""
        item = jnp.dtype(self.dtype).itemsize
        queries = 2 * self.tokens * self.heads * self.head_dim * item
        per_pair = 4 * self.heads * self.head_dim
        if self.operation == DECODE:
            visible = self.tokens * self.context
            return StepCost(visible * self.position_bytes + queries, visible * per_pair)
        if self.operation == PREFILL:
            pairs = self.tokens * self.context + self.tokens * (self.tokens + 1) // 2
            return StepCost((self.context + self.tokens) * self.position_bytes + queries, pairs * per_pair)
        new = 2 * self.tokens * self.kv_heads * self.head_dim * item
        return StepCost(new + self.tokens * self.position_bytes, 0)

    @property
    def position_bytes(self) -> int:
        """Bytes of one position in the pages, scales included."""
        item = jnp.dtype(self.pool_dtype).itemsize
        return self.kv_heads * (2 * self.head_dim * item + (8 if item == 1 else 0))

    @property
    def pages_per_call(self) -> int:
        """Pages that one call touches."""
        if self.operation == WRITE:
            return self.tokens if self.tokens <= MOST_LONE_TOKENS else -(-self.tokens // self.page_size)
        rows = self.tokens if self.operation == DECODE else 1
        return rows * self.columns

    @property
    def columns(self) -> int:
        """Pages of one sequence."""
        positions = self.context if self.operation == DECODE else self.context + self.tokens
        return -(-positions // self.page_size)


@dataclass(frozen=True)
class KernelTime:
    """One operation's time on this device.

    choice: the lowering that ran, and why. seconds: of a call, in a stream of calls. floor_s: least time by the
    measured rates. bound: "bandwidth" or "compute", what the floor is spent on.
    """

    shape: KernelShape
    choice: Choice
    seconds: float
    floor_s: float
    bound: str

    @property
    def fraction(self) -> float:
        """Part of the measured limit that was reached; 1 is perfect."""
        return self.floor_s / self.seconds


_SMALL = {"heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": "float32"}
_CPU_SHAPES = (
    KernelShape(DECODE, 1, 512, **_SMALL),
    KernelShape(DECODE, 8, 512, **_SMALL),
    KernelShape(DECODE, 8, 512, **_SMALL, page_dtype="int8"),
    KernelShape(PREFILL, 128, 0, **_SMALL),
    KernelShape(PREFILL, 64, 256, **_SMALL),
    KernelShape(WRITE, 8, **_SMALL),
    KernelShape(WRITE, 128, **_SMALL),
)
_DECODE_SIZES = ((1, 512), (1, 4096), (16, 512), (16, 4096), (64, 512), (64, 4096))
_ACCELERATOR_SHAPES = (
    *(KernelShape(DECODE, batch, context) for batch, context in _DECODE_SIZES),
    *(KernelShape(DECODE, batch, context, page_size=16) for batch, context in ((1, 4096), (64, 4096))),
    *(KernelShape(DECODE, 64, 4096, page_dtype=page_dtype) for page_dtype in ("int8", "float8_e4m3fn")),
    *(KernelShape(PREFILL, tokens, prefix) for tokens, prefix in ((512, 0), (2048, 0), (8192, 0), (512, 4096))),
    *(KernelShape(WRITE, tokens) for tokens in (64, 2048)),
)


def shapes_for(platform: str) -> tuple[KernelShape, ...]:
    """The table of a platform: the attention of Llama 3 8B, or something small on "cpu"."""
    return _CPU_SHAPES if platform == "cpu" else _ACCELERATOR_SHAPES


def check_choices(shapes: Sequence[KernelShape], impl: str) -> None:
    """Raise KernelUnavailable when an explicit `impl` cannot run one of the shapes here."""
    for shape in shapes:
        KernelCalls(shape, 1.0, impl).choice()


def time_kernel(shape: KernelShape, rates: DeviceRates, impl: str = AUTO) -> KernelTime:
    """Time one shape: calls in a row inside one program, each on other pages than the one before.

    Raises KernelUnavailable when an explicit `impl` cannot run it.
    """
    cost = shape.cost
    floor, bound = cost.floor_seconds(rates.bandwidth, rates.flops), cost.bound(rates.bandwidth, rates.flops)
    calls = KernelCalls(shape, floor, impl)
    choice = calls.choice()
    state, fixed = calls.arguments()
    program = jax.jit(calls.run, donate_argnums=0)
    seconds = stream_seconds(lambda state: program(state, *fixed), state) / calls.rounds
    return KernelTime(shape, choice, seconds, floor, bound)


class KernelCalls:
    """A program of many calls of one operation, and its arguments.

    least_s: seconds that a call takes at least; there are so many calls that the program's own start is little beside.
    """

    def __init__(self, shape: KernelShape, least_s: float, impl: str = AUTO) -> None:
        on_cpu = jax.default_backend() == "cpu"
        self.shape, self.impl = shape, impl
        self.rounds = min(2048, max(4, math.ceil(2e-3 / least_s)))
        # Pages that fit a cache would time the cache: calls use different ones until this much has passed.
        cold_bytes = 64 * 2**20 if on_cpu else 512 * 2**20
        touched = shape.pages_per_call * shape.page_size * shape.position_bytes
        self.copies = min(self.rounds, max(1, -(-cold_bytes // touched)))
        self.num_pages = 1 + self.copies * shape.pages_per_call

    def choice(self) -> Choice:
        """The lowering that will run, and why."""
        package, chosen = f"pallas_kernels.{self.shape.operation}", []

        def look(state: Any, fixed: tuple[Any, ...]) -> None:
            chosen.append(choose_for(package, self.impl, *self._call_arguments(0, state, *fixed)))

        jax.eval_shape(look, *jax.eval_shape(self.arguments))
        return chosen[0]

    def run(self, state: Any, *fixed: Any) -> Any:
        """All calls; each one's result is the next one's query or pool, so that none can be left out."""
        return jax.lax.fori_loop(0, self.rounds, lambda index, state: self._once(index, state, *fixed), state)

    def arguments(self) -> tuple[Any, tuple[Any, ...]]:
        """(queries or, for kv_write, the pool; everything that stays as it is)."""
        shape, key = self.shape, jax.random.key(0, impl="rbg")
        dtype = jnp.dtype(shape.dtype)
        order = np.random.default_rng(0).permutation(self.num_pages - 1) + 1
        pages = jax.jit(self._random_pool)(key)
        if shape.operation == WRITE:
            new = jax.random.normal(key, (2, shape.tokens, shape.kv_heads, shape.head_dim), dtype)
            run = -(-shape.tokens // shape.pages_per_call)
            ids = np.repeat(order.reshape(self.copies, -1), run, axis=1)[:, : shape.tokens]
            offsets = jnp.arange(shape.tokens, dtype=jnp.int32) % shape.page_size
            return pages, (*new, jnp.asarray(ids, jnp.int32), offsets)
        q = jax.random.normal(key, (shape.tokens, shape.heads, shape.head_dim), dtype)
        tables = jnp.asarray(order.reshape(self.copies, -1, shape.columns), jnp.int32)
        if shape.operation == DECODE:
            return q, (pages, tables, jnp.full((shape.tokens,), shape.context, jnp.int32))
        starts = jnp.array([0, shape.tokens], jnp.int32)
        return q, (pages, tables, starts, jnp.array([shape.context + shape.tokens], jnp.int32))

    def _once(self, index: Any, state: Any, *fixed: Any) -> Any:
        arguments = self._call_arguments(index, state, *fixed)
        if self.shape.operation == WRITE:
            return kv_write(*arguments, impl=self.impl)
        operation: Callable[..., Any] = paged_decode if self.shape.operation == DECODE else paged_prefill
        return operation(*arguments, impl=self.impl)[0]

    def _call_arguments(self, index: Any, state: Any, *fixed: Any) -> tuple[Any, ...]:
        if self.shape.operation == WRITE:
            k, v, ids, offsets = fixed
            # Once all pages were written to, the next position of each.
            offsets = offsets + index // self.copies
            return k, v, state, ids[index % self.copies], offsets % self.shape.page_size
        pages, tables, *rest = fixed
        spec = AttentionSpec(self.shape.head_dim**-0.5)
        return (state, None, None, pages, tables[index % self.copies], *rest, spec)

    def _random_pool(self, key: jax.Array) -> KVPages:
        shape = self.shape
        sizes = pool_shape(self.num_pages, shape.kv_heads, shape.page_size, 2 * shape.head_dim, better_apart())
        return random_pages(key, sizes, shape.pool_dtype)


def random_pages(key: jax.Array, shape: Sequence[int], dtype: str) -> KVPages:
    """Pages of random numbers of about unit size: zeros could run faster than real data does."""
    if jnp.dtype(dtype).itemsize > 1:
        return KVPages(jax.random.normal(key, shape, jnp.dtype(dtype)), None)
    data = jax.random.randint(key, shape, -100, 101, jnp.int8).astype(jnp.dtype(dtype))
    return KVPages(data, jnp.full((shape[0], 2, shape[1], shape[-2]), 0.01, jnp.float32))
