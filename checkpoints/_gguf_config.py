"""GGUF metadata as Hugging Face's config.json and generation_config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints._errors import CheckpointError
from checkpoints._gguf_header import GGUFHeader
from checkpoints._gguf_names import Architecture
from checkpoints._gguf_rope import rope_scaling

# End-of-turn tokens that instruct models end a message with, whatever the file calls its EOS.
_END_OF_TURN = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"})
_CONTROL_TOKEN = 3


class Metadata:
    """Typed access to the keys of one file; a missing or misfit value is a `CheckpointError`."""

    def __init__(self, values: Mapping[str, Any], prefix: str, source: str) -> None:
        self.values = values
        self.prefix = prefix
        self.source = source

    def integer(self, key: str, default: int | None = None) -> int:
        """A count; an array is accepted when all layers agree."""
        value = self.values.get(f"{self.prefix}.{key}", default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, np.ndarray):
            raise CheckpointError(
                f"{self.source}: metadata {self.prefix}.{key} differs between layers, which is not supported; "
                "use a model whose layers are alike."
            )
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self._bad(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.values.get(f"{self.prefix}.{key}", default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._bad(key, value, "a finite number")
        return float(np.float32(value)) if type(value) is int else _shortest(value)

    def has(self, key: str) -> bool:
        """Whether the file sets the key."""
        return f"{self.prefix}.{key}" in self.values

    def _bad(self, key: str, value: object, wanted: str) -> CheckpointError:
        found = "missing" if value is None else f"{str(value)[:40]!r}"
        return CheckpointError(
            f"{self.source}: metadata {self.prefix}.{key} is {found} but must be {wanted}; convert the file again."
        )


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32, so that 9.999999747378752e-06 reads 1e-05 again."""
    return float(str(np.float32(value)))


def gguf_config(header: GGUFHeader, arch: Architecture, factors: Mapping[str, np.ndarray], source: str) -> dict:
    """The config.json a Hugging Face checkpoint of this model would have."""
    keys = Metadata(header.metadata, header.metadata["general.architecture"], source)
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if not keys.has("attention.key_length") and hidden % heads:
        raise CheckpointError(f"{source}: the width {hidden} does not divide into {heads} heads; convert it again.")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{source}: the matrix token_embd.weight is missing; convert the file again.")
    config: dict[str, Any] = {
        "architectures": [arch.class_name],
        "model_type": arch.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": keys.integer("feed_forward_length", 4 * hidden),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "gelu_pytorch_tanh" if arch.model_type.startswith("gemma") else "silu",
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }
    _add_rope(config, keys, factors)
    _add_attention(config, keys)
    _add_experts(config, keys, header)
    _add_token_ids(config, header)
    return config


def _add_rope(config: dict[str, Any], keys: Metadata, factors: Mapping[str, np.ndarray]) -> None:
    rotary = keys.integer("rope.dimension_count", config["head_dim"])
    if rotary != config["head_dim"]:
        config["partial_rotary_factor"] = rotary / config["head_dim"]
    scaling = rope_scaling(keys, factors, config["rope_theta"], rotary, config["max_position_embeddings"])
    if scaling is not None:
        config["rope_scaling"] = scaling


def _add_attention(config: dict[str, Any], keys: Metadata) -> None:
    if keys.has("attention.sliding_window") and keys.values.get(f"{keys.prefix}.attention.sliding_window"):
        config["sliding_window"] = keys.integer("attention.sliding_window")
        if config["model_type"] == "llama":
            config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        elif config["model_type"].startswith("qwen"):
            config["use_sliding_window"] = True
    if config["model_type"] == "gemma2":
        config["attn_logit_softcapping"] = keys.number("attn_logit_softcapping", 50.0)
        config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 30.0)
        # The 27B model scales queries by its width per head instead of by head_dim, as llama.cpp does.
        per_head = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = per_head if config["num_hidden_layers"] == 46 else config["head_dim"]
    if config["model_type"] == "gemma3_text":
        per_head = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = per_head if config["num_hidden_layers"] == 62 else config["head_dim"]
        config["sliding_window_pattern"] = 6
        config["rope_local_base_freq"] = 10000.0


def _add_experts(config: dict[str, Any], keys: Metadata, header: GGUFHeader) -> None:
    if not keys.values.get(f"{keys.prefix}.expert_count"):
        return
    count, used = keys.integer("expert_count"), keys.integer("expert_used_count")
    config["num_experts_per_tok"] = used
    if config["model_type"] in ("llama", "mistral"):
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": count}
        return
    config["num_experts"] = count
    config["moe_intermediate_size"] = keys.integer("expert_feed_forward_length", config["intermediate_size"])
    config["norm_topk_prob"] = config["model_type"] == "qwen3_moe"
    shared = header.tensors.get("blk.0.ffn_up_shexp.weight")
    if shared is not None:
        config["shared_expert_intermediate_size"] = shared.shape[0]


def _add_token_ids(config: dict[str, Any], header: GGUFHeader) -> None:
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = header.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if type(value) is int and 0 <= value < config["vocab_size"]:
            config[f"{ours}_token_id"] = value


def gguf_generation_config(header: GGUFHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    """The generation_config.json of this model: every id that ends a turn."""
    metadata = header.metadata
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, np.ndarray) and len(tokens) == len(kinds):
        ends += [i for i in np.flatnonzero(kinds == _CONTROL_TOKEN).tolist() if tokens[i] in _END_OF_TURN]
    valid = [value for value in ends if type(value) is int and 0 <= value < config["vocab_size"]]
    result: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(valid))} if valid else {}
    if "bos_token_id" in config:
        result["bos_token_id"] = config["bos_token_id"]
    return result
