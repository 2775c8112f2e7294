"""Qwen 2 MoE (2024), with a gated shared expert; Qwen 3 MoE (2025), without."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families._common import (
    Config,
    Family,
    attention_biases,
    flag,
    llama_like,
    positive_int,
    same_window,
)
from jaxinfer.models.families._experts import experts, in_dense_layers, router, shared_expert
from jaxinfer.models.families._rope import one_rope
from jaxinfer.models.families._rules import HF_LAYER, NORMS_BEFORE, attention, ends, gated_mlp
from jaxinfer.models.layer_config import MoEConfig
from jaxinfer.models.tensors import ModelError

_MLP = f"{HF_LAYER}.mlp"
_RULES = (
    *ends(),
    *NORMS_BEFORE,
    *attention(),
    *in_dense_layers(gated_mlp()),
    *router(f"{_MLP}.gate"),
    *experts(f"{_MLP}.experts"),
    *shared_expert(f"{_MLP}.shared_expert", f"{_MLP}.shared_expert_gate"),
)


def _moe(config: Config, *, count: int, per_token: int, width: int, **architecture: Any) -> MoEConfig:
    layers, step = positive_int(config, "num_hidden_layers"), positive_int(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ModelError(f"The model's mlp_only_layers must be a list of layers, not {dense!r}.")
    # transformers 5 writes num_local_experts.
    stated = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    return MoEConfig(
        num_experts=positive_int(config, stated, count),
        experts_per_token=positive_int(config, "num_experts_per_tok", per_token),
        intermediate_size=positive_int(config, "moe_intermediate_size", width),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
        normalized=flag(config, "norm_topk_prob", False),
        **architecture,
    )


def _windows(config: Config, layers: int) -> tuple[int | None, ...]:
    used, window = flag(config, "use_sliding_window", False), config.get("sliding_window", 4096)
    return same_window(config, layers, window if used else None)


def _read_qwen2(config: Config) -> DecoderConfig:
    shared = positive_int(config, "shared_expert_intermediate_size", 5632)
    moe = _moe(config, count=60, per_token=4, width=1408, shared_intermediate_size=shared, shared_gate=True)
    return llama_like(
        config, ropes=one_rope(), max_positions=32768, kv_heads=16, qkv_bias=flag(config, "qkv_bias", True), moe=moe
    )


def _read_qwen3(config: Config) -> DecoderConfig:
    return llama_like(
        config,
        ropes=one_rope(),
        windows=_windows,
        max_positions=32768,
        kv_heads=4,
        qk_norm="head",
        moe=_moe(config, count=128, per_token=8, width=768),
        **attention_biases(config),
    )


FAMILIES = (
    Family(
        "qwen2_moe",
        ("Qwen2MoeForCausalLM",),
        _read_qwen2,
        _RULES,
        # Which layers have windows, when they are used, has meant different things.
        neutral={"use_sliding_window": (None, False)},
        harmless=("sliding_window", "max_window_layers"),
    ),
    Family("qwen3_moe", ("Qwen3MoeForCausalLM",), _read_qwen3, _RULES, harmless=("max_window_layers",)),
)
