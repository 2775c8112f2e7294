"""The examples run, and agree with the engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
GOLDEN = Path(__file__).parents[1] / "golden"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_random_model():
    ids = load("own_program").random_model()
    assert len(ids) == 12
    assert all(0 <= token < 256 for token in ids)


def test_a_loaded_model_gives_what_transformers_gives():
    from checkpoints import open_checkpoint

    example = load("own_program")
    expected = np.load(GOLDEN / "llama" / "expected.npz")
    with open_checkpoint(GOLDEN / "llama") as checkpoint:
        config = example.decoder_config(checkpoint)
        params = example.load_params(checkpoint, config)
    ids = example.generate(config, params, expected["prompt_2"].tolist(), new_tokens=24)
    assert ids == expected["greedy_2"][:24].tolist()


def test_a_model_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["own_program.py", "--model", "nope"])
    with pytest.raises(SystemExit) as left:
        load("own_program").main()
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("nope: no such file")
    assert told.count("\n") == 1
