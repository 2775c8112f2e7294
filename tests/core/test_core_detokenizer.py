"""Incremental text against the text of all ids at once, with decoders of the `tokenizers` library."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxinfer.core.detokenizer import IncrementalDetokenizer

TEXT = "The quick brown fox 😀 jumps über 日本語 — naïve café, 한국어 👩‍👩‍👧 done.\n  Indented\ttext " * 3


class Decoder:
    """Counts how many ids are decoded."""

    def __init__(self, backend):
        self.backend = backend
        special = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in special.items() if token.special)
        self.decoded = 0

    def decode(self, ids, skip_special_tokens=True):
        self.decoded += len(ids)
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)


def byte_level(vocab_size):
    """A byte-level BPE: with 256 entries every token is a byte, with more some merges cross character borders."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size + 2, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator([TEXT], trainer)
    return backend


def sentencepiece_like():
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁leading", "▁x", "▁The", "▁quick", "x", "qu", "ick", "e", "日", "▁▁"]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return backend


BYTES = Decoder(byte_level(256))
MERGED = Decoder(byte_level(400))
PIECES = Decoder(sentencepiece_like())


def stream(decoder, ids, prompt=(), skip=True):
    detokenizer = IncrementalDetokenizer(decoder, prompt, skip)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("decoder", [BYTES, MERGED], ids=["bytes", "merged"])
def test_text_comes_whole_and_never_half_a_character(decoder):
    ids = decoder.backend.encode(TEXT).ids
    deltas = stream(decoder, ids)
    assert "".join(deltas) == TEXT
    assert not any("�" in delta for delta in deltas)
    assert deltas[-1] == ""


def test_emoji_appears_with_its_last_byte():
    ids = BYTES.backend.encode("a😀b").ids
    assert stream(BYTES, ids) == ["a", "", "", "", "😀", "b", ""]


def test_cost_per_token_does_not_grow():
    ids = BYTES.backend.encode(TEXT).ids
    costs = []
    for repeats in (1, 20):
        BYTES.decoded = 0
        stream(BYTES, ids * repeats)
        costs.append(BYTES.decoded / (len(ids) * repeats))
    assert costs[1] < 1.1 * costs[0]
    assert costs[1] < 20


@pytest.mark.parametrize("decoder", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_cost_is_bounded_for_bytes_that_never_become_a_character(decoder):
    token = next(i for i in range(3, 256) if decoder.backend.decode([i]) == "�")
    decoder.decoded = 0
    deltas = stream(decoder, [token] * 3000)
    assert decoder.decoded < 30 * 3000
    assert set("".join(deltas)) == {"�"}


@settings(max_examples=400)
@given(st.data(), st.booleans())
@pytest.mark.parametrize("decoder", [BYTES, MERGED], ids=["bytes", "merged"])
def test_any_byte_level_ids_give_the_text_of_all_at_once(decoder, data, skip):
    size = decoder.backend.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=60))
    assert "".join(stream(decoder, ids, skip=skip)) == decoder.decode(ids, skip)


@settings(max_examples=300)
@given(st.text(max_size=30), st.text(max_size=60))
@pytest.mark.parametrize("decoder", [BYTES, MERGED], ids=["bytes", "merged"])
def test_output_continues_the_prompt(decoder, prompt, output):
    prompt_ids, output_ids = decoder.backend.encode(prompt).ids, decoder.backend.encode(output).ids
    deltas = stream(decoder, output_ids, prompt_ids)
    assert "".join(deltas) == output
    if "�" not in output:
        assert not any("�" in delta for delta in deltas)


def pieces(*names):
    return [PIECES.backend.token_to_id(name) for name in names]


def test_sentencepiece_leading_spaces():
    assert "".join(stream(PIECES, pieces("▁", "▁leading", "▁x"))) == " leading x"
    assert stream(PIECES, pieces("▁quick", "▁x"), prompt=pieces("<s>", "▁The")) == [" quick", " x", ""]
    assert stream(PIECES, pieces("▁The", "▁x"), prompt=pieces("<s>")) == ["The", " x", ""]


def test_sentencepiece_bytes_become_characters_one_by_one():
    ids = pieces("▁x", *(f"<0x{byte:02X}>" for byte in "日本😀é".encode()), "▁x")
    deltas = stream(PIECES, ids, prompt=pieces("▁The"))
    assert [delta for delta in deltas if delta] == [" x", "日", "本", "😀", "é", " x"]


WORDS = st.sampled_from(pieces("▁", "▁leading", "▁x", "▁The", "x", "qu", "ick", "e", "日", "▁▁", "</s>"))
CHARACTERS = st.characters(min_codepoint=32, exclude_categories=["Cs"], exclude_characters="�")


@settings(max_examples=400)
@given(st.data(), st.booleans())
def test_any_valid_sentencepiece_ids_give_the_text_of_all_at_once(data, skip):
    def draw_ids(most):
        ids = []
        for item in data.draw(st.lists(st.one_of(WORDS, CHARACTERS), max_size=most)):
            ids += [item] if isinstance(item, int) else pieces(*(f"<0x{byte:02X}>" for byte in item.encode()))
        return ids

    prompt, output = draw_ids(6), draw_ids(30)
    deltas = stream(PIECES, output, prompt, skip)
    whole = PIECES.decode([*prompt, *output], skip)[len(PIECES.decode(prompt, skip)) :]
    assert "".join(deltas) == whole
    assert not any("�" in delta for delta in deltas)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 269), max_size=80), st.lists(st.integers(0, 269), max_size=10))
def test_any_sentencepiece_ids_at_all_are_taken(output, prompt):
    stream(PIECES, output, prompt)


def test_special_tokens_are_skipped_or_shown():
    ids = [*BYTES.backend.encode("a").ids, 1, *BYTES.backend.encode("b").ids]
    assert stream(BYTES, ids) == ["a", "", "b", ""]
    assert stream(BYTES, ids, skip=False) == ["a", "</s>", "b", ""]


def test_unfinished_bytes_are_shown_at_the_end():
    ids = BYTES.backend.encode("a😀").ids[:-1]
    assert stream(BYTES, ids) == ["a", "", "", "", "�"]
