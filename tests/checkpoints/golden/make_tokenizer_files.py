"""Write tokenizers/ and its ids: `python make_tokenizer_files.py MODEL.gguf` where transformers and sentencepiece are.

tokenizers/ gets three small tokenizers, trained on `varied_strings` from fixed seeds, as Hugging Face folders:
`fast` (tokenizer.json with added tokens), `llama` and `gemma` (tokenizer.model).  `ids.json` gets for each of them,
for `llama` with `legacy` on, and for the default model's GGUF file, what transformers makes of the 2,000 strings: the
first eight digits of the SHA-256 of the ids as JSON, and likewise of the text they decode to.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from varied_strings import varied_strings

HERE = Path(__file__).resolve().parent / "tokenizers"


def digest(value: object) -> str:
    """What stands for a list of ids or a text."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]


def write_fast(directory: Path) -> None:
    """A byte-level tokenizer.json with special and added tokens of every kind."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    built.train_from_iterator(varied_strings(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<|im_start|>", eos_token="<|im_end|>")
    fast.add_tokens([AddedToken("<|x|>", lstrip=True, rstrip=True), AddedToken("[INST]", single_word=True), "the"])
    fast.save_pretrained(directory)


def write_sentencepiece(directory: Path, *, dummy_prefix: bool, **settings: object) -> None:
    """A tokenizer.model with byte fallback and the settings of its class."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in varied_strings() if text.strip() and "\0" not in text]),
        model_writer=model,
        vocab_size=1600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=dummy_prefix,
        hard_vocab_limit=False,
        character_coverage=0.98,
        num_threads=1,
        minloglevel=2,
        **({} if dummy_prefix else {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}),
        **({} if dummy_prefix else {"bos_piece": "<bos>", "eos_piece": "<eos>", "pad_piece": "<pad>"}),
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def row(tokenizer: PreTrainedTokenizerFast, strings: list[str]) -> dict[str, str]:
    """The digests of all strings, one after the other."""
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in strings]
    return {
        "ids": "".join(map(digest, ids)),
        "decoded": "".join(digest(tokenizer.decode(one, clean_up_tokenization_spaces=False)) for one in ids),
    }


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    options = parser.parse_args()
    write_fast(HERE / "fast")
    llama = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "legacy": False}
    write_sentencepiece(HERE / "llama", dummy_prefix=True, tokenizer_class="LlamaTokenizer", **llama)
    gemma = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    write_sentencepiece(
        HERE / "gemma", dummy_prefix=False, tokenizer_class="GemmaTokenizer", add_bos_token=True, **gemma
    )
    strings = varied_strings()
    golden = {name: row(AutoTokenizer.from_pretrained(HERE / name), strings) for name in ("fast", "llama", "gemma")}
    # Llama 2's published tokenizer.json prepends the space to every text between special tokens, as llama.cpp does.
    legacy = AutoTokenizer.from_pretrained(HERE / "llama")
    legacy.backend_tokenizer.pre_tokenizer = None
    legacy.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    golden["llama-legacy"] = row(legacy, strings)
    smollm = AutoTokenizer.from_pretrained(options.model.parent, gguf_file=options.model.name)
    # transformers ignores tokenizer.ggml.pre, which says smollm: every digit is split off first.
    digits = pre_tokenizers.Digits(individual_digits=True)
    smollm.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    golden["smollm2"] = row(smollm, strings)
    (HERE / "ids.json").write_text(json.dumps(golden, indent=0) + "\n")


if __name__ == "__main__":
    main()
