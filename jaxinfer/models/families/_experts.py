"""Rules for the tensors of layers with experts, and of latent attention."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families._rules import ATTENTION, HF_LAYER, When, linear, norm, transposed, vector
from jaxinfer.models.layer_config import MLAConfig, MoEConfig
from jaxinfer.models.tensors import Rule

MOE = "layers_{layer}/moe"
EXPERTS = f"{MOE}/experts"


def expert_layers(config: DecoderConfig) -> list[int]:
    """The layers that have experts."""
    return [layer for layer in range(config.num_layers) if config.has_experts(layer)]


def dense_layers(config: DecoderConfig) -> list[int]:
    """The layers that have the MLP."""
    return [layer for layer in range(config.num_layers) if not config.has_experts(layer)]


def in_expert_layers(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The same rules for the layers with experts alone."""
    return tuple(dataclasses.replace(rule, layers=expert_layers) for rule in rules)


def in_dense_layers(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The same rules for the layers with the MLP alone."""
    return tuple(dataclasses.replace(rule, layers=dense_layers) for rule in rules)


def moe(config: DecoderConfig) -> MoEConfig:
    """The experts of a config that has them."""
    assert config.moe is not None, "only layers with experts have these tensors"
    return config.moe


def router(tensor: str, choice_bias: str = "", renamed: str = "") -> tuple[Rule, ...]:
    """The router's weight [experts, hidden], its bias and its bias of the choice, where there are such.

    renamed: another name that the weight's tensor may have.
    """
    weight = Rule(
        f"{MOE}/router/kernel",
        (f"{tensor}.weight",),
        lambda c: ((moe(c).num_experts, c.hidden_size),),
        transposed,
    )
    if renamed:
        weight = dataclasses.replace(weight, otherwise=dataclasses.replace(weight, tensors=(f"{renamed}.weight",)))
    rules = [
        weight,
        _float32_vector(f"{MOE}/router/bias", f"{tensor}.bias", lambda c: moe(c).router_bias),
    ]
    if choice_bias:
        rules.append(_float32_vector(f"{MOE}/router/choice_bias", choice_bias, lambda c: moe(c).choice_bias))
    return in_expert_layers(tuple(rules))


def _float32_vector(parameter: str, tensor: str, when: When) -> Rule:
    rule = vector(parameter, tensor, lambda c: moe(c).num_experts, lambda c: c.moe is not None and when(c))
    return dataclasses.replace(rule, dtype="float32")


def experts(
    tensors: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", fused: str = ""
) -> tuple[Rule, ...]:
    """Three tensors for each expert, or the two that hold all of them: gate_up_proj and down_proj.

    fused: how the names of these two begin; as those of the others, when empty.
    """
    fused = fused or tensors
    fused_gate_up = Rule(
        f"{EXPERTS}/gate_up",
        (f"{fused}.gate_up_proj",),
        lambda c: ((moe(c).num_experts, 2 * moe(c).intermediate_size, c.hidden_size),),
        _fused_gate_up,
    )
    fused_down = Rule(
        f"{EXPERTS}/down",
        (f"{fused}.down_proj",),
        lambda c: ((moe(c).num_experts, c.hidden_size, moe(c).intermediate_size),),
        lambda c, found: np.ascontiguousarray(found[0].swapaxes(1, 2)),
    )
    rules = (
        Rule(
            f"{EXPERTS}/gate_up",
            lambda c: (*_each(c, tensors, gate), *_each(c, tensors, up)),
            lambda c: ((moe(c).intermediate_size, c.hidden_size),) * (2 * moe(c).num_experts),
            _stacked_gate_up,
            otherwise=fused_gate_up,
        ),
        Rule(
            f"{EXPERTS}/down",
            lambda c: _each(c, tensors, down),
            lambda c: ((c.hidden_size, moe(c).intermediate_size),) * moe(c).num_experts,
            _stacked_down,
            otherwise=fused_down,
        ),
    )
    return in_expert_layers(rules)


def _each(config: DecoderConfig, tensors: str, part: str) -> tuple[str, ...]:
    return tuple(f"{tensors}.{expert}.{part}.weight" for expert in range(moe(config).num_experts))


def _stacked_gate_up(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    """Gates [inner, hidden] of all experts and then ups -> [experts, 2, hidden, inner]."""
    count, (inner, hidden) = len(tensors) // 2, tensors[0].shape
    joined = np.empty((count, 2, hidden, inner), tensors[0].dtype)
    for index, tensor in enumerate(tensors):
        joined[index % count, index // count] = tensor.T
    return joined


def _stacked_down(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    """[hidden, inner] of each expert -> [experts, inner, hidden]."""
    joined = np.empty((len(tensors), *tensors[0].shape[::-1]), tensors[0].dtype)
    for index, tensor in enumerate(tensors):
        joined[index] = tensor.T
    return joined


def _fused_gate_up(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    """[experts, 2 * inner, hidden], gates first -> [experts, 2, hidden, inner]."""
    count, both, hidden = tensors[0].shape
    return np.ascontiguousarray(tensors[0].reshape(count, 2, both // 2, hidden).swapaxes(2, 3))


def shared_expert(tensors: str, gate: str | None = None) -> tuple[Rule, ...]:
    """The MLP that every position uses, and the projection that gates it."""

    def inner(c: DecoderConfig) -> tuple[int, int]:
        return (moe(c).shared_intermediate_size, c.hidden_size)

    rules = (
        *linear(f"{MOE}/shared/gate", f"{tensors}.gate_proj", inner),
        *linear(f"{MOE}/shared/up", f"{tensors}.up_proj", inner),
        *linear(f"{MOE}/shared/down", f"{tensors}.down_proj", lambda c: inner(c)[::-1]),
    )
    if gate is not None:
        rules = (*rules, *linear(f"{MOE}/shared_gate", gate, lambda c: (1, c.hidden_size)))

    def has_shared(c: DecoderConfig) -> bool:
        return c.moe is not None and c.moe.shared_intermediate_size > 0

    return in_expert_layers(tuple(dataclasses.replace(rule, when=has_shared) for rule in rules))


# --- latent attention ------------------------------------------------------------------------------------------------


def latent_attention(tensors: str = f"{HF_LAYER}.self_attn") -> tuple[Rule, ...]:
    """DeepSeek's names. kv_b_proj holds each head's key_up and value_up."""

    def low_rank(c: DecoderConfig) -> bool:
        return _mla(c).query_rank is not None

    def q_shape(c: DecoderConfig, inputs: int) -> tuple[int, int]:
        return (c.num_heads * (_mla(c).plain_dim + _mla(c).rope_dim), inputs)

    def rank(c: DecoderConfig) -> int:
        return _mla(c).query_rank or 1

    q_a = linear(f"{ATTENTION}/q_a", f"{tensors}.q_a_proj", lambda c: (rank(c), c.hidden_size), lambda c: c.qkv_bias)
    q, kv_b = f"{ATTENTION}/q/kernel", (f"{tensors}.kv_b_proj.weight",)
    return (
        Rule(q, (f"{tensors}.q_proj.weight",), lambda c: (q_shape(c, c.hidden_size),), _by_query_head, _not(low_rank)),
        Rule(q, (f"{tensors}.q_b_proj.weight",), lambda c: (q_shape(c, rank(c)),), _by_query_head, low_rank),
        *(dataclasses.replace(rule, when=_both(rule.when, low_rank)) for rule in q_a),
        *norm(f"{ATTENTION}/q_a_norm", f"{tensors}.q_a_layernorm", rank, low_rank),
        *linear(
            f"{ATTENTION}/kv_a",
            f"{tensors}.kv_a_proj_with_mqa",
            lambda c: (_mla(c).row_dim, c.hidden_size),
            lambda c: c.qkv_bias,
        ),
        *norm(f"{ATTENTION}/kv_a_norm", f"{tensors}.kv_a_layernorm", lambda c: _mla(c).latent_dim),
        Rule(f"{ATTENTION}/key_up", kv_b, _kv_b_shape, lambda c, found: _kv_b(c, found)[:, : _mla(c).plain_dim]),
        Rule(
            f"{ATTENTION}/value_up",
            kv_b,
            _kv_b_shape,
            lambda c, found: np.ascontiguousarray(_kv_b(c, found)[:, _mla(c).plain_dim :].swapaxes(1, 2)),
        ),
        *linear(
            f"{ATTENTION}/out",
            f"{tensors}.o_proj",
            lambda c: (c.hidden_size, c.num_heads * _mla(c).value_dim),
            lambda c: c.output_bias,
        ),
    )


def _mla(config: DecoderConfig) -> MLAConfig:
    assert config.mla is not None, "only latent attention has these tensors"
    return config.mla


def _by_query_head(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    """[heads * width, inputs] -> [inputs, heads, width]."""
    return np.ascontiguousarray(np.moveaxis(tensors[0].reshape(config.num_heads, -1, tensors[0].shape[1]), 2, 0))


def _kv_b_shape(config: DecoderConfig) -> tuple[tuple[int, int]]:
    mla = _mla(config)
    return ((config.num_heads * (mla.plain_dim + mla.value_dim), mla.latent_dim),)


def _kv_b(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    return tensors[0].reshape(config.num_heads, -1, tensors[0].shape[1])


def _not(condition: When) -> When:
    return lambda config: not condition(config)


def _both(one: When, other: When) -> When:
    return lambda config: one(config) and other(config)
