"""What one family's config.json has beyond the keys that all share, from GGUF metadata.

Where llama.cpp knows a number only from the model's depth or not at all, so does this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from checkpoints._errors import CheckpointError
from checkpoints._gguf_header import GGUFHeader
from checkpoints._gguf_metadata import Metadata

Config = dict[str, Any]
_SIGMOID = 2


def _window(config: Config, keys: Metadata) -> bool:
    """Set sliding_window where the file has one that is not zero."""
    if not keys.values.get(f"{keys.prefix}.attention.sliding_window"):
        return False
    config["sliding_window"] = keys.integer("attention.sliding_window")
    return True


def _layer_types(config: Config, keys: Metadata) -> list[str] | None:
    """Which layers slide, where the file lists it."""
    value = keys.values.get(f"{keys.prefix}.attention.sliding_window_pattern")
    layers = config["num_hidden_layers"]
    if not isinstance(value, np.ndarray) or len(value) < layers:
        return None
    return ["sliding_attention" if slides else "full_attention" for slides in value[:layers]]


def _llama(config: Config, keys: Metadata, header: GGUFHeader) -> None:
    """One GGUF architecture for three of Hugging Face's."""
    if keys.values.get(f"{keys.prefix}.expert_count"):
        config |= {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": keys.integer("expert_count"),
            "num_experts_per_tok": keys.integer("expert_used_count"),
            "sliding_window": None,
        }
        _window(config, keys)
    elif _window(config, keys):
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


def _qwen(config: Config, keys: Metadata, header: GGUFHeader) -> None:
    config["use_sliding_window"] = _window(config, keys)
    if not keys.values.get(f"{keys.prefix}.expert_count"):
        return
    config["num_experts"] = keys.integer("expert_count")
    config["num_experts_per_tok"] = keys.integer("expert_used_count")
    config["moe_intermediate_size"] = keys.integer("expert_feed_forward_length", config["intermediate_size"])
    config["norm_topk_prob"] = config["model_type"] == "qwen3_moe"
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    shared = header.tensors.get("blk.0.ffn_up_shexp.weight")
    if shared is not None:
        config["shared_expert_intermediate_size"] = shared.shape[0]


def _gemma(config: Config, keys: Metadata, header: GGUFHeader) -> None:
    config |= {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _query_scale(config: Config, layers_of_27b: int) -> int:
    # The 27B models scale queries by their width per head instead of by head_dim.
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return per_head if config["num_hidden_layers"] == layers_of_27b else config["head_dim"]


def _gemma2(config: Config, keys: Metadata, header: GGUFHeader) -> None:
    _gemma(config, keys, header)
    config["attn_logit_softcapping"] = keys.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 30.0)
    config["query_pre_attn_scalar"] = _query_scale(config, 46)
    config["sliding_window"] = keys.integer("attention.sliding_window", 4096)


def _gemma3(config: Config, keys: Metadata, header: GGUFHeader) -> None:
    _gemma(config, keys, header)
    config["query_pre_attn_scalar"] = _query_scale(config, 62)
    if keys.has("final_logit_softcapping"):
        config["final_logit_softcapping"] = keys.number("final_logit_softcapping")
    config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10000.0)
    windowed = _window(config, keys)
    config["sliding_window_pattern"] = 6 if windowed else 1
    layers = config["num_hidden_layers"]
    config["layer_types"] = _layer_types(config, keys) or [
        "sliding_attention" if windowed and (layer + 1) % 6 else "full_attention" for layer in range(layers)
    ]


def _phi3(config: Config, keys: Metadata, header: GGUFHeader) -> None:
    config["sliding_window"] = None
    _window(config, keys)
    original = keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original


def _olmo2(config: Config, keys: Metadata, header: GGUFHeader) -> None:
    if _window(config, keys):
        config |= {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]}
        config["layer_types"] = _layer_types(config, keys) or [
            "sliding_attention" if (layer + 1) % 4 else "full_attention" for layer in range(config["num_hidden_layers"])
        ]


def _smollm3(config: Config, keys: Metadata, header: GGUFHeader) -> None:
    config |= {"use_sliding_window": False, "sliding_window": None, "no_rope_layer_interval": 4}
    config["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]


def _deepseek2(config: Config, keys: Metadata, header: GGUFHeader) -> None:
    del config["head_dim"]
    rotary = keys.integer("rope.dimension_count")
    # Files from before the latent attention of llama.cpp give the heads' widths under the plain keys.
    key_width = keys.integer("attention.key_length_mla" if keys.has("attention.key_length_mla") else _KEY)
    value_width = keys.integer("attention.value_length_mla" if keys.has("attention.value_length_mla") else _VALUE)
    if key_width <= rotary:
        raise CheckpointError(
            f"{keys.source}: keys of width {key_width} hold no rotary part of {rotary}; convert it again."
        )
    config |= {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": keys.integer("attention.q_lora_rank") if keys.has("attention.q_lora_rank") else None,
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key_width - rotary,
        "v_head_dim": value_width,
        "first_k_dense_replace": keys.count("leading_dense_block_count", 0),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", config["intermediate_size"]),
        "moe_layer_freq": 1,
        "norm_topk_prob": keys.values.get(f"{keys.prefix}.expert_weights_norm") is True,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }
    if keys.values.get(f"{keys.prefix}.expert_count"):
        config["n_routed_experts"] = keys.integer("expert_count")
        config["num_experts_per_tok"] = keys.integer("expert_used_count")
        config["n_shared_experts"] = keys.count("expert_shared_count", 0) or None
    groups, used = keys.integer("expert_group_count", 1), keys.integer("expert_group_used_count", 1)
    config |= {"n_group": groups, "topk_group": used}
    corrected = any(name.endswith(".exp_probs_b.bias") for name in header.tensors)
    if corrected or keys.values.get(f"{keys.prefix}.expert_gating_func") == _SIGMOID:
        config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
        config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    else:
        config |= {"scoring_func": "softmax", "topk_method": "group_limited_greedy" if groups > 1 else "greedy"}


def _gpt_oss(config: Config, keys: Metadata, header: GGUFHeader) -> None:
    config |= {
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "swiglu_limit": 7.0,
    }
    config["layer_types"] = _layer_types(config, keys) or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(config["num_hidden_layers"])
    ]
    if isinstance(config.get("rope_scaling"), dict):
        # The published models do not round the ends of the YaRN ramp, and the file has no key for it.
        config["rope_scaling"]["truncate"] = False


def gpt2_config(keys: Metadata, header: GGUFHeader, vocab_size: int) -> Config:
    """GPT-2's config.json, whose keys are its own."""
    hidden, context = keys.integer("embedding_length"), keys.integer("context_length")
    feed_forward = keys.integer("feed_forward_length", 4 * hidden)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_embd": hidden,
        "n_layer": keys.layers(header),
        "n_head": keys.integer("attention.head_count"),
        "n_positions": context,
        "n_ctx": context,
        "n_inner": None if feed_forward == 4 * hidden else feed_forward,
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


_KEY, _VALUE = "attention.key_length", "attention.value_length"
FAMILY_KEYS: dict[str, Callable[[Config, Metadata, GGUFHeader], None]] = {
    "llama": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen2moe": _qwen,
    "qwen3moe": _qwen,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
}
