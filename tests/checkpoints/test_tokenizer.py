"""Tokenizers of every kind: ids, one BOS, all EOS, chat templates."""

from __future__ import annotations

import io

import pytest
import sentencepiece
from checkpoint_files import TEMPLATE, TinyGGUF, write_hf, write_tokenizer

from checkpoints import CheckpointError, open_checkpoint
from checkpoints._gguf_tokenizer import gguf_tokenizer
from checkpoints._pre_tokenizers import PRE_TOKENIZERS

CORPUS = ["hello world, this is a small text", "leading x and more words", "numbers 1 22 333 4444", "naïve café"] * 20


def tokenizer_of(source):
    with open_checkpoint(source) as checkpoint:
        return checkpoint.tokenizer()


def chat(content, role="user"):
    return [{"role": role, "content": content}]


def test_special_tokens_in_text_are_single_ids(tmp_path):
    tokenizer = tokenizer_of(TinyGGUF().write(tmp_path / "m.gguf"))
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert (ids[0], ids[-1], len(ids)) == (0, 1, 3)
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hello<|im_end|>"
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.id_to_piece(ids[1]) == "hello"
    assert tokenizer.id_to_piece(10**6) == tokenizer.id_to_piece(-1) == ""


def test_ids_out_of_range_are_a_sentence(tmp_path):
    tokenizer = tokenizer_of(TinyGGUF().write(tmp_path / "m.gguf"))
    for ids in ([-1], [1 << 40]):
        with pytest.raises(CheckpointError, match="token ids must lie"):
            tokenizer.decode(ids)


def test_pre_tokenizer_named_by_the_file_decides_the_split(tmp_path):
    split = tokenizer_of(TinyGGUF(pre="smollm").write(tmp_path / "a.gguf"))
    joined = tokenizer_of(TinyGGUF(pre="gpt-2").write(tmp_path / "b.gguf"))
    assert len(split.encode("12")) == 2
    assert len(joined.encode("12")) == 1
    # Digits leave the space before them with the spaces: two spaces are one token.
    assert len(split.encode("  1")) == 2
    unknown = TinyGGUF(pre="martian").write(tmp_path / "c.gguf")
    with pytest.raises(CheckpointError, match="'martian' is not supported"):
        tokenizer_of(unknown)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [("qwen2", ["a", "1", "2", "3", "4", " b", "'LL", "\n\n"]), ("llama-bpe", ["a", "123", "4", " b", "'LL", "\n\n"])],
)
def test_word_split_of_qwen2_and_llama3(tmp_path, pre, pieces):
    split = PRE_TOKENIZERS[pre].build()
    assert [
        piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in split.pre_tokenize_str("a1234 b'LL\n\n")
    ] == pieces
    tokenizer_of(TinyGGUF(pre=pre).write(tmp_path / "m.gguf"))


def test_qwen2_normalizes_and_llama3_adds_bos(tmp_path):
    qwen = tokenizer_of(TinyGGUF(pre="qwen2").write(tmp_path / "a.gguf"))
    assert qwen.encode("e\u0301") == qwen.encode("\u00e9")
    llama = tokenizer_of(TinyGGUF(pre="llama-bpe", add_bos=None).write(tmp_path / "b.gguf"))
    assert llama.encode("hello")[0] == 0
    assert llama.adds_bos


@pytest.mark.parametrize("text", ["hello", "", "<|im_start|>hello", "<|im_start|><|im_start|>hello"])
def test_exactly_one_bos_whatever_the_text_holds(tmp_path, text):
    for tokenizer in (
        tokenizer_of(TinyGGUF(add_bos=True).write(tmp_path / "m.gguf")),
        bos_tokenizer(tmp_path / "hf", adds_bos=True),
        bos_tokenizer(tmp_path / "hf2", adds_bos=False, add_bos_token=True),
    ):
        assert tokenizer.encode(text).count(0) == 1
        assert tokenizer.encode(text)[0] == 0


def bos_tokenizer(directory, **settings):
    write_hf(directory)
    write_tokenizer(directory, **settings)
    return tokenizer_of(directory)


@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"])
def test_exactly_one_bos_in_chats(tmp_path, template):
    for tokenizer in (
        tokenizer_of(TinyGGUF(add_bos=True, template=template).write(tmp_path / "m.gguf")),
        bos_tokenizer(tmp_path / "hf", adds_bos=True, chat_template=template),
    ):
        ids = tokenizer.encode_chat(chat("hello"))
        assert ids == [0, *tokenizer.encode("hello", add_special_tokens=False)]


def test_no_bos_where_the_model_wants_none(tmp_path):
    for tokenizer in (
        tokenizer_of(TinyGGUF(add_bos=False).write(tmp_path / "m.gguf")),
        bos_tokenizer(tmp_path / "hf", adds_bos=True, add_bos_token=False),
    ):
        assert 0 not in tokenizer.encode("hello")
        # Two of its tokens in a row are text like any other then.
        assert tokenizer.encode("<|im_start|><|im_start|>") == [0, 0]


def test_null_bos_token_is_respected(tmp_path):
    write_hf(tmp_path / "m", bos_token_id=3)
    write_tokenizer(tmp_path / "m", bos_token=None)
    assert tokenizer_of(tmp_path / "m").bos_id is None


def test_eos_of_generation_config_config_and_tokenizer(tmp_path):
    assert tokenizer_of(write_hf(tmp_path / "m")).eos_ids == (7, 5, 6, 1)


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    import tokenizers

    directory = write_hf(tmp_path / "m")
    built = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    built.enable_truncation(2)
    built.enable_padding(length=50)
    built.save(str(directory / "tokenizer.json"))
    assert len(tokenizer_of(directory).encode("hello hello hello")) not in (2, 50)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


