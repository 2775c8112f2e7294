"""safetensors and Orbax directories, conversion between them, and what is refused."""

from __future__ import annotations

import json
import pickle
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import TinyGGUF, hf_tensors, write_hf, write_index, write_tokenizer

import checkpoints
from checkpoints import CheckpointError, convert, open_checkpoint
from checkpoints._orbax_store import write_orbax


def assert_same_tensors(checkpoint, expected):
    assert set(checkpoint.tensors) == set(expected)
    for name, value in expected.items():
        got, info = checkpoint.read(name), checkpoint.tensors[name]
        assert (got.dtype, got.shape) == (value.dtype, value.shape) == (info.dtype, info.shape)
        assert got.tobytes() == value.tobytes()
        assert info.nbytes == value.nbytes


@pytest.mark.parametrize("shards", [1, 3])
def test_safetensors_are_read_as_stored(tmp_path, shards):
    with open_checkpoint(write_hf(tmp_path / "m", shards=shards)) as checkpoint:
        assert checkpoint.format == "safetensors"
        assert checkpoint.config["model_type"] == "llama"
        assert checkpoint.generation_config == {"eos_token_id": [7, 5]}
        assert_same_tensors(checkpoint, hf_tensors())


def test_safetensors_to_orbax_is_bit_identical(tmp_path):
    source = write_hf(tmp_path / "m", shards=2)
    assert convert(source, tmp_path / "o") == tmp_path / "o"
    shutil.rmtree(source)
    with open_checkpoint(tmp_path / "o") as checkpoint:
        assert checkpoint.format == "orbax"
        assert_same_tensors(checkpoint, hf_tensors())
        assert checkpoint.read("model.norm.weight").dtype == ml_dtypes.bfloat16
        assert checkpoint.config["model_type"] == "llama"
        assert checkpoint.tokenizer().eos_ids == (7, 5, 6, 1)


def test_gguf_to_orbax_keeps_weights_config_and_tokenizer(tmp_path):
    path = TinyGGUF(add_bos=True).write(tmp_path / "m.gguf")
    convert(path, tmp_path / "o")
    with open_checkpoint(path) as before, open_checkpoint(tmp_path / "o") as after:
        assert_same_tensors(after, {name: before.read(name) for name in before.tensors})
        assert after.config == before.config | {"torch_dtype": "float32"}
        assert after.generation_config == before.generation_config
        old, new = before.tokenizer(), after.tokenizer()
        assert (old.bos_id, old.eos_ids, old.special_ids) == (new.bos_id, new.eos_ids, new.special_ids)
        messages = [{"role": "user", "content": "hello 12  you"}]
        assert old.encode_chat(messages) == new.encode_chat(messages)
        assert old.encode("hello 12") == new.encode("hello 12")


def test_convert_refuses_to_overwrite_and_leaves_nothing_half_done(tmp_path):
    source = write_hf(tmp_path / "m")
    (tmp_path / "taken").mkdir()
    with pytest.raises(CheckpointError, match="not overwritten"):
        convert(source, tmp_path / "taken")
    write_index(source, {})
    (source / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        convert(source, tmp_path / "o")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "taken"]


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "a/../../x", "", "a\0b", "..\\x"])
def test_shard_paths_cannot_leave_the_directory(tmp_path, shard):
    directory = write_hf(tmp_path / "m", shards=2)
    shutil.copy(next(directory.glob("*.safetensors")), tmp_path / "secret.safetensors")
    write_index(directory, dict.fromkeys(hf_tensors(), shard))
    with pytest.raises(CheckpointError, match=r"the file name .* leaves the directory"):
        open_checkpoint(directory)


@pytest.mark.parametrize("shard", ["x" * 300, "a/" * 3000 + "b", "\ud800", "\x1b[2J"])
def test_shards_whose_names_are_none(tmp_path, shard):
    directory = write_hf(tmp_path / "m", shards=2)
    write_index(directory, dict.fromkeys(hf_tensors(), shard))
    with pytest.raises(CheckpointError, match="is no name of a file") as caught:
        open_checkpoint(directory)
    assert str(caught.value).isprintable()


def test_what_a_file_says_is_one_line_of_bounded_length():
    text = str(CheckpointError(f"m.gguf: it says \x1b[2J{'x' * 5000}\n\tand more; get another file."))
    assert text.isprintable()
    assert len(text) < 800
    assert text.startswith("m.gguf: it says")
    assert text.endswith("and more; get another file.")


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json", "model.safetensors.index.json"])
def test_links_cannot_leave_the_directory(tmp_path, name):
    directory = write_hf(tmp_path / "m", shards=2)
    (directory / name).rename(tmp_path / name)
    (directory / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match="link that leaves"):
        open_checkpoint(directory)


