"""What is special in each family: published configs as they are, layers, tensor names, heads, refusals."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models import ModelError, assemble_params, family_of
from jaxinfer.models.layers import Norm
from jaxinfer.runtime.steps import attention_spec

OLD_KEYS = {"torch_dtype": "bfloat16", "transformers_version": "4.42.4", "use_cache": True, "initializer_range": 0.02}
SMOLLM2 = {
    **OLD_KEYS,
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
QWEN2_7B = {
    **OLD_KEYS,
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
GEMMA_2_9B = {
    **OLD_KEYS,
    "_name_or_path": "google/gemma-2-9b",
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "vocab_size": 256000,
}
GEMMA_3_12B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "vision_use_head": False},
}
PHI_3_MINI = {
    **OLD_KEYS,
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
PHI_4_MINI = PHI_3_MINI | {
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
SMOLLM3 = {
    **OLD_KEYS,
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
OPT_125M = {
    **OLD_KEYS,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "prefix": "</s>",
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}


def decoder(config, **changes):
    return family_of(config).decoder(config | changes)


# --- configs as they are published -----------------------------------------------------------------------------------


def test_llama_and_qwen():
    assert decoder(SMOLLM2).tied_head
    assert decoder(QWEN2_7B).windows == (None,) * 28


def test_gemma_2():
    config = decoder(GEMMA_2_9B)
    assert config.windows == (4096, None) * 21
    assert config.tied_head
    assert config.embedding_scale == 3584**0.5
    spec = attention_spec(config, 0)
    assert (spec.scale, spec.softcap, spec.window) == (1 / 16, 50.0, 4096)
    assert config.logit_softcap == 30.0
    assert decoder(GEMMA_2_9B, final_logit_softcapping=None).logit_softcap is None
    assert decoder(GEMMA_2_9B, query_pre_attn_scalar=224).attention_scale == 224**-0.5


def test_gemma_3_inside_a_model_that_sees():
    config = decoder(GEMMA_3_12B)
    assert (config.vocab_size, config.head_dim, config.num_layers) == (262208, 256, 48)
    assert config.windows == ((1024,) * 5 + (None,)) * 8
    assert [(rope.theta, rope.scaling, rope.factor) for rope in config.ropes[4:6]] == [
        (1e4, "default", 1.0),
        (1e6, "linear", 8.0),
    ]
    assert config.max_positions == 131072
    assert config.attention_softcap is config.logit_softcap is None


def test_phi():
    assert decoder(PHI_3_MINI).windows == (2047,) * 32
    assert decoder(PHI_3_MINI, sliding_window=None).windows == (None,) * 32
    config = decoder(PHI_4_MINI)
    assert {(rope.rotary_dim, rope.original_max_positions, rope.longest) for rope in config.ropes} == {
        (96, 4096, 131072)
    }


def test_smollm3():
    config = decoder(SMOLLM3)
    assert [rope is None for rope in config.ropes] == [False, False, False, True] * 9
    assert decoder(SMOLLM3, no_rope_layers=None).ropes == config.ropes
    windowed = decoder(SMOLLM3, use_sliding_window=True, sliding_window=64)
    assert windowed.windows == (None, None, None, 64) * 9


def test_gpt2_and_opt():
    config = decoder(GPT2)
    assert (config.intermediate_size, config.max_positions, config.position_offset) == (3072, 1024, 0)
    assert decoder(GPT2, scale_attn_weights=False).attention_scale == 1.0
    config = decoder(OPT_125M)
    assert (config.intermediate_size, config.max_positions, config.position_offset) == (3072, 2048, 2)
    config = decoder(OPT_125M, do_layer_norm_before=False, word_embed_proj_dim=512)
    assert (config.norm_placement, config.table_width, config.hidden_size) == ("after_sum", 512, 768)


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (OPT_125M, {"word_embed_proj_dim": 0}, "word_embed_proj_dim 0"),
        (OPT_125M, {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        (OPT_125M, {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        (OPT_125M, {"activation_function": "quick_gelu"}, "activation_function"),
        (OPT_125M, {"hidden_size": 100}, "num_attention_heads"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
        (GPT2, {"n_head": 7}, "n_head 7"),
        (GEMMA_2_9B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA_2_9B, {"layer_types": ["sliding_attention"]}, "layer_types"),
        (GEMMA_2_9B, {"layer_types": "full_attention"}, "layer_types"),
        (GEMMA_2_9B, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (GEMMA_2_9B, {"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        (GEMMA_3_12B, {"text_config": None}, "text_config"),
        (GEMMA_3_12B, {"text_config": {"use_new_thing": 1}}, "use_new_thing"),
        (GEMMA_3_12B, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (PHI_4_MINI, {"interpolate_factor": 2}, "interpolate_factor"),
        (PHI_4_MINI, {"lm_head_bias": True}, "lm_head_bias"),
        (SMOLLM3, {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        (SMOLLM3, {"no_rope_layers": [2] * 36}, "no_rope_layers"),
        (SMOLLM2, {"rope_interleaved": True}, "rope_interleaved"),
        (SMOLLM2, {"attention_bias": "yes"}, "true or false"),
        (SMOLLM2, {"pruned_heads": {"0": [1]}}, "pruned_heads"),
        (QWEN2_7B, {"max_window_layers": -1}, "max_window_layers"),
    ],
)
def test_what_is_not_built_is_refused(config, changes, named):
    with pytest.raises(ModelError) as error:
        decoder(config, **changes)
    message = str(error.value)
    assert named in message
    assert message.endswith(".")
    assert "\n" not in message


# --- norms -----------------------------------------------------------------------------------------------------------


def test_a_gemma_norm_of_zeros_scales_by_one():
    config = decoder(GEMMA_2_9B, num_hidden_layers=1)
    x = jnp.array([[3.0, -4.0]])
    out = Norm(2, config).apply({"params": {"scale": jnp.zeros(2)}}, x)
    np.testing.assert_allclose(out, x / np.sqrt(12.5), rtol=1e-6)


def test_norm_scales_are_multiplied_where_each_family_does():
    # In bfloat16 the order of rounding and scaling shows.
    x = jnp.array(np.random.default_rng(0).normal(size=(1, 512)), jnp.bfloat16)
    scale = jnp.array(np.random.default_rng(1).uniform(0.5, 1.5, 512), jnp.bfloat16)
    exact = np.asarray(x, np.float32) / np.sqrt(np.mean(np.asarray(x, np.float32) ** 2) + 1e-6)
    normed = jnp.array(exact, jnp.bfloat16)
    expected = {
        "rms": scale * normed,
        "rms_float32": jnp.array(exact * np.asarray(scale, np.float32), jnp.bfloat16),
        "rms_offset": jnp.array(exact * (1 + np.asarray(scale, np.float32)), jnp.bfloat16),
    }
    for kind, wanted in expected.items():
        config = decoder(GEMMA_2_9B).replace(norm=kind, dtype="bfloat16")
        out = Norm(512, config).apply({"params": {"scale": scale}}, x)
        assert out.dtype == jnp.bfloat16
        assert (out == wanted).mean() > 0.999
    assert (expected["rms"] == expected["rms_float32"]).mean() < 0.9


# --- tensors ---------------------------------------------------------------------------------------------------------


def tensors_of(model):
    from checkpoints import open_checkpoint

    with open_checkpoint(model.path) as checkpoint:
        return dict(checkpoint.config), {name: checkpoint.read(name) for name in checkpoint.tensors}


def assemble(config, arrays):
    family = family_of(config)
    shapes = {name: array.shape for name, array in arrays.items()}
    arguments = family.rules, family.ignored, family.copies, shapes, arrays.__getitem__, jnp.asarray
    return assemble_params(family.decoder(config), *arguments, prefixes=family.prefixes)


EMBEDDINGS = {
    "gpt2": "wte.weight",
    "opt": "model.decoder.embed_tokens.weight",
    "gemma2": "model.embed_tokens.weight",
    "gemma3-nested": "language_model.model.embed_tokens.weight",
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_tied_and_untied_heads(golden_models, name):
    config, arrays = tensors_of(golden_models[name])
    embedding = arrays[next(tensor for tensor in arrays if tensor.endswith(EMBEDDINGS[name].rpartition("model.")[2]))]
    head = "language_model.lm_head.weight" if name == "gemma3-nested" else "lm_head.weight"
    assert "head" not in assemble(config, arrays)
    assert "head" not in assemble(config, arrays | {head: embedding.copy()})
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        assemble(config, arrays | {head: embedding + 1})
    untied = config | {"tie_word_embeddings": False}
    np.testing.assert_array_equal(assemble(untied, arrays | {head: embedding + 1})["head"], embedding + 1)
    with pytest.raises(ModelError, match=r"missing: lm_head\.weight"):
        assemble(untied, arrays)


@pytest.mark.parametrize(
    ("name", "begin", "instead"),
    [
        ("gpt2", "", "transformer."),
        ("opt", "model.decoder.", "decoder."),
        ("gemma3-nested", "model.language_model.", "language_model.model."),
        ("gemma3-nested", "language_model.model.", "model.language_model."),
    ],
)
def test_tensor_names_of_other_releases(golden_models, name, begin, instead):
    config, arrays = tensors_of(golden_models[name])
    renamed = {
        instead + tensor[len(begin) :] if tensor.startswith(begin) else tensor: a for tensor, a in arrays.items()
    }
    found, expected = assemble(config, renamed), assemble(config, arrays)
    np.testing.assert_array_equal(found["embedding"], expected["embedding"])


def test_a_tensor_under_both_of_its_names_is_an_error(golden_models):
    config, arrays = tensors_of(golden_models["gpt2"])
    with pytest.raises(ModelError, match=r"wte\.weight and transformer\.wte\.weight are the same"):
        assemble(config, arrays | {"transformer.wte.weight": arrays["wte.weight"]})


def test_causal_masks_stored_with_gpt2_are_ignored_but_not_its_biases(golden_models):
    config, arrays = tensors_of(golden_models["gpt2"])
    assemble(config, arrays | {"h.0.attn.bias": np.ones((1, 1, 4, 4)), "h.1.attn.masked_bias": np.ones(())})
    with pytest.raises(ModelError, match=r"unexpected: transformer\.h\.0\.attn\.c_fc\.bias"):
        assemble(config, arrays | {"h.0.attn.c_fc.bias": np.ones(4)})


def test_joined_projections_are_cut_where_they_were_joined(golden_models):
    config, arrays = tensors_of(golden_models["phi3-short"])
    attention = assemble(config, arrays)["layers_0"]["attention"]
    joined = arrays["model.layers.0.self_attn.qkv_proj.weight"].astype(np.float32)  # 4 + 2 + 2 heads of 8 features
    assert joined.shape == (64, 32)
    np.testing.assert_array_equal(attention["q"]["kernel"][:, 3, 5], joined[3 * 8 + 5])
    np.testing.assert_array_equal(attention["kv"]["kernel"][:, 0, 1, 5], joined[32 + 8 + 5])
    np.testing.assert_array_equal(attention["kv"]["kernel"][:, 1, 0, 5], joined[48 + 5])
