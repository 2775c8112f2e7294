"""DeepSeek-V2, V2-Lite and V3 (2024): latent attention, shared experts, routing limited to groups of experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import DecoderConfig, RopeConfig
from jaxinfer.models.families._common import (
    Config,
    Family,
    attention_biases,
    flag,
    llama_like,
    positive_float,
    positive_int,
)
from jaxinfer.models.families._experts import experts, in_dense_layers, latent_attention, router, shared_expert
from jaxinfer.models.families._rope import rope_of, rope_settings
from jaxinfer.models.families._rules import HF_LAYER, NORMS_BEFORE, ends, gated_mlp
from jaxinfer.models.layer_config import MLAConfig, MoEConfig
from jaxinfer.models.tensors import ModelError

_MLP = f"{HF_LAYER}.mlp"
_RULES = (
    *ends(),
    *NORMS_BEFORE,
    *latent_attention(),
    *in_dense_layers(gated_mlp()),
    *router(f"{_MLP}.gate", f"{_MLP}.gate.e_score_correction_bias"),
    *experts(f"{_MLP}.experts"),
    *shared_expert(f"{_MLP}.shared_experts"),
)
_HARMLESS = ("qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux")
_EVERY_LAYER = {"moe_layer_freq": (None, 1)}


def _read_v2(config: Config) -> DecoderConfig:
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"The model's topk_method {method!r} is not supported; greedy and group_limited_greedy are.")
    limited = method == "group_limited_greedy"
    moe = _moe(
        config,
        count=64,
        per_token=6,
        width=1407,
        shared=2,
        dense=0,
        groups=positive_int(config, "n_group") if limited else 1,
        groups_per_token=positive_int(config, "topk_group") if limited else 1,
        weight_scale=positive_float(config, "routed_scaling_factor", 1.0),
    )
    return _decoder(config, moe, interleaved=True)


def _read_v3(config: Config) -> DecoderConfig:
    moe = _moe(
        config,
        count=256,
        per_token=8,
        width=2048,
        shared=1,
        dense=3,
        scores="sigmoid",
        choice_bias=True,
        normalized=flag(config, "norm_topk_prob", True),
        groups=positive_int(config, "n_group", 8),
        groups_per_token=positive_int(config, "topk_group", 4),
        weight_scale=positive_float(config, "routed_scaling_factor", 2.5),
    )
    return _decoder(config, moe, interleaved=flag(config, "rope_interleave", True))


def _moe(
    config: Config, *, count: int, per_token: int, width: int, shared: int, dense: int, **routing: Any
) -> MoEConfig:
    layers, first = positive_int(config, "num_hidden_layers"), config.get("first_k_dense_replace")
    first = dense if first is None else first
    if not isinstance(first, int) or first < 0:
        raise ModelError(f"The model's first_k_dense_replace must be a number of layers, not {first!r}.")
    inner = positive_int(config, "moe_intermediate_size", width)
    return MoEConfig(
        num_experts=positive_int(config, "n_routed_experts", count),
        experts_per_token=positive_int(config, "num_experts_per_tok", per_token),
        intermediate_size=inner,
        layers=tuple(layer >= first for layer in range(layers)),
        shared_intermediate_size=inner * positive_int(config, "n_shared_experts", shared),
        **routing,
    )


def _decoder(config: Config, moe: MoEConfig, *, interleaved: bool) -> DecoderConfig:
    low_rank = config.get("q_lora_rank", 1536) is not None
    mla = MLAConfig(
        latent_dim=positive_int(config, "kv_lora_rank", 512),
        rope_dim=positive_int(config, "qk_rope_head_dim", 64),
        plain_dim=positive_int(config, "qk_nope_head_dim", 128),
        value_dim=positive_int(config, "v_head_dim", 128),
        query_rank=positive_int(config, "q_lora_rank", 1536) if low_rank else None,
    )
    settings = rope_settings(config)
    theta = positive_float(config, "rope_theta", 10000.0)
    rope = rope_of(config, settings, mla.rope_dim, theta=theta, interleaved=interleaved)
    decoder = llama_like(
        config,
        ropes=lambda _, width, layers: (rope,) * layers,
        head_dim=mla.rope_dim,
        attention_scale=(mla.plain_dim + mla.rope_dim) ** -0.5 * _magnitude(rope, settings) ** 2,
        moe=moe,
        **attention_biases(config),
    )
    if decoder.num_kv_heads != decoder.num_heads:
        raise ModelError(
            f"Latent attention shares no heads, so num_key_value_heads must be {decoder.num_heads}, or absent."
        )
    # What is cached is one head, the latent, whatever heads it is expanded to.
    return decoder.replace(num_kv_heads=1, head_dim=mla.row_dim, mla=mla)


def _magnitude(rope: RopeConfig, settings: Mapping[str, Any]) -> float:
    """What YaRN multiplies queries and keys with besides cosines and sines."""
    weight = settings.get("mscale_all_dim")
    if rope.scaling == "default" or not weight or rope.factor <= 1:
        return 1.0
    return 0.1 * positive_float(settings, "mscale_all_dim") * math.log(rope.factor) + 1


FAMILIES = (
    Family(
        "deepseek_v2",
        ("DeepseekV2ForCausalLM",),
        _read_v2,
        _RULES,
        # Where weights are normalized, DeepSeek's code does not scale them and transformers' does not normalize them.
        neutral={**_EVERY_LAYER, "norm_topk_prob": (None, False), "scoring_func": (None, "softmax")},
        harmless=(*_HARMLESS, "mlp_bias", "n_group", "topk_group"),
    ),
    Family(
        "deepseek_v3",
        ("DeepseekV3ForCausalLM",),
        _read_v3,
        _RULES,
        # The layer that predicts a second token; transformers leaves it out too.
        ignored=(r".*rotary_emb\.inv_freq", r"model\.layers\.61\..*"),
        neutral={**_EVERY_LAYER, "scoring_func": (None, "sigmoid"), "topk_method": (None, "noaux_tc")},
        harmless=(*_HARMLESS, "num_nextn_predict_layers", "num_mtp_layers"),
    ),
)
