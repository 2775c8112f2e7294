"""Compile the serving programs for a chip that is not attached; say whether they fit and how good they can be.

The environment that the compilers need (`jaxinfer.runtime.compiler_environment`) must be set before jax is imported.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.models import DecoderConfig, abstract_params
from jaxinfer.runtime.chips import USABLE_MEMORY, Target, gpu_target_config
from jaxinfer.runtime.cost import StepCost, decode_cost, mixed_cost, prefill_cost
from jaxinfer.runtime.hlo_traffic import memory_traffic
from jaxinfer.runtime.limits import Buckets, RunnerLimits
from jaxinfer.runtime.parallel import MODEL_AXIS, check_divisible, param_specs, state_specs
from jaxinfer.runtime.programs import integers, prefill_shapes, updates_of
from jaxinfer.runtime.state import DecodeBatch, EngineState, init_state
from jaxinfer.runtime.steps import attention_spec, decode_step, mixed_step
from pallas_kernels.dispatch import XLA, choose_for
from pallas_kernels.quantized_matmul import stored_bytes


class CompilerMissing(ValueError):
    """The compiler for a target is not installed; the message says how to install it."""


@dataclass(frozen=True)
class BucketReport:
    """One compiled program, per device.

    kind: "decode" or "prefill". rows: sequences of it. decodes: sequences that may decode beside a prefill. tokens:
        positions computed in all.
    seconds: of compiling. argument_bytes, temp_bytes, alias_bytes: the compiler's own figures.
    pool_bytes: of the KV pool. in_place: the pool is updated without a copy (alias_bytes covers it).
    cost: the least work, with all decodes at the largest context. bytes_accessed: what the compiled program moves to
        and from memory, where it can be counted.
    flops: the compiler's count, None where it gives none.
    floor_s: least time of that work by the datasheet. estimate_s: the compiler's estimate, None without a usable one.
    kernels: the lowering chosen for attention (XLA if any part of it is done so), and why.
    """

    kind: str
    rows: int
    decodes: int
    tokens: int
    seconds: float
    argument_bytes: int
    temp_bytes: int
    alias_bytes: int
    pool_bytes: int
    in_place: bool
    cost: StepCost
    bytes_accessed: int | None
    flops: float | None
    floor_s: float
    estimate_s: float | None
    kernels: str

    @property
    def needed_bytes(self) -> int:
        """Memory while it runs: arguments (the pool among them), temporaries, and results that are not aliased."""
        return self.argument_bytes + self.temp_bytes


@dataclass(frozen=True)
class CompileReport:
    """All programs of an engine on a target, per device.

    memory_bytes: usable. weight_bytes, pool_bytes: of parameters and KV pool. spare_bytes: what is left (negative: what
    is missing). most_pages, most_slots: the largest pool that fits, and the sequences of full context that it holds.
    """

    target: str
    tensor_parallel: int
    buckets: tuple[BucketReport, ...]
    memory_bytes: int
    weight_bytes: int
    pool_bytes: int
    spare_bytes: int
    most_pages: int
    most_slots: int

    @property
    def fits(self) -> bool:
        """Whether every program fits the memory."""
        return self.spare_bytes >= 0


def compile_report(
    config: DecoderConfig, limits: RunnerLimits, buckets: Buckets, target: Target, tensor_parallel: int | None = None
) -> Iterator[BucketReport | CompileReport]:
    """Compile every bucket and yield its report; at the end the report of all.

    tensor_parallel: devices to cut the model over; None for all of the target's.
    Raises ValueError when the model cannot be cut so, CompilerMissing when the compiler is not installed.
    """
    parallel = target.devices if tensor_parallel is None else tensor_parallel
    if not 1 <= parallel <= target.devices:
        raise ValueError(f"{target.name} has {target.devices} devices, so tensor parallelism cannot be {parallel}.")
    check_divisible(config, parallel)
    build = _Build(config, limits, buckets, target, _devices(target)[:parallel])
    reports = []
    for kind, rows, tokens in _programs(buckets):
        reports.append(build.compile(kind, rows, tokens))
        yield reports[-1]
    yield build.summary(tuple(reports))


def _programs(buckets: Buckets) -> Iterator[tuple[str, int, int]]:
    for rows in buckets.decode_rows:
        yield "decode", rows, rows
    for tokens, rows in buckets.prefill:
        yield "prefill", rows, tokens


def _devices(target: Target) -> list[Any]:
    chip = target.chip
    try:
        if chip.gpu is None:
            name = next(name for chips, name in chip.topologies if chips >= target.chips)
            return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
        return list(
            topologies.get_topology_desc(
                platform="cuda",
                topology_name=chip.name,
                topology=f"1x1x{target.devices}",
                target_config=gpu_target_config(chip),
            ).devices
        )
    except Exception as error:
        package = "libtpu" if chip.gpu is None else "the CUDA plugin of jax"
        raise CompilerMissing(
            f"Compiling for {target.name} needs {package}, which cannot be loaded here "
            f"({str(error).splitlines()[0][:200]}); install it, with Python 3.12 or newer, by: "
            "pip install -e '.[aot]'."
        ) from error


class _Build:
    """One model on one target: abstract arguments with their shardings."""

    def __init__(
        self, config: DecoderConfig, limits: RunnerLimits, buckets: Buckets, target: Target, devices: list[Any]
    ) -> None:
        self.config, self.limits, self.target, self.parallel = config, limits, target, len(devices)
        self.buckets = buckets
        self.mesh = jax.sharding.Mesh(devices, (MODEL_AXIS,))
        cores = None if target.chip.gpu is not None else devices[0].num_cores
        abstract_device = jax.sharding.AbstractDevice(
            device_kind=devices[0].device_kind, num_cores=cores, platform=target.chip.platform
        )
        self.abstract_mesh = jax.sharding.AbstractMesh(
            (len(devices),),
            (MODEL_AXIS,),
            axis_types=(jax.sharding.AxisType.Auto,),
            abstract_device=abstract_device,
        )
        params = abstract_params(config)
        with jax.sharding.use_abstract_mesh(self.abstract_mesh):  # the layout of pages depends on the chip
            state = jax.eval_shape(
                lambda: init_state(
                    config,
                    num_slots=limits.max_slots,
                    num_pages=limits.num_pages,
                    page_size=limits.page_size,
                    max_context=limits.max_context,
                )
            )
        self.params = self._place(params, param_specs(params))
        self.state: EngineState = self._place(state, state_specs(state))
        self.weight_bytes = _bytes_per_device(self.params)
        self.pool_bytes = _bytes_per_device(self.state.kv)

    def compile(self, kind: str, rows: int, tokens: int) -> BucketReport:
        """Compile one bucket."""
        step, batch, cost = self._program(kind, rows, tokens)
        started = time.perf_counter()
        with jax.sharding.use_abstract_mesh(self.abstract_mesh):
            lowered = jax.jit(step, static_argnums=0, donate_argnums=2).lower(
                self.config, self.params, self.state, batch
            )
            compiled = lowered.compile()
        seconds = time.perf_counter() - started
        memory, figures, text = compiled.memory_analysis(), compiled.cost_analysis() or {}, compiled.as_text()
        assert memory is not None, "both compilers report memory"
        assert text is not None, "both compilers report the program's text"
        cost = StepCost(cost.bytes // self.parallel, cost.flops // self.parallel)
        floor = cost.floor_seconds(self.target.chip.bandwidth, self.target.chip.flops)
        estimate = figures.get("optimal_seconds")
        return BucketReport(
            kind=kind,
            rows=rows,
            decodes=self._decodes_beside(tokens) if kind == "prefill" else 0,
            tokens=tokens,
            seconds=seconds,
            argument_bytes=memory.argument_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            pool_bytes=self.pool_bytes,
            in_place=memory.alias_size_in_bytes >= self.pool_bytes,
            cost=cost,
            bytes_accessed=memory_traffic(text) if self.target.chip.platform == "tpu" else None,
            flops=figures.get("flops"),
            floor_s=floor,
            # The compiler's sum over operations can come out below what physics allows; then it says nothing.
            estimate_s=estimate if estimate is not None and estimate >= floor else None,
            kernels=self._kernel_choice(kind, rows, tokens),
        )

    def summary(self, buckets: tuple[BucketReport, ...]) -> CompileReport:
        """The verdict over all buckets."""
        usable = int(self.target.chip.memory_bytes * USABLE_MEMORY)
        needed = max(bucket.needed_bytes for bucket in buckets)
        page_bytes = self.pool_bytes // self.limits.num_pages
        most_pages = max(0, (usable - (needed - self.pool_bytes)) // page_bytes)
        return CompileReport(
            target=self.target.name,
            tensor_parallel=self.parallel,
            buckets=buckets,
            memory_bytes=usable,
            weight_bytes=self.weight_bytes,
            pool_bytes=self.pool_bytes,
            spare_bytes=usable - needed,
            most_pages=most_pages,
            most_slots=max(0, most_pages - 1) // self.limits.pages_per_sequence,
        )

    def _program(self, kind: str, rows: int, tokens: int) -> tuple[Any, Any, StepCost]:
        context = self.limits.max_context
        if kind == "decode":
            batch: Any = DecodeBatch(integers(rows), integers(rows), updates_of(rows))
            step, cost = decode_step, decode_cost(self.config, rows, context - 1)
        else:
            batch = prefill_shapes(tokens, rows, self.buckets.mixed_in(tokens), self.limits)
            decodes = self._decodes_beside(tokens)
            cost = (
                mixed_cost(self.config, tokens, decodes, context - 1) if decodes else prefill_cost(self.config, tokens)
            )
            step = mixed_step
        return step, self._place(batch, jax.tree.map(lambda _: PartitionSpec(), batch)), cost

    def _decodes_beside(self, tokens: int) -> int:
        """Most decodes that run with a prefill in `tokens` positions: one slot and position are the prefill's."""
        return min(self.buckets.mixed_in(tokens), tokens - 1, self.limits.max_slots - 1)

    def _place(self, tree: Any, specs: Any) -> Any:
        def place(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec))

        return jax.tree.map(place, tree, specs)

    def _kernel_choice(self, kind: str, rows: int, tokens: int) -> str:
        attention = self.config.attention
        with jax.sharding.use_abstract_mesh(self.abstract_mesh):
            calls = self._kernel_calls(kind, rows, tokens)
            choices = [choose_for(f"pallas_kernels.{name}", attention, *arguments) for name, arguments in calls]
        choice = next((choice for choice in choices if choice.name == XLA), choices[0])
        return f"{choice.name}: {choice.reason}"

    def _kernel_calls(self, kind: str, rows: int, tokens: int) -> list[tuple[str, tuple[Any, ...]]]:
        """Package and arguments of what a program calls: see `mixed_step`."""
        config, columns = self.config, self.limits.pages_per_sequence
        spec, dtype = attention_spec(config, 0), jnp.dtype(config.dtype)
        heads, kv_heads = config.num_heads // self.parallel, max(1, config.num_kv_heads // self.parallel)
        width = spec.key_width(self.state.kv[0].width)
        pages = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype), self.state.kv[0]
        )

        def queries(count: int) -> Any:
            return jax.ShapeDtypeStruct((count, heads, width), dtype)

        k = jax.ShapeDtypeStruct((tokens, kv_heads, width), dtype)
        new = k, None if spec.values_in_keys else k
        table, starts, lengths = integers(rows, columns), integers(rows + 1), integers(rows)
        if kind == "decode":
            return [("paged_decode", (queries(rows), *new, pages, table, lengths, spec))]
        decodes = self.buckets.mixed_in(tokens)
        if not decodes:
            return [("paged_prefill", (queries(tokens), *new, pages, table, starts, lengths, spec))]
        decoding = queries(decodes), None, None, pages, integers(decodes, columns), integers(decodes), spec
        return [
            ("paged_prefill", (queries(tokens), None, None, pages, table, starts, lengths, spec)),
            ("paged_decode", decoding),
            ("kv_write", (*new, pages, integers(tokens), integers(tokens))),
        ]


def _bytes_per_device(tree: Any) -> int:
    total = 0
    for leaf in jax.tree.leaves(tree):
        total += stored_bytes(jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype))
    return total
