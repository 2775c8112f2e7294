"""The model families: how each one's config.json and tensor names map onto the decoder. Data, no computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.models.config import DecoderConfig, RopeConfig
from jaxinfer.models.tensors import ModelError, Rule

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One family of models.

    model_type: its name in config.json. architectures: the classes that config.json may name.
    decoder: config.json -> DecoderConfig. rules, ignored, copies: see `assemble_params`.
    """

    model_type: str
    architectures: tuple[str, ...]
    decoder: Callable[[Config], DecoderConfig]
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    copies: tuple[tuple[str, str], ...] = (("lm_head.weight", "model.embed_tokens.weight"),)


def family_of(config: Config) -> Family:
    """The family of a config.json; raises ModelError, naming the known ones, when there is none."""
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    architectures = architectures if isinstance(architectures, list) else [architectures]
    for family in FAMILIES:
        known_class = any(name in family.architectures for name in architectures)
        if model_type == family.model_type and (known_class or not architectures):
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    asked = ", ".join(map(str, architectures)) or "unnamed"
    raise ModelError(f"The architecture {asked} (model_type {model_type!r}) is not supported; supported are {known}.")


# --- config.json ---------------------------------------------------------------------------------------------------

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Keys that would change the computation in a way the decoder does not know, and the values that do not.
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1, 1.0),
    "query_pre_attn_scalar": (None,),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
    "no_rope_layers": (None,),
    "is_encoder_decoder": (None, False),
}


def _require(config: Config, key: str) -> Any:
    value = config.get(key)
    if value is None:
        raise ModelError(f"The model's config has no {key}, which is needed to build it.")
    return value


