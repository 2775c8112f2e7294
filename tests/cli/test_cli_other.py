"""Help, versions, info, convert, and the option tables."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from tiny_model import write_model

import jaxinfer
from checkpoints import DEFAULT_MODEL, NAMED_MODELS, open_checkpoint
from jaxinfer.cli import _options, main
from jaxinfer.cli._errors import UserMistake
from jaxinfer.cli._quiet import native_messages_held
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.engine.build import EngineOptions
from pallas_kernels.dispatch import LOWERINGS


def test_every_field_has_its_option():
    assert {flag.field for flag in _options.SAMPLING_FLAGS} == {f.name for f in dataclasses.fields(SamplingParams)}
    engine = {field.name for field in dataclasses.fields(EngineOptions)}
    assert {flag.field for flag in _options.ENGINE_FLAGS} == engine - {"seed"}


def test_what_is_written_down_twice_agrees():
    choices = {flag.field: flag.choices for flag in _options.ENGINE_FLAGS}
    assert choices["attention"] == ("auto", *LOWERINGS)
    assert DEFAULT_MODEL in _options.MODEL_HELP
    assert _options.DEFAULT_MODEL == DEFAULT_MODEL


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 5}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
        ),
        ({"temperature": None, "top_k": None, "eos_token_id": 2}, {"temperature": 0.0}),
    ],
)
def test_a_models_own_sampling(config, expected):
    assert _options.model_defaults(config) == expected


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess:
    start = ["-m", "jaxinfer.cli"] if code is None else ["-c", code]
    return subprocess.run([sys.executable, *start, *arguments], capture_output=True, text=True, check=False)


def test_help_versions_and_mistakes_do_not_wait_for_jax():
    script = """
import contextlib, sys
from jaxinfer.cli import main
for arguments in (["--help"], ["generate", "--help"], ["bench", "steps", "--help"], ["--version"], ["generate", "--x"]):
    with contextlib.suppress(SystemExit):
        main(arguments)
assert main([]) == 0
assert "jax" not in sys.modules and "numpy" not in sys.modules
"""
    done = run(code=script)
    assert done.returncode == 0, done.stderr
    assert f"jaxinfer {jaxinfer.__version__}\n" in done.stdout
    assert "--repetition-penalty" in done.stdout
    assert done.stderr.startswith("jaxinfer: ")


def test_native_messages_are_shown_only_when_the_program_fails(capfd, monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    with native_messages_held():
        os.write(2, b"slow compile?")

    @native_messages_held()
    def fail(mistake: type[Exception]) -> None:
        os.write(2, mistake.__name__.encode())
        raise mistake

    for mistake in (UserMistake, RuntimeError):
        with pytest.raises(mistake):
            fail(mistake)
    assert capfd.readouterr().err == "RuntimeError"
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    with native_messages_held():
        os.write(2, b"as asked")
    assert capfd.readouterr().err == "as asked"


def test_info(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["jaxinfer"] == jaxinfer.__version__
    assert set(facts["versions"]) >= {"jax", "jaxlib", "flax", "python"}
    assert facts["devices"]
    assert set(facts["kernels"]) == {"paged_decode", "paged_prefill", "kv_write", "quantized_matmul"}
    assert all(kernel["choice"] in LOWERINGS and kernel["reason"] for kernel in facts["kernels"].values())
    assert set(facts["named_models"]) == set(NAMED_MODELS)
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    for text in (facts["backend"], facts["caches"]["named models"]["path"], facts["kernels"]["paged_decode"]["reason"]):
        assert text in shown


def test_info_says_whether_a_model_is_cached(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXINFER_CACHE_DIR", str(tmp_path))
    assert main(["info"]) == 0
    assert f"{DEFAULT_MODEL}  not cached" in capsys.readouterr().out


def test_convert(capsys, tiny_model, tmp_path):
    destination = tmp_path / "converted"
    assert main(["convert", tiny_model, str(destination)]) == 0
    assert capsys.readouterr().out == f"Wrote {destination}\n"
    with open_checkpoint(tiny_model) as before, open_checkpoint(destination) as after:
        assert after.format == "orbax"
        assert {name: info.shape for name, info in after.tensors.items()} == {
            name: info.shape for name, info in before.tensors.items()
        }


def test_convert_says_when_there_is_no_tokenizer(capsys, tmp_path):
    model = write_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    assert main(["convert", str(model), str(tmp_path / "converted")]) == 0
    assert capsys.readouterr().out.startswith(f"Wrote {tmp_path / 'converted'}, without a tokenizer")


def test_info_tells_the_size_of_the_cache(capsys):
    assert main(["info", "--json"]) == 0
    pool = json.loads(capsys.readouterr().out)["kv_cache"]
    assert pool == {"default_bytes": 2**30, "most_times_the_slots": 4}
    assert main(["info"]) == 0
    assert "up to 1.1 GB, and 4 times what the slots can use" in capsys.readouterr().out


def test_plan_tells_the_size_of_the_cache(capsys, tiny_model):
    arguments = ["plan", "--model", tiny_model, "--page-size", "16", "--max-context", "64"]
    assert main(arguments) == 0
    assert "up to 1 GiB on a CPU" in capsys.readouterr().out
    assert main([*arguments, "--kv-gib", "1"]) == 0
    assert "For KV there are 1.00 GiB" in capsys.readouterr().out


CTRL_C_WHILE_IMPORTING = """
import signal, sys
from jaxinfer.cli import main

class Presser:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                if name == "numpy":  # what modules that are not Python make of it
                    raise ImportError("Encountered an error while initializing the extension.")
                raise

sys.meta_path.insert(0, Presser())
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with Ctrl-C ignored
sys.exit(main(["info"]))
"""


@pytest.mark.parametrize("module", ["jaxinfer.cli._interrupt", "jaxinfer.cli._generate", "jax", "numpy"])
def test_ctrl_c_while_importing_is_silent(module):
    done = run(module, code=CTRL_C_WHILE_IMPORTING)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
