"""config.json and tensor names: what they mean, and what is refused in one sentence."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models import ModelError, RopeConfig, assemble_params, family_of
from jaxinfer.models.rope import inverse_frequencies, rotate, rotation
from jaxinfer.runtime.loading import check_tokenizer
from jaxinfer.runtime.steps import attention_spec

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def family_config(model_type: str, **changes):
    names = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM"}
    base = LLAMA | {"model_type": model_type, "architectures": [names.get(model_type, "LlamaForCausalLM")]}
    return base | changes


def decoder(model_type: str = "llama", **changes):
    config = family_config(model_type, **changes)
    return family_of(config).decoder(config)


def refusal(model_type: str = "llama", **changes) -> str:
    with pytest.raises(ModelError) as error:
        decoder(model_type, **changes)
    message = str(error.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


# --- RoPE ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": {"rope_theta": 500000, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 500000}},
        {"rope_theta": 500000.0},
        {"rope_theta": 500000.0, "rope_scaling": None},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "default"}},
        {"rope_theta": 500000.0, "rope_parameters": {"rope_theta": None, "rope_type": None}},
    ],
)
def test_theta_from_every_spelling(keys):
    frequencies = inverse_frequencies(decoder(**keys).ropes[0])
    assert frequencies.dtype == np.float32
    assert frequencies.shape == (32,)
    np.testing.assert_allclose(frequencies[1], 500000 ** (-1 / 32), rtol=1e-6)


def test_default_theta():
    np.testing.assert_allclose(inverse_frequencies(decoder().ropes[0])[1], 10000 ** (-1 / 32), rtol=1e-6)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                **{key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"},
            },
        },
        {
            "original_max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                **LLAMA3,
                "original_max_position_embeddings": 131072,
            },
        },
    ],
)
def test_llama3_scaling(keys):
    scaled = inverse_frequencies(decoder(**keys).ropes[0])
    ratio = scaled / inverse_frequencies(RopeConfig(theta=5e5, rotary_dim=64))
    np.testing.assert_allclose(ratio[:15], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[15:18], [0.6056, 0.3037, 0.1034], atol=5e-5)
    np.testing.assert_allclose(ratio[18:], 1 / 32, rtol=1e-6)


def test_linear_scaling_divides_every_frequency():
    scaled = inverse_frequencies(decoder(rope_scaling={"type": "linear", "factor": 4.0}).ropes[0])
    np.testing.assert_allclose(scaled * 4, inverse_frequencies(decoder().ropes[0]), rtol=1e-6)


def test_rotation_by_hand():
    rope = RopeConfig(theta=100.0, rotary_dim=4)
    x = np.arange(1, 7, dtype=np.float32).reshape(1, 1, 6)
    out = np.asarray(rotate(jnp.array(x), *rotation(rope, jnp.array([3]))))[0, 0]
    angles = 3 * np.array([1, 0.1])
    first = x[0, 0, :2] * np.cos(angles) - x[0, 0, 2:4] * np.sin(angles)
    second = x[0, 0, 2:4] * np.cos(angles) + x[0, 0, :2] * np.sin(angles)
    np.testing.assert_allclose(out, [*first, *second, 5, 6], rtol=1e-5)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "proportional"),
        ({"rope_scaling": {"type": "dynamic"}}, "factor"),
        ({"rope_scaling": {"type": ["linear"]}}, "linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_scaling": {"type": "default", "mrope_section": [4, 4]}}, "mrope_section"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2.0}}, "both"),
        ({"rope_parameters": 7}, "keys and values"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor 'two'"),
        ({"rope_theta": -1.0}, "theta"),
        ({"head_dim": 9}, "even"),
    ],
)
def test_rope_that_is_refused(keys, names):
    assert names in refusal(**keys)


# --- sizes, biases, windows ------------------------------------------------------------------------------------------


def test_head_dim_is_its_own_key():
    config = decoder("qwen3", hidden_size=2560, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    assert config.head_dim == 128
    rules = family_of(family_config("qwen3")).rules
    shapes = {rule.parameter.rpartition("attention/")[2]: rule.shapes(config) for rule in rules}
    assert shapes["q/kernel"] == ((4096, 2560),)
    assert shapes["kv/kernel"] == ((1024, 2560), (1024, 2560))


@pytest.mark.parametrize(("model_type", "expected"), [("llama", 64), ("qwen2", 64), ("mistral", 64), ("qwen3", 128)])
def test_head_dim_absent_or_null(model_type, expected):
    assert decoder(model_type).head_dim == expected
    assert decoder(model_type, head_dim=None).head_dim == expected


def test_biases():
    def biases(model_type: str, **keys):
        config = decoder(model_type, **keys)
        return config.qkv_bias, config.output_bias

    assert biases("qwen2") == (True, False)
    assert biases("llama") == biases("qwen3") == biases("mistral") == (False, False)
    assert biases("llama", attention_bias=True) == biases("qwen3", attention_bias=True) == (True, True)


def test_windows():
    assert decoder("llama", sliding_window=4).windows == (None,) * 3
    assert decoder("mistral").windows == (4096,) * 3
    assert decoder("mistral", sliding_window=None).windows == (None,) * 3
    assert decoder("mistral", sliding_window=4).windows == (4,) * 3
    assert decoder("qwen2", sliding_window=4, max_window_layers=1).windows == (None,) * 3
    used = {"use_sliding_window": True, "sliding_window": 4}
    assert decoder("qwen2", **used, max_window_layers=1).windows == (None, 4, 4)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert decoder("qwen3", **used, layer_types=kinds).windows == (4, None, 4)


def test_window_of_4_at_position_10_sees_keys_7_to_10():
    from pallas_kernels import empty_pages
    from pallas_kernels.paged_decode import paged_decode
    from pallas_kernels.paged_prefill import paged_prefill

    config = decoder("mistral", sliding_window=4, num_attention_heads=1, head_dim=16)
    spec = attention_spec(config, 0)
    # Equal keys weigh alike, and value i is the i-th unit vector: the output says what was seen.
    keys, values = jnp.zeros((11, 1, 16)), jnp.eye(11, 16)[:, None]
    table, start = jnp.array([[1, 2]]), jnp.array([0, 11])
    expected = [0.0] * 7 + [0.25] * 4 + [0.0] * 5

    pages = empty_pages(3, 1, 8, 32, jnp.float32)
    out, pages = paged_prefill(keys, keys, values, pages, table, start, jnp.array([11]), spec)
    np.testing.assert_allclose(out[10, 0], expected)
    out, _ = paged_prefill(keys[:3], None, None, pages, table, jnp.array([0, 3]), jnp.array([11]), spec)
    np.testing.assert_allclose(out[2, 0], expected)
    out, _ = paged_decode(keys[:1], None, None, pages, table, jnp.array([11]), spec)
    np.testing.assert_allclose(out[0, 0], expected)


@pytest.mark.parametrize(
    ("model_type", "keys", "names"),
    [
        ("llama", {"hidden_size": None}, "hidden_size"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers"),
        ("llama", {"vocab_size": "32"}, "vocab_size"),
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 2}, "evenly"),
        ("llama", {"hidden_act": "relu2"}, "relu2"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ("mistral", {"sliding_window": 0}, "window"),
        ("mistral", {"sliding_window": "8"}, "window"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_contradictory_configs(model_type, keys, names):
    assert names in refusal(model_type, **keys)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "awq"}),
        ("partial_rotary_factor", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.0625),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("attention_multiplier", 0.0156),
        ("logits_scaling", 8.0),
        ("query_pre_attn_scalar", 256),
        ("num_local_experts", 8),
        ("num_experts", 8),
        ("no_rope_layers", [0, 1]),
        ("is_encoder_decoder", True),
    ],
)
def test_keys_that_would_change_the_computation_are_refused(key, value):
    message = refusal(**{key: value})
    assert key in message
    assert repr(value) in message


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        {"model_type": None, "architectures": None},
        {"model_type": "llama", "architectures": [["LlamaForCausalLM"]]},
        {"model_type": "llama", "architectures": 7},
    ],
)
def test_unknown_architecture(keys):
    with pytest.raises(ModelError, match=r"is not supported; supported are LlamaForCausalLM, .*\.$"):
        family_of(LLAMA | keys)


def test_architecture_may_be_unnamed_or_a_string():
    assert family_of(LLAMA | {"architectures": None}).model_type == "llama"
    assert family_of(LLAMA | {"architectures": "LlamaForCausalLM"}).model_type == "llama"


def test_tokenizer_larger_than_the_embedding_table():
    check_tokenizer(32, decoder())
    with pytest.raises(ModelError, match="33 token ids, but the model has embeddings for 32"):
        check_tokenizer(33, decoder())


# --- tensors ---------------------------------------------------------------------------------------------------------


class Tensors:
    """The tensors of a golden checkpoint, to be changed and assembled."""

    def __init__(self, model) -> None:
        from checkpoints import open_checkpoint

        with open_checkpoint(model.path) as checkpoint:
            self.config = dict(checkpoint.config)
            self.arrays = {name: checkpoint.read(name) for name in checkpoint.tensors}

    def assemble(self):
        family = family_of(self.config)
        config = family.decoder(self.config)
        shapes = {name: array.shape for name, array in self.arrays.items()}
        read = self.arrays.__getitem__
        return assemble_params(config, family.rules, family.ignored, family.copies, shapes, read, jnp.asarray)

    def refusal(self) -> str:
        with pytest.raises(ModelError) as error:
            self.assemble()
        assert "\n" not in str(error.value)
        return str(error.value)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_untied_with_head(golden_models):
    tensors = Tensors(golden_models["llama"])
    params = tensors.assemble()
    np.testing.assert_array_equal(params["head"], tensors.arrays[HEAD])
    assert not np.array_equal(params["head"], params["embedding"])


def test_untied_without_head_is_an_error(golden_models):
    tensors = Tensors(golden_models["llama"])
    del tensors.arrays[HEAD]
    assert "missing: lm_head.weight" in tensors.refusal()


def test_tied_without_head(golden_models):
    params = Tensors(golden_models["qwen2"]).assemble()
    assert "head" not in params


def test_tied_with_an_equal_head(golden_models):
    tensors = Tensors(golden_models["qwen2"])
    tensors.arrays[HEAD] = tensors.arrays[EMBEDDING].copy()
    assert "head" not in tensors.assemble()


@pytest.mark.parametrize("change", ["value", "shape"])
def test_tied_with_another_head_is_an_error(golden_models, change):
    tensors = Tensors(golden_models["qwen2"])
    head = tensors.arrays[EMBEDDING].copy()
    head[0, 0] += 1
    tensors.arrays[HEAD] = head if change == "value" else head[1:]
    message = tensors.refusal()
    assert "lm_head.weight" in message
    assert "tie_word_embeddings" in message


def test_tied_without_embedding_is_an_error(golden_models):
    tensors = Tensors(golden_models["qwen2"])
    tensors.arrays[HEAD] = tensors.arrays.pop(EMBEDDING)
    assert f"missing: {EMBEDDING}" in tensors.refusal()


def test_every_parameter_of_the_decoder_is_made(golden_models):
    from jaxinfer.models import abstract_params

    for model in golden_models.values():
        wanted = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), abstract_params(model.config))
        assert jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), model.params) == wanted


def test_a_bias_that_nothing_uses_is_an_error(golden_models):
    tensors = Tensors(golden_models["llama"])
    tensors.arrays["model.layers.0.self_attn.q_proj.bias"] = np.zeros(48, np.float32)
    assert "unexpected: model.layers.0.self_attn.q_proj.bias" in tensors.refusal()
    tensors = Tensors(golden_models["qwen2"])
    tensors.arrays["model.layers.1.self_attn.o_proj.bias"] = np.zeros(48, np.float32)
    assert "unexpected: model.layers.1.self_attn.o_proj.bias" in tensors.refusal()


def test_stored_frequencies_are_ignored(golden_models):
    tensors = Tensors(golden_models["llama"])
    tensors.arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    tensors.assemble()


def test_all_problems_in_one_error(golden_models):
    tensors = Tensors(golden_models["qwen3"])
    del tensors.arrays["model.layers.1.mlp.up_proj.weight"]
    del tensors.arrays["model.layers.2.self_attn.k_norm.weight"]
    tensors.arrays["model.norm.weight"] = np.ones(47, np.float32)
    tensors.arrays["model.layers.0.self_attn.o_proj.weight"] = np.ones((64, 48), np.float32)
    tensors.arrays["model.layers.3.mlp.up_proj.weight"] = np.ones((96, 48), np.float32)
    message = tensors.refusal()
    for part in (
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.2.self_attn.k_norm.weight",
        "unexpected: model.layers.3.mlp.up_proj.weight",
        "model.norm.weight is [47] instead of [48]",
        "model.layers.0.self_attn.o_proj.weight is [64, 48] instead of [48, 64]",
    ):
        assert part in message


def test_missing_tensor_on_disk(golden_models, tmp_path):
    from safetensors.numpy import load_file, save_file

    from checkpoints import open_checkpoint
    from jaxinfer.runtime.loading import decoder_config, load_params

    source = golden_models["qwen2"].path
    arrays = load_file(source / "model.safetensors")
    del arrays["model.layers.0.mlp.down_proj.weight"]
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text())))
    with open_checkpoint(tmp_path) as checkpoint:
        config = decoder_config(checkpoint)
        with pytest.raises(ModelError, match=r"missing: model\.layers\.0\.mlp\.down_proj\.weight"):
            load_params(checkpoint, config)