def _positive_int(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        _require(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"The model's config has {key} {value!r}, which must be a positive integer.")
    return value


def _positive_float(config: Config, key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        _require(config, key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"The model's config has {key} {value!r}, which must be a positive number.")
    return float(value)


_ROPE_KEYS = (
    *("rope_type", "type", "rope_theta", "factor"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
)


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next(value for value in values if value is not None)


def _rope(config: Config, rotary_dim: int, default_theta: float) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4)."""
    given = [config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    if any(not isinstance(scaling, Mapping) for scaling in given):
        raise ModelError(f"The model's config describes RoPE by {given!r}, which must be keys and values.")
    if len(given) == 2 and given[0] != given[1]:
        raise ModelError("The model's config has both rope_parameters and rope_scaling, and they differ; remove one.")
    scaling = given[0] if given else {}
    for key, value in scaling.items():
        if value is not None and key not in _ROPE_KEYS and (key, value) != ("partial_rotary_factor", 1):
            raise ModelError(f"The model's config sets {key} of RoPE to {value!r}, which is not supported.")
    theta = _positive_float(scaling, "rope_theta", _positive_float(config, "rope_theta", default_theta))
    kind = _first(scaling.get("rope_type"), scaling.get("type"), "default")
    values: dict[str, Any] = {}
    if kind in ("linear", "llama3"):
        values["factor"] = _positive_float(scaling, "factor")
    if kind == "llama3":
        values["low_freq_factor"] = _positive_float(scaling, "low_freq_factor")
        values["high_freq_factor"] = _positive_float(scaling, "high_freq_factor")
        key = "original_max_position_embeddings"
        stated = scaling if config.get(key) is None else config
        values["original_max_positions"] = _positive_int(stated, key, config.get("max_position_embeddings") or 8192)
    return RopeConfig(theta=theta, rotary_dim=rotary_dim, scaling=str(kind), **values)


def _activation(config: Config) -> str:
    name = config.get("hidden_act", "silu")
    known = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
    if name not in known:
        raise ModelError(f"The model's hidden_act {name!r} is not supported; {', '.join(known)} are.")
    return known[name]


def _decoder(
    config: Config,
    *,
    qkv_bias: bool,
    output_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
    windows: Callable[[Config, int], tuple[int | None, ...]],
    default_kv_heads: int | None = None,
) -> DecoderConfig:
    """The keys that all of these families share; the defaults are those of their classes in transformers."""
    for key, harmless in _NEUTRAL.items():
        if config.get(key) not in harmless:
            raise ModelError(f"The model's config sets {key} to {config[key]!r}, which is not supported.")
    hidden, heads = _positive_int(config, "hidden_size"), _positive_int(config, "num_attention_heads")
    layers = _positive_int(config, "num_hidden_layers")
    width = _positive_int(config, "head_dim", head_dim or max(1, hidden // heads))
    try:
        return DecoderConfig(
            vocab_size=_positive_int(config, "vocab_size"),
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=_positive_int(config, "num_key_value_heads", default_kv_heads or heads),
            head_dim=width,
            intermediate_size=_positive_int(config, "intermediate_size"),
            max_positions=_positive_int(config, "max_position_embeddings", 2048),
            norm_eps=_positive_float(config, "rms_norm_eps", 1e-6),
            rope=_rope(config, width, 10000.0),
            windows=windows(config, layers),
            tied_head=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=qk_norm,
            activation=_activation(config),
        )
    except ModelError:
        raise
    except (TypeError, ValueError) as error:
        raise ModelError(f"The model's config is not valid: {error}") from error


def _full_attention(config: Config, layers: int) -> tuple[int | None, ...]:
    return (None,) * layers


def _window_everywhere(config: Config, layers: int) -> tuple[int | None, ...]:
    # An absent key means transformers' default of 4,096; an explicit null means full attention.
    return (config.get("sliding_window", 4096),) * layers


def _window_by_layer(config: Config, layers: int) -> tuple[int | None, ...]:
    """Qwen's rule: windows only with use_sliding_window, in the layers named by layer_types or max_window_layers."""
    if not config.get("use_sliding_window", False):
        return (None,) * layers
    window = _positive_int(config, "sliding_window", 4096)
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(layers))
    if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ModelError("The model's layer_types must name full_attention or sliding_attention for every layer.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


# --- tensors -------------------------------------------------------------------------------------------------------


def _same(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    return tensors[0]


def _transposed(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(tensors[0].T)


def _by_head(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    """A projection [heads * head_dim, hidden] -> [hidden, heads, head_dim]; a bias [..] -> [heads, head_dim]."""
    split = tensors[0].reshape(-1, config.head_dim, *tensors[0].shape[1:])
    return np.ascontiguousarray(np.moveaxis(split, 2, 0)) if split.ndim == 3 else split


def _joined_by_head(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    """Keys and values, each as in _by_head -> [hidden, 2, kv_heads, head_dim]; biases -> [2, kv_heads, head_dim]."""
    return np.stack([_by_head(config, [tensor]) for tensor in tensors], axis=-3)


def _q_size(config: DecoderConfig) -> int:
    return config.num_heads * config.head_dim


def _kv_size(config: DecoderConfig) -> int:
    return config.num_kv_heads * config.head_dim


_ATTENTION, _LAYER, _NAME = "layers_{layer}/attention", "layers_{layer}", "model.layers.{layer}"
_Q, _K, _V = (f"{_NAME}.self_attn.{part}_proj" for part in "qkv")


def _linear(parameter: str, tensor: str, shape: Callable[[DecoderConfig], tuple[int, int]], **when: Any) -> Rule:
    """The kernel [inputs, outputs] of a weight [outputs, inputs]."""
    return Rule(f"{parameter}/kernel", (f"{tensor}.weight",), lambda c: (shape(c),), _transposed, **when)


def _bias(
    parameter: str, tensor: str, size: Callable[[DecoderConfig], int], when: Callable[[DecoderConfig], bool]
) -> Rule:
    return Rule(f"{parameter}/bias", (f"{tensor}.bias",), lambda c: ((size(c),),), _same, when=when)


def _norm(parameter: str, tensor: str, size: Callable[[DecoderConfig], int], **when: Any) -> Rule:
    return Rule(f"{parameter}/scale", (f"{tensor}.weight",), lambda c: ((size(c),),), _same, **when)


_RULES = (
    Rule("embedding", ("model.embed_tokens.weight",), lambda c: ((c.vocab_size, c.hidden_size),), _same),
    _norm(f"{_LAYER}/attention_norm", f"{_NAME}.input_layernorm", lambda c: c.hidden_size),
    Rule(f"{_ATTENTION}/q/kernel", (f"{_Q}.weight",), lambda c: ((_q_size(c), c.hidden_size),), _by_head),
    Rule(
        f"{_ATTENTION}/q/bias",
        (f"{_Q}.bias",),
        lambda c: ((_q_size(c),),),
        _by_head,
        when=lambda c: c.qkv_bias,
    ),
    Rule(
        f"{_ATTENTION}/kv/kernel",
        (f"{_K}.weight", f"{_V}.weight"),
        lambda c: ((_kv_size(c), c.hidden_size),) * 2,
        _joined_by_head,
    ),
    Rule(
        f"{_ATTENTION}/kv/bias",
        (f"{_K}.bias", f"{_V}.bias"),
        lambda c: ((_kv_size(c),),) * 2,
        _joined_by_head,
        when=lambda c: c.qkv_bias,
    ),
    _norm(f"{_ATTENTION}/q_norm", f"{_NAME}.self_attn.q_norm", lambda c: c.head_dim, when=lambda c: c.qk_norm),
    _norm(f"{_ATTENTION}/k_norm", f"{_NAME}.self_attn.k_norm", lambda c: c.head_dim, when=lambda c: c.qk_norm),
    _linear(f"{_ATTENTION}/out", f"{_NAME}.self_attn.o_proj", lambda c: (c.hidden_size, _q_size(c))),
    _bias(f"{_ATTENTION}/out", f"{_NAME}.self_attn.o_proj", lambda c: c.hidden_size, lambda c: c.output_bias),
    _norm(f"{_LAYER}/mlp_norm", f"{_NAME}.post_attention_layernorm", lambda c: c.hidden_size),
    *(
        rule
        for part in ("gate", "up")
        for rule in (
            _linear(f"{_LAYER}/mlp/{part}", f"{_NAME}.mlp.{part}_proj", lambda c: (c.intermediate_size, c.hidden_size)),
            _bias(
                f"{_LAYER}/mlp/{part}", f"{_NAME}.mlp.{part}_proj", lambda c: c.intermediate_size, lambda c: c.mlp_bias
            ),
        )
    ),
    _linear(f"{_LAYER}/mlp/down", f"{_NAME}.mlp.down_proj", lambda c: (c.hidden_size, c.intermediate_size)),
    _bias(f"{_LAYER}/mlp/down", f"{_NAME}.mlp.down_proj", lambda c: c.hidden_size, lambda c: c.mlp_bias),
    _norm("final_norm", "model.norm", lambda c: c.hidden_size),
    Rule(
        "head",
        ("lm_head.weight",),
        lambda c: ((c.vocab_size, c.hidden_size),),
        _same,
        when=lambda c: not c.tied_head,
    ),
)

FAMILIES: tuple[Family, ...] = (
    Family(
        "llama",
        ("LlamaForCausalLM",),
        lambda c: _decoder(
            c,
            qkv_bias=bool(c.get("attention_bias", False)),
            output_bias=bool(c.get("attention_bias", False)),
            windows=_full_attention,
        ),
        _RULES,
    ),
    Family("qwen2", ("Qwen2ForCausalLM",), lambda c: _decoder(c, qkv_bias=True, windows=_window_by_layer), _RULES),
    Family(
        "qwen3",
        ("Qwen3ForCausalLM",),
        lambda c: _decoder(
            c,
            qkv_bias=bool(c.get("attention_bias", False)),
            output_bias=bool(c.get("attention_bias", False)),
            qk_norm=True,
            head_dim=128,
            windows=_window_by_layer,
        ),
        _RULES,
    ),
    Family(
        "mistral",
        ("MistralForCausalLM",),
        lambda c: _decoder(c, qkv_bias=False, windows=_window_everywhere, default_kv_heads=8),
        _RULES,
    ),
)
