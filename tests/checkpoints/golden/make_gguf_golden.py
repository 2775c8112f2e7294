"""Write tiny GGUF files of every family with llama.cpp's own converter.

Run `python make_gguf_golden.py LLAMA_CPP [name ...]`.

Needs torch, transformers and a source tree of llama.cpp (its Python part; the sdist of llama-cpp-python has one under
vendor/llama.cpp), nothing of this project.  For each family it writes gguf/NAME.gguf.xz and gguf/NAME.json: the
config.json of the same model by transformers, and shape and SHA-256 of every tensor that transformers saved, as
float32.  Weights are random multiples of 1/64, so Gemma's 1 + w is exact and the files compress.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import sys
import tempfile
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import transformers

HERE = Path(__file__).resolve().parent / "gguf"
COMMON = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0, 1.5, 2.0, 4.0],
    "short_factor": [1.0, 1.0, 1.25, 1.5],
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
DEEPSEEK_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707, "rope_theta": 10000.0}


def configs() -> dict[str, transformers.PreTrainedConfig]:
    """The models, by the name of their file."""
    t = transformers
    return {
        "llama": t.LlamaConfig(**COMMON | {"head_dim": 64, "rope_parameters": LLAMA3}),
        "llama-tied": t.LlamaConfig(**COMMON | {"tie_word_embeddings": True, "attention_bias": True}),
        "mistral": t.MistralConfig(**COMMON | {"head_dim": 16, "sliding_window": None}),
        "mixtral": t.MixtralConfig(**COMMON | {"num_local_experts": 3}),
        "qwen2": t.Qwen2Config(**COMMON | {"rope_parameters": YARN}),
        "qwen3": t.Qwen3Config(**COMMON | {"head_dim": 16, "tie_word_embeddings": True}),
        "qwen3moe": t.Qwen3MoeConfig(
            **COMMON | EXPERTS | {"head_dim": 16, "num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": []}
        ),
        "gemma2": t.Gemma2Config(**COMMON | {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}),
        "gemma3": t.Gemma3TextConfig(
            **COMMON | {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}
        ),
        "phi3": t.Phi3Config(
            **COMMON | {"rope_parameters": LONG, "sliding_window": None, "original_max_position_embeddings": 64}
        ),
        "olmo2": t.Olmo2Config(**COMMON),
        "smollm3": t.SmolLM3Config(**COMMON | {"num_hidden_layers": 4, "pad_token_id": 0}),
        "gpt2": t.GPT2Config(
            vocab_size=24, n_positions=64, n_ctx=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
        ),
        "deepseek-v2": t.DeepseekV2Config(
            **COMMON | EXPERTS | LATENT | {"rope_parameters": DEEPSEEK_YARN, "topk_method": "group_limited_greedy"}
        ),
        "deepseek-v2-lite": t.DeepseekV2Config(
            **COMMON | EXPERTS | LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy"}
        ),
        "deepseek-v3": t.DeepseekV3Config(
            **COMMON
            | EXPERTS
            | LATENT
            | {"norm_topk_prob": True, "rope_parameters": DEEPSEEK_YARN}
            # As in the published config.json; the class has no such arguments.
            | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        ),
        "gpt-oss": t.GptOssConfig(
            **COMMON
            | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
            | {"rope_parameters": YARN | {"truncate": False}}
        ),
    }


def save_model(config: transformers.PreTrainedConfig, directory: Path) -> None:
    """Save the model of a config with weights that only its tensor names decide."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.state_dict().items():
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        values = np.random.default_rng(seed).integers(-8, 8, tuple(parameter.shape)) / 64
        parameter.copy_(torch.from_numpy(values.astype(np.float32)))
    model.save_pretrained(directory)


def set_tiny_vocab(model: object) -> None:
    """In place of the converter's tokenizer, which is not what these files are about."""
    writer = model.gguf_writer
    size = model.hparams["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *(f"t{i}" for i in range(3, size))])
    writer.add_token_types([1] * size)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def convert(source: Path, target: Path) -> None:
    """Run llama.cpp's converter to float32."""
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    architecture = get_model_architecture(ModelBase.load_hparams(source, False), ModelType.TEXT)
    kind = get_model_class(architecture)
    kind.set_vocab = set_tiny_vocab
    # Gemma 3's converter counts the ids of this file.
    tokenizer = {"model": {"vocab": {f"t{i}": i for i in range(24)}}, "added_tokens": []}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    with torch.inference_mode():
        kind(source, gguf.LlamaFileType.ALL_F32, target, eager=True).write()


def fingerprints(directory: Path) -> dict[str, list[object]]:
    """Shape and digest of every saved tensor as float32."""
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    result: dict[str, list[object]] = {}
    for name, tensor in sorted(tensors.items()):
        values = np.ascontiguousarray(tensor.float().numpy())
        result[name] = [list(values.shape), hashlib.sha256(values.tobytes()).hexdigest()[:16]]
    return result


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    sys.path[:0] = [str(options.llama_cpp), str(options.llama_cpp / "gguf-py")]
    HERE.mkdir(exist_ok=True)
    for name, config in configs().items():
        if options.names and name not in options.names:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            source, target = Path(scratch) / "tiny-model", Path(scratch) / "m.gguf"
            save_model(config, source)
            convert(source, target)
            golden = {"config": json.loads((source / "config.json").read_text()), "tensors": fingerprints(source)}
            (HERE / f"{name}.gguf.xz").write_bytes(lzma.compress(target.read_bytes(), preset=9))
            (HERE / f"{name}.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")
            print(name, target.stat().st_size, (HERE / f"{name}.gguf.xz").stat().st_size)


if __name__ == "__main__":
    main()
