"""Decode steps with experts and latent attention, compiled for v6e: what one token moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_steps import compile_for, needs_libtpu

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}


@needs_libtpu
@pytest.mark.parametrize(
    ("config", "expert"),
    [(QWEN3_30B_A3B, 3 * 2048 * 768), (DEEPSEEK_V2_LITE, 3 * 2048 * 1408)],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_one_token_moves_the_experts_that_it_is_routed_to(tmp_path: Path, config: dict[str, Any], expert: int):
    """Of two layers of the published shapes; all experts of a layer would be nine times the floor and more."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"num_hidden_layers": 2, "max_position_embeddings": 4096}))
    shape = ("--max-slots", "1", "--max-context", "2048", "--decode-rows", "1", "--prefill-tokens", "32")
    code, report = compile_for("--config", str(path), "--target", "v6e-1", *shape)  # the later --config counts
    assert code == 0
    (decode,) = [bucket for bucket in report["buckets"] if bucket["kind"] == "decode"]
    assert decode["kernels"].startswith("pallas_mosaic_tpu")
    assert decode["in_place"]
    # The floor counts the routed experts; one expert more would show.
    assert decode["cost"]["bytes"] <= decode["bytes_accessed"] < decode["cost"]["bytes"] + 2 * expert
    assert decode["temp_bytes"] < 2 * expert
    assert report["weight_bytes"] > 2.5 * decode["cost"]["bytes"]
