"""The decoder: Flax modules without state, whose parameters are an argument of every call.

Attention itself is handed in (`attend`), so the same modules serve prefill, decode and anything else that can say how
queries meet the cache. All activations are flat: [T, features], whatever sequences the T positions belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxinfer.models.attention import Attend, Attention
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.layers import MLP, Norm, Projection
from jaxinfer.models.linear import INIT, embedded, table_product, weight_init
from jaxinfer.models.mla import LatentAttention
from jaxinfer.models.moe import MoE
from jaxinfer.models.rope import Rotation, rotation
from pallas_kernels import KVPages


def mixer(config: DecoderConfig, layer: int) -> nn.Module:
    """What mixes the positions of one layer: (x, rotation, pages, attend) -> (change of x, pages)."""
    return (Attention if config.mla is None else LatentAttention)(config, layer, name="attention")


def feed_forward(config: DecoderConfig, layer: int, x: jax.Array, real: jax.Array) -> jax.Array:
    """What works on each position of one layer: x [T, hidden], real bool[T] (False for padding) -> change of x."""
    return MoE(config, name="moe")(x, real) if config.has_experts(layer) else MLP(config, name="mlp")(x)


class Block(nn.Module):
    """One layer: a mixer and a feed-forward part, each added to the residual stream with its norms."""

    config: DecoderConfig
    layer: int

    @nn.compact
    def __call__(
        self, x: jax.Array, real: jax.Array, rotation: Rotation | None, pages: KVPages, attend: Attend
    ) -> tuple[jax.Array, KVPages]:
        """x [T, hidden], real bool[T] -> ([T, hidden], the layer's pages)."""
        config, layer = self.config, self.layer
        change, pages = mixer(config, layer)(_before(config, "attention", x), rotation, pages, attend)
        x = _added(config, "attention", x, change)
        change = feed_forward(config, layer, _before(config, "mlp", x), real)
        return _added(config, "mlp", x, change), pages


def _before(config: DecoderConfig, part: str, x: jax.Array) -> jax.Array:
    """What a part of the block is given."""
    return _norm(config, f"{part}_norm", x) if config.norm_placement in ("before", "around") else x


def _added(config: DecoderConfig, part: str, x: jax.Array, change: jax.Array) -> jax.Array:
    """The residual stream with what a part of the block made of it."""
    if config.norm_placement == "after_sum":
        return _norm(config, f"{part}_norm", x + change)
    if config.norm_placement in ("after", "around"):
        change = _norm(config, f"{part}_post_norm", change)
    return x + change


def _norm(config: DecoderConfig, name: str, x: jax.Array) -> jax.Array:
    return Norm(config.hidden_size, config, name=name)(x)


class OneLayer(nn.Module):
    """A block under the name that it has in the decoder."""

    config: DecoderConfig
    layer: int

    @nn.compact
    def __call__(self, *inputs: Any) -> tuple[jax.Array, KVPages]:
        """See Block."""
        return Block(self.config, self.layer, name=f"layers_{self.layer}")(*inputs)


def _run_layer(
    config: DecoderConfig, layer: int, attend: Attend, params: Any, *inputs: Any
) -> tuple[jax.Array, KVPages]:
    result: Any = OneLayer(config, layer, parent=None).apply({"params": {f"layers_{layer}": params}}, *inputs, attend)
    return result


Run = Callable[..., tuple[jax.Array, KVPages]]
"""(x, real, rotation, pages) -> (x, pages), see Block"""


class Decoder(nn.Module):
    """Token ids to final hidden states, and hidden states to logits."""

    config: DecoderConfig

    def setup(self) -> None:
        """Declare the parameters."""
        config = self.config
        table_shape, dtype = (config.vocab_size, config.table_width), jnp.dtype(config.dtype)
        self.embedding = self.param("embedding", weight_init(config, ("embedding",)), table_shape, dtype)
        if config.embedding_size is not None:
            self.project_in = Projection(config.embedding_size, (config.hidden_size,), False, config)
            self.project_out = Projection(config.hidden_size, (config.embedding_size,), False, config)
        if config.position_offset is not None:
            rows = config.max_positions + config.position_offset
            self.position_embedding = self.param("position_embedding", INIT, (rows, config.hidden_size), dtype)
        self.layers = [Block(config, layer) for layer in range(config.num_layers)]
        if config.norm_placement != "after_sum":
            self.final_norm = Norm(config.hidden_size, config)
        head_init = weight_init(config, ("head",))
        self.head = self.embedding if config.tied_head else self.param("head", head_init, table_shape, dtype)

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, kv: Sequence[KVPages], attend: Attend
    ) -> tuple[jax.Array, tuple[KVPages, ...]]:
        """token_ids i32[T], positions i32[T], pages per layer -> (normed hidden states [T, hidden], pages).

        A negative position marks padding.
        """
        config = self.config
        real, positions = positions >= 0, jnp.maximum(positions, 0)
        x = self._embedded(token_ids, positions)
        rotations = {rope: None if rope is None else rotation(rope, positions) for rope in config.ropes}
        written = []
        runs: dict[Any, Run] = {}
        for layer, (rope, pages) in enumerate(zip(config.ropes, kv, strict=True)):
            run = self._run_of(layer, runs, attend)
            x, pages = run(x, real, rotations[rope], pages)
            written.append(pages)
        return (x if config.norm_placement == "after_sum" else self.final_norm(x)), tuple(written)

    def _run_of(self, layer: int, runs: dict[Any, Run], attend: Attend) -> Run:
        """How to run a layer: by the jitted function that all layers of its kind share, so that jax traces one of them.

        `runs` has the functions made so far, by kind.
        """
        if self.is_initializing():
            return partial(self.layers[layer], attend=attend)
        config, params = self.config, self.variables["params"][f"layers_{layer}"]
        leaves, structure = jax.tree.flatten(params)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        kind = (config.ropes[layer], config.windows[layer], config.has_experts(layer), structure, shapes)
        if kind not in runs:
            runs[kind] = jax.jit(partial(_run_layer, config, layer, attend))
        return partial(runs[kind], params)

    def _embedded(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        config = self.config
        x = embedded(self.embedding, token_ids, config)
        if config.embedding_scale != 1:
            x = x * jnp.array(config.embedding_scale, x.dtype)
        if config.embedding_size is not None:
            x = self.project_in(x)
        if config.position_offset is not None:
            x = x + self.position_embedding[positions + config.position_offset]
        return x

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [R, hidden] -> logits f32[R, vocab]."""
        if self.config.embedding_size is not None:
            hidden = self.project_out(hidden)
        logits = table_product(hidden, self.head, self.config)
        if self.config.logit_softcap is not None:
            logits = jnp.tanh(logits / self.config.logit_softcap) * self.config.logit_softcap
        return logits


def init_params(config: DecoderConfig, key: jax.Array) -> dict[str, Any]:
    """Random parameters: a nested dict of arrays in config.dtype."""

    def no_attention(layer: int, q: jax.Array, k: Any, v: Any, pages: Any, sinks: Any) -> tuple[jax.Array, Any]:
        return q[..., : config.value_dim], pages

    def logits_of(decoder: Decoder, *inputs: Any) -> jax.Array:
        return decoder.logits(decoder(*inputs)[0])

    token, kv = jnp.zeros((1,), jnp.int32), (None,) * config.num_layers
    return dict(Decoder(config).init(key, token, token, kv, no_attention, method=logits_of)["params"])


def abstract_params(config: DecoderConfig) -> dict[str, Any]:
    """The same tree as `init_params`, as ShapeDtypeStructs; computes nothing."""
    return jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
