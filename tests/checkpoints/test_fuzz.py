"""Damaged files by the thousand: one sentence or a working checkpoint, bounded memory and time, nothing else."""

from __future__ import annotations

import lzma
import re
import struct
import tempfile
import time
from functools import cache
from pathlib import Path

import hypothesis.strategies as st
import pytest
from checkpoint_files import TinyGGUF, write_hf
from damage import KINDS, apply
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings

from checkpoints import CheckpointError, open_checkpoint
from checkpoints._chat_template import render_chat

GOLDEN = Path(__file__).parent / "golden" / "gguf"
FREE_BYTES = 64 << 20
SECONDS = 10
PLACES = st.one_of(st.integers(0, 100), st.integers(0, 3000), st.integers(0, 1 << 20))
CHANGES = st.lists(
    st.one_of(st.just("field"), st.just("field"), st.sampled_from(KINDS)).flatmap(
        lambda kind: st.tuples(st.just(kind), PLACES, st.integers(0, 1 << 16))
    ),
    min_size=1,
    max_size=4,
)


@cache
def originals() -> dict[str, dict[str, bytes]]:
    """The undamaged checkpoints: their files by name, one `m.gguf` or what a directory holds."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        result = {
            "tiny": {"m.gguf": TinyGGUF().write(root / "a.gguf").read_bytes()},
            "tiny v2": {"m.gguf": version_2(TinyGGUF(kind=Kind.Q8_0, pre="qwen2").write(root / "b.gguf"))},
        }
        for name in ("deepseek-v3", "gpt-oss", "gemma2", "gpt2", "mixtral"):
            result[name] = {"m.gguf": lzma.decompress((GOLDEN / f"{name}.gguf.xz").read_bytes())}
        for name, shards in (("single", 1), ("sharded", 3)):
            directory = write_hf(root / name, shards=shards)
            result[name] = {path.name: path.read_bytes() for path in directory.iterdir()}
        return result


def version_2(path: Path) -> bytes:
    """The same file as version 2, which differs in the number only."""
    return path.read_bytes()[:4] + struct.pack("<I", 2) + path.read_bytes()[8:]


def use(source: Path) -> None:
    """All that the engine does with a checkpoint before it computes."""
    with open_checkpoint(source) as checkpoint:
        for name, info in checkpoint.tensors.items():
            assert checkpoint.read(name).shape == info.shape
            checkpoint.read_quantized(name)
        tokenizer = checkpoint.tokenizer()
        tokenizer.decode(tokenizer.encode("hello <|im_end|> 12"))
        if tokenizer.chat_template:
            # What `encode_chat` does, without a process for every file.
            tokenizer.encode(render_chat(tokenizer.chat_template, {"messages": [{"role": "user", "content": "hi"}]}))


def status(key: str) -> int:
    """A number of this process's memory in bytes."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found
    return int(found[1]) << 10


def check(files: dict[str, bytes], damaged: str, changes: list[tuple]) -> None:
    """Damage one file of a checkpoint and use it."""
    content = files[damaged]
    for change in changes:
        content = apply(content, change)
    with tempfile.TemporaryDirectory(prefix="fuzz") as scratch:
        root = Path(scratch) / "m"
        root.mkdir()
        for name, original in files.items():
            (root / name).write_bytes(content if name == damaged else original)
        size = sum(path.stat().st_size for path in root.iterdir())
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of memory so far
        before, started = status("VmRSS"), time.process_time()
        try:
            use(root / "m.gguf" if "m.gguf" in files else root)
        except CheckpointError as error:
            assert_one_sentence(str(error))
        assert time.process_time() - started < SECONDS  # of computing: the machine may be busy
        assert status("VmHWM") - before < 2 * size + FREE_BYTES


def assert_one_sentence(text: str) -> None:
    assert "\n" not in text
    assert text.endswith(".")
    assert len(text) < 800
    assert text.isprintable(), text


def fuzz(examples: int):
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )


GGUF = st.sampled_from(("tiny", "tiny", "tiny v2", "deepseek-v3", "gpt-oss", "gemma2", "gpt2", "mixtral"))
DIRECTORY = st.sampled_from(("single", "sharded"))
SHARED = [(GGUF, "m.gguf"), (DIRECTORY, r".*\.safetensors"), (DIRECTORY, r".*\.json")]


def run(examples: int, names: st.SearchStrategy[str], pattern: str) -> None:
    @fuzz(examples)
    @given(names, st.integers(0, 9), CHANGES)
    def example(name: str, number: int, changes: list[tuple]) -> None:
        files = originals()[name]
        possible = sorted(file for file in files if re.fullmatch(pattern, file))
        check(files, possible[number % len(possible)], changes)

    example()


@pytest.mark.parametrize(("names", "pattern"), SHARED, ids=["gguf", "safetensors", "json"])
def test_a_thousand_damaged_files(names, pattern):
    run(340, names, pattern)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("names", "pattern"), SHARED, ids=["gguf", "safetensors", "json"])
def test_ten_thousand_damaged_files(names, pattern):
    run(3400, names, pattern)


def test_the_originals_are_whole(tmp_path):
    for name, files in originals().items():
        root = tmp_path / name
        root.mkdir()
        for file, content in files.items():
            (root / file).write_bytes(content)
        use(root / "m.gguf" if "m.gguf" in files else root)
