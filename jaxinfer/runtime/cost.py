"""What a step must at least read, write and compute: the floor that its time is compared with."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax

from jaxinfer.models import DecoderConfig, abstract_params


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

    Every weight is read once, every visible key and value once, the new ones and the logits are written once.
    """
    visible = sum(_visible(window, context + 1) for window in config.windows)
    kv_per_layer = config.kv_bytes_per_token // config.num_layers
    logits = batch * config.vocab_size * 4
    embedded = batch * config.hidden_size * _item_bytes(config)
    moved = weight_bytes_read(config) + embedded + batch * (visible * kv_per_layer + config.kv_bytes_per_token) + logits
    attention = 4 * batch * visible * config.num_heads * config.head_dim
    return StepCost(moved, 2 * batch * (matmul_weights(config) + head_weights(config)) + attention)


def prefill_cost(config: DecoderConfig, tokens: int, start: int = 0) -> StepCost:
    """One prefill of `tokens` positions of one sequence that has `start` cached; logits of the last position only."""
    kv_per_layer = config.kv_bytes_per_token // config.num_layers
    pairs = sum(sum(_visible(window, start + index + 1) for index in range(tokens)) for window in config.windows)
    moved = weight_bytes_read(config) + tokens * config.hidden_size * _item_bytes(config) + config.vocab_size * 4
    moved += tokens * config.kv_bytes_per_token + sum(_visible(w, start) for w in config.windows) * kv_per_layer
    attention = 4 * pairs * config.num_heads * config.head_dim
    return StepCost(moved, 2 * tokens * matmul_weights(config) + 2 * head_weights(config) + attention)


@functools.cache
def parameter_bytes(config: DecoderConfig) -> int:
    """Bytes of all parameters."""
    leaves = jax.tree.leaves(abstract_params(config))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


@functools.cache
def weight_bytes_read(config: DecoderConfig) -> int:
    """Bytes of the parameters that a step reads whole: all but tables of which it reads rows."""
    params = abstract_params(config)
    tables = [params[name] for name in ("position_embedding",) if name in params]
    tables += [] if config.tied_head else [params["embedding"]]
    return parameter_bytes(config) - sum(table.size * table.dtype.itemsize for table in tables)


@functools.cache
def matmul_weights(config: DecoderConfig) -> int:
    """Parameters of all layers that every position is multiplied with."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config))
    return sum(math.prod(leaf.shape) for path, leaf in leaves if path[-1].key == "kernel")


def head_weights(config: DecoderConfig) -> int:
    """Parameters of the LM head."""
    return config.vocab_size * config.hidden_size


def _visible(window: int | None, length: int) -> int:
    return length if window is None else min(window, length)


def _item_bytes(config: DecoderConfig) -> int:
    return jax.numpy.dtype(config.dtype).itemsize
