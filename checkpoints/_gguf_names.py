"""GGUF tensor names to Hugging Face names, by architecture."""

from __future__ import annotations

import re
from dataclasses import dataclass

from checkpoints._errors import CheckpointError


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture differs from the common llama-like naming.

    `permuted` marks the interleaved Q/K rows llama.cpp uses for its "normal" rotary embedding; `unit_offset_norms`
    the norms stored as 1 + w where Hugging Face stores w; `expert_style` the naming of the expert weights.
    """

    model_type: str
    class_name: str
    permuted: bool = False
    unit_offset_norms: bool = False
    sandwich_norms: bool = False
    expert_style: str = "qwen"


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", permuted=True, expert_style="mixtral"),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma": Architecture("gemma", "GemmaForCausalLM", unit_offset_norms=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", unit_offset_norms=True, sandwich_norms=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", unit_offset_norms=True, sandwich_norms=True),
}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
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
_EXPERTS = {
    "qwen": {
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    },
    "mixtral": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
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


def hugging_face_name(name: str, arch: Architecture) -> str | None:
    """The Hugging Face name, with `{}` for the expert number of stacked experts, or None for an unknown tensor."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    block = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)", stem)
    if block is None:
        top = _TOP.get(stem)
        return f"{top}.{kind}" if top else None
    table = _BLOCK | _EXPERTS[arch.expert_style] | (_SANDWICH if arch.sandwich_norms else {})
    part = table.get(block[2])
    return f"model.layers.{int(block[1])}.{part}.{kind}" if part else None