def test_links_of_the_hub_cache_are_followed(tmp_path):
    repository = tmp_path / "models--a--b"
    snapshot = write_hf(repository / "snapshots" / "0123")
    (repository / "blobs").mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(repository / "blobs" / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    with open_checkpoint(snapshot) as checkpoint:
        assert_same_tensors(checkpoint, hf_tensors())


def break_header(directory):
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


def break_offsets(directory):
    header = json.dumps({"t": {"dtype": "F32", "shape": [1 << 32, 1 << 32], "data_offsets": [0, 8]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


def remove_weights(directory):
    (directory / "model.safetensors").unlink()


def leave_pickle(directory):
    remove_weights(directory)
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def leave_gguf(directory):
    remove_weights(directory)
    (directory / "a.gguf").touch()


def break_config(directory):
    (directory / "config.json").write_text('{"model_type": "llama",\n oops}')


def nest_config(directory):
    (directory / "config.json").write_text("[" * 100_000)


def list_config(directory):
    (directory / "config.json").write_text("[]")


def binary_config(directory):
    (directory / "config.json").write_bytes(b"\xff\xfe\x00")


def missing_config(directory):
    (directory / "config.json").unlink()


def missing_shard(directory):
    remove_weights(directory)
    write_index(directory, {"t": "model-00001-of-00001.safetensors"})


def odd_index(directory):
    remove_weights(directory)
    write_index(directory, {"t": 3})


def empty_orbax(directory):
    remove_weights(directory)
    (directory / "params").mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (break_header, "not a readable safetensors file"),
        (break_offsets, "not a readable safetensors file"),
        (remove_weights, "there is no model.safetensors"),
        (leave_pickle, "pickled .* refused; convert them to safetensors"),
        (leave_gguf, "name one of them, such as a.gguf"),
        (break_config, "malformed JSON at line 2"),
        (nest_config, "malformed JSON"),
        (list_config, "no JSON object"),
        (binary_config, "not UTF-8"),
        (missing_config, "config.json is missing"),
        (missing_shard, "is missing; download it"),
        (odd_index, "weight_map must map"),
        (empty_orbax, "Orbax checkpoint cannot be read"),
    ],
)
def test_damaged_directories_are_one_sentence(tmp_path, damage, words):
    directory = write_hf(tmp_path / "m")
    damage(directory)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(directory)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)


def test_links_inside_an_orbax_checkpoint_are_refused(tmp_path):
    convert(write_hf(tmp_path / "m"), tmp_path / "o")
    secret = tmp_path / "secret"
    (tmp_path / "o" / "params" / "manifest.ocdbt").rename(secret)
    (tmp_path / "o" / "params" / "manifest.ocdbt").symlink_to(secret)
    with pytest.raises(CheckpointError, match="links inside an Orbax checkpoint are refused"):
        open_checkpoint(tmp_path / "o")


def test_orbax_bomb_is_refused(tmp_path):
    # One value broadcast: it compresses to next to nothing and would fill the memory when read.
    write_hf(tmp_path / "o")
    (tmp_path / "o" / "model.safetensors").unlink()
    write_orbax(tmp_path / "o", {"t": np.zeros(1 << 28, np.uint8)})
    with pytest.raises(CheckpointError, match="far larger tensors"):
        open_checkpoint(tmp_path / "o")


def test_tensor_missing_from_its_shard(tmp_path):
    directory = write_hf(tmp_path / "m", shards=2)
    shard = next(directory.glob("*.safetensors")).name
    write_index(directory, {"model.ghost.weight": shard})
    with pytest.raises(CheckpointError, match=r"'model.ghost.weight' named by .* is not in it"):
        open_checkpoint(directory)


def test_pickles_are_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'exploded')!r}, 'w')",))

    for name in ("pytorch_model.bin", "model.pt"):
        path = tmp_path / name
        path.write_bytes(pickle.dumps(Bomb()))
        for target in (tmp_path, path):
            with pytest.raises(CheckpointError, match="refused"):
                open_checkpoint(target)
    assert not (tmp_path / "exploded").exists()


def test_unknown_sources(tmp_path):
    for source in ("no-such-model", "a" * 5000, "nul\0byte", str(tmp_path / "x" / "y" / "z")):
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(source)
        assert "\n" not in str(caught.value)


def test_hub_id_that_is_neither_cached_nor_reachable(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_, **__):
        raise LocalEntryNotFoundError("offline\nmode")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        CheckpointError, match=r"^org/name: not in the local cache and the hub cannot be reached; .*\.$"
    ):
        open_checkpoint("org/name")


def test_hub_snapshot_is_opened(tmp_path, monkeypatch):
    import huggingface_hub

    directory = write_hf(tmp_path / "m")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(directory))
    with open_checkpoint("org/name") as checkpoint:
        assert checkpoint.source == "org/name"
        assert_same_tensors(checkpoint, hf_tensors())


def test_reading_one_tensor_does_not_read_the_others(tmp_path):
    import tracemalloc

    import safetensors.numpy

    directory = write_hf(tmp_path / "m")
    (directory / "model.safetensors").unlink()
    big = {f"t{i}": np.full((1 << 20,), i, np.float32) for i in range(8)}
    safetensors.numpy.save_file(big, directory / "model.safetensors")
    del big
    tracemalloc.start()
    with open_checkpoint(directory) as checkpoint:
        for name in checkpoint.tensors:
            assert checkpoint.read(name)[0] == int(name[1:])
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    tracemalloc.stop()


def test_public_names_exist():
    assert all(getattr(checkpoints, name) is not None for name in checkpoints.__all__)


def test_tokenizer_is_missing(tmp_path):
    directory = write_hf(tmp_path / "m")
    (directory / "tokenizer.json").unlink()
    with open_checkpoint(directory) as checkpoint, pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        checkpoint.tokenizer()
    write_tokenizer(directory)
    (directory / "tokenizer.json").write_text("{}")
    with open_checkpoint(directory) as checkpoint, pytest.raises(CheckpointError, match="not a readable tokenizer"):
        checkpoint.tokenizer()
