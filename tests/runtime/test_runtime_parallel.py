"""Tensor parallelism: the same steps over several (simulated) devices give the same answers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxinfer.models import DecoderConfig, RopeConfig
from jaxinfer.models.layer_config import MLAConfig, MoEConfig
from jaxinfer.runtime.parallel import check_divisible

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding
from jaxinfer.models import DecoderConfig, RopeConfig, init_params
from jaxinfer.models.layer_config import MLAConfig, MoEConfig
from jaxinfer.runtime.parallel import MODEL_AXIS, param_specs, state_specs
from jaxinfer.runtime.state import DecodeBatch, MixedBatch, PrefillBatch, TableUpdates, init_state
from jaxinfer.runtime.steps import decode_step, mixed_step, prefill_step

base = dict(
    vocab_size=96, hidden_size=32, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8, intermediate_size=64,
    max_positions=64, norm_eps=1e-5, ropes=(RopeConfig(1e4, 8),) * 2, windows=(None, 5), qkv_bias=True,
    tied_head={tied}, kv_dtype="{kv_dtype}",
)
config = DecoderConfig(**(base | {architecture}))
def spread(x):
    return x * 8 + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape)  # biases begin as zeros
params = jax.tree.map(spread, init_params(config, jax.random.key(0)))
def updates(slots, columns, pages):
    return TableUpdates(*(jnp.array(x, jnp.int32) for x in (slots, columns, pages)))
prefill = PrefillBatch(jnp.arange(16, dtype=jnp.int32) * 5 % 96, jnp.array([0, 9, 14]), jnp.array([1, 0]),
                       jnp.zeros(2, jnp.int32), updates([0, 1, 1], [0, 0, 1], [3, 2, 5]))
decode = DecodeBatch(jnp.array([7, 8]), jnp.array([0, 1]), updates([2], [0], [0]))
chunk = PrefillBatch(jnp.array([4, 5, 6, 9, 0, 0]), jnp.array([0, 3]), jnp.array([1]), jnp.array([10]),
                     updates([2], [0], [0]))
mixed = MixedBatch(chunk, jnp.array([0, 2]), jnp.array([3, 2, 6]))

def run(mesh):
    state = init_state(config, num_slots=2, num_pages=8, page_size=8, max_context=32)
    own = params
    if mesh is not None:
        put = lambda tree, specs: jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, specs)
        own, state = put(params, param_specs(params)), put(state, state_specs(state))
    logits, state = jax.jit(prefill_step, static_argnums=0)(config, own, state, prefill)
    more, state = jax.jit(decode_step, static_argnums=0)(config, own, state, decode)
    last, state = jax.jit(mixed_step, static_argnums=0)(config, own, state, mixed)
    if mesh is not None:
        assert state.kv[0].data.sharding.shard_shape(state.kv[0].data.shape)[1] == 1, state.kv[0].data.sharding
    return np.asarray(logits), np.asarray(more), np.asarray(last)[:2]

alone = run(None)
mesh = jax.make_mesh((4,), (MODEL_AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
with jax.set_mesh(mesh):
    cut = run(mesh)
for a, b in zip(alone, cut):
    assert np.abs(a).max() > 1, np.abs(a).max()
    np.testing.assert_allclose(a, b, rtol=0, atol={part} * np.abs(a).max())
print("equal")
"""


NORMS_AFTER = {
    "norm": "rms_float32",
    "norm_placement": "after",
    "qk_norm": "projection",
    "attention_softcap": 5.0,
    "logit_softcap": 20.0,
}
LAYER_NORMS = {
    "norm": "layer",
    "gated_mlp": False,
    "activation": "gelu_tanh",
    "output_bias": True,
    "mlp_bias": True,
    "position_offset": 2,
}


CLAMPED_EXPERTS = {
    "attention_sinks": True,
    "moe": MoEConfig(8, 3, 16, (False, True), "topk_softmax", router_bias=True, expert_bias=True, swiglu_limit=7.0),
}
LATENT = {
    "num_kv_heads": 1,
    "head_dim": 24,
    "attention_scale": 0.2,
    "ropes": (RopeConfig(1e4, 8, interleaved=True),) * 2,
    "mla": MLAConfig(latent_dim=16, rope_dim=8, plain_dim=8, value_dim=12, query_rank=20),
    "moe": MoEConfig(8, 2, 16, (True, True), "sigmoid", choice_bias=True, shared_intermediate_size=16),
}


# With int8 pages a difference in the last bit may round a key or value to its neighbour.
@pytest.mark.parametrize(
    ("tied", "kv_dtype", "part", "architecture"),
    [
        (False, "int8", 0.05, {}),
        (True, "auto", 2e-5, NORMS_AFTER),
        (True, "auto", 2e-5, LAYER_NORMS),
        (True, "auto", 2e-5, CLAMPED_EXPERTS),
        (False, "auto", 2e-5, LATENT),
    ],
)
def test_four_devices_answer_as_one(tied: bool, kv_dtype: str, part: float, architecture: dict[str, object]):
    program = PROGRAM.format(tied=tied, kv_dtype=kv_dtype, part=part, architecture=architecture)
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]


SMALL = DecoderConfig(
    vocab_size=96,
    hidden_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    intermediate_size=64,
    max_positions=64,
    norm_eps=1e-5,
    ropes=(RopeConfig(1e4, 8),),
    windows=(None,),
)


def test_heads_that_cannot_be_cut_evenly_are_refused():
    with pytest.raises(ValueError, match="3 key/value heads cannot be cut evenly over 2 devices"):
        check_divisible(SMALL.replace(num_heads=6, num_kv_heads=3), 2)


def test_experts_that_cannot_be_cut_evenly_are_refused():
    with pytest.raises(ValueError, match="18 inner features of an expert cannot be cut evenly over 4 devices"):
        check_divisible(SMALL.replace(moe=MoEConfig(4, 2, 18, (True,))), 4)
