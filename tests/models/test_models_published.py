"""Models of published shapes: configs that transformers writes, parameter counts, plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxinfer.cli import main
from jaxinfer.engine.plan import make_plan
from jaxinfer.models import abstract_params, family_of
from jaxinfer.runtime.chips import parse_target

PUBLISHED = json.loads((Path(__file__).parents[1] / "golden" / "parameters.json").read_text())


def decoder(name: str, **changes):
    config = PUBLISHED[name]["config"]
    return family_of(config).decoder(config).replace(dtype="bfloat16", **changes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_transformers_counts(name):
    plan = make_plan(decoder(name))
    assert plan.parameters == PUBLISHED[name]["parameters"]
    assert plan.weight_bytes == 2 * plan.parameters


def test_a_decode_reads_no_table_of_positions():
    config = decoder("gpt2")
    plan = make_plan(config, max_context=2, batches=(1,), prefills=(1,))
    positions = abstract_params(config)["position_embedding"].size
    assert positions == 1024 * 768
    # Weights without the table, a token's embedding, keys and values of two positions and those written, logits.
    moved = 2 * (plan.parameters - positions) + 2 * 768 + 3 * plan.kv_bytes_per_token + 4 * 50257
    assert plan.steps[-1].cost.bytes == moved


def test_operations_of_an_mlp_without_a_gate():
    config = decoder("opt-125m")
    (prefill, _) = make_plan(config, max_context=2, batches=(1,), prefills=(1,)).steps
    weights = 12 * (4 * 768 * 768 + 2 * 768 * 3072) + 768 * 50272
    assert prefill.cost.flops == 2 * weights + 12 * 4 * 768


def test_windows_bound_what_a_decode_reads():
    full, windowed = (decoder("gemma-2-2b", windows=windows) for windows in ((None,) * 26, (4096, None) * 13))
    read = [make_plan(config, batches=(1,)).steps[-1].cost.bytes for config in (full, windowed)]
    kv_per_layer = full.kv_bytes_per_token // 26
    assert read[0] - read[1] == 13 * kv_per_layer * (8192 - 4096)
    assert decoder("gemma-2-2b").windows == (4096, None) * 13


def test_models_cut_over_devices():
    for name in ("gemma-2-2b", "phi-3-mini-4k", "olmo-2-7b", "smollm3-3b"):
        plan = make_plan(decoder(name), target=parse_target("v6e-4"))
        assert plan.weight_bytes_per_device < 0.26 * plan.weight_bytes
    with pytest.raises(ValueError, match="50257 vocabulary entries cannot be cut evenly over 4 devices"):
        make_plan(decoder("gpt2"), target=parse_target("v6e-4"))


@pytest.mark.parametrize("name", ["gemma-3-1b", "phi-3-mini-4k", "gpt2"])
def test_the_command_plans_from_a_config(name, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED[name]["config"]))
    assert main(["plan", "--config", str(path), "--target", "v6e-1"]) == 0
    assert f"{PUBLISHED[name]['parameters']:,}" in capsys.readouterr().out
