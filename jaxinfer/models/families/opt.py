"""OPT (Zhang et al., 2022): LayerNorms, learned positions from row 2 on, an MLP without gate."""

from __future__ import annotations

from collections.abc import Callable

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families._common import Config, Family, activation, flag, positive_int
from jaxinfer.models.families._rules import LAYER, attention, ends, mlp, norm, table, transposed
from jaxinfer.models.tensors import ModelError, Rule

_NAME = "model.decoder.layers.{layer}"


def _projection(direction: str, shape: Callable[[DecoderConfig], tuple[int, int]]) -> tuple[Rule, ...]:
    """Between the embeddings and a residual stream of another width."""
    name = f"project_{direction}"
    tensors = (f"model.decoder.{name}.weight",)
    rule = Rule(
        f"{name}/kernel", tensors, lambda c: (shape(c),), transposed, when=lambda c: c.embedding_size is not None
    )
    return (rule,)


_RULES = (
    *ends("model.decoder.embed_tokens", "model.decoder.final_layer_norm"),
    table("position_embedding", "model.decoder.embed_positions.weight", lambda c: c.max_positions + 2),
    *norm(f"{LAYER}/attention_norm", f"{_NAME}.self_attn_layer_norm"),
    *norm(f"{LAYER}/mlp_norm", f"{_NAME}.final_layer_norm"),
    *attention(f"{_NAME}.self_attn", out="out_proj"),
    *mlp(f"{_NAME}.fc1", f"{_NAME}.fc2"),
    *_projection("in", lambda c: (c.hidden_size, c.table_width)),
    *_projection("out", lambda c: (c.table_width, c.hidden_size)),
)


def _read(config: Config) -> DecoderConfig:
    hidden, heads = positive_int(config, "hidden_size", 768), positive_int(config, "num_attention_heads", 12)
    layers, bias = positive_int(config, "num_hidden_layers", 12), flag(config, "enable_bias", True)
    if hidden % heads:
        raise ModelError(f"The model's hidden_size {hidden} is no multiple of its num_attention_heads {heads}.")
    embedded = positive_int(config, "word_embed_proj_dim", hidden)
    return DecoderConfig(
        vocab_size=positive_int(config, "vocab_size", 50272),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=positive_int(config, "ffn_dim", 3072),
        max_positions=positive_int(config, "max_position_embeddings", 2048),
        norm_eps=1e-5,
        ropes=(None,) * layers,
        windows=(None,) * layers,
        tied_head=flag(config, "tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        norm="layer",
        norm_placement="before" if flag(config, "do_layer_norm_before", True) else "after_sum",
        activation=activation(config, "activation_function", "relu"),
        gated_mlp=False,
        embedding_size=None if embedded == hidden else embedded,
        position_offset=2,
    )


FAMILIES = (
    Family(
        "opt",
        ("OPTForCausalLM",),
        _read,
        _RULES,
        copies=(("lm_head.weight", "model.decoder.embed_tokens.weight"),),
        prefixes=(("decoder.", "model.decoder."),),
        neutral={"layer_norm_elementwise_affine": (None, True), "_remove_final_layer_norm": (None, False)},
    ),
)
