"""Mixture of experts: a router, and experts of which only those that a position is routed to are read and computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.layer_config import MoEConfig
from jaxinfer.models.layers import MLP, Projection, activation_of
from jaxinfer.models.linear import INIT, precision
from jaxinfer.models.mesh import MODEL_AXIS, model_parallelism
from pallas_kernels.dispatch import current_platform

MOST_TILE_ROWS = 128
"""Positions that are multiplied with an expert at a time."""
MOST_PAIRS = 16
"""Pairs of position and expert that are written out one by one in a program."""
EXPERT_SPECS = {
    "gate_up": PartitionSpec(None, None, None, MODEL_AXIS),
    "gate_up_bias": PartitionSpec(None, None, MODEL_AXIS),
    "down": PartitionSpec(None, MODEL_AXIS, None),
    "down_bias": PartitionSpec(),
}
"""How the arrays of ExpertWeights are cut over the devices of a mesh."""


class MoE(nn.Module):
    """A weighted sum of each position's experts, and the MLP that all positions share where there is one."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array, real: jax.Array) -> jax.Array:
        """x [T, hidden], real bool[T] (False for padding, which uses no expert) -> [T, hidden]."""
        config = self.config
        moe = _moe(config)
        routing = Routing(*Router(config, name="router")(x), real)
        out = Experts(config, name="experts")(x, routing)
        if not moe.shared_intermediate_size:
            return out
        shared = MLP(config.replace(intermediate_size=moe.shared_intermediate_size), name="shared")(x)
        if moe.shared_gate:
            gate = Projection(config.hidden_size, (1,), False, config, name="shared_gate")(x)
            shared = shared * nn.sigmoid(gate)
        return out + shared


class Router(nn.Module):
    """Which experts each position uses, and with what weight; in float32, since a tie may hang on the last bit."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [T, hidden] -> experts i32[T, experts_per_token], weights f32[T, experts_per_token]."""
        config, moe = self.config, _moe(self.config)
        kernel = self.param("kernel", INIT, (config.hidden_size, moe.num_experts), jnp.dtype(config.dtype))
        exact = x.astype(jnp.float32), kernel.astype(jnp.float32)
        logits = jnp.matmul(*exact, precision=jax.lax.Precision.HIGHEST)
        if moe.router_bias:
            logits = logits + self.param("bias", nn.initializers.zeros, (moe.num_experts,), jnp.float32)
        choice_bias = None
        if moe.choice_bias:
            choice_bias = self.param("choice_bias", nn.initializers.zeros, (moe.num_experts,), jnp.float32)
        return route(moe, logits, choice_bias)


