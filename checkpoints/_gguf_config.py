"""GGUF metadata as Hugging Face's config.json and generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints._errors import CheckpointError
from checkpoints._gguf_families import FAMILY_KEYS, gpt2_config
from checkpoints._gguf_header import GGUFHeader
from checkpoints._gguf_metadata import Metadata
from checkpoints._gguf_names import Architecture
from checkpoints._gguf_rope import rope_scaling

# End-of-turn tokens that instruct models end a message with, whatever the file calls its EOS.
_END_OF_TURN = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>"})
# gpt-oss ends each of an answer's messages with <|end|>, and the answer with one of these.
_END_OF_ANSWER = frozenset({"<|return|>", "<|call|>"})
_CONTROL_TOKEN = 3


def gguf_config(header: GGUFHeader, arch: Architecture, factors: Mapping[str, np.ndarray], source: str) -> dict:
    """The config.json a Hugging Face checkpoint of this model would have."""
    name = header.metadata["general.architecture"]
    keys = Metadata(header.metadata, name, source)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{source}: the matrix token_embd.weight is missing; convert the file again.")
    if arch.model_type == "gpt2":
        config = gpt2_config(keys, header, embedding.shape[0])
    else:
        config = _shared_keys(keys, header, arch, embedding.shape[0])
        _add_rope(config, keys, factors)
        FAMILY_KEYS[name](config, keys, header)
    _add_token_ids(config, header)
    return config


def _shared_keys(keys: Metadata, header: GGUFHeader, arch: Architecture, vocab_size: int) -> dict[str, Any]:
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if not keys.has("attention.key_length") and hidden % heads:
        raise CheckpointError(f"{keys.source}: the width {hidden} does not divide into {heads} heads; convert again.")
    return {
        "architectures": [arch.class_name],
        "model_type": arch.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": keys.layers(header),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": keys.integer("attention.key_length", hidden // heads),
        "intermediate_size": keys.integer("feed_forward_length", 4 * hidden),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }


def _add_rope(config: dict[str, Any], keys: Metadata, factors: Mapping[str, np.ndarray]) -> None:
    rotary = keys.integer("rope.dimension_count", config["head_dim"])
    if rotary != config["head_dim"] and not keys.has("attention.kv_lora_rank"):
        config["partial_rotary_factor"] = rotary / config["head_dim"]
    scaling = rope_scaling(keys, factors, config["rope_theta"], rotary, config["max_position_embeddings"])
    if scaling is not None:
        config["rope_scaling"] = scaling


def _add_token_ids(config: dict[str, Any], header: GGUFHeader) -> None:
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = header.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        # Written out as null when there is none: an absent key means a number of its own in some classes.
        known = type(value) is int and 0 <= value < config["vocab_size"]
        config[f"{ours}_token_id"] = value if known else None


def gguf_generation_config(header: GGUFHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    """The generation_config.json of this model: every id that ends a turn."""
    metadata = header.metadata
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, np.ndarray) and len(tokens) == len(kinds):
        control = {tokens[i]: i for i in np.flatnonzero(kinds == _CONTROL_TOKEN).tolist()}
        wanted = _END_OF_ANSWER if control.keys() >= _END_OF_ANSWER else _END_OF_TURN
        ends += [i for token, i in control.items() if token in wanted]
    valid = [value for value in ends if type(value) is int and 0 <= value < config["vocab_size"]]
    result: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(valid))} if valid else {}
    if config["bos_token_id"] is not None:
        result["bos_token_id"] = config["bos_token_id"]
    return result
