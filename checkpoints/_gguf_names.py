"""GGUF tensor names to Hugging Face names, by architecture."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from checkpoints._errors import CheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Join:
    """One Hugging Face tensor that a GGUF file keeps as several.

    name: in a layer, `part`s: the GGUF names there. shape: of the joined tensor, from the parts' shapes; raises
    ValueError when these do not fit each other. join: the parts, as read, to the tensor.
    """

    name: str
    parts: tuple[str, ...]
    shape: Callable[[tuple[Shape, ...]], Shape]
    join: Callable[[list[np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture's files are named and laid out.

    top, block: GGUF names, outside and inside the layers, to Hugging Face's; where these have no `.weight` or `.bias`
    of the same kind, the GGUF name is given with it.  `{}` stands for the expert number of stacked experts.
    layer: Hugging Face's prefix of a layer's names.
    `permuted` marks the interleaved Q/K rows llama.cpp uses for its "normal" rotary embedding; `unit_offset_norms`
    the norms stored as 1 + w where Hugging Face stores w; `transposed` the Hugging Face names whose matrices are
    [inputs, outputs].
    """

    model_type: str
    class_name: str
    top: Mapping[str, str]
    block: Mapping[str, str]
    joins: tuple[Join, ...] = ()
    layer: str = "model.layers.{}"
    permuted: bool = False
    unit_offset_norms: bool = False
    transposed: frozenset[str] = frozenset()

    def hugging_face_name(self, name: str) -> str | None:
        """The Hugging Face name, with `{}` for the expert number of stacked experts, or None for an unknown tensor."""
        stem, _, kind = name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)", stem)
        table, part = (self.top, stem) if block is None else (self.block, block[2])
        exact = table.get(f"{part}.{kind}")
        if exact is None:
            if kind not in ("weight", "bias") or part not in table:
                return None
            exact = f"{table[part]}.{kind}"
        return exact if block is None else f"{self.layer.format(int(block[1]))}.{exact}"


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = _ATTENTION | _MLP
_ROUTED = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_QWEN_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OLMO2 = {name: part for name, part in _LLAMA.items() if not name.endswith("_norm")} | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = _ATTENTION | {
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_DEEPSEEK2 = {
    **_LLAMA,
    **_ROUTED,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GPT_OSS = {
    **{name: part for name, part in _ATTENTION.items() if name != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}


def _kv_b_shape(parts: tuple[Shape, ...]) -> Shape:
    k, v = parts  # [heads, rank, nope], [heads, v_head_dim, rank]
    if len(k) != 3 or len(v) != 3 or k[0] != v[0] or k[1] != v[2]:
        raise ValueError
    return (k[0] * (k[2] + v[1]), k[1])


def _join_kv_b(parts: list[np.ndarray]) -> np.ndarray:
    k, v = parts
    return np.concatenate([k.swapaxes(1, 2), v], axis=1).reshape(-1, v.shape[2])


def _gate_up_shape(parts: tuple[Shape, ...]) -> Shape:
    gate, up = parts  # [experts, width, hidden], or biases [experts, width]
    if gate != up or len(gate) not in (2, 3):
        raise ValueError
    return (gate[0], *gate[2:], 2 * gate[1])


def _interleave_gate_up(parts: list[np.ndarray]) -> np.ndarray:
    # Rows alternate between gate and up; the matrices are [inputs, outputs].
    gate, up = parts
    joined = np.stack(parts, axis=2).reshape(gate.shape[0], 2 * up.shape[1], *up.shape[2:])
    return joined.swapaxes(1, 2) if joined.ndim == 3 else joined


_KV_B = Join("self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), _kv_b_shape, _join_kv_b)
_GATE_UP = tuple(
    Join(f"mlp.experts.{name}", (f"ffn_gate_exps.{kind}", f"ffn_up_exps.{kind}"), _gate_up_shape, _interleave_gate_up)
    for name, kind in (("gate_up_proj", "weight"), ("gate_up_proj_bias", "bias"))
)
_GEMMA3 = _LLAMA | _HEAD_NORMS | _SANDWICH

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _TOP, _LLAMA | _MIXTRAL, permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _TOP, _LLAMA),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _TOP, _LLAMA | _HEAD_NORMS),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _TOP, _LLAMA | _ROUTED | _QWEN_SHARED),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _TOP, _LLAMA | _HEAD_NORMS | _ROUTED),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _TOP, _LLAMA, unit_offset_norms=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _TOP, _LLAMA | _SANDWICH, unit_offset_norms=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _TOP, _GEMMA3, unit_offset_norms=True),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _TOP, _PHI3),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", _TOP, _OLMO2 | _HEAD_NORMS),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _TOP, _LLAMA, permuted=True),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        _GPT2_TOP,
        _GPT2,
        layer="transformer.h.{}",
        transposed=frozenset({"c_attn.weight", "c_proj.weight", "c_fc.weight"}),
    ),
    "deepseek2": Architecture("deepseek_v2", "DeepseekV2ForCausalLM", _TOP, _DEEPSEEK2, (_KV_B,)),
    "gpt-oss": Architecture(
        "gpt_oss", "GptOssForCausalLM", _TOP, _GPT_OSS, _GATE_UP, transposed=frozenset({"experts.down_proj"})
    ),
}
# Frequency factors are no weights of the Hugging Face model: they become the configuration's rope scaling.
ROPE_FACTOR_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})


def architecture(name: object, source: str) -> Architecture:
    """The naming rules of a GGUF architecture; raises `CheckpointError` for one that is not supported."""
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{source}: the GGUF architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}."
        )
    return ARCHITECTURES[name]
