"""Tensor parallelism: which axis of every array is cut over the devices of a mesh.

Set a mesh with an axis named MODEL_AXIS (`jax.set_mesh`, or an abstract mesh when compiling ahead of time) around the
jitted steps. Heads, MLP features and vocabulary are cut over it: the compiler adds an all-reduce after each output and
down projection (Shoeybi et al., 2019). Kernels see their own heads only. Every expert's inner width is cut like an
MLP's, so that all devices work whichever experts are chosen. Latent attention has query heads to cut, but one latent
for all: every device keeps the whole cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxinfer.models import DecoderConfig, abstract_params
from jaxinfer.models.linear import check_groups, weight_specs
from jaxinfer.models.mesh import MODEL_AXIS, model_parallelism
from jaxinfer.models.moe import EXPERT_SPECS
from jaxinfer.runtime.state import EngineState
from pallas_kernels import KVPages
from pallas_kernels.quantized_matmul import QuantizedWeight, is_quantized_weight

_HEADS = PartitionSpec(None, MODEL_AXIS, None)
_PAGES = KVPages(
    PartitionSpec(None, MODEL_AXIS),  # pyright: ignore[reportArgumentType]  # specs in place of arrays
    PartitionSpec(None, None, MODEL_AXIS, None),  # pyright: ignore[reportArgumentType]
)
_WHOLE_PAGES = KVPages(PartitionSpec(), PartitionSpec())  # pyright: ignore[reportArgumentType]
_PARAMETERS = {
    ("q", "kernel"): PartitionSpec(None, MODEL_AXIS, None),
    ("q", "bias"): PartitionSpec(MODEL_AXIS, None),
    ("kv", "kernel"): PartitionSpec(None, None, MODEL_AXIS, None),
    ("kv", "bias"): PartitionSpec(None, MODEL_AXIS, None),
    ("out", "kernel"): PartitionSpec(MODEL_AXIS, None),
    ("gate", "kernel"): PartitionSpec(None, MODEL_AXIS),
    ("gate", "bias"): PartitionSpec(MODEL_AXIS),
    ("up", "kernel"): PartitionSpec(None, MODEL_AXIS),
    ("up", "bias"): PartitionSpec(MODEL_AXIS),
    ("down", "kernel"): PartitionSpec(MODEL_AXIS, None),
    **{("experts", name): spec for name, spec in EXPERT_SPECS.items()},
    ("key_up",): PartitionSpec(MODEL_AXIS, None, None),
    ("value_up",): PartitionSpec(MODEL_AXIS, None, None),
    ("sinks",): PartitionSpec(MODEL_AXIS),
    ("embedding",): PartitionSpec(MODEL_AXIS, None),
    ("head",): PartitionSpec(MODEL_AXIS, None),
}
"""By the end of a parameter's path; all others are whole on every device."""


def check_divisible(config: DecoderConfig, devices: int) -> None:
    """Raise ValueError when a model cannot be cut evenly over that many devices."""
    sizes = {
        "key/value heads" if config.mla is None else "heads": _heads_to_cut(config),
        "MLP features": config.intermediate_size,
        "vocabulary entries": config.vocab_size,
    }
    if config.moe is not None:
        sizes["inner features of an expert"] = config.moe.intermediate_size
        sizes["inner features of the shared expert"] = config.moe.shared_intermediate_size
    for name, size in sizes.items():
        if size % devices:
            raise ValueError(f"The model's {size} {name} cannot be cut evenly over {devices} devices.")
    if config.weights:
        check_groups(abstract_params(config), devices)


def _heads_to_cut(config: DecoderConfig) -> int:
    return config.num_kv_heads if config.mla is None else config.num_heads


def param_specs(params: Any) -> Any:
    """The PartitionSpec of every parameter: a tree like `params`."""

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec | QuantizedWeight:
        names = tuple(key.key for key in path)
        if is_quantized_weight(leaf):
            return weight_specs(leaf, names[-2] if names[-1] == "kernel" else names[-1])
        return next((found for end, found in _PARAMETERS.items() if names[-len(end) :] == end), PartitionSpec())

    return jax.tree_util.tree_map_with_path(spec, params, is_leaf=is_quantized_weight)


def state_specs(state: EngineState) -> Any:
    """The PartitionSpec of every array of the state: a tree like `state`."""
    kv = tuple(_page_specs(pages) for pages in state.kv)
    return EngineState(kv, PartitionSpec(), PartitionSpec())  # pyright: ignore[reportArgumentType]


def attend_by_heads(attend: Callable[..., tuple[jax.Array, KVPages]]) -> Callable[..., tuple[jax.Array, KVPages]]:
    """`attend(q, k, v, pages, *indices, sinks=sinks)` as a function of (q, k, v, pages, sinks, *indices).

    With a mesh with MODEL_AXIS it runs on every device with the device's own heads.
    """

    def plain(q: jax.Array, k: jax.Array, v: Any, pages: KVPages, sinks: Any, *indices: jax.Array) -> Any:
        return attend(q, k, v, pages, *indices, sinks=sinks)

    def sharded(q: jax.Array, k: jax.Array, v: Any, pages: KVPages, sinks: Any, *indices: jax.Array) -> Any:
        # Values that lie in keys mean one head for all queries, which every device has.
        new = PartitionSpec() if v is None else _HEADS
        specs = _page_specs(pages)
        head_sinks = None if sinks is None else PartitionSpec(MODEL_AXIS)
        run = jax.shard_map(
            plain,
            in_specs=(_HEADS, new, new, specs, head_sinks, *(PartitionSpec() for _ in indices)),
            out_specs=(_HEADS, specs),
            check_vma=False,  # a Pallas call does not say over which axes its results vary
        )
        return run(q, k, v, pages, sinks, *indices)

    return plain if model_parallelism() == 1 else sharded


def _page_specs(pages: KVPages) -> KVPages:
    chosen = _PAGES if pages.kv_heads > 1 else _WHOLE_PAGES
    return KVPages(chosen.data, None if pages.scales is None else chosen.scales)
