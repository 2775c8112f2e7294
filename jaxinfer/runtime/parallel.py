"""Tensor parallelism: which axis of every array is cut over the devices of a mesh.

Set a mesh with an axis named MODEL_AXIS (`jax.set_mesh`, or an abstract mesh when compiling ahead of time) around the
jitted steps. Heads, MLP features and vocabulary are cut over it: the compiler adds an all-reduce after each output and
down projection (Shoeybi et al., 2019). Kernels see their own heads only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxinfer.models import DecoderConfig
from jaxinfer.runtime.state import EngineState
from pallas_kernels import KVPages

MODEL_AXIS = "model"
_HEADS = PartitionSpec(None, MODEL_AXIS, None)
_PAGES = KVPages(
    PartitionSpec(None, MODEL_AXIS, None, None),  # pyright: ignore[reportArgumentType]  # specs in place of arrays
    PartitionSpec(None, None, MODEL_AXIS, None),  # pyright: ignore[reportArgumentType]
)
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
    ("embedding",): PartitionSpec(MODEL_AXIS, None),
    ("head",): PartitionSpec(MODEL_AXIS, None),
}
"""By the end of a parameter's path; all others are whole on every device."""


def model_parallelism() -> int:
    """Devices along MODEL_AXIS of the mesh in force; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[MODEL_AXIS] if not mesh.empty and MODEL_AXIS in mesh.axis_names else 1


def check_divisible(config: DecoderConfig, devices: int) -> None:
    """Raise ValueError when a model cannot be cut evenly over that many devices."""
    sizes = {
        "key/value heads": config.num_kv_heads,
        "MLP features": config.intermediate_size,
        "vocabulary entries": config.vocab_size,
    }
    for name, size in sizes.items():
        if size % devices:
            raise ValueError(f"The model's {size} {name} cannot be cut evenly over {devices} devices.")


def param_specs(params: Any) -> Any:
    """The PartitionSpec of every parameter: a tree like `params`."""

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        names = tuple(key.key for key in path)
        return next((found for end, found in _PARAMETERS.items() if names[-len(end) :] == end), PartitionSpec())

    return jax.tree_util.tree_map_with_path(spec, params)


def state_specs(state: EngineState) -> Any:
    """The PartitionSpec of every array of the state: a tree like `state`."""
    kv = tuple(_page_specs(pages) for pages in state.kv)
    return EngineState(kv, PartitionSpec(), PartitionSpec())  # pyright: ignore[reportArgumentType]


def attend_by_heads(attend: Callable[..., tuple[jax.Array, KVPages]]) -> Callable[..., tuple[jax.Array, KVPages]]:
    """`attend(q, k, v, pages, *indices)` run on every device with its own heads, when a mesh with MODEL_AXIS is set."""
    if model_parallelism() == 1:
        return attend

    def sharded(q: jax.Array, k: jax.Array, v: jax.Array, pages: KVPages, *indices: jax.Array) -> Any:
        specs = _page_specs(pages)
        run = jax.shard_map(
            attend,
            in_specs=(_HEADS, _HEADS, _HEADS, specs, *(PartitionSpec() for _ in indices)),
            out_specs=(_HEADS, specs),
            check_vma=False,  # a Pallas call does not say over which axes its results vary
        )
        return run(q, k, v, pages, *indices)

    return sharded


def _page_specs(pages: KVPages) -> KVPages:
    return KVPages(_PAGES.data, None if pages.scales is None else _PAGES.scales)
