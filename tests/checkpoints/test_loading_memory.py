"""The memory that loading takes: the parameters, three tenths more, and one tensor."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from gguf.constants import GGMLQuantizationType as Kind

from checkpoints import convert

ROOT = Path(__file__).parents[2]
HIDDEN, LAYERS, WIDE, VOCABULARY = 1024, 4, 4096, 8192
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": WIDE,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LOAD = """
    import json, sys
    import jax
    from checkpoints import open_checkpoint
    from jaxinfer.runtime.loading import decoder_config, load_params

    def status(key):
        with open("/proc/self/status") as file:
            return int(next(line for line in file if line.startswith(key + ":")).split()[1]) << 10

    jax.numpy.zeros(8).block_until_ready()
    with open_checkpoint(sys.argv[1]) as checkpoint:
        config = decoder_config(checkpoint)
        checkpoint.read("model.norm.weight")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the peak so far
        before = status("VmRSS")
        steps = []
        params = load_params(checkpoint, config, lambda *step: steps.append(step))
        jax.block_until_ready(params)
        peak = status("VmHWM") - before
    print(json.dumps({"peak": peak, "params": sum(leaf.nbytes for leaf in jax.tree.leaves(params)), "steps": steps}))
"""


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of the model by their names in GGUF."""
    result: dict[str, tuple[int, ...]] = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        block |= {f"attn_{part}": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")}
        block |= {"ffn_gate": (WIDE, HIDDEN), "ffn_up": (WIDE, HIDDEN), "ffn_down": (HIDDEN, WIDE)}
        result |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    # The largest comes last, when all others are there already.
    return result | {"output": (VOCABULARY, HIDDEN)}


def write_gguf(path: Path) -> Path:
    """The model in Q8_0, its norms in float32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, shape in shapes().items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            continue
        blocks = np.zeros((shape[0], shape[1] // 32 * 34), np.uint8)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=Kind.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_directory(path: Path) -> Path:
    """The model as bfloat16 safetensors."""
    from checkpoints._gguf_names import ARCHITECTURES

    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    names = {ARCHITECTURES["llama"].hugging_face_name(f"{name}.weight"): shape for name, shape in shapes().items()}
    # Random, because Orbax compresses what it can.
    rng = np.random.default_rng(0)
    tensors = {name: rng.random(shape, np.float32).astype(ml_dtypes.bfloat16) for name, shape in names.items()}
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.slow
def test_peak_while_loading(tmp_path):
    directory = write_directory(tmp_path / "m")
    sources = [directory, write_gguf(tmp_path / "m.gguf"), convert(directory, tmp_path / "o", format="orbax")]
    largest = 4 * max(math.prod(shape) for shape in shapes().values())
    for source in sources:
        # Arrays as small as these would stay with glibc when they are freed; a real model's go back at once, like so.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", textwrap.dedent(LOAD), str(source)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert result.returncode == 0, result.stderr[-3000:]
        facts = json.loads(result.stdout.splitlines()[-1])
        assert facts["params"] == 4 * sum(math.prod(shape) for shape in shapes().values())
        peak, params = facts["peak"], facts["params"]
        assert params < peak < params + 1.6 * largest < 1.3 * params + largest, (source.name, peak / params)
        assert facts["steps"][-1] == ["Loading", len(facts["steps"]), len(facts["steps"])]
