"""Write rope.json and config_keys.json next to this file: ``python make_config_golden.py``.

rope.json: what transformers computes from RoPE settings. A case has the config's keys, the length of the sequence, and
the frequencies of all pairs and the attention factor for it.
config_keys.json: per model_type, the keys that the class of its config defines, with their defaults, and the class of
the model.
parameters.json: how many parameters transformers counts in models of published shapes, which are made without memory.
Needs torch and transformers (the versions used are in README.md), nothing of jaxinfer.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

HERE = Path(__file__).resolve().parent
MODEL_TYPES = (
    *(
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "gemma3",
        "phi3",
        "olmo2",
        "smollm3",
        "gpt2",
        "opt",
    ),
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
)
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SHORT, LONG = [1.0 + 0.05 * i for i in range(12)], [1.0 + 0.7 * i for i in range(12)]
LONGROPE = {"short_factor": SHORT, "long_factor": LONG, "partial_rotary_factor": 0.75}


def _llama(*lengths: int, **keys: object) -> list[tuple[str, dict[str, object], int]]:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 131072}
    return [("llama", {**sizes, **keys}, length) for length in lengths or (1,)]


def _phi3(*lengths: int, **keys: object) -> list[tuple[str, dict[str, object], int]]:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 131072}
    return [("phi3", {**sizes, **keys}, length) for length in lengths]


def rope_cases() -> list[tuple[str, dict[str, object], int]]:
    """(model_type, keys of config.json, length of the sequence)."""
    dynamic = {"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    return [
        *_llama(rope_parameters={"rope_type": "default", "rope_theta": 500000}),
        *_llama(rope_theta=500000.0),
        *_llama(rope_scaling={"type": "linear", "factor": 4.0}),
        *_llama(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}),
        *_llama(1, 2048, 2049, 3000, 4096, **dynamic),
        *_llama(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3}),
        *_llama(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}),
        *_llama(rope_theta=1e6, rope_scaling=YARN),
        *_llama(
            rope_theta=1e6, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        ),
        *_llama(rope_parameters={**YARN, "rope_theta": 1e6, "attention_factor": 0.8}),
        *_llama(rope_parameters={**YARN, "rope_theta": 1e4, "beta_fast": 16.0, "beta_slow": 2.0}),
        *_llama(rope_parameters={**YARN, "rope_theta": 150000.0, "truncate": False}),
        *_llama(rope_parameters={**YARN, "factor": 40.0, "rope_theta": 1e4, "mscale": 0.707, "mscale_all_dim": 1.0}),
        *_llama(rope_parameters={**YARN, "factor": 40.0, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0}),
        *_llama(rope_parameters={**YARN, "factor": 40.0, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0}),
        *_llama(rope_parameters={**YARN, "factor": None, "rope_theta": 1e4}),
        *_llama(rope_parameters={**YARN, "factor": 1.0, "rope_theta": 1e4}),
        *_llama(rope_parameters={**YARN, "rope_theta": 1e4, "original_max_position_embeddings": 64}),
        *_phi3(1, 4096, 4097, rope_scaling={"type": "longrope", **LONGROPE}),
        *_phi3(1, 4097, rope_scaling={"type": "su", "original_max_position_embeddings": 4096, **LONGROPE}),
        *_phi3(8192, 8193, original_max_position_embeddings=8192, rope_scaling={"type": "longrope", **LONGROPE}),
        *_phi3(1, 4097, rope_parameters={"rope_type": "longrope", "attention_factor": 1.25, **LONGROPE}),
        *_phi3(4097, rope_parameters={"rope_type": "longrope", "factor": 16.0, **LONGROPE}),
        *_phi3(1, rope_theta=250000.0, partial_rotary_factor=0.5),
        ("gemma3_text", {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 48, "rope_theta": 2e6}, 1),
        (
            "gemma3_text",
            {"head_dim": 48, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            1,
        ),
        (
            "gemma3_text",
            {
                "head_dim": 48,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
                },
            },
            1,
        ),
    ]


def frequencies(model_type: str, keys: dict[str, object], length: int) -> dict[str, object]:
    """By kind of layer, what the model's own rotary embedding has after a sequence of that length."""
    positions = torch.arange(length)[None]
    x = torch.zeros(1)
    # The config edits what it is given.
    keys = json.loads(json.dumps(keys))
    if model_type == "gemma3_text":
        rope = Gemma3RotaryEmbedding(Gemma3TextConfig(**keys))
        return {
            kind: [getattr(rope, f"{kind}_inv_freq").tolist(), getattr(rope, f"{kind}_attention_scaling")]
            for kind in ("full_attention", "sliding_attention")
        }
    rope = (
        LlamaRotaryEmbedding(LlamaConfig(**keys)) if model_type == "llama" else Phi3RotaryEmbedding(Phi3Config(**keys))
    )
    rope(x, positions)
    return {"full_attention": [rope.inv_freq.tolist(), rope.attention_scaling]}


def config_keys(model_type: str) -> dict[str, object]:
    """The keys of a config class with their defaults, without those that every config has."""
    kind = CONFIG_MAPPING[model_type]
    general = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name not in general}
    defaults = {name: None if field.default is dataclasses.MISSING else field.default for name, field in fields.items()}
    return {"class": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type], "keys": defaults}


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
PUBLISHED: dict[str, tuple[str, dict[str, object]]] = {
    "gemma-2-2b": ("gemma2", {"head_dim": 256} | dict(zip(SIZES, (2304, 9216, 26, 8, 4), strict=True))),
    "gemma-3-1b": ("gemma3_text", {"vocab_size": 262144} | dict(zip(SIZES, (1152, 6912, 26, 4, 1), strict=True))),
    "phi-3-mini-4k": ("phi3", {"vocab_size": 32064} | dict(zip(SIZES, (3072, 8192, 32, 32, 32), strict=True))),
    "olmo-2-7b": ("olmo2", {"vocab_size": 100352} | dict(zip(SIZES, (4096, 11008, 32, 32, 32), strict=True))),
    "smollm3-3b": ("smollm3", {"vocab_size": 128256} | dict(zip(SIZES, (2048, 11008, 36, 16, 4), strict=True))),
    "gpt2": ("gpt2", {}),
    "opt-125m": ("opt", {"vocab_size": 50272}),
    "opt-350m": (
        "opt",
        {
            "hidden_size": 1024,
            "ffn_dim": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
    ),
}


def count_parameters(model_type: str, keys: dict[str, object]) -> dict[str, object]:
    """Of a model of that shape; tied ones count once."""
    config = CONFIG_MAPPING[model_type](**keys, architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return {"config": config.to_dict(), "parameters": sum(parameter.numel() for parameter in model.parameters())}


def main() -> None:
    published = {name: count_parameters(*shape) for name, shape in PUBLISHED.items()}
    (HERE / "parameters.json").write_text(json.dumps(published, indent=1, default=str) + "\n")
    cases = [
        {"model_type": model_type, "config": keys, "length": length, "ropes": frequencies(model_type, keys, length)}
        for model_type, keys, length in rope_cases()
    ]
    (HERE / "rope.json").write_text(json.dumps(cases, indent=None).replace('{"model_type"', '\n{"model_type"') + "\n")
    keys = {model_type: config_keys(model_type) for model_type in MODEL_TYPES}
    (HERE / "config_keys.json").write_text(json.dumps(keys, indent=1) + "\n")


if __name__ == "__main__":
    main()
