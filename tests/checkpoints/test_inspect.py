"""`python -m checkpoints inspect` for every format."""

from __future__ import annotations

import lzma
import shutil
from pathlib import Path

import pytest
from checkpoint_files import TinyGGUF, write_hf, write_tokenizer

from checkpoints import DEFAULT_MODEL, convert
from checkpoints.__main__ import main

GOLDEN = Path(__file__).parent / "golden"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role.') }}{% endif %}hi"


@pytest.fixture
def shown(capsys, monkeypatch):
    """Runs the command and returns what it prints, one line for each row."""
    monkeypatch.setenv("COLUMNS", "300")

    def run(source) -> str:
        assert main(["inspect", str(source)]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return "\n".join(
            " ".join(line.replace("│", " ").replace("┃", " ").split()) for line in captured.out.splitlines()
        )

    return run


def assert_rows(text: str, *rows: str) -> None:
    for row in rows:
        assert row in text.splitlines(), (row, text)


def test_safetensors(tmp_path, shown):
    directory = write_hf(tmp_path / "m", shards=3, architectures=["LlamaForCausalLM"], hidden_size=4)
    write_tokenizer(directory, adds_bos=True, chat_template=TOOLS)
    assert_rows(
        shown(directory),
        "format safetensors",
        "architecture LlamaForCausalLM",
        "hidden_size 4",
        "stored types BF16 (3 tensors, 67 values), F16 (1 tensors, 32 values), F32 (1 tensors, 4 values)",
        "model.layers.*.mlp.up_proj.weight 1 32 64 F16",
        "total 5 103 214",
        "vocabulary 265 ids, 2 special",
        "BOS 0 <|im_start|>",
        "adds BOS yes",
        f"chat template {len(TOOLS)} characters",
        "system role in the prompt",
        "tools in the prompt",
    )


def test_orbax(tmp_path, shown):
    directory = write_hf(tmp_path / "m")
    write_tokenizer(directory, chat_template=NO_SYSTEM)
    convert(directory, tmp_path / "o")
    text = shown(tmp_path / "o")
    assert_rows(text, "format orbax", "model type llama", "total 5 103 214", "tools left out")
    assert "system role the chat template refuses these messages: it says: No system role." in text


def test_gguf(tmp_path, shown):
    text = shown(TinyGGUF().write(tmp_path / "m.gguf"))
    assert_rows(
        text,
        "format gguf",
        "architecture LlamaForCausalLM",
        "rope_theta 500000.0",
        "model.layers.*.mlp.up_proj.weight 1 6,144 3,840 Q4_1",
        "system role in the prompt",
        "tools left out",
    )
    assert "stored types Q4_1 (8 tensors," in text
    assert "F32 (3 tensors, 192 values)" in text


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        (
            "deepseek-v3",
            ["n_routed_experts 8", "kv_lora_rank 16", "model.layers.*.mlp.experts.*.up_proj.weight 8 4,096 16,384 F32"],
        ),
        ("gpt2", ["n_embd 32", "transformer.h.*.attn.c_attn.weight 2 6,144 24,576 F32"]),
        ("gpt-oss", ["num_local_experts 4", "model.layers.*.mlp.experts.gate_up_proj 2 20,480 81,920 F32"]),
    ],
)
def test_other_families(tmp_path, shown, name, rows):
    path = tmp_path / "m.gguf"
    path.write_bytes(lzma.decompress((GOLDEN / "gguf" / f"{name}.gguf.xz").read_bytes()))
    assert_rows(shown(path), *rows, "chat template none")


def test_sentencepiece_and_no_tokenizer(tmp_path, shown):
    directory = write_hf(tmp_path / "m")
    (directory / "tokenizer.json").unlink()
    assert "cannot be used" in shown(directory)
    for file in (GOLDEN / "tokenizers" / "gemma").iterdir():
        shutil.copy(file, directory / file.name)
    text = shown(directory)
    assert_rows(text, "BOS 2 <bos>", "adds BOS yes", "chat template none")


@pytest.mark.model
def test_named_model(shown):
    assert_rows(
        shown(DEFAULT_MODEL),
        f"source {DEFAULT_MODEL}",
        "format gguf",
        "architecture LlamaForCausalLM",
        "num_hidden_layers 30",
        "vocabulary 49,152 ids, 17 special",
        "BOS 1 <|im_start|>",
        "adds BOS no",
        "EOS 2 <|im_end|>",
        "system role in the prompt",
    )
