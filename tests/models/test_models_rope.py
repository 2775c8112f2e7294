"""RoPE against transformers: the frequencies of every scaling and spelling; the rotation by hand."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models import ModelError, RopeConfig, family_of
from jaxinfer.models.rope import inverse_frequencies, rotate, rotation
from jaxinfer.runtime.limits import RunnerLimits
from jaxinfer.runtime.runner import Runner

CASES = json.loads((Path(__file__).parents[1] / "golden" / "rope.json").read_text())
SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def decoder_of(case):
    config = {"model_type": case["model_type"], **SIZES, **case["config"]}
    return family_of(config).decoder(config).for_context(case["length"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['model_type']}-{case['length']}")
def test_frequencies_of_transformers(case):
    decoder = decoder_of(case)
    kinds = ["sliding_attention"] * 5 + ["full_attention"]  # the pattern of Gemma 3; others have one kind
    for kind, rope in zip(kinds, decoder.ropes, strict=True):
        frequencies, attention_factor = case["ropes"].get(kind, case["ropes"]["full_attention"])
        np.testing.assert_allclose(inverse_frequencies(rope), frequencies, rtol=2e-6)
        assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-9)


def test_the_cases_differ():
    # Two different settings that gave the same numbers would show that nothing was computed from them.
    spellings = {json.dumps(case["ropes"]) for case in CASES}
    assert len(spellings) >= 20


def test_the_longest_sequence_chooses_the_factors():
    (rope, *_) = decoder_of(next(case for case in CASES if case["model_type"] == "phi3")).ropes
    short, long = (inverse_frequencies(rope.for_length(length)) for length in (4096, 4097))
    plain = inverse_frequencies(RopeConfig(rope.theta, rope.rotary_dim))
    np.testing.assert_allclose(plain / short, rope.short_factors, rtol=1e-6)
    np.testing.assert_allclose(plain / long, rope.long_factors, rtol=1e-6)


@pytest.mark.parametrize("context", [128, 136])
def test_a_runner_compiles_with_the_factors_of_its_context(golden_models, monkeypatch, context):
    seen = []

    def compile_programs(config, *_):
        seen.append(config)
        raise InterruptedError("The config is all that is wanted.")

    monkeypatch.setattr("jaxinfer.runtime.programs.compile_programs", compile_programs)
    model = golden_models["phi3-short"]  # an original context of 128 positions
    limits = RunnerLimits(
        max_slots=1,
        page_size=8,
        num_pages=20,
        max_context=context,
        max_batched_tokens=8,
        max_prefill_rows=1,
        vocab_size=model.config.vocab_size,
    )
    with pytest.raises(InterruptedError):
        Runner(model.config, model.params, limits)
    rope = seen[0].ropes[0]
    plain = inverse_frequencies(RopeConfig(rope.theta, rope.rotary_dim))
    factors = rope.long_factors if context > 128 else rope.short_factors
    np.testing.assert_allclose(plain / inverse_frequencies(rope), factors, rtol=1e-6)
    assert model.config.ropes[0].longest == model.config.max_positions == 256


def test_dynamic_scaling_is_for_sequences_beyond_the_stated_context():
    config = {**SIZES, "model_type": "llama", "max_position_embeddings": 100}
    config["rope_scaling"] = {"type": "dynamic", "factor": 2.5}
    assert family_of(config).decoder(config).max_positions == 250


def test_halves_are_rotated_by_hand():
    rope = RopeConfig(theta=100.0, rotary_dim=4, attention_factor=1.5)
    x = np.arange(1, 7, dtype=np.float32).reshape(1, 1, 6)
    out = np.asarray(rotate(jnp.array(x), *rotation(rope, jnp.array([3]))))[0, 0]
    angles = 3 * np.array([1, 0.1])
    turned = 1.5 * (x[0, 0, :2] + 1j * x[0, 0, 2:4]) * np.exp(1j * angles)
    np.testing.assert_allclose(out, [*turned.real, *turned.imag, 5, 6], rtol=1e-5)


def test_neighbours_are_rotated_by_hand():
    rope = RopeConfig(theta=100.0, rotary_dim=4, interleaved=True)
    x = np.arange(1, 7, dtype=np.float32).reshape(1, 1, 6)
    out = np.asarray(rotate(jnp.array(x), *rotation(rope, jnp.array([3])), rope.interleaved))[0, 0]
    turned = (x[0, 0, 0:4:2] + 1j * x[0, 0, 1:4:2]) * np.exp(1j * 3 * np.array([1, 0.1]))
    np.testing.assert_allclose(out, [turned[0].real, turned[0].imag, turned[1].real, turned[1].imag, 5, 6], rtol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "settings", "named"),
    [
        ("llama", {"rope_type": "yarn", "factor": 4.0, "short_factor": [1.0]}, "short_factor of yarn"),
        ("llama", {"rope_type": "linear", "factor": 4.0, "beta_fast": 32}, "beta_fast of linear"),
        ("llama", {"rope_type": "default", "factor": 4.0}, "factor of default"),
        (
            "llama",
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 2.0},
            "beta_fast above beta_slow",
        ),
        ("llama", {"rope_type": "yarn", "factor": 4.0, "truncate": "no"}, "truncate"),
        ("llama", {"rope_type": "yarn", "factor": 0.0}, "factor 0.0"),
        (
            "phi3",
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 16},
            "16 positive short factors",
        ),
        (
            "phi3",
            {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [-1.0] * 16},
            "positive long factors",
        ),
        ("phi3", {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": "1"}, "long_factor"),
        ("phi3", {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [True] * 16}, "long_factor"),
        ("phi3", {"rope_type": "default", "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("phi3", {"rope_type": "default", "partial_rotary_factor": 0.03}, "even"),
        ("gemma3_text", {"rope_type": "default", "rope_theta": 1e4}, "other kinds of layer"),
    ],
)
def test_settings_that_are_refused(model_type, settings, named):
    config = {"model_type": model_type, **SIZES, "rope_parameters": settings}
    with pytest.raises(ModelError) as error:
        family_of(config).decoder(config)
    assert named in str(error.value)
    assert str(error.value).endswith(".")
