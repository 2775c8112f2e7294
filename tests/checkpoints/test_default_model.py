"""The default model against what transformers made of the same file."""

from __future__ import annotations

import json
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from checkpoints import DEFAULT_MODEL, fetch_named_model, open_checkpoint
from checkpoints._gguf_names import ARCHITECTURES

pytestmark = pytest.mark.model
GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2_ids.json").read_text())


@pytest.fixture(scope="module")
def checkpoint():
    with open_checkpoint(DEFAULT_MODEL) as opened:
        yield opened


def test_ids_and_texts_are_transformers_own(checkpoint):
    tokenizer = checkpoint.tokenizer()
    assert len(GOLDEN["strings"]) >= 500
    for entry in GOLDEN["strings"]:
        text, ids = entry["text"], entry["ids"]
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == entry.get("decoded", text)
        assert tokenizer.decode(ids) == entry.get("visible", text)


def test_chats_are_transformers_own(checkpoint):
    tokenizer = checkpoint.tokenizer()
    for chat in GOLDEN["chats"]:
        assert tokenizer.apply_chat_template(chat["messages"]) == chat["text"]
        assert tokenizer.encode_chat(chat["messages"]) == chat["ids"]


def test_facts(checkpoint):
    tokenizer, config = checkpoint.tokenizer(), checkpoint.config
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), 49152)
    assert not tokenizer.adds_bos
    assert sum(np.prod(info.shape) for info in checkpoint.tensors.values()) == 134_515_008
    assert (config["num_hidden_layers"], config["head_dim"], config["num_key_value_heads"]) == (30, 64, 3)
    assert config["tie_word_embeddings"] is True


@pytest.mark.slow
def test_every_tensor_is_the_packages_dequantization_bit_for_bit(checkpoint):
    names = {ARCHITECTURES["llama"].hugging_face_name(tensor.name): tensor for tensor in stored_tensors()}
    assert set(names) == set(checkpoint.tensors)
    for name, tensor in names.items():
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        got, quantized = checkpoint.read(name), checkpoint.read_quantized(name)
        if quantized is not None:
            np.testing.assert_array_equal(quantized.dequantized().view(np.uint32), got.view(np.uint32))
        if heads := 9 if ".q_proj" in name else 3 if ".k_proj" in name else 0:
            got = got.reshape(heads, 2, 32, -1).swapaxes(1, 2).reshape(got.shape)
        np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32), err_msg=name)
    assert {tensor.tensor_type.name for tensor in names.values()} == {"F32", "Q4_1", "Q8_0"}


def stored_tensors():
    return gguf.GGUFReader(fetch_named_model(DEFAULT_MODEL)).tensors


def test_opening_is_quick():
    started = time.monotonic()
    with open_checkpoint(DEFAULT_MODEL) as opened:
        opened.tokenizer()
    assert time.monotonic() - started < 5
