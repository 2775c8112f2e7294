"""Conversion both ways: every bit, what transformers needs, and what the command line says."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoint_files import TinyGGUF, hf_tensors, write_hf
from gguf.constants import GGMLQuantizationType as Kind

import checkpoints.__main__
import jaxinfer.cli
from checkpoints import TARGET_FORMATS, CheckpointError, conversion_note, convert, open_checkpoint


def content(directory) -> dict[str, tuple[object, ...]]:
    """Type, shape and bytes of every tensor."""
    with open_checkpoint(directory) as checkpoint:
        return {
            name: (checkpoint.read(name).dtype, checkpoint.read(name).shape, checkpoint.read(name).tobytes())
            for name in checkpoint.tensors
        }


def more_types() -> dict[str, np.ndarray]:
    every = np.arange(256, dtype=np.uint8)
    return {
        "f8": every.view(ml_dtypes.float8_e4m3fn).reshape(16, 16),
        "f8b": every.view(ml_dtypes.float8_e5m2),
        "bf16": np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(64, 1024),
        "f16": np.arange(1 << 16, dtype=np.uint16).view(np.float16),
        "i8": every[:251].view(np.int8),
        "u8": every[:3],
        "bool": every[1:] > 7,
        "scalar": np.array(-0.0, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }


@pytest.mark.parametrize("shard_bytes", [1, 100, 10**9])
def test_round_trip_is_bit_identical(tmp_path, shard_bytes):
    source = write_hf(tmp_path / "a", shards=2)
    convert(source, tmp_path / "b", format="orbax")
    convert(tmp_path / "b", tmp_path / "c", shard_bytes=shard_bytes)
    before, after = content(source), content(tmp_path / "c")
    assert before == after == content(tmp_path / "b")
    assert after["model.norm.weight"][0] == ml_dtypes.bfloat16
    files = sorted(path.name for path in (tmp_path / "c").glob("*.safetensors"))
    assert len(files) == {1: 5, 100: 3, 10**9: 1}[shard_bytes]
    with open_checkpoint(source) as one, open_checkpoint(tmp_path / "c") as other:
        assert other.format == "safetensors"
        assert other.config == one.config | {"torch_dtype": other.config["torch_dtype"]}
        assert other.generation_config == one.generation_config
        assert other.tokenizer().encode("hello 12") == one.tokenizer().encode("hello 12")


def test_every_type_keeps_its_bits(tmp_path):
    source = write_hf(tmp_path / "a")
    safetensors.numpy.save_file(more_types(), source / "model.safetensors")
    expected = {name: (value.dtype, value.shape, value.tobytes()) for name, value in more_types().items()}
    assert content(source) == expected
    convert(source, tmp_path / "b", format="safetensors")
    assert content(tmp_path / "b") == expected
    # Orbax stores no array without elements.
    safetensors.numpy.save_file(
        {name: value for name, value in more_types().items() if value.size}, source / "model.safetensors"
    )
    convert(source, tmp_path / "c", format="orbax")
    assert content(tmp_path / "c") == {name: value for name, value in expected.items() if name != "empty"}


def test_shards_are_what_transformers_writes(tmp_path):
    source = write_hf(tmp_path / "a")
    convert(source, tmp_path / "b", format="safetensors", shard_bytes=100)
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(value.nbytes for value in hf_tensors().values())}
    assert set(index["weight_map"]) == set(hf_tensors())
    for file in set(index["weight_map"].values()):
        path = tmp_path / "b" / file
        with safetensors.safe_open(path, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert set(opened.keys()) == {name for name, shard in index["weight_map"].items() if shard == file}
        assert path.stat().st_mode == (tmp_path / "b" / "config.json").stat().st_mode


def test_gguf_to_safetensors(tmp_path):
    path = TinyGGUF(add_bos=True, kind=Kind.Q8_0).write(tmp_path / "m.gguf")
    convert(path, tmp_path / "b", format="safetensors")
    with open_checkpoint(path) as before, open_checkpoint(tmp_path / "b") as after:
        assert set(before.tensors) == set(after.tensors)
        for name in before.tensors:
            np.testing.assert_array_equal(before.read(name), after.read(name))
        assert after.config == before.config | {"torch_dtype": "float32"}
        assert after.tokenizer().encode("hello") == before.tokenizer().encode("hello")
    settings = json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    # transformers takes the BOS from here, not from add_bos_token.
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(tmp_path / "b" / "tokenizer.json"))
    assert library.encode("hello").ids == before.tokenizer().encode("hello")


def test_a_file_without_a_usable_tokenizer_is_converted_and_it_is_said(tmp_path):
    path = TinyGGUF(pre="martian").write(tmp_path / "m.gguf")
    assert "without a tokenizer" in conversion_note(convert(path, tmp_path / "b", format="safetensors"))


def test_unknown_format(tmp_path):
    with pytest.raises(CheckpointError, match=r"'pickle' is no format to write; orbax and safetensors are\."):
        convert(write_hf(tmp_path / "a"), tmp_path / "b", format="pickle")


def test_progress_counts_every_byte(tmp_path):
    steps = []
    convert(write_hf(tmp_path / "a"), tmp_path / "b", progress=lambda *step: steps.append(step))
    total = sum(value.nbytes for value in hf_tensors().values())
    assert {step[2] for step in steps} == {total}
    assert steps[-1][1] == total


@pytest.mark.parametrize("main", [checkpoints.__main__.main, jaxinfer.cli.main])
def test_command_line_converts_both_ways(tmp_path, main, capsys):
    source = write_hf(tmp_path / "a")
    assert main(["convert", str(source), str(tmp_path / "b"), "--to", "orbax"]) == 0
    assert capsys.readouterr().out == f"Wrote {tmp_path / 'b'}\n"
    assert main(["convert", str(tmp_path / "b"), str(tmp_path / "c")]) == 0
    assert content(source) == content(tmp_path / "c")


def test_formats_of_both_command_lines_are_the_librarys():
    from jaxinfer.cli._convert import FORMATS

    assert FORMATS == TARGET_FORMATS
