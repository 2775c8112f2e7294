"""Experts and routers against float64 numpy, one position after the other; and what a step with experts computes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models import DecoderConfig, RopeConfig, moe
from jaxinfer.models.layer_config import MoEConfig
from jaxinfer.models.moe import (
    ExpertWeights,
    MoE,
    Routing,
    expert_by_expert,
    route,
    row_by_row,
    tile_rows,
    weighted_sum,
)

HIDDEN, INNER = 24, 12
GROUPED = {"groups": 4, "groups_per_token": 2}


def config_of(**changes) -> DecoderConfig:
    fields = {"num_experts": 8, "experts_per_token": 3, "intermediate_size": INNER, "layers": (True,)} | changes
    return DecoderConfig(
        vocab_size=32,
        hidden_size=HIDDEN,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=32,
        max_positions=64,
        norm_eps=1e-6,
        ropes=(RopeConfig(1e4, 8),),
        windows=(None,),
        moe=MoEConfig(**fields),
    )


# --- routing ---------------------------------------------------------------------------------------------------------


def routed(logits, bias=None, **changes):
    """{expert: weight} of one position."""
    settings = config_of(num_experts=len(logits), **changes).moe
    bias = None if bias is None else jnp.array(bias, jnp.float32)
    ids, weights = route(settings, jnp.array([logits], jnp.float32), bias)
    return dict(zip(np.asarray(ids)[0].tolist(), np.asarray(weights)[0].tolist(), strict=True))


def test_softmax_over_all_and_then_the_best():
    plain = routed([2.0, 1, 0, -1], experts_per_token=2)
    assert plain == pytest.approx({0: 0.6439, 1: 0.2369}, abs=5e-5)
    normalized = routed([2.0, 1, 0, -1], experts_per_token=2, normalized=True)
    assert normalized == pytest.approx({0: 0.7311, 1: 0.2689}, abs=5e-5)
    # Over the chosen alone it is the same as normalizing.
    assert routed([2.0, 1, 0, -1], experts_per_token=2, scores="topk_softmax") == pytest.approx(normalized, abs=1e-6)


def test_weight_scale_comes_last():
    scaled = routed([2.0, 1, 0, -1], experts_per_token=2, normalized=True, weight_scale=2.5)
    assert sum(scaled.values()) == pytest.approx(2.5)


def test_choice_bias_chooses_but_does_not_weigh():
    logits, bias = [2.0, 1, 0, -1], [0, 0, 0, 1.0]
    chosen = routed(logits, bias, experts_per_token=2, scores="sigmoid", choice_bias=True)
    assert set(chosen) == {0, 3}
    assert chosen[3] == pytest.approx(1 / (1 + np.exp(1)), abs=1e-6)


def test_groups_by_their_best():
    # Softmax scores: the third group's second is chosen before better ones of other groups.
    logits = [3.0, -9, 2, 1.9, 2.5, -5, 1, 0]
    assert set(routed(logits, experts_per_token=2, groups=4, groups_per_token=1)) == {0, 1}
    assert set(routed(logits, experts_per_token=2)) == {0, 4}


def test_groups_by_the_sum_of_their_two_best():
    logits = [3.0, -9, 2, 1.9, 2.5, -5, 1, 0]
    assert set(routed(logits, experts_per_token=2, scores="sigmoid", groups=4, groups_per_token=1)) == {2, 3}


def test_groups_of_negative_scores_are_still_chosen_from():
    # A bias may bring every score below 0; experts of other groups must not win by being hidden.
    chosen = routed([1.0, 0, 3, 2], [-9.0, -9, -1, -1], experts_per_token=2, scores="sigmoid", choice_bias=True,
                    groups=2, groups_per_token=1)  # fmt: skip
    assert set(chosen) == {2, 3}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"experts_per_token": 9}, "9 of 8"),
        ({"groups": 3}, "3 groups"),
        ({"groups": 4, "groups_per_token": 5}, "5 serve"),
        ({"groups": 4, "groups_per_token": 1}, "too small"),
        ({"groups": 8, "groups_per_token": 4, "scores": "sigmoid"}, "too small"),
        ({"scores": "linear"}, "linear"),
        ({"layers": (True, False)}, "2 layers"),
        ({"weight_scale": -1.0}, "weight_scale"),
    ],
)
def test_contradictions_are_refused(changes, names):
    with pytest.raises(ValueError, match=names):
        config_of(**changes)


# --- experts ---------------------------------------------------------------------------------------------------------


def arrays_of(config, tokens: int, seed: int = 0):
    random = np.random.default_rng(seed)
    settings = config.moe
    experts, has_bias = settings.num_experts, settings.expert_bias
    held = ExpertWeights(
        gate_up=random.normal(size=(experts, 2, HIDDEN, INNER)).astype(np.float32),
        down=random.normal(size=(experts, INNER, HIDDEN)).astype(np.float32) / 4,
        gate_up_bias=random.normal(size=(experts, 2, INNER)).astype(np.float32) if has_bias else None,
        down_bias=random.normal(size=(experts, HIDDEN)).astype(np.float32) if has_bias else None,
    )
    ids = np.argsort(random.normal(size=(tokens, experts)), axis=1)[:, : settings.experts_per_token].astype(np.int32)
    weights = random.uniform(size=ids.shape).astype(np.float32)
    x = random.normal(size=(tokens, HIDDEN)).astype(np.float32)
    return x, ids, weights, held


def oracle(config, x, ids, weights, held):
    """f64[T, hidden], without down_bias: one position and one expert at a time."""
    settings, out = config.moe, np.zeros(x.shape)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            gate, up = (x[token].astype(np.float64) @ held.gate_up[expert, part] for part in (0, 1))
            if held.gate_up_bias is not None:
                gate, up = gate + held.gate_up_bias[expert, 0], up + held.gate_up_bias[expert, 1]
            if settings.swiglu_limit is None:
                inner = gate / (1 + np.exp(-gate)) * up
            else:
                gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
                inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            out[token] += weight * (inner @ held.down[expert])
    return out


def computed(config, x, ids, weights, real, held):
    routing = Routing(jnp.array(ids), jnp.array(weights), jnp.array(real))
    held = jax.tree.map(jnp.array, held)
    return np.asarray(jax.jit(weighted_sum, static_argnums=0)(config, jnp.array(x), routing, held))


@pytest.mark.parametrize("tokens", [1, 2, 7, 40, 300])
@pytest.mark.parametrize("kind", ["gated", "clamped"])
def test_experts_equal_one_position_after_the_other(tokens, kind):
    changes = {} if kind == "gated" else {"swiglu_limit": 7.0, "expert_bias": True}
    config = config_of(**changes)
    x, ids, weights, held = arrays_of(config, tokens)
    out = computed(config, x, ids, weights, np.ones(tokens, bool), held)
    np.testing.assert_allclose(out, oracle(config, x, ids, weights, held), atol=2e-4)


@pytest.mark.parametrize("ids", [[[5, 1, 2]] * 30, [[0, 1, 2]] * 15 + [[5, 6, 7]] * 15, [[7, 6, 5]]])
def test_uneven_experts(ids):
    config = config_of()
    x, _, weights, held = arrays_of(config, len(ids))
    ids = np.array(ids, np.int32)
    out = computed(config, x, ids, weights, np.ones(len(ids), bool), held)
    np.testing.assert_allclose(out, oracle(config, x, ids, weights, held), atol=2e-4)


def test_row_by_row_equals_expert_by_expert():
    config = config_of(expert_bias=True, swiglu_limit=7.0)
    x, ids, weights, held = arrays_of(config, 5)
    routing = Routing(jnp.array(ids), jnp.array(weights), jnp.ones(5, bool))
    held = jax.tree.map(jnp.array, held)
    first, second = (each(config, jnp.array(x), routing, held) for each in (row_by_row, expert_by_expert))
    np.testing.assert_allclose(first, second, atol=1e-5)


@pytest.mark.parametrize("clamped", [False, True])
def test_padding_goes_nowhere(clamped):
    """Positions of NaN between real ones, and NaN in every expert that no real position uses."""
    config = config_of(**({"swiglu_limit": 7.0, "expert_bias": True} if clamped else {}))
    x, ids, weights, held = arrays_of(config, 11)
    ids = np.argsort(np.random.default_rng(3).normal(size=(11, 4)), axis=1)[:, :3].astype(np.int32)
    real = np.array([1, 0, 1, 1, 0, 1, 1, 0, 0, 1, 0], bool)
    x[~real] = weights[~real] = np.nan
    ids[~real] = 7
    used = sorted(set(ids[real].ravel()))
    poisoned = dataclasses.replace(
        held, gate_up=np.full_like(held.gate_up, np.nan), down=np.full_like(held.down, np.nan)
    )
    poisoned.gate_up[used], poisoned.down[used] = held.gate_up[used], held.down[used]
    module = moe.Experts(config)
    params = {name: jnp.array(value) for name, value in vars(poisoned).items() if value is not None}
    routing = Routing(jnp.array(ids), jnp.array(weights), jnp.array(real))
    out = np.asarray(module.apply({"params": params}, jnp.array(x), routing))
    expected = oracle(config, x[real], ids[real], weights[real], held)
    if held.down_bias is not None:
        expected += np.einsum("tk,tkh->th", weights[real], held.down_bias[ids[real]])
    np.testing.assert_allclose(out[real], expected, atol=2e-4)
    assert (out[~real] == 0).all()


def test_shared_expert_and_its_gate():
    config = config_of(shared_intermediate_size=20, shared_gate=True)
    module, x = MoE(config), jax.random.normal(jax.random.key(1), (4, HIDDEN))
    real = jnp.ones(4, bool)
    params = jax.tree.map(lambda leaf: leaf * 20, module.init(jax.random.key(0), x, real)["params"])
    whole = module.apply({"params": params}, x, real)
    routing = Routing(*moe.Router(config).apply({"params": params["router"]}, x), real)
    routed_part = moe.Experts(config).apply({"params": params["experts"]}, x, routing)
    exact = np.asarray(x, np.float64)
    gate, up, down = (np.asarray(params["shared"][name]["kernel"], np.float64) for name in ("gate", "up", "down"))
    inner = exact @ gate
    shared = (inner / (1 + np.exp(-inner)) * (exact @ up)) @ down
    shared *= 1 / (1 + np.exp(-exact @ np.asarray(params["shared_gate"]["kernel"], np.float64)))
    np.testing.assert_allclose(whole, np.asarray(routed_part) + shared, rtol=1e-4, atol=1e-4)
    assert np.abs(shared).max() > 0.1


# --- what is read and computed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_only_routed_experts_are_computed(tokens):
    """By the compiler's own count, which takes a loop's body once: a turn is one tile through one expert."""
    experts, hidden, inner, used = 64, 256, 128, 4
    config = config_of(num_experts=experts, experts_per_token=used, intermediate_size=inner).replace(hidden_size=hidden)
    shape = jax.ShapeDtypeStruct
    routing = Routing(shape((tokens, used), jnp.int32), shape((tokens, used), jnp.float32), shape((tokens,), jnp.bool_))
    held = ExpertWeights(
        shape((experts, 2, hidden, inner), jnp.float32), shape((experts, inner, hidden), jnp.float32), None, None
    )
    x = shape((tokens, hidden), jnp.float32)
    compiled = jax.jit(weighted_sum, static_argnums=0).lower(config, x, routing, held).compile()
    one_expert, tile = 3 * hidden * inner, tile_rows(config.moe, tokens, used)
    rows = tokens * used * hidden * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * 4 * one_expert + 4 * rows
    assert compiled.cost_analysis()["flops"] < 2 * tile * one_expert + 5000 * (tokens + 2)
