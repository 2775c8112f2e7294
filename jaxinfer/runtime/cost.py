"""What a step must at least read, write and compute: the floor that its time is compared with."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.models import DecoderConfig, abstract_params
from jaxinfer.models.layer_config import MoEConfig
from pallas_kernels.quantized_matmul import is_quantized_weight, stored_bytes

_PRODUCTS = ("kernel", "gate_up", "down", "key_up", "value_up")
"""Names of the parameters that activations are multiplied with."""


@dataclass(frozen=True)
class StepCost:
    """The least work of one step: bytes moved to or from memory, floating-point operations."""

    bytes: int
    flops: int

    def floor_seconds(self, bandwidth: float, rate: float) -> float:
        """Least time on a device of `bandwidth` bytes/s and `rate` FLOP/s (the roofline of Williams et al., 2009)."""
        return max(self.bytes / bandwidth, self.flops / rate)

    def bound(self, bandwidth: float, rate: float) -> str:
        """What that time is spent on: "bandwidth" or "compute"."""
        return "bandwidth" if self.bytes / bandwidth >= self.flops / rate else "compute"


def decode_cost(config: DecoderConfig, batch: int, context: int) -> StepCost:
    """One decode step of `batch` sequences with `context` positions cached each.

    Every weight is read once, every visible key and value once, the new ones and the logits are written once. Of
    experts, those are read and multiplied with that `experts_used` says.
    """
    visible = sum(_visible(window, context + 1) for window in config.windows)
    kv_per_layer = config.kv_bytes_per_token // config.num_layers
    logits = batch * config.vocab_size * 4
    embedded = batch * config.table_width * _item_bytes(config)
    cached = batch * (visible * kv_per_layer + config.kv_bytes_per_token)
    moved = weight_bytes_read(config, batch) + embedded + cached + logits
    attention = batch * visible * pair_flops(config)
    return StepCost(moved, 2 * batch * (matmul_weights(config) + head_weights(config)) + attention)


def prefill_cost(config: DecoderConfig, tokens: int, start: int = 0) -> StepCost:
    """One prefill of `tokens` positions of one sequence that has `start` cached; logits of the last position only."""
    kv_per_layer = config.kv_bytes_per_token // config.num_layers
    pairs = sum(sum(_visible(window, start + index + 1) for index in range(tokens)) for window in config.windows)
    embedded, logits = tokens * config.table_width * _item_bytes(config), config.vocab_size * 4
    moved = weight_bytes_read(config, tokens) + embedded + logits
    moved += tokens * config.kv_bytes_per_token + sum(_visible(w, start) for w in config.windows) * kv_per_layer
    attention = pairs * pair_flops(config)
    return StepCost(moved, 2 * tokens * matmul_weights(config) + 2 * head_weights(config) + attention)


def mixed_cost(config: DecoderConfig, tokens: int, decodes: int, context: int) -> StepCost:
    """One program for `tokens` positions: one each of `decodes` sequences with `context` cached, then a prefill."""
    decode, prefill = decode_cost(config, decodes, context), prefill_cost(config, tokens - decodes)
    alone = weight_bytes_read(config, decodes) + weight_bytes_read(config, tokens - decodes)
    moved = decode.bytes + prefill.bytes - alone + weight_bytes_read(config, tokens)
    return StepCost(moved, decode.flops + prefill.flops)


@functools.cache
def _leaves(config: DecoderConfig) -> tuple[tuple[tuple[Any, ...], Any], ...]:
    """(path, shape and type) of every parameter; kept, since large models take seconds to trace."""
    params = abstract_params(config)
    return tuple(jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized_weight))


def parameter_bytes(config: DecoderConfig) -> int:
    """Bytes of all parameters."""
    return sum(tree_bytes(leaf) for _, leaf in _leaves(config))


def tree_bytes(params: Any) -> int:
    """Bytes of a tree of parameters."""
    return sum(stored_bytes(leaf) for leaf in jax.tree.leaves(params))


def weight_bytes_read(config: DecoderConfig, tokens: int = 1) -> int:
    """Bytes of the parameters that a step over so many positions reads: all but tables of which it reads rows, and but
    experts that no position uses."""
    unused = 0.0 if config.moe is None else 1 - experts_used(config.moe, tokens) / config.moe.num_experts
    experts = sum(tree_bytes(leaf) for path, leaf in _leaves(config) if _of_experts(path))
    tables = ("position_embedding",) if config.tied_head else ("position_embedding", "embedding")
    rows = sum(tree_bytes(leaf) for path, leaf in _leaves(config) if path[0].key in tables)
    return parameter_bytes(config) - rows - int(experts * unused)


def experts_used(moe: MoEConfig, tokens: int) -> float:
    """Different experts that so many positions use in a layer, on average when all experts are used alike."""
    return moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens)


def active_parameters(config: DecoderConfig) -> int:
    """Parameters of the model without the experts that a position does not use."""
    return sum(_used(config, path, leaf) for path, leaf in _leaves(config))


def matmul_weights(config: DecoderConfig) -> int:
    """Parameters of all layers that a position is multiplied with: of experts, those of the ones it uses."""
    return sum(_used(config, path, leaf) for path, leaf in _leaves(config) if path[-1].key in _PRODUCTS)


def pair_flops(config: DecoderConfig) -> int:
    """Floating-point operations for one query position and one key position of a layer."""
    return 2 * config.num_heads * (config.head_dim + config.value_dim)


def head_weights(config: DecoderConfig) -> int:
    """Parameters of the LM head."""
    return config.vocab_size * config.table_width


def _used(config: DecoderConfig, path: tuple[Any, ...], leaf: Any) -> int:
    """Numbers of a parameter that a position uses."""
    if config.moe is None or not _of_experts(path):
        return leaf.size
    return leaf.size * config.moe.experts_per_token // config.moe.num_experts


def _of_experts(path: tuple[Any, ...]) -> bool:
    return len(path) > 1 and path[-2].key == "experts"


def _visible(window: int | None, length: int) -> int:
    return length if window is None else min(window, length)


def _item_bytes(config: DecoderConfig) -> int:
    return jax.numpy.dtype(config.dtype).itemsize
