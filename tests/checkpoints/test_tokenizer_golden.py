"""Ids of 2,000 varied strings, for every kind of tokenizer, against what transformers made of the same files."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from checkpoint_files import write_hf

from checkpoints import DEFAULT_MODEL, open_checkpoint
from checkpoints._gguf_tokenizer import gguf_tokenizer

GOLDEN = Path(__file__).parent / "golden"
sys.path.insert(0, str(GOLDEN))
from varied_strings import varied_strings  # noqa: E402

STRINGS = varied_strings()
EXPECTED = json.loads((GOLDEN / "tokenizers" / "ids.json").read_text())


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]


def assert_ids(tokenizer, kind: str, strings: list[str] = STRINGS) -> None:
    """Compare ids and decoded texts of some of the strings; shows the first ones that differ."""
    golden = {key: [row[i : i + 8] for i in range(0, len(row), 8)] for key, row in EXPECTED[kind].items()}
    assert len(golden["ids"]) == len(golden["decoded"]) == len(STRINGS) == 2000
    places = {text: place for place, text in enumerate(STRINGS)}
    ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in strings}
    wrong = [text for text, row in ids.items() if digest(row) != golden["ids"][places[text]]]
    assert not wrong, (len(wrong), wrong[:10])
    texts = {text: tokenizer.decode(row, skip_special_tokens=False) for text, row in ids.items()}
    wrong = [(text, shown) for text, shown in texts.items() if digest(shown) != golden["decoded"][places[text]]]
    assert not wrong, (len(wrong), wrong[:10])


def folder(path: Path, kind: str) -> Path:
    """A checkpoint with the tokenizer of that kind and nothing else's."""
    write_hf(path)
    (path / "tokenizer.json").unlink()
    for file in (GOLDEN / "tokenizers" / kind).iterdir():
        shutil.copy(file, path / file.name)
    return path


def as_gguf(kind: str) -> dict[str, object]:
    """The metadata that llama.cpp's converter makes of a tokenizer.model."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(GOLDEN / "tokenizers" / kind / "tokenizer.model"))
    size = range(model.get_piece_size())

    def type_of(i: int) -> int:
        return 2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in size],
        "tokenizer.ggml.scores": np.array([model.get_score(i) for i in size], np.float32),
        "tokenizer.ggml.token_type": np.array([type_of(i) for i in size], np.int32),
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_space_prefix": kind == "llama",
    }


def test_fast_tokenizer_with_added_tokens(tmp_path):
    with open_checkpoint(folder(tmp_path / "m", "fast")) as checkpoint:
        assert_ids(checkpoint.tokenizer(), "fast")


def test_gemma_tokenizer_model(tmp_path):
    with open_checkpoint(folder(tmp_path / "m", "gemma")) as checkpoint:
        assert_ids(checkpoint.tokenizer(), "gemma")


def test_llama_tokenizer_model(tmp_path):
    with open_checkpoint(folder(tmp_path / "m", "llama")) as checkpoint:
        tokenizer = checkpoint.tokenizer()
        # transformers 5 gives a text that begins with a space no other; sentencepiece, which it stands for, does.
        spaced = [text for text in STRINGS if text.startswith((" ", "\u2581"))]
        assert len(spaced) < 300
        assert_ids(tokenizer, "llama", [text for text in STRINGS if text not in set(spaced)])
        library = sentencepiece.SentencePieceProcessor(
            model_file=str(GOLDEN / "tokenizers" / "llama" / "tokenizer.model")
        )
        plain = [text for text in spaced if not any(special in text for special in ("<s>", "</s>", "<unk>"))]
        assert len(plain) > 100
        for text in plain:
            assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text)


def test_legacy_llama_tokenizer_model(tmp_path):
    directory = folder(tmp_path / "m", "llama")
    settings = json.loads((directory / "tokenizer_config.json").read_text()) | {"legacy": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with open_checkpoint(directory) as checkpoint:
        assert_ids(checkpoint.tokenizer(), "llama-legacy")


@pytest.mark.parametrize("kind", ["llama-legacy", "gemma"])
def test_gguf_files_with_scores(kind):
    assert_ids(gguf_tokenizer(as_gguf(kind.removesuffix("-legacy")), [], "m.gguf"), kind)


@pytest.mark.parametrize("kind", ["fast", "llama", "gemma"])
def test_exactly_one_bos(tmp_path, kind):
    with open_checkpoint(folder(tmp_path / "m", kind)) as checkpoint:
        tokenizer = checkpoint.tokenizer()
        if kind == "fast":
            assert not tokenizer.adds_bos
            return
        bos = tokenizer.id_to_piece(tokenizer.bos_id)
        for text in STRINGS[:200]:
            for given in (text, bos + text, bos * 3 + text):
                ids = tokenizer.encode(given)
                assert ids[0] == tokenizer.bos_id
                assert ids[1:2] != [tokenizer.bos_id] or text.startswith(bos)


@pytest.mark.model
def test_default_model_and_what_it_is_converted_to(tmp_path):
    with open_checkpoint(DEFAULT_MODEL) as checkpoint:
        tokenizer = checkpoint.tokenizer()
        assert_ids(tokenizer, "smollm2")
        folder_of_it = write_hf(tmp_path / "m")
        tokenizer.save(folder_of_it)
    with open_checkpoint(folder_of_it) as checkpoint:
        assert_ids(checkpoint.tokenizer(), "smollm2")
