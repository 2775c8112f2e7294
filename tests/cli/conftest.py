"""Runs of the command inside the test process, on one engine that is built once."""

from __future__ import annotations

import io
import os
import signal
import sys
from types import SimpleNamespace

import pytest
from tiny_model import write_model

from jaxinfer.cli import main
from jaxinfer.core.observer import unobserved
from jaxinfer.engine import Engine


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def refusal(capsys):
    """Run a command that must be refused; returns its sentence."""

    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("jaxinfer: ")
        assert captured.err.count("\n") == 1
        assert captured.err.endswith((".\n", "`.\n"))
        return captured.err

    return run


@pytest.fixture(scope="session")
def tiny_runner(tiny_model):
    """The tiny model with two slots, compiled."""
    from jaxinfer.engine import build

    return build.build_engine(
        tiny_model, build.EngineOptions(max_slots=2, max_context=64, max_batched_tokens=64)
    ).runner


@pytest.fixture
def engine_builds(monkeypatch, tiny_runner):
    """Make every engine run on the runner that is there already; lists the (model, options) that were asked for."""
    from jaxinfer.engine import build

    asked = []

    def build_engine(model, options, on_progress=None, observer=unobserved):
        asked.append(SimpleNamespace(model=model, options=options))
        tiny_runner.reset()
        with build.open_checkpoint(model) as checkpoint:
            return Engine(
                tiny_runner, checkpoint.tokenizer(), mode=options.mode, policy=options.policy, observer=observer
            )

    monkeypatch.setattr(build, "build_engine", build_engine)
    return asked


class TextInput(io.TextIOWrapper):
    """Standard input with some content."""

    def __init__(self, content: bytes, *, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def standard_input(monkeypatch):
    """Replace standard input by some bytes."""

    def replace(content: bytes, *, terminal: bool = False) -> None:
        monkeypatch.setattr(sys, "stdin", TextInput(content, terminal=terminal))

    return replace


@pytest.fixture
def ctrl_c_in_round(monkeypatch):
    """Press Ctrl-C when the engine's nth round begins; gives a list that has an entry for each round begun."""

    def at(number: int) -> list[int]:
        real_step, steps = Engine.step, []

        def step(engine):
            steps.append(1)
            if len(steps) == number:
                os.kill(os.getpid(), signal.SIGINT)
            return real_step(engine)

        monkeypatch.setattr(Engine, "step", step)
        return steps

    return at
