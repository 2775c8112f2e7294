"""GPT-2 (Radford et al., 2019): LayerNorms, learned positions, no gate, weights stored [inputs, outputs]."""

from __future__ import annotations

import numpy as np

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families._common import Config, Family, activation, flag, positive_float, positive_int
from jaxinfer.models.families._rules import ATTENTION, LAYER, MLP, Size, ends, hidden_size, norm, same, table, vector
from jaxinfer.models.tensors import ModelError, Rule

_NAME = "transformer.h.{layer}"


def _heads_of(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    """[.., 3 * hidden] -> [.., 3, heads, head_dim]: queries, keys, values."""
    return tensors[0].reshape(*tensors[0].shape[:-1], 3, config.num_heads, config.head_dim)


def _q(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(_heads_of(config, tensors)[..., 0, :, :])


def _kv(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(_heads_of(config, tensors)[..., 1:, :, :])


def _linear(parameter: str, tensor: str, inputs: Size, outputs: Size) -> tuple[Rule, ...]:
    return (
        Rule(f"{parameter}/kernel", (f"{tensor}.weight",), lambda c: ((inputs(c), outputs(c)),), same),
        vector(f"{parameter}/bias", f"{tensor}.bias", outputs),
    )


def _inner_size(config: DecoderConfig) -> int:
    return config.intermediate_size


_RULES = (
    *ends("transformer.wte", "transformer.ln_f"),
    table("position_embedding", "transformer.wpe.weight", lambda c: c.max_positions),
    *norm(f"{LAYER}/attention_norm", f"{_NAME}.ln_1"),
    *norm(f"{LAYER}/mlp_norm", f"{_NAME}.ln_2"),
    *(
        rule
        for part, join in (("q", _q), ("kv", _kv))
        for rule in (
            Rule(
                f"{ATTENTION}/{part}/kernel",
                (f"{_NAME}.attn.c_attn.weight",),
                lambda c: ((c.hidden_size, 3 * c.hidden_size),),
                join,
            ),
            Rule(f"{ATTENTION}/{part}/bias", (f"{_NAME}.attn.c_attn.bias",), lambda c: ((3 * c.hidden_size,),), join),
        )
    ),
    *_linear(f"{ATTENTION}/out", f"{_NAME}.attn.c_proj", hidden_size, hidden_size),
    *_linear(f"{MLP}/up", f"{_NAME}.mlp.c_fc", hidden_size, _inner_size),
    *_linear(f"{MLP}/down", f"{_NAME}.mlp.c_proj", _inner_size, hidden_size),
)


def _read(config: Config) -> DecoderConfig:
    hidden, heads = positive_int(config, "n_embd", 768), positive_int(config, "n_head", 12)
    layers = positive_int(config, "n_layer", 12)
    if hidden % heads:
        raise ModelError(f"The model's n_embd {hidden} is no multiple of its n_head {heads}.")
    return DecoderConfig(
        vocab_size=positive_int(config, "vocab_size", 50257),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=positive_int(config, "n_inner", 4 * hidden),
        max_positions=positive_int(config, "n_positions", 1024),
        norm_eps=positive_float(config, "layer_norm_epsilon", 1e-5),
        ropes=(None,) * layers,
        windows=(None,) * layers,
        tied_head=flag(config, "tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm="layer",
        activation=activation(config, "activation_function", "gelu_new"),
        gated_mlp=False,
        position_offset=0,
        attention_scale=None if flag(config, "scale_attn_weights", True) else 1.0,
    )


FAMILIES = (
    Family(
        "gpt2",
        ("GPT2LMHeadModel",),
        _read,
        _RULES,
        # The causal mask, as older checkpoints store it.
        ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
        copies=(("lm_head.weight", "transformer.wte.weight"),),
        prefixes=(*((name, f"transformer.{name}") for name in ("wte.", "wpe.", "h.", "ln_f.")),),
        harmless=(
            *("n_ctx", "reorder_and_upcast_attn"),
            *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
        ),
    ),
)
