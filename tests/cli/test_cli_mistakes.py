"""Every mistake a user can make ends in one sentence and exit code 2."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.numpy
from tiny_model import SMALL, write_model

from jaxinfer.cli import _bench


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nonsense"], "'nonsense'"),
        (["generate", "hi", "--dtype", "float8"], "--dtype"),
        (["generate", "hi", "--attention", "magic"], "--attention"),
        (["generate", "hi", "--mode", "sometimes"], "--mode"),
        (["generate", "hi", "--wrong"], "--wrong; see `jaxinfer generate --help`"),
        (["bench", "steps", "--wrong"], "--wrong; see `jaxinfer bench steps --help`"),
        (["--wrong"], "--wrong; see `jaxinfer --help`"),
        (["generate", "--model", "", "hi"], "empty"),
        (["generate", "hi", "--temp", "0"], "--temp"),  # no abbreviations
        (["generate", "hi", "--temperature", "warm"], "'warm'"),
        (["generate", "hi", "--max-tokens", "1.5"], "'1.5'"),
        (["generate", "hi", "--logit-bias", "3"], "ID=BIAS"),
        (["generate", "hi", "--logit-bias", "x=3"], "'x'"),
        (["generate", "hi", "--stop-token-ids", "1,,2"], "''"),
        (["generate", "hi", "--prompt-file", "/no/such/file"], "/no/such/file"),
        (["generate", "hi", "--prompt-file", "/"], "/: Is a directory"),
        (["generate", ""], "empty"),
        (["generate", "hi", ""], "empty"),
        (["generate", "hi", "--raw", "--system", "Be kind."], "--system"),
        (["generate", "hi", "--logprobs", "3"], "--json"),
        (["generate", "\udcff"], "UTF-8"),
        (["bench"], "WHAT"),
        (["bench", "steps", "--batch", "0"], "'0'"),
        (["bench", "steps", "--batch", "1,two"], "'two'"),
        (["convert", "only-one"], "DST"),
        (["generate", "hi", "--policy", "priority"], "--policy"),  # prompts have no priority here
        (["generate", "hi", "--trace", "/nowhere/out.json"], "/nowhere/out.json: No such file"),
        (["generate", "hi", "--trace", "same", "--report", "same"], "give two files"),
        (["bench", "serve", "--metrics-port", "70000"], "'70000' is not a port"),
    ],
)
def test_arguments(refusal, arguments, named):
    assert named in refusal(*arguments)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature must be a finite number"),
        (["--temperature", "inf"], "temperature must be a finite number"),
        (["--top-p", "1.5"], "top_p"),
        (["--top-k", "-2"], "top_k"),
        (["--min-p", "2"], "min_p"),
        (["--repetition-penalty", "0"], "repetition_penalty"),
        (["--presence-penalty", "3"], "presence_penalty"),
        (["--frequency-penalty", "-3"], "frequency_penalty"),
        (["--n", "0"], "n must be"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--max-tokens", "5", "--min-tokens", "6"], "min_tokens"),
        (["--stop", ""], "stop"),
        (["--logit-bias", "5=1000"], "logit_bias"),
        (["--json", "--logprobs", "21"], "logprobs"),
    ],
)
def test_bad_parameters_need_no_model(refusal, monkeypatch, options, named):
    monkeypatch.setattr("jaxinfer.cli._serving.open_checkpoint", lambda *_, **__: pytest.fail("the model was opened"))
    assert named in refusal("generate", "hi", *options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-context", "100000"], "100000"),
        (["--max-context", "0"], "max_context"),
        (["--page-size", "7"], "page_size"),
        (["--num-pages", "1"], "num_pages"),
        (["--num-pages", "3000000000"], "3000000000"),
        (["--kv-cache-gib", "0"], "kv_cache_gib"),
        (["--host-cache-gib", "-1"], "host_cache_gib"),
        (["--host-cache-gib", "1e7"], "GiB of memory"),
        (["--logit-bias", "999=1"], "999"),
        (["--stop-token-ids", "160"], "160"),
    ],
)
def test_options_that_do_not_fit_the_model(refusal, monkeypatch, tiny_model, options, named):
    refuse_building(monkeypatch)
    assert named in refusal("generate", "--model", tiny_model, "hi", *options)


def test_a_prompt_over_the_context(refusal, monkeypatch, tiny_model):
    refuse_building(monkeypatch)
    sentence = refusal("generate", "--model", tiny_model, "x" * 100, *SMALL)
    assert "64" in sentence
    assert "shorten" in sentence


def test_a_request_over_the_cache(refusal, monkeypatch, tiny_model):
    refuse_building(monkeypatch)
    assert "cache" in refusal("generate", "--model", tiny_model, "hi", "--num-pages", "3", "--max-tokens", "40", *SMALL)


def test_a_kernel_that_cannot_run(refusal, tiny_model):
    sentence = refusal("generate", "--model", tiny_model, "hi", "--attention", "pallas_mosaic_tpu", *SMALL)
    assert "needs a tpu device" in sentence


# --- models ----------------------------------------------------------------------------------------------------------


def refuse_building(monkeypatch):
    monkeypatch.setattr(
        "jaxinfer.engine.build.build_engine", lambda *_: pytest.fail("the engine was built before the refusal")
    )


def bad_model(tmp_path: Path, kind: str) -> Path:
    """A model with one fault."""
    if kind == "missing":
        return tmp_path / "nothing"
    if kind in ("truncated.gguf", "not.gguf", "empty.gguf"):
        content = {"truncated.gguf": b"GGUF\x03\0\0\0\x01\0\0", "not.gguf": b"hello, world" * 100, "empty.gguf": b""}
        path = tmp_path / kind
        path.write_bytes(content[kind])
        return path
    if kind == "empty directory":
        return tmp_path
    model = write_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    weights = model / "model.safetensors"
    match kind:
        case "unknown architecture":
            config |= {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
        case "contradicting config":
            config |= {"num_key_value_heads": 3}
        case "missing tensor":
            tensors = safetensors.numpy.load_file(weights)
            del tensors["model.layers.1.mlp.up_proj.weight"]
            safetensors.numpy.save_file(tensors, weights)
        case "truncated weights":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "broken config":
            (model / "config.json").write_text("{")
            return model
        case "no tokenizer":
            (model / "tokenizer.json").unlink()
        case "bad generation config":
            (model / "generation_config.json").write_text('{"do_sample": true, "temperature": "hot"}')
    (model / "config.json").write_text(json.dumps(config))
    return model


UNREADABLE = {
    "missing": "no such file",
    "truncated.gguf": "truncated.gguf",
    "not.gguf": "not.gguf",
    "empty.gguf": "empty.gguf",
    "empty directory": "checkpoint directory",
    "truncated weights": "model.safetensors",
    "broken config": "config.json",
}
NOT_RUNNABLE = {
    "unknown architecture": "MambaForCausalLM",
    "contradicting config": "heads",
    "missing tensor": "model.layers.1.mlp.up_proj.weight",
    "no tokenizer": "tokenizer",
}


@pytest.mark.parametrize("kind", [*UNREADABLE, *NOT_RUNNABLE, "bad generation config"])
def test_models_to_generate_with(refusal, tmp_path, kind):
    model = str(bad_model(tmp_path, kind))
    sentence = refusal("generate", "--model", model, "hi")
    assert (UNREADABLE | NOT_RUNNABLE | {"bad generation config": "generation_config.json"})[kind] in sentence


@pytest.mark.parametrize("kind", [*UNREADABLE, *NOT_RUNNABLE])
def test_models_to_measure(refusal, tmp_path, kind):
    model = str(bad_model(tmp_path, kind))
    assert (UNREADABLE | NOT_RUNNABLE)[kind] in refusal("bench", "steps", "--model", model)


@pytest.mark.parametrize("kind", UNREADABLE)
def test_models_to_convert(refusal, tmp_path, kind):
    model, destination = str(bad_model(tmp_path, kind)), tmp_path / "converted"
    assert UNREADABLE[kind] in refusal("convert", model, str(destination))
    assert not destination.exists()


def test_convert_does_not_overwrite(refusal, tiny_model, tmp_path):
    assert "exists already" in refusal("convert", tiny_model, str(tmp_path))


def test_a_system_message_needs_a_template(refusal, tmp_path):
    model = str(write_model(tmp_path / "model", template=None))
    assert "chat template" in refusal("generate", "--model", model, "hi", "--system", "Be kind.")


def test_a_template_that_refuses(refusal, tmp_path):
    model = str(write_model(tmp_path / "model", template="{{ raise_exception('Only poems.') }}"))
    assert "Only poems" in refusal("generate", "--model", model, "hi")


def test_no_prompt_and_no_terminal(refusal, standard_input):
    standard_input(b"")
    assert "no prompt" in refusal("generate")
    standard_input(b"\n")
    assert "no prompt" in refusal("generate")


def test_input_that_is_not_text(refusal, standard_input, tmp_path):
    standard_input(b"\xff\xfe")
    assert "Standard input is not UTF-8" in refusal("generate")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert "latin is not UTF-8" in refusal("generate", "--prompt-file", str(tmp_path / "latin"))


def test_what_a_chat_cannot_do(refusal, standard_input, tmp_path):
    standard_input(b"", terminal=True)
    assert "--json" in refusal("generate", "--json")
    assert "--raw" in refusal("generate", "--raw")
    assert "--n" in refusal("generate", "--n", "2")
    model = str(write_model(tmp_path / "model", template=None))
    assert "no chat template" in refusal("generate", "--model", model)


def test_a_hub_model_offline():
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"}
    command = [sys.executable, "-m", "jaxinfer.cli", "generate", "--model", "nobody/nothing", "hi"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("jaxinfer: nobody/nothing: ")
    assert done.stderr.count("\n") == 1
    assert "offline" in done.stderr or "go online" in done.stderr


def test_a_backend_that_is_not_there():
    environment = os.environ | {"JAX_PLATFORMS": "abacus"}
    command = [sys.executable, "-m", "jaxinfer.cli", "info"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("jaxinfer: jax finds no device")
    assert done.stderr.count("\n") == 1


def test_a_trial_is_of_the_engine_that_was_asked_for(refusal, monkeypatch, tiny_model):
    refuse_building(monkeypatch)
    seen = {}
    monkeypatch.setattr("jaxinfer.engine.build.Engine", lambda *_, **settings: seen.update(settings) or FakeTrial())
    asked = ("--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--mode", "static")
    assert "on trial" in refusal("generate", "--model", tiny_model, "hi", *asked)
    asked_for = {"mode": "static", "enable_prefix_caching": False, "enable_chunked_prefill": False}
    assert seen == seen | asked_for


class FakeTrial:
    """Refuses every request."""

    def add_request(self, *_):
        raise ValueError("on trial.")


COMPILE = ("compile", "--target", "v5e-1")


def test_compile_prints_nothing_before_a_mistake(refusal, monkeypatch, tiny_model):
    def compile_report(config, limits, *_):
        raise ValueError(f"{limits.max_context} positions.")
        yield

    monkeypatch.setattr("jaxinfer.runtime.compiler_environment.compiler_environment", lambda _: {})
    monkeypatch.setattr("jaxinfer.runtime.aot.compile_report", compile_report)
    longest = json.loads((Path(tiny_model) / "config.json").read_text())["max_position_embeddings"]
    assert longest < 2048
    assert refusal(*COMPILE, "--model", tiny_model) == f"jaxinfer: {longest} positions.\n"
    told = refusal(*COMPILE, "--model", tiny_model, "--max-context", "2048")
    assert f"made for {longest}" in told


def test_steps_are_timed_at_sizes_that_the_model_has():
    prefills = {"prefill_rows": (1,), "prefill_context": (0,)}
    given = argparse.Namespace(batch=(1,), context=None, prefill=None, **prefills)
    sizes = _bench._sizes(given, 100)
    assert (sizes.contexts, sizes.prefills) == ((100,), (100,))
    sizes = _bench._sizes(given, 4096)
    assert (sizes.contexts, sizes.prefills) == ((128,), (512,))
    sizes = _bench._sizes(argparse.Namespace(batch=(1,), context=(300,), prefill=(400,), **prefills), 100)
    assert (sizes.contexts, sizes.prefills) == ((300,), (400,))
