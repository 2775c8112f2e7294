"""Every key that a family's config class in transformers defines is used, refused, or known to change nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.models import ModelError, family_of

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "config_keys.json").read_text())
CHANGES_NOTHING = re.compile(
    # Training, ids of special tokens, caching, dimensions of other heads.
    r"initializer_range|init_std|.*dropout|dropout|layerdrop|.*_pdrop|.*_token_id|use_cache|summary_\w+|pretraining_tp"
    # Another order of the same sums.
    r"|reorder_and_upcast_attn"
    # Of the part that sees.
    r"|vision_config|mm_tokens_per_image|\w+_token_index"
)
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
BASES: dict[str, dict[str, Any]] = {
    # What makes the keys matter that are moot by default.
    "qwen2": {"use_sliding_window": True},
    "qwen3": {"use_sliding_window": True},
    "smollm3": {"use_sliding_window": True, "sliding_window": 64},
    "phi3": {"rope_parameters": LONGROPE, "max_position_embeddings": 131072},
}
OTHER_VALUES = {
    # For keys whose default says little about their values.
    "layer_types": ["full_attention"],
    "no_rope_layers": [0],
    "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 77.0},
    "no_rope_layer_interval": 2,
    "hidden_act": "relu",
    "hidden_activation": "relu",
    "activation_function": "gelu",
    "text_config": {"num_hidden_layers": 3},
    "num_key_value_heads": 1,
}


OF_EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")


def model_types() -> list[str]:
    return [name for name in GOLDEN if name not in OF_EXPERTS]


def full_config(model_type: str) -> dict[str, Any]:
    """Every key of the class, at its default."""
    entry = GOLDEN[model_type]
    config = {"model_type": model_type, "architectures": [entry["class"]], **entry["keys"]}
    if model_type == "gemma3":
        config["text_config"] = {}
    return config | BASES.get(model_type, {})


def decoder(config: dict[str, Any]):
    return family_of(config).decoder(config)


def outcome(config: dict[str, Any]):
    """The decoder, or the sentence of the refusal."""
    try:
        return decoder(config)
    except ModelError as error:
        return str(error)


def other_value(key: str, value: Any, layers: int) -> Any:
    if key in OTHER_VALUES:
        other = OTHER_VALUES[key]
        return other * layers if isinstance(other, list) else other
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2
    return 7 if value is None else f"{value}-of-another-kind"


@pytest.mark.parametrize("model_type", model_types())
def test_every_key_matters_is_refused_or_changes_nothing(model_type):
    full = full_config(model_type)
    usual = decoder(full)
    for key in GOLDEN[model_type]["keys"]:
        changed = full | {key: other_value(key, full[key], usual.num_layers)}
        harmless = CHANGES_NOTHING.fullmatch(key) is not None
        assert (outcome(changed) == usual) == harmless, (
            f"{model_type}: {key} {'changes' if harmless else 'does not change'} the decoder"
        )


@pytest.mark.parametrize("model_type", model_types())
def test_an_absent_key_means_the_default_of_its_class(model_type):
    full = full_config(model_type)
    usual = decoder(full)
    for key in set(GOLDEN[model_type]["keys"]) - set(BASES.get(model_type, {})):
        found = outcome({name: value for name, value in full.items() if name != key})
        # No sensible model leaves its size to chance.
        assert found == usual or f"has no {key}," in found, key


@pytest.mark.parametrize("model_type", model_types())
def test_a_key_that_nobody_knows_is_refused_unless_it_switches_nothing_on(model_type):
    full = full_config(model_type)
    for value in (None, False, "", [], {}):
        decoder(full | {"use_new_thing": value})
    for value in (True, 1, 0.5, "yes", [1], {"a": 1}):
        with pytest.raises(ModelError, match=r"sets use_new_thing to .* not supported"):
            decoder(full | {"use_new_thing": value})
