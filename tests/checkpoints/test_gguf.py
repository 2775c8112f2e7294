"""GGUF files as the Hugging Face view."""

from __future__ import annotations

import math

import gguf
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import HEADS, HIDDEN, KV_HEADS, TinyGGUF
from gguf.constants import GGMLQuantizationType as Kind

from checkpoints import CheckpointError, open_checkpoint

Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


def to_gguf_rows(weights: np.ndarray, heads: int) -> np.ndarray:
    """The converter's permutation, from Hugging Face rows to interleaved rows."""
    half = weights.shape[0] // heads // 2
    return weights.reshape(heads, 2, half, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def test_head_dim_8_rows_are_interleaved(tmp_path):
    # The known case: with head dim 8, GGUF rows are Hugging Face rows 0 4 1 5 2 6 3 7.
    rows = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.float32)
    stored = np.repeat(np.concatenate([rows, rows + 8])[:, None], HIDDEN, 1)
    tensors = {"blk.0.attn_q.weight": np.tile(stored, (2, 1)), "blk.0.attn_k.weight": stored}
    recipe = TinyGGUF(kind=Kind.F32, tensors=tensors, extra={"llama.attention.key_length": ("add_uint32", 8)})
    with open_checkpoint(recipe.write(tmp_path / "m.gguf")) as checkpoint:
        assert checkpoint.config["head_dim"] == 8
        assert checkpoint.read(K)[:, 0].tolist() == list(range(16))
        assert checkpoint.read(Q)[:, 0].tolist() == [*range(16), *range(16)]


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1])
def test_quantized_weights_are_the_packages_own(tmp_path, kind):
    path = TinyGGUF(kind=kind, tied=False).write(tmp_path / "m.gguf")
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
        "blk.0.attn_q.weight": Q,
        "blk.0.attn_k.weight": K,
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    }
    with open_checkpoint(path) as checkpoint:
        for stored, name in names.items():
            tensor = reader[stored]
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            got = checkpoint.read(name)
            assert got.dtype == np.float32
            assert checkpoint.tensors[name].shape == got.shape
            assert checkpoint.tensors[name].nbytes == got.nbytes
            assert checkpoint.tensors[name].stored_as == kind.name
            if name in (Q, K):
                got = to_gguf_rows(got, HEADS if name == Q else KV_HEADS)
                assert not np.array_equal(checkpoint.read(name), got)
            np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F16, np.float16), (Kind.BF16, ml_dtypes.bfloat16)])
def test_unquantized_weights_keep_their_type(tmp_path, kind, dtype):
    recipe = TinyGGUF(kind=kind, arch="qwen2")
    with open_checkpoint(recipe.write(tmp_path / "m.gguf")) as checkpoint:
        got = checkpoint.read(Q)
        assert got.dtype == dtype == checkpoint.tensors[Q].dtype
        np.testing.assert_array_equal(got, recipe.weights()["blk.0.attn_q.weight"].astype(dtype))


def test_qwen_rows_are_not_permuted_and_biases_are_named(tmp_path):
    bias = np.arange(HEADS * 16, dtype=np.float32)
    recipe = TinyGGUF(arch="qwen2", pre="qwen2", kind=Kind.F32, tensors={"blk.0.attn_q.bias": bias})
    with open_checkpoint(recipe.write(tmp_path / "m.gguf")) as checkpoint:
        assert checkpoint.config["model_type"] == "qwen2"
        np.testing.assert_array_equal(checkpoint.read(Q), recipe.weights()["blk.0.attn_q.weight"])
        np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.q_proj.bias"), bias)


def test_llama_bias_rows_are_unpermuted_like_the_matrix(tmp_path):
    bias = np.arange(HEADS * 16, dtype=np.float32)
    recipe = TinyGGUF(kind=Kind.F32, tensors={"blk.0.attn_q.bias": to_gguf_rows(bias, HEADS)})
    with open_checkpoint(recipe.write(tmp_path / "m.gguf")) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.q_proj.bias"), bias)


def test_qwen3_norms_are_named(tmp_path):
    norms = {f"blk.0.attn_{part}_norm.weight": np.ones(16, np.float32) for part in "qk"}
    recipe = TinyGGUF(arch="qwen3", pre="qwen2", tensors=norms)
    with open_checkpoint(recipe.write(tmp_path / "m.gguf")) as checkpoint:
        assert "model.layers.0.self_attn.k_norm.weight" in checkpoint.tensors


def test_gemma_norms_lose_the_one_they_are_stored_with(tmp_path):
    recipe = TinyGGUF(arch="gemma", kind=Kind.F32, tensors={"output_norm.weight": np.ones(HIDDEN, np.float32)})
    with open_checkpoint(recipe.write(tmp_path / "m.gguf")) as checkpoint:
        assert not checkpoint.read("model.norm.weight").any()


def test_stacked_experts_become_single_matrices(tmp_path):
    stack = np.arange(3 * 96 * HIDDEN, dtype=np.float32).reshape(3, 96, HIDDEN)
    extra = {"llama.expert_count": ("add_uint32", 3), "llama.expert_used_count": ("add_uint32", 2)}
    recipe = TinyGGUF(kind=Kind.F32, tensors={"blk.0.ffn_up_exps.weight": stack}, extra=extra)
    with open_checkpoint(recipe.write(tmp_path / "m.gguf")) as checkpoint:
        assert (checkpoint.config["model_type"], checkpoint.config["num_local_experts"]) == ("mixtral", 3)
        name = "model.layers.0.block_sparse_moe.experts.1.w3.weight"
        np.testing.assert_array_equal(checkpoint.read(name), stack[1])


