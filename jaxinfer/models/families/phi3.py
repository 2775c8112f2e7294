"""Phi-3 and Phi-4 (Abdin et al., 2024): Llama with joined projections, longrope and partly rotated heads."""

from __future__ import annotations

import numpy as np

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families._common import Config, Family, llama_like, same_window
from jaxinfer.models.families._rope import one_rope
from jaxinfer.models.families._rules import (
    ATTENTION,
    HF_LAYER,
    MLP,
    NORMS_BEFORE,
    attention_out,
    by_head,
    ends,
    joined_by_head,
    kv_size,
    linear,
    q_size,
    transposed,
)
from jaxinfer.models.tensors import Rule, Shapes

_QKV, _GATE_UP = f"{HF_LAYER}.self_attn.qkv_proj.weight", f"{HF_LAYER}.mlp.gate_up_proj.weight"


def _qkv_shape(config: DecoderConfig) -> Shapes:
    return ((q_size(config) + 2 * kv_size(config), config.hidden_size),)


def _gate_up_shape(config: DecoderConfig) -> Shapes:
    return ((2 * config.intermediate_size, config.hidden_size),)


def _q(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    return by_head(config, [tensors[0][: q_size(config)]])


def _kv(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    return joined_by_head(config, np.split(tensors[0][q_size(config) :], 2))


def _gate(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    return transposed(config, [tensors[0][: config.intermediate_size]])


def _up(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    return transposed(config, [tensors[0][config.intermediate_size :]])


_RULES = (
    *ends(),
    *NORMS_BEFORE,
    Rule(f"{ATTENTION}/q/kernel", (_QKV,), _qkv_shape, _q),
    Rule(f"{ATTENTION}/kv/kernel", (_QKV,), _qkv_shape, _kv),
    *attention_out(f"{HF_LAYER}.self_attn.o_proj"),
    Rule(f"{MLP}/gate/kernel", (_GATE_UP,), _gate_up_shape, _gate),
    Rule(f"{MLP}/up/kernel", (_GATE_UP,), _gate_up_shape, _up),
    *linear(f"{MLP}/down", f"{HF_LAYER}.mlp.down_proj", lambda c: (c.hidden_size, c.intermediate_size)),
)


def _windows(config: Config, layers: int) -> tuple[int | None, ...]:
    return same_window(config, layers, config.get("sliding_window"))


def _read(config: Config) -> DecoderConfig:
    # Older configs call longrope "su" or "yarn".
    ropes = one_rope(partial=True, original=4096, aliases={"su": "longrope", "yarn": "longrope"})
    return llama_like(config, ropes=ropes, windows=_windows, max_positions=4096, norm_eps=1e-5)


FAMILIES = (
    Family(
        "phi3",
        ("Phi3ForCausalLM",),
        _read,
        _RULES,
        neutral={"full_attn_mod": (None, 1), "interpolate_factor": (None, 1)},
    ),
)
