"""Steps with capped scores, windows and joined norms, compiled for a TPU that is not attached."""

from __future__ import annotations

import json

import pytest
from test_steps import compile_for, needs_libtpu

GEMMA_2 = {
    # The shape of the 2B model, with one layer of each kind.
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "vocab_size": 256000,
    "hidden_size": 2304,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "sliding_window": 1024,
}
SHAPE = ("--max-slots", "16", "--max-context", "2048", "--decode-rows", "16", "--prefill-tokens", "256")


@needs_libtpu
@pytest.mark.slow
def test_caps_and_windows_run_in_the_tpu_kernels(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GEMMA_2))
    code, report = compile_for("--config", str(path), "--target", "v6e-1", *SHAPE)
    assert code == 0
    for bucket in report["buckets"]:
        assert bucket["kernels"].startswith("pallas_mosaic_tpu")
        assert bucket["in_place"]
        assert bucket["bytes_accessed"] < 1.15 * bucket["cost"]["bytes"]