def test_config_of_a_tied_llama(tmp_path):
    with open_checkpoint(TinyGGUF().write(tmp_path / "m.gguf")) as checkpoint:
        config = checkpoint.config
        assert checkpoint.format == "gguf"
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["tie_word_embeddings"] is True
        assert "lm_head.weight" not in checkpoint.tensors
        assert config["vocab_size"] == checkpoint.tensors["model.embed_tokens.weight"].shape[0]
        assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 500000.0)
        assert (config["max_position_embeddings"], config["head_dim"]) == (128, 16)
        assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)
        assert "rope_scaling" not in config


def test_untied_head_and_window(tmp_path):
    recipe = TinyGGUF(tied=False, extra={"llama.attention.sliding_window": ("add_uint32", 32)})
    with open_checkpoint(recipe.write(tmp_path / "m.gguf")) as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is False
        assert checkpoint.config["sliding_window"] == 32
        assert "lm_head.weight" in checkpoint.tensors


def test_all_ends_of_turn_become_eos_ids(tmp_path):
    extra = {"tokenizer.ggml.eot_token_id": ("add_uint32", 9), "tokenizer.ggml.eom_token_id": ("add_uint32", 10**6)}
    with open_checkpoint(TinyGGUF(extra=extra).write(tmp_path / "m.gguf")) as checkpoint:
        assert checkpoint.generation_config["eos_token_id"] == [1, 9]
        assert checkpoint.tokenizer().eos_ids == (1, 9)


def test_yarn_and_linear_scaling(tmp_path):
    yarn = {
        "llama.rope.scaling.type": ("add_string", "yarn"),
        "llama.rope.scaling.factor": ("add_float32", 4.0),
        "llama.rope.scaling.original_context_length": ("add_uint32", 32),
    }
    with open_checkpoint(TinyGGUF(extra=yarn).write(tmp_path / "y.gguf")) as checkpoint:
        scaling = checkpoint.config["rope_scaling"]
        assert (scaling["rope_type"], scaling["factor"]) == ("yarn", 4.0)
        assert scaling["original_max_position_embeddings"] == 32
    linear = {"llama.rope.scale_linear": ("add_float32", 2.0)}
    with open_checkpoint(TinyGGUF(extra=linear).write(tmp_path / "l.gguf")) as checkpoint:
        assert checkpoint.config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_llama3_factors_give_back_their_parameters(tmp_path):
    # Known case: theta 5e5, d=64, factor 32, low 1, high 4, original 8192 divides pairs 15, 16, 17 in between.
    factors = np.ones(32, np.float32)
    for pair in range(32):
        wavelength = 2 * math.pi * 500000 ** (2 * pair / 64)
        smooth = min(1.0, max(0.0, (8192 / wavelength - 1) / 3))
        factors[pair] = 1 / ((1 - smooth) / 32 + smooth)
    np.testing.assert_allclose(1 / factors[15:18], [0.6056, 0.3037, 0.1034], atol=1e-4)
    extra = {"llama.attention.key_length": ("add_uint32", 64)}
    with open_checkpoint(TinyGGUF(extra=extra, tensors={"rope_freqs.weight": factors}).write(tmp_path / "m.gguf")) as c:
        assert "rope_freqs.weight" not in c.tensors
        assert c.config["rope_scaling"] == {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }


def test_other_factors_are_listed_not_dropped(tmp_path):
    factors = np.linspace(1, 3, 8, dtype=np.float32)
    with open_checkpoint(TinyGGUF(tensors={"rope_freqs.weight": factors}).write(tmp_path / "m.gguf")) as checkpoint:
        scaling = checkpoint.config["rope_scaling"]
        assert scaling["rope_type"] == "longrope"
        np.testing.assert_array_equal(np.float32(scaling["long_factor"]), factors)
        assert scaling["short_factor"] == scaling["long_factor"]
        assert scaling["attention_factor"] == 1.0


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (TinyGGUF(arch="mamba"), "'mamba' is not supported"),
        (TinyGGUF(extra={"split.count": ("add_uint16", 3)}), "one of 3 parts"),
        (TinyGGUF(heads=[2, 4]), "differs between layers"),
        (
            TinyGGUF(extra={"llama.block_count": ("add_uint32", 2**31 - 1)}),
            "claims 2147483647 layers and has 11 tensors",
        ),
        (TinyGGUF(heads=7), "does not divide into 7 heads"),
        (TinyGGUF(tensors={"blk.0.strange.weight": np.ones(32, np.float32)}), "has no place in a llama model"),
        (TinyGGUF(extra={"llama.attention.key_length": ("add_string", "x")}), "must be a positive integer"),
    ],
)
def test_unreadable_models_are_one_sentence(tmp_path, recipe, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(recipe.write(tmp_path / "m.gguf"))
    assert "\n" not in str(caught.value)


def test_closed_checkpoint_and_unknown_tensor(tmp_path):
    checkpoint = open_checkpoint(TinyGGUF().write(tmp_path / "m.gguf"))
    with pytest.raises(CheckpointError, match="no tensor named 'nothing'"):
        checkpoint.read("nothing")
    checkpoint.close()
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoint.read(Q)