def route(moe: MoEConfig, logits: jax.Array, choice_bias: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Logits f32[T, experts] -> the chosen experts i32[T, k] and their weights f32[T, k], see MoEConfig.

    choice_bias: f32[experts], with `moe.choice_bias`.
    """
    if moe.scores == "topk_softmax":
        best, ids = jax.lax.top_k(logits, moe.experts_per_token)
        weights = nn.softmax(best)
    else:
        scores = nn.softmax(logits) if moe.scores == "softmax" else nn.sigmoid(logits)
        ranked = scores if choice_bias is None else scores + choice_bias
        if moe.ranks_groups:
            ranked = _only_best_groups(moe, ranked)
        ids = jax.lax.top_k(ranked, moe.experts_per_token)[1]
        weights = jnp.take_along_axis(scores, ids, axis=-1)
    if moe.normalized:
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return ids, weights * moe.weight_scale


def _only_best_groups(moe: MoEConfig, ranked: jax.Array) -> jax.Array:
    grouped = ranked.reshape(-1, moe.groups, moe.num_experts // moe.groups)
    of_group = jax.lax.top_k(grouped, moe.best_of_group)[0].sum(-1)
    best = jax.lax.top_k(of_group, moe.groups_per_token)[1]
    allowed = jnp.any(best[:, :, None] == jnp.arange(moe.groups), axis=1)
    return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """Where positions go. ids i32[T, k], weights f32[T, k], real bool[T] (False for padding, which goes nowhere)."""

    ids: jax.Array
    weights: jax.Array
    real: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertWeights:
    """gate_up [experts, 2, hidden, inner], down [experts, inner, hidden]; their biases, None where there are none."""

    gate_up: jax.Array
    down: jax.Array
    gate_up_bias: jax.Array | None
    down_bias: jax.Array | None


class Experts(nn.Module):
    """The experts of a layer.

    Over several devices each has a part of every expert's inner width, as with an MLP: all take part whichever experts
    are chosen.
    """

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array, routing: Routing) -> jax.Array:
        """x [T, hidden] -> [T, hidden], 0 for padding."""
        config, moe, dtype = self.config, _moe(self.config), jnp.dtype(self.config.dtype)
        experts, hidden, inner = moe.num_experts, config.hidden_size, moe.intermediate_size
        zeros, has_bias = nn.initializers.zeros, moe.expert_bias
        held = ExpertWeights(
            gate_up=self.param("gate_up", INIT, (experts, 2, hidden, inner), dtype),
            down=self.param("down", INIT, (experts, inner, hidden), dtype),
            gate_up_bias=self.param("gate_up_bias", zeros, (experts, 2, inner), dtype) if has_bias else None,
            down_bias=self.param("down_bias", zeros, (experts, hidden), dtype) if has_bias else None,
        )
        out = _on_every_device(config, x, routing, held)
        if held.down_bias is not None:
            # Once, not on every device.
            tokens = jnp.arange(x.shape[0])[:, None]
            shares = jnp.zeros((x.shape[0], experts), jnp.float32).at[tokens, routing.ids].set(routing.weights)
            out = out + jnp.matmul(shares, held.down_bias.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        return jnp.where(routing.real[:, None], out, 0).astype(x.dtype)


def _on_every_device(config: DecoderConfig, x: jax.Array, routing: Routing, held: ExpertWeights) -> jax.Array:
    """f32[T, hidden], the sum over the devices' parts of the experts' inner width."""
    if model_parallelism() == 1:
        return weighted_sum(config, x, routing, held)
    whole = PartitionSpec()
    specs: Any = {name: None if getattr(held, name) is None else spec for name, spec in EXPERT_SPECS.items()}
    run = jax.shard_map(
        lambda *inside: jax.lax.psum(weighted_sum(config, *inside), MODEL_AXIS),
        in_specs=(whole, whole, ExpertWeights(**specs)),
        out_specs=whole,
        check_vma=False,
    )
    return run(x, routing, held)


def weighted_sum(config: DecoderConfig, x: jax.Array, routing: Routing, held: ExpertWeights) -> jax.Array:
    """f32[T, hidden]: of each position's experts, without down_bias; what it is for padding means nothing."""
    # Few pairs seldom share an expert. Only the TPU's compiler multiplies with a slice without copying it first.
    few = routing.ids.size <= min(MOST_PAIRS, _moe(config).num_experts // 4) and current_platform() == "tpu"
    rows = (row_by_row if few else expert_by_expert)(config, x, routing, held)
    rows = rows.reshape(*routing.ids.shape, -1).astype(jnp.float32)
    return jnp.einsum("tk,tkh->th", routing.weights, rows, precision=jax.lax.Precision.HIGHEST)


def row_by_row(config: DecoderConfig, x: jax.Array, routing: Routing, held: ExpertWeights) -> jax.Array:
    """[T * k, hidden]: every pair of position and expert by itself, with no loop that keeps weights from streaming."""
    pairs = [(token, choice) for token in range(x.shape[0]) for choice in range(routing.ids.shape[1])]
    return jnp.concatenate([_one_expert(config, x[t : t + 1], routing.ids[t, c], held) for t, c in pairs])


def expert_by_expert(config: DecoderConfig, x: jax.Array, routing: Routing, held: ExpertWeights) -> jax.Array:
    """[T * k, hidden]: positions sorted by expert, and a loop over tiles of positions that share one.

    The loop ends with the last tile of an expert that somebody uses; padding lies behind it.
    """
    moe, (tokens, per_token) = _moe(config), routing.ids.shape
    tile = tile_rows(moe, tokens, per_token)
    order, tiles = sort_by_expert(moe, routing, tile)
    rows = jnp.pad(x[order // per_token], ((0, tile), (0, 0)))

    def one_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        expert, start = tiles.expert(index), tiles.start(index)
        block = jax.lax.dynamic_slice(rows, (start, 0), (tile, rows.shape[1]))
        result = _one_expert(config, block, expert, held)
        # What a short tile writes past its expert's rows is overwritten by the next tile, or is padding.
        return jax.lax.dynamic_update_slice(out, result, (start, 0))

    out = jax.lax.fori_loop(0, tiles.count, one_tile, jnp.zeros_like(rows))[: order.size]
    return jnp.zeros_like(out).at[order].set(out, unique_indices=True)


@dataclass(frozen=True)
class Tiles:
    """Stretches of `size` sorted rows that one expert works on, the experts in their order.

    ends: i32[experts], tiles up to each expert's last. firsts: i32[experts], the first row of each expert.
    """

    size: int
    ends: jax.Array
    firsts: jax.Array

    @property
    def count(self) -> jax.Array:
        """i32: all tiles."""
        return self.ends[-1]

    def expert(self, index: jax.Array) -> jax.Array:
        """The expert of a tile."""
        return jnp.searchsorted(self.ends, index, side="right", method="compare_all")

    def start(self, index: jax.Array) -> jax.Array:
        """The first row of a tile."""
        expert = self.expert(index)
        before = jnp.where(expert > 0, self.ends[expert - 1], 0)
        return self.firsts[expert] + (index - before) * self.size


def tile_rows(moe: MoEConfig, tokens: int, per_token: int) -> int:
    """Rows of a tile: about what an expert gets when all get alike, and never more than one can get."""
    alike = max(8, -(-tokens * per_token // moe.num_experts))
    return min(MOST_TILE_ROWS, tokens, 1 << (alike - 1).bit_length())


def sort_by_expert(moe: MoEConfig, routing: Routing, tile: int) -> tuple[jax.Array, Tiles]:
    """The order i32[T * k] of (position, expert) pairs by expert, those of padding at the end, and the tiles."""
    # Padding goes to an expert that does not exist.
    flat = jnp.where(routing.real[:, None], routing.ids, moe.num_experts).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.sum(flat[:, None] == jnp.arange(moe.num_experts), axis=0, dtype=jnp.int32)
    return order, Tiles(tile, jnp.cumsum(-(-counts // tile)), jnp.cumsum(counts) - counts)


def _one_expert(config: DecoderConfig, rows: jax.Array, expert: jax.Array, held: ExpertWeights) -> jax.Array:
    """rows [R, hidden] through one expert, without down_bias -> [R, hidden]."""
    # Two products: for one with gate and up, TPU's compiler would lay out all experts anew.
    gate, up = (jnp.matmul(rows, held.gate_up[expert, part], precision=precision(config)) for part in (0, 1))
    if held.gate_up_bias is not None:
        gate, up = gate + held.gate_up_bias[expert, 0], up + held.gate_up_bias[expert, 1]
    return jnp.matmul(_inner(config, gate, up), held.down[expert], precision=precision(config))


def _inner(config: DecoderConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    moe = _moe(config)
    if moe.swiglu_limit is None:
        return activation_of(config)(gate) * up
    gate = jnp.minimum(gate, moe.swiglu_limit)
    up = jnp.clip(up, -moe.swiglu_limit, moe.swiglu_limit)
    return gate * nn.sigmoid(gate * moe.swiglu_alpha) * (up + 1)


def _moe(config: DecoderConfig) -> MoEConfig:
    assert config.moe is not None, "only models with experts have these modules"
    return config.moe
