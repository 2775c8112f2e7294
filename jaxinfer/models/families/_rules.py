"""Rules for the tensors that many families name and lay out alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.tensors import Rule, Shapes

Size = Callable[[DecoderConfig], int]
Shape = Callable[[DecoderConfig], tuple[int, ...]]
When = Callable[[DecoderConfig], bool]

LAYER, ATTENTION, MLP = "layers_{layer}", "layers_{layer}/attention", "layers_{layer}/mlp"
"""Where the parameters of a layer are."""
HF_LAYER = "model.layers.{layer}"
"""How most families name the tensors of a layer."""


def same(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    """The tensor as it is."""
    return tensors[0]


def transposed(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    """[outputs, inputs] -> [inputs, outputs]."""
    return np.ascontiguousarray(tensors[0].T)


def by_head(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    """A projection [heads * head_dim, hidden] -> [hidden, heads, head_dim]; a bias [..] -> [heads, head_dim]."""
    split = tensors[0].reshape(-1, config.head_dim, *tensors[0].shape[1:])
    return np.ascontiguousarray(np.moveaxis(split, 2, 0)) if split.ndim == 3 else split


def joined_by_head(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    """Keys and values, each as in by_head -> [hidden, 2, kv_heads, head_dim]; biases -> [2, kv_heads, head_dim]."""
    return np.stack([by_head(config, [tensor]) for tensor in tensors], axis=-3)


def always(config: DecoderConfig) -> bool:
    """For parameters that every config has."""
    return True


def hidden_size(config: DecoderConfig) -> int:
    """Features of the residual stream."""
    return config.hidden_size


def q_size(config: DecoderConfig) -> int:
    """Features of all queries."""
    return config.num_heads * config.head_dim


def kv_size(config: DecoderConfig) -> int:
    """Features of all keys, or of all values."""
    return config.num_kv_heads * config.head_dim


def vector(parameter: str, tensor: str, size: Size, when: When = always) -> Rule:
    """A parameter [size] that is a tensor as it is."""
    return Rule(parameter, (tensor,), lambda c: ((size(c),),), same, when=when)


def table(parameter: str, tensor: str, rows: Size) -> Rule:
    """A parameter [rows, hidden] that is a tensor as it is."""
    return Rule(parameter, (tensor,), lambda c: ((rows(c), c.hidden_size),), same)


def linear(parameter: str, tensor: str, shape: Shape, bias: When | None = None) -> tuple[Rule, ...]:
    """The kernel [inputs, outputs] of a weight [outputs, inputs] of that shape, and the bias where there is one."""
    kernel = Rule(f"{parameter}/kernel", (f"{tensor}.weight",), lambda c: (shape(c),), transposed)
    if bias is None:
        return (kernel,)
    return kernel, vector(f"{parameter}/bias", f"{tensor}.bias", lambda c: shape(c)[0], bias)


def norm(parameter: str, tensor: str, size: Size = hidden_size, when: When = always) -> tuple[Rule, ...]:
    """The scale of a norm, and its bias where norms have one."""
    return (
        vector(f"{parameter}/scale", f"{tensor}.weight", size, when),
        vector(f"{parameter}/bias", f"{tensor}.bias", size, lambda c: c.norm == "layer" and when(c)),
    )


def attention(tensors: str = f"{HF_LAYER}.self_attn", out: str = "o_proj") -> tuple[Rule, ...]:
    """Separate q_proj, k_proj and v_proj, q_norm and k_norm where there are such, and the output projection."""
    q, k, v = (f"{tensors}.{part}_proj" for part in "qkv")

    def has_qkv_bias(c: DecoderConfig) -> bool:
        return c.qkv_bias

    return (
        Rule(f"{ATTENTION}/q/kernel", (f"{q}.weight",), lambda c: ((q_size(c), c.hidden_size),), by_head),
        Rule(f"{ATTENTION}/q/bias", (f"{q}.bias",), lambda c: ((q_size(c),),), by_head, when=has_qkv_bias),
        Rule(
            f"{ATTENTION}/kv/kernel",
            (f"{k}.weight", f"{v}.weight"),
            lambda c: ((kv_size(c), c.hidden_size),) * 2,
            joined_by_head,
        ),
        Rule(
            f"{ATTENTION}/kv/bias",
            (f"{k}.bias", f"{v}.bias"),
            lambda c: ((kv_size(c),),) * 2,
            joined_by_head,
            when=has_qkv_bias,
        ),
        *_qk_norm("q", tensors, q_size),
        *_qk_norm("k", tensors, kv_size),
        *attention_out(f"{tensors}.{out}"),
    )


def attention_out(tensor: str) -> tuple[Rule, ...]:
    """The output projection of attention."""
    return linear(f"{ATTENTION}/out", tensor, lambda c: (c.hidden_size, q_size(c)), lambda c: c.output_bias)


def _qk_norm(part: str, tensors: str, whole: Size) -> tuple[Rule, ...]:
    def size(c: DecoderConfig) -> int:
        return c.head_dim if c.qk_norm == "head" else whole(c)

    return norm(f"{ATTENTION}/{part}_norm", f"{tensors}.{part}_norm", size, lambda c: c.qk_norm != "none")


def mlp(up: str, down: str, gate: str | None = None) -> tuple[Rule, ...]:
    """The projections of the MLP, by the names of their tensors."""
    inner = [("up", up)] if gate is None else [("gate", gate), ("up", up)]

    def has_bias(c: DecoderConfig) -> bool:
        return c.mlp_bias

    return (
        *(
            rule
            for part, tensor in inner
            for rule in linear(f"{MLP}/{part}", tensor, lambda c: (c.intermediate_size, c.hidden_size), has_bias)
        ),
        *linear(f"{MLP}/down", down, lambda c: (c.hidden_size, c.intermediate_size), has_bias),
    )


def gated_mlp(tensors: str = f"{HF_LAYER}.mlp") -> tuple[Rule, ...]:
    """gate_proj, up_proj and down_proj."""
    return mlp(f"{tensors}.up_proj", f"{tensors}.down_proj", f"{tensors}.gate_proj")


def ends(
    embedding: str = "model.embed_tokens", final_norm: str = "model.norm", head: str = "lm_head"
) -> tuple[Rule, ...]:
    """The token embedding, the norm at the end and the LM head."""

    def rows(c: DecoderConfig) -> Shapes:
        return ((c.vocab_size, c.table_width),)

    return (
        Rule("embedding", (f"{embedding}.weight",), rows, same),
        *norm("final_norm", final_norm, when=lambda c: c.norm_placement != "after_sum"),
        Rule("head", (f"{head}.weight",), rows, same, when=lambda c: not c.tied_head),
    )


NORMS_BEFORE = (
    *norm(f"{LAYER}/attention_norm", f"{HF_LAYER}.input_layernorm"),
    *norm(f"{LAYER}/mlp_norm", f"{HF_LAYER}.post_attention_layernorm"),
)
LLAMA_RULES = (*ends(), *NORMS_BEFORE, *attention(), *gated_mlp())
"""The tensors of Llama, and of the many families that kept its names."""
