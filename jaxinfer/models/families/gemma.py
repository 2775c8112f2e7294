"""Gemma 2 (2024) and the text part of Gemma 3 (2025): norms around each part, windows, caps, scaled embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import DecoderConfig, RopeConfig
from jaxinfer.models.families._common import (
    Config,
    Family,
    Windows,
    attention_biases,
    flag,
    layer_kinds,
    llama_like,
    optional_float,
    positive_float,
    positive_int,
    refuse_unknown,
)
from jaxinfer.models.families._rope import one_rope, rope_of
from jaxinfer.models.families._rules import HF_LAYER, LAYER, attention, ends, gated_mlp, norm
from jaxinfer.models.tensors import ModelError

_RULES = (
    *ends(),
    *norm(f"{LAYER}/attention_norm", f"{HF_LAYER}.input_layernorm"),
    *norm(f"{LAYER}/attention_post_norm", f"{HF_LAYER}.post_attention_layernorm"),
    *norm(f"{LAYER}/mlp_norm", f"{HF_LAYER}.pre_feedforward_layernorm"),
    *norm(f"{LAYER}/mlp_post_norm", f"{HF_LAYER}.post_feedforward_layernorm"),
    *attention(),
    *gated_mlp(),
)
_GEMMA3_DEFAULTS = {
    # What the nested text_config of published checkpoints leaves out.
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}


def _fields(config: Config) -> dict[str, Any]:
    """What both generations share."""
    return {
        "kv_heads": 4,
        "head_dim": 256,
        "tied_head": True,
        "activation_key": "hidden_activation",
        "default_activation": "gelu_pytorch_tanh",
        **attention_biases(config),
        "norm": "rms_offset",
        "norm_placement": "around",
        "embedding_scale": positive_int(config, "hidden_size") ** 0.5,
        "attention_scale": positive_float(config, "query_pre_attn_scalar", 256) ** -0.5,
    }


def _windows(pattern: int) -> Windows:
    """Windows in all layers but every `pattern`-th, unless layer_types says otherwise."""

    def read(config: Config, layers: int) -> tuple[int | None, ...]:
        window = config.get("sliding_window", 4096)
        return tuple(window if kind == "sliding_attention" else None for kind in _kinds(config, layers, pattern))

    return read


def _kinds(config: Config, layers: int, pattern: int) -> tuple[str, ...]:
    default = ("sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers))
    return layer_kinds(config, layers, tuple(default))


def _read_gemma2(config: Config) -> DecoderConfig:
    return llama_like(
        config,
        ropes=one_rope(),
        windows=_windows(2),
        max_positions=8192,
        attention_softcap=optional_float(config, "attn_logit_softcapping", 50.0),
        logit_softcap=optional_float(config, "final_logit_softcapping", 30.0),
        **_fields(config),
    )


def _read_gemma3(config: Config) -> DecoderConfig:
    pattern = positive_int(config, "sliding_window_pattern", 6)

    def ropes(config: Config, head_dim: int, layers: int) -> tuple[RopeConfig | None, ...]:
        by_kind = _gemma3_ropes(config, head_dim)
        return tuple(by_kind[kind] for kind in _kinds(config, layers, pattern))

    return llama_like(
        config,
        ropes=ropes,
        windows=_windows(pattern),
        max_positions=131072,
        qk_norm="head",
        attention_softcap=optional_float(config, "attn_logit_softcapping", None),
        logit_softcap=optional_float(config, "final_logit_softcapping", None),
        **_fields(config),
    )


def _gemma3_ropes(config: Config, head_dim: int) -> dict[str, RopeConfig]:
    """Of each kind of layer: `rope_parameters` by kind, or rope_local_base_freq beside rope_theta and rope_scaling."""
    given = config.get("rope_parameters") or {}
    thetas = {
        "full_attention": positive_float(config, "rope_theta", 1e6),
        "sliding_attention": positive_float(config, "rope_local_base_freq", 1e4),
    }
    scaling = {"full_attention": config.get("rope_scaling") or {}, "sliding_attention": {}}
    if not isinstance(given, Mapping) or set(given) - set(thetas):
        raise ModelError(f"The model's config has rope_parameters for other kinds of layer than {', '.join(thetas)}.")
    settings = {kind: {**(given.get(kind) or {}), **scaling[kind]} for kind in thetas}
    return {kind: rope_of(config, settings[kind], head_dim, theta=theta) for kind, theta in thetas.items()}


def _read_nested(config: Config) -> DecoderConfig:
    """The text part of a model that also sees."""
    given = config.get("text_config")
    if not isinstance(given, Mapping):
        raise ModelError("The model's config has no text_config, which describes the text part of this architecture.")
    tied = flag(config, "tie_word_embeddings", True)
    text = Config({**_GEMMA3_DEFAULTS, **given, "tie_word_embeddings": tied})
    decoder = _read_gemma3(text)
    refuse_unknown(text, harmless=_UNREAD)
    return decoder


# The activation is hidden_activation; hidden_act is an older name that transformers passes over.
_UNREAD = ("hidden_act", "sliding_window_size")

FAMILIES = (
    Family("gemma2", ("Gemma2ForCausalLM",), _read_gemma2, _RULES, harmless=_UNREAD),
    Family("gemma3_text", ("Gemma3ForCausalLM",), _read_gemma3, _RULES, harmless=_UNREAD),
    Family(
        "gemma3",
        ("Gemma3ForConditionalGeneration",),
        _read_nested,
        _RULES,
        ignored=(r".*rotary_emb\.inv_freq", r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
        prefixes=(
            ("language_model.model.", "model."),
            ("model.language_model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ),
        harmless=("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
    ),
)
