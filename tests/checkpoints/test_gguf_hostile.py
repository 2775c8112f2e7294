"""Damaged and malicious GGUF files: one sentence and little memory."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from checkpoint_files import TinyGGUF, gguf_bytes, gguf_string, gguf_tensor

from checkpoints import CheckpointError, open_checkpoint

PAD = bytes(256)
LITTLE = 4 << 20


def alignment(value: int) -> bytes:
    return gguf_string("general.alignment") + struct.pack("<II", 4, value)


CASES = {
    "empty": (b"", "empty"),
    "magic": (b"PK\x03\x04" + PAD, "not a GGUF file"),
    "only magic": (b"GGUF", "truncated"),
    "version": (gguf_bytes(version=1) + PAD, "version 1 is not supported"),
    "big endian": (b"GGUF\x00\x00\x00\x03" + PAD, "big-endian"),
    "tensor count": (gguf_bytes(tensor_count=1 << 60) + PAD, "tensors, more than"),
    "key count": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + PAD, "metadata keys, more than"),
    "key length": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + PAD, "past the end"),
    "string length": (gguf_bytes(keys=[gguf_string("a") + struct.pack("<IQ", 8, 1 << 40)]) + PAD, "past the end"),
    "array length": (
        gguf_bytes(keys=[gguf_string("a") + struct.pack("<IIQ", 9, 0, 1 << 50)]) + PAD,
        "items, more than",
    ),
    "array beyond file": (gguf_bytes(keys=[gguf_string("a") + struct.pack("<IIQ", 9, 12, 1 << 20)]), "past the end"),
    "strings beyond file": (gguf_bytes(keys=[gguf_string("a") + struct.pack("<IIQ", 9, 8, 1 << 20)]), "past the end"),
    "nested array": (
        gguf_bytes(keys=[gguf_string("a") + struct.pack("<IIQ", 9, 9, 1)]) + PAD,
        "unsupported value type",
    ),
    "value type": (gguf_bytes(keys=[gguf_string("a") + struct.pack("<I", 99)]) + PAD, "unknown value type"),
    "bad text": (gguf_bytes(keys=[struct.pack("<QBB", 2, 0xFF, 0xFE)]) + PAD, "not valid UTF-8"),
    "key twice": (gguf_bytes(keys=[alignment(32), alignment(32)]) + PAD, "appears twice"),
    "alignment 0": (gguf_bytes(keys=[alignment(0)]) + PAD, "general.alignment is 0"),
    "alignment 2^30": (gguf_bytes(keys=[alignment(1 << 30)]) + PAD, "general.alignment is 1073741824"),
    "alignment 48": (gguf_bytes(keys=[alignment(48)]) + PAD, "not a power of two"),
    "n_dims": (gguf_bytes(tensor_count=1, tensors=gguf_tensor("t", [1], n_dims=10**6)) + PAD, "1000000 dimensions"),
    "dims": (gguf_bytes(tensor_count=1, tensors=gguf_tensor("t", [1 << 32, 1 << 32])) + PAD, "past the end"),
    "dim overflow": (gguf_bytes(tensor_count=1, tensors=gguf_tensor("t", [1 << 63] * 4)) + PAD, "past the end"),
    "zero dim": (gguf_bytes(tensor_count=1, tensors=gguf_tensor("t", [0, 4])) + PAD, "does not fit"),
    "tensor type": (gguf_bytes(tensor_count=1, tensors=gguf_tensor("t", [4], kind=4242)) + PAD, "unknown type 4242"),
    "block": (gguf_bytes(tensor_count=1, tensors=gguf_tensor("t", [33], kind=8)) + PAD, "32-value blocks of Q8_0"),
    "offset": (gguf_bytes(tensor_count=1, tensors=gguf_tensor("t", [4], offset=1 << 62)) + PAD, "past the end"),
    "unaligned": (gguf_bytes(tensor_count=1, tensors=gguf_tensor("t", [4], offset=4)) + PAD, "not a multiple"),
    "overlap": (
        gguf_bytes(tensor_count=2, tensors=gguf_tensor("t", [16]) + gguf_tensor("u", [4], offset=32)) + PAD,
        "overlap",
    ),
    "name twice": (gguf_bytes(tensor_count=2, tensors=gguf_tensor("t", [4]) * 2) + PAD, "appears twice"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_sentence_and_little_memory(tmp_path, name):
    content, words = CASES[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=words) as caught:
            open_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < LITTLE
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    assert len(text) < 400


def test_every_truncation_is_a_sentence(tmp_path):
    whole = TinyGGUF().write(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 9000, 97), *range(9000, len(whole), 4001), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


def test_flipped_header_bytes_never_escape_as_other_errors(tmp_path):
    whole = bytearray(TinyGGUF().write(tmp_path / "m.gguf").read_bytes())
    path = tmp_path / "flipped.gguf"
    for position in range(0, 700):
        changed = bytearray(whole)
        changed[position] ^= 0xFF
        path.write_bytes(changed)
        try:
            with open_checkpoint(path) as checkpoint:
                checkpoint.tokenizer()
        except CheckpointError:
            continue
