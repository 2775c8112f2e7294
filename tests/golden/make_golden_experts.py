"""Write the tiny reference checkpoints of families with experts or latent attention next to this file.

``python make_golden_experts.py [name ...]``: like make_golden.py, whose checks every seed must pass, too.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from make_golden import COMMON, Family, Model, fill, main, modules_with
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

SIZES = {**COMMON, "vocab_size": 96, "hidden_size": 32, "tie_word_embeddings": False}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LATENT = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}


def families() -> list[Family]:
    mixtral = MixtralConfig(
        **SIZES,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=6,
        num_experts_per_tok=2,
        rms_norm_eps=1e-5,
        rope_parameters=PLAIN_ROPE,
    )
    qwen3_moe = Qwen3MoeConfig(
        **SIZES,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[],
        rope_parameters=PLAIN_ROPE,
    )
    qwen2_moe = Qwen2MoeConfig(
        **SIZES,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        rope_parameters=PLAIN_ROPE,
    )
    v2_lite = DeepseekV2Config(
        **SIZES,
        **LATENT,
        q_lora_rank=None,
        n_shared_experts=2,
        topk_method="greedy",
        routed_scaling_factor=1.5,
        rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    )
    v2 = DeepseekV2Config(
        **SIZES,
        **LATENT,
        q_lora_rank=20,
        n_shared_experts=1,
        topk_method="group_limited_greedy",
        n_group=2,
        topk_group=1,
        routed_scaling_factor=3.0,
        rope_parameters=PLAIN_ROPE,
    )
    v3 = DeepseekV3Config(
        **SIZES,
        **LATENT,
        q_lora_rank=20,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    )
    gpt_oss = GptOssConfig(
        **SIZES,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        num_local_experts=6,
        num_experts_per_tok=2,
        rope_parameters={**YARN, "truncate": False},
    )
    experts = {"one expert fewer": _fewer_experts}
    latent = {**experts, "shared experts": lambda model: fill(model, "shared_experts.down_proj.weight")}
    grouped = {**latent, "groups": _one_group, "scaling": _no_scaling}
    oss = {
        **experts,
        "sinks": lambda model: fill(model, "self_attn.sinks", -30.0),
        "clamp": _no_clamp,
        "expert biases": lambda model: fill(model, "down_proj_bias"),
        "router bias": lambda model: fill(model, "router.bias"),
        "window": lambda model: setattr(model.config, "sliding_window", 256),
    }
    return [
        Family("mixtral", mixtral, torch.bfloat16, experts),
        Family("qwen2-moe", qwen2_moe, torch.bfloat16, {**experts, "shared expert gate": _open_shared_gate}),
        Family("qwen3-moe", qwen3_moe, torch.bfloat16, experts),
        Family("deepseek-v2-lite", v2_lite, torch.bfloat16, latent),
        Family("deepseek-v2", v2, torch.bfloat16, grouped),
        Family("deepseek-v3", v3, torch.float32, {**grouped, "choice bias": lambda m: fill(m, "correction_bias")}),
        Family("gpt-oss", gpt_oss, torch.bfloat16, oss),
        Family("gpt-oss-mxfp4", gpt_oss, torch.bfloat16, oss),
    ]


def _fewer_experts(model: Model) -> None:
    for module in modules_with(model, "top_k"):
        module.top_k -= 1


def _one_group(model: Model) -> None:
    for module in modules_with(model, "topk_group"):
        module.topk_group = module.num_group


def _open_shared_gate(model: Model) -> None:
    fill(model, "shared_expert_gate.weight")


def _no_scaling(model: Model) -> None:
    for module in modules_with(model, "routed_scaling_factor"):
        module.routed_scaling_factor = 1.0


def _no_clamp(model: Model) -> None:
    for module in modules_with(model, "limit"):
        module.limit = 1e6


def randomise(model: Model, seed: int) -> None:
    """Weights with real spread, wide enough that experts clamp, sinks weigh and routers decide clearly."""
    generator = torch.Generator().manual_seed(seed)
    spreads = {"sinks": 1.0, "bias": 0.5, "gate_up_proj": 0.6, "gate.weight": 0.6, "router.weight": 0.6}
    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if "correction_bias" in n)]
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        if name.endswith("norm.weight"):
            tensor.data.uniform_(0.5, 1.5, generator=generator)
        else:
            spread = next((value for end, value in spreads.items() if name.endswith(end)), 0.25)
            tensor.data.normal_(0.0, spread, generator=generator)


# --- MXFP4 -----------------------------------------------------------------------------------------------------------

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def pack_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[experts, inputs, outputs] -> blocks u8[experts, outputs, inputs / 32, 16] and scales u8[experts, outputs, .]."""
    rows = weight.float().transpose(1, 2)
    blocks = rows.reshape(*rows.shape[:2], -1, 32)
    exponents = torch.ceil(torch.log2(blocks.abs().amax(-1).clamp(min=1e-6) / 6.0))
    nearest = (blocks / 2.0 ** exponents[..., None])[..., None].sub(FP4).abs().argmin(-1)
    packed = nearest[..., 0::2] | (nearest[..., 1::2] << 4)
    return packed.to(torch.uint8), (exponents + 127).to(torch.uint8)


def quantize_experts(folder: Path) -> None:
    """Rewrite a gpt-oss checkpoint as its publisher's: experts in MXFP4."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = pack_mxfp4(tensors.pop(name))
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    config = folder / "config.json"
    left_alone = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": left_alone}
    content = {**json.loads(config.read_text()), "quantization_config": quantization}
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_checkpoint(family: Family, seed: int, folder: Path) -> None:
    model = AutoModelForCausalLM.from_config(family.config, dtype=torch.float32)
    randomise(model, seed)
    shutil.rmtree(folder, ignore_errors=True)
    model.to(family.dtype).save_pretrained(folder)
    if family.name.endswith("mxfp4"):
        quantize_experts(folder)


if __name__ == "__main__":
    main(families(), write_checkpoint)
