"""What a model needs and what a chip can give, by arithmetic alone: parameters, KV memory, requests, step floors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.models import DecoderConfig, abstract_params
from jaxinfer.runtime.chips import USABLE_MEMORY, Target
from jaxinfer.runtime.cost import StepCost, active_parameters, decode_cost, prefill_cost, tree_bytes
from jaxinfer.runtime.parallel import MODEL_AXIS, check_divisible, param_specs
from pallas_kernels.quantized_matmul import is_quantized_weight, stored_bytes

GIB = 1024**3
SMALLEST_CONTEXT = 512
_MOST_PARAMETERS = 2**60


@dataclass(frozen=True)
class ModulePlan:
    """Parameters of one kind of module, all layers together.

    name: its path; `layers` stands for all of them. copies: how many the model has. parameters, bytes: of all copies.
    """

    name: str
    copies: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class ContextPlan:
    """KV memory of requests of one length.

    context: positions of each. bytes: of one request, in whole pages. bytes_per_layer: of these. requests: that fit the
    pool at once, None when its size is not known.
    """

    context: int
    bytes: int
    bytes_per_layer: int
    requests: int | None


@dataclass(frozen=True)
class StepPlan:
    """The least one step takes.

    kind: "prefill" or "decode". batch: sequences. tokens: positions computed for each. context: positions that each
    has cached before. kv_bytes: that the batch has cached after it. cost: of all devices together. floor_s, bound: the
    least time on the target and what it is spent on, None without a target.
    """

    kind: str
    batch: int
    tokens: int
    context: int
    kv_bytes: int
    cost: StepCost
    floor_s: float | None
    bound: str | None

    @property
    def intensity(self) -> float:
        """Operations per byte moved."""
        return self.cost.flops / self.cost.bytes

    @property
    def tokens_per_s(self) -> float | None:
        """Most positions per second, None without a target."""
        return None if self.floor_s is None else self.batch * self.tokens / self.floor_s


@dataclass(frozen=True)
class Plan:
    """A model, and perhaps a target. Bytes are of all devices together unless they say otherwise.

    parameters, weight_bytes: of the model. active_parameters: without the experts that a position does not use.
    weight_bytes_per_device: where the model is cut over several.
    kv_bytes_per_token: keys and values of one position, all layers, scales included. kv_bytes: what the pool may have,
    None when neither a target nor a size was given; negative when the weights alone do not fit the target.
    """

    modules: tuple[ModulePlan, ...]
    parameters: int
    active_parameters: int
    weight_bytes: int
    weight_bytes_per_device: int
    kv_bytes_per_token: int
    kv_bytes: int | None
    page_size: int
    devices: int
    contexts: tuple[ContextPlan, ...]
    steps: tuple[StepPlan, ...]


def make_plan(
    config: DecoderConfig,
    *,
    target: Target | None = None,
    devices: int | None = None,
    kv_bytes: int | None = None,
    page_size: int = 64,
    max_context: int | None = None,
    batches: Sequence[int] = (1, 8, 64),
    prefills: Sequence[int] = (512,),
) -> Plan:
    """Work it all out.

    target: chips to run on; their datasheets give memory and floors. devices: of the target to cut the model over; None
    for all. kv_bytes: size of the KV pool over all devices; None for what the weights leave. page_size: positions of a
    page. max_context: longest request; None for the model's own limit. batches: of decode steps at that context.
    prefills: prompt lengths.
    Raises ValueError, one sentence, when these contradict the model or each other.
    """
    context = config.max_positions if max_context is None else max_context
    if not 2 <= context <= config.max_positions:
        raise ValueError(f"max_context is {context}, but this model has contexts of 2 to {config.max_positions}.")
    if max(prefills) > config.max_positions:
        raise ValueError(f"A prompt of {max(prefills)} tokens exceeds the model's {config.max_positions} positions.")
    parallel = _devices(config, target, devices)
    params = _parameters(config)
    modules = _modules(params)
    per_device = _bytes_per_device(params, parallel)
    if kv_bytes is None and target is not None:
        # Latents are not cut: every device holds the same cache.
        parts = parallel if config.mla is None else 1
        kv_bytes = parts * (int(target.chip.memory_bytes * USABLE_MEMORY) - per_device)
    lengths = [size for size in _doublings(SMALLEST_CONTEXT, context) if size < context]
    return Plan(
        modules=modules,
        parameters=sum(module.parameters for module in modules),
        active_parameters=active_parameters(config),
        weight_bytes=sum(module.bytes for module in modules),
        weight_bytes_per_device=per_device,
        kv_bytes_per_token=config.kv_bytes_per_token,
        kv_bytes=kv_bytes,
        page_size=page_size,
        devices=parallel,
        contexts=tuple(_context(config, length, page_size, kv_bytes) for length in (*lengths, context)),
        steps=(
            *(_step("prefill", config, 1, tokens, 0, target, parallel) for tokens in prefills),
            *(_step("decode", config, batch, 1, context - 1, target, parallel) for batch in batches),
        ),
    )


def _parameters(config: DecoderConfig) -> Any:
    """Shapes of the parameters; ValueError for more than any machine has, whose figures would overflow."""
    try:
        params = abstract_params(config)
        too_many = sum(leaf.size for leaf in jax.tree.leaves(params)) > _MOST_PARAMETERS
    except OverflowError:
        too_many = True
    if too_many:
        raise ValueError("The config describes a model of more than 2^60 parameters, which no machine holds.")
    return params


def _devices(config: DecoderConfig, target: Target | None, asked: int | None) -> int:
    there = 1 if target is None else target.devices
    if asked is not None and not 1 <= asked <= there:
        name = "One device without a target" if target is None else f"{target.name} has {there} devices"
        raise ValueError(f"{name}, so the model cannot be cut over {asked}.")
    devices = there if asked is None else asked
    check_divisible(config, devices)
    return devices


def _doublings(size: int, limit: int) -> list[int]:
    return [size << power for power in range(max(0, (limit // size).bit_length()))]


def _modules(params: Any) -> tuple[ModulePlan, ...]:
    """Parameters by module, equal modules of all layers together, in the order of the model."""
    sums: dict[str, list[int]] = {}
    counted: set[tuple[str, ...]] = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized_weight):
        keys = [key.key for key in path]
        parent = keys[:-1] if len(keys) > 1 else keys
        name = "/".join(re.sub(r"layers_\d+", "layers", key) for key in parent)
        entry = sums.setdefault(name, [0, 0, 0])
        entry[0] += tuple(parent) not in counted
        counted.add(tuple(parent))
        entry[1] += leaf.size
        entry[2] += tree_bytes(leaf)
    return tuple(ModulePlan(name, *figures) for name, figures in sums.items())


def _bytes_per_device(params: Any, devices: int) -> int:
    def of_leaf(leaf: Any, spec: Any) -> int:
        return stored_bytes(leaf) // (devices if MODEL_AXIS in spec else 1)

    return sum(jax.tree.leaves(jax.tree.map(of_leaf, params, param_specs(params))))


def _context(config: DecoderConfig, context: int, page_size: int, kv_bytes: int | None) -> ContextPlan:
    size = -(-context // page_size) * page_size * config.kv_bytes_per_token
    return ContextPlan(context, size, size // config.num_layers, None if kv_bytes is None else max(0, kv_bytes // size))


def _step(
    kind: str, config: DecoderConfig, batch: int, tokens: int, context: int, target: Target | None, devices: int
) -> StepPlan:
    cost = prefill_cost(config, tokens, context) if kind == "prefill" else decode_cost(config, batch, context)
    floor = bound = None
    if target is not None:
        bandwidth, rate = devices * target.chip.bandwidth, devices * target.chip.flops
        floor, bound = cost.floor_seconds(bandwidth, rate), cost.bound(bandwidth, rate)
    kv_bytes = batch * (context + tokens) * config.kv_bytes_per_token
    return StepPlan(kind, batch, tokens, context, kv_bytes, cost, floor, bound)
