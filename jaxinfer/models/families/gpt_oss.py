"""gpt-oss (OpenAI, 2025): attention sinks, a window in every second layer, clamped experts in MXFP4."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families._common import (
    Config,
    Family,
    attention_biases,
    layer_kinds,
    llama_like,
    positive_float,
    positive_int,
)
from jaxinfer.models.families._experts import EXPERTS, in_expert_layers, moe, router
from jaxinfer.models.families._rope import one_rope
from jaxinfer.models.families._rules import ATTENTION, HF_LAYER, NORMS_BEFORE, attention, ends, same, vector
from jaxinfer.models.layer_config import MoEConfig
from jaxinfer.models.tensors import ModelError, Rule

_MLP, MXFP4_BLOCK = f"{HF_LAYER}.mlp", 32


def _windows(config: Config, layers: int) -> tuple[int | None, ...]:
    default = ("full_attention" if layer % 2 else "sliding_attention" for layer in range(layers))
    window = config.get("sliding_window", 128)
    kinds = layer_kinds(config, layers, tuple(default))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _read(config: Config) -> DecoderConfig:
    quantization = config.get("quantization_config")
    if quantization and (not isinstance(quantization, dict) or quantization.get("quant_method") != "mxfp4"):
        raise ModelError("The model's quantization_config has a quant_method that is not supported; mxfp4 is.")
    layers = positive_int(config, "num_hidden_layers", 36)
    experts = MoEConfig(
        num_experts=positive_int(config, "num_local_experts", 128),
        experts_per_token=positive_int(config, "num_experts_per_tok", 4),
        intermediate_size=positive_int(config, "intermediate_size", 2880),
        layers=(True,) * layers,
        scores="topk_softmax",
        router_bias=True,
        expert_bias=True,
        swiglu_limit=positive_float(config, "swiglu_limit", 7.0),
        swiglu_alpha=positive_float(config, "swiglu_alpha", 1.702),
    )
    return llama_like(
        config,
        ropes=one_rope(theta=150000.0),
        windows=_windows,
        max_positions=131072,
        norm_eps=1e-5,
        kv_heads=8,
        head_dim=64,
        norm="rms_float32",
        attention_sinks=True,
        moe=experts,
        **attention_biases(config, True),
    )


# --- experts: [experts, inputs, outputs], gates and ups alternating -------------------------------------------------


def _separated(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    """[experts, hidden, 2 * inner] -> [experts, 2, hidden, inner]; biases without hidden."""
    split = tensors[0].reshape(*tensors[0].shape[:-1], -1, 2)
    return np.ascontiguousarray(np.moveaxis(split, -1, 1))


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """blocks u8[.., n, 16], two FP4 (E2M1) values in a byte, low half first; scales u8[.., n], powers of two by 127.

    Returns bfloat16[.., 32 * n], exact (OCP Microscaling Formats, 2023).
    """
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([magnitudes, -magnitudes])
    joined = np.empty((*scales.shape[:-1], MXFP4_BLOCK * scales.shape[-1]), ml_dtypes.bfloat16)
    # One matrix at a time: in float32 all of a layer's would take twice what they become.
    for index in np.ndindex(scales.shape[:-2]):
        halves = np.stack([blocks[index] & 15, blocks[index] >> 4], axis=-1)
        exponents = scales[index].astype(np.int32)[..., None] - 127
        exact = np.ldexp(values[halves].reshape(*scales[index].shape, MXFP4_BLOCK), exponents)
        joined[index] = exact.reshape(joined[index].shape)
    return joined


def _separated_mxfp4(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    return _separated(config, [dequantize_mxfp4(*tensors).swapaxes(1, 2)])


def _down_mxfp4(config: DecoderConfig, tensors: list[np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(dequantize_mxfp4(*tensors).swapaxes(1, 2))


def _packed(experts: int, rows: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    blocks = -(-columns // MXFP4_BLOCK)
    return (experts, rows, blocks, MXFP4_BLOCK // 2), (experts, rows, blocks)


def _expert_rules() -> tuple[Rule, ...]:
    experts = f"{_MLP}.experts"
    packed_gate_up = Rule(
        f"{EXPERTS}/gate_up",
        (f"{experts}.gate_up_proj_blocks", f"{experts}.gate_up_proj_scales"),
        lambda c: _packed(moe(c).num_experts, 2 * moe(c).intermediate_size, c.hidden_size),
        _separated_mxfp4,
    )
    packed_down = Rule(
        f"{EXPERTS}/down",
        (f"{experts}.down_proj_blocks", f"{experts}.down_proj_scales"),
        lambda c: _packed(moe(c).num_experts, c.hidden_size, moe(c).intermediate_size),
        _down_mxfp4,
    )
    return (
        Rule(
            f"{EXPERTS}/gate_up",
            (f"{experts}.gate_up_proj",),
            lambda c: ((moe(c).num_experts, c.hidden_size, 2 * moe(c).intermediate_size),),
            _separated,
            otherwise=packed_gate_up,
        ),
        Rule(
            f"{EXPERTS}/down",
            (f"{experts}.down_proj",),
            lambda c: ((moe(c).num_experts, moe(c).intermediate_size, c.hidden_size),),
            same,
            otherwise=packed_down,
        ),
        Rule(
            f"{EXPERTS}/gate_up_bias",
            (f"{experts}.gate_up_proj_bias",),
            lambda c: ((moe(c).num_experts, 2 * moe(c).intermediate_size),),
            _separated,
        ),
        Rule(
            f"{EXPERTS}/down_bias",
            (f"{experts}.down_proj_bias",),
            lambda c: ((moe(c).num_experts, c.hidden_size),),
            same,
        ),
    )


_SINKS = vector(f"{ATTENTION}/sinks", f"{HF_LAYER}.self_attn.sinks", lambda c: c.num_heads)

FAMILIES = (
    Family(
        "gpt_oss",
        ("GptOssForCausalLM",),
        _read,
        (
            *ends(),
            *NORMS_BEFORE,
            *attention(),
            dataclasses.replace(_SINKS, dtype="float32"),
            *router(f"{_MLP}.router"),
            *in_expert_layers(_expert_rules()),
        ),
        harmless=("initial_context_length", "experts_per_token"),
    ),
)