TEXTS = ["hello world", " leading x", "leading x", "  two", "naïve 你好 😀", "numbers 1 22 333", "a\n\tb", "", " "]


def sentencepiece_directory(directory, model_file, **settings):
    import json
    import shutil

    write_hf(directory)
    (directory / "tokenizer.json").unlink()
    shutil.copy(model_file, directory / "tokenizer.model")
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | settings))
    return tokenizer_of(directory)


def test_sentencepiece_model_gives_the_librarys_ids(tmp_path, model_file):
    tokenizer = sentencepiece_directory(tmp_path / "m", model_file)
    library = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (7, 5, 6, 2))
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *library.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == library.decode(library.encode(text)) == text
    ids = tokenizer.encode("hello</s> world", add_special_tokens=False)
    assert ids == [*library.encode("hello"), 2, *library.encode(" world")]
    assert {0, 1, 2} <= tokenizer.special_ids


def test_sentencepiece_without_a_space_after_special_tokens(tmp_path, model_file):
    tokenizer = sentencepiece_directory(tmp_path / "m", model_file, legacy=False)
    ids = tokenizer.encode("</s>hello", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "</s>hello"
    assert tokenizer.id_to_piece(ids[1])[0] == "h"


def test_sentencepiece_added_tokens(tmp_path, model_file):
    added = {"339": {"content": "<|x|>", "special": True}, "oops": {"content": "y"}, "7": "z"}
    tokenizer = sentencepiece_directory(tmp_path / "m", model_file, added_tokens_decoder=added)
    assert 339 in tokenizer.encode("a<|x|>b")
    assert 339 in tokenizer.special_ids


def test_broken_sentencepiece_model(tmp_path, model_file):
    broken = tmp_path / "broken.model"
    broken.write_bytes(b"\x00\x01nonsense")
    with pytest.raises(CheckpointError, match="not a readable sentencepiece model"):
        sentencepiece_directory(tmp_path / "m", broken)


def gguf_metadata(model_file, **more):
    import numpy as np

    library = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    size = range(library.get_piece_size())

    def kind(i):
        return 2 if library.is_unknown(i) else 3 if library.is_control(i) else 6 if library.is_byte(i) else 1

    return library, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [library.id_to_piece(i) for i in size],
        "tokenizer.ggml.scores": np.array([library.get_score(i) for i in size], np.float32),
        "tokenizer.ggml.token_type": np.array([kind(i) for i in size], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | more


def test_scored_gguf_vocabulary_gives_sentencepieces_ids(model_file):
    library, metadata = gguf_metadata(model_file)
    tokenizer = gguf_tokenizer(metadata, [], "m.gguf")
    for text in TEXTS[:-2]:
        assert tokenizer.encode(text) == [1, *library.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # One space in front belongs to the encoding, the piece that is only a space does not.
    pieces = [library.piece_to_id(piece) for piece in ("\u2581", "\u2581more", "\u2581x")]
    assert 0 not in pieces
    assert tokenizer.decode(pieces) == library.decode(pieces) == " more x"


def test_scored_gguf_vocabulary_without_a_space_in_front(model_file):
    _, metadata = gguf_metadata(model_file, **{"tokenizer.ggml.add_space_prefix": False})
    tokenizer = gguf_tokenizer(metadata, [], "m.gguf")
    assert tokenizer.id_to_piece(tokenizer.encode("hello", False)[0])[0] == "h"
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
        ({"tokenizer.ggml.tokens": None}, "has no tokenizer"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "same token twice"),
        ({"tokenizer.ggml.scores": None}, "one score per token"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["zzz qqq"]},
            "inconsistent",
        ),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": []}, "does not say how its tokenizer splits"),
        ({"tokenizer.ggml.model": "gpt2"}, "no merges"),
    ],
)
def test_broken_gguf_tokenizers(model_file, change, words):
    _, metadata = gguf_metadata(model_file, **change)
    with pytest.raises(CheckpointError, match=words):
        gguf_tokenizer(metadata, [], "m.gguf")


def test_named_templates_and_template_files(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    tokenizer = bos_tokenizer(tmp_path / "a", chat_template=named)
    assert tokenizer.apply_chat_template(chat("x")) == "plain"
    assert tokenizer.apply_chat_template(chat("x"), tools=[{"type": "function"}]) == "1 tools"
    (tmp_path / "a" / "chat_template.jinja").write_text("from the file")
    assert tokenizer_of(tmp_path / "a").apply_chat_template(chat("x")) == "from the file"
    assert bos_tokenizer(tmp_path / "b").chat_template == TEMPLATE


def test_text_that_is_not_unicode_is_a_sentence(tmp_path):
    tokenizer = tokenizer_of(TinyGGUF().write(tmp_path / "m.gguf"))
    with pytest.raises(CheckpointError, match=r"not valid Unicode at 'caf\\udce9'"):
        tokenizer.encode("caf\udce9")
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(CheckpointError, match="not valid Unicode"):
        tokenizer.encode_chat(chat("\ud800"))


def test_content_in_parts_becomes_text(tmp_path):
    tokenizer = tokenizer_of(TinyGGUF().write(tmp_path / "m.gguf"))
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
    assert tokenizer.apply_chat_template(chat(parts)) == "<hello\nworld>"
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert tokenizer.apply_chat_template([*chat("hello"), call]) == "<hello><None>"


@pytest.mark.parametrize(
    "content", [None, 5, {"text": "a"}, ["a"], [{"type": "image_url", "image_url": "x"}], [{"type": "text"}]]
)
def test_content_that_is_no_text(tmp_path, content):
    tokenizer = tokenizer_of(TinyGGUF().write(tmp_path / "m.gguf"))
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(CheckpointError, match="the content of message 0"):
        tokenizer.encode_chat(chat(content))
