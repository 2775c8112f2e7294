"""Standard streams that are closed, full or of another encoding, and memory that is not there."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import jax
import pytest
from tiny_model import SMALL

from jaxinfer.cli import main
from jaxinfer.engine import build


def shell(command: str) -> subprocess.CompletedProcess:
    """Run a line of shell in which $JAXINFER is the command."""
    environment = os.environ | {"JAXINFER": f"{sys.executable} -m jaxinfer.cli"}
    return subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        ("$JAXINFER simulate --example >&-", 0, ""),
        ("$JAXINFER --nonsense 2>&-", 2, ""),
        (
            "$JAXINFER generate <&-",
            2,
            "jaxinfer: There is no prompt; give one as an argument, with --prompt-file or through a pipe.\n",
        ),
        (
            "$JAXINFER simulate --example >/dev/full",
            2,
            "jaxinfer: The output cannot be written: No space left on device.\n",
        ),
    ],
)
def test_streams_that_take_nothing(command, code, error):
    done = shell(command)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", error)


def test_a_pipe_that_closes_early_is_silent():
    done = shell("{ $JAXINFER simulate --example; echo $? >&2; } | head -1")
    assert done.stdout.count("\n") == 1
    assert done.stderr == "141\n"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_other_encodings(tiny_model, engine_builds, monkeypatch, encoding):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    arguments = ("generate", "--model", tiny_model, *SMALL, "--max-tokens", "2", "caf\u00e9")
    assert main([*arguments, "--json"]) == 0
    assert json.loads(written.getvalue().decode(encoding))["prompt"] == "caf\u00e9"
    written.truncate(0)
    assert main([*arguments, "two"]) == 0
    assert ("> caf?" if encoding == "ascii" else "> caf\u00e9") in written.getvalue().decode(encoding)


def test_memory_that_is_not_there(refusal, monkeypatch, tiny_model):
    def too_much(*_):
        raise MemoryError

    monkeypatch.setattr("jaxinfer.cli._simulate.Simulator", too_much)
    assert "not enough memory" in refusal("simulate", "--num-prompts", "2")

    def exhausted(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")

    monkeypatch.setattr(build, "Runner", exhausted)
    assert "make it smaller (kv_cache_gib)" in refusal("generate", "--model", tiny_model, *SMALL, "hi")


@pytest.mark.parametrize("option", ["--num-pages", "--max-slots", "--vocab-size"])
def test_simulations_that_are_too_large(refusal, option):
    assert f"{option} is 99999999999, but" in refusal("simulate", "--num-prompts", "2", option, "99999999999")


def test_a_simulated_pool_is_bounded(capsys):
    assert main(["simulate", "--json", "--num-prompts", "2", "--max-context", "99999999999"]) == 0
    assert json.loads(capsys.readouterr().out)["KV pages"] == "9999999"
