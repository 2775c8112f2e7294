"""How byte-level vocabularies split a text before merging, by the name that GGUF files give it.

The names (`tokenizer.ggml.pre`) and their patterns are those of llama.cpp, the patterns as the models' own
tokenizer.json have them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from checkpoints._errors import CheckpointError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_MARKED_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
# Written as escapes, because some of these letters change when a text is normalized.
_DEEPSEEK_LETTERS = (
    "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8"
    "-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)
_DEEPSEEK_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_3_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|""" + _SPACES
)
_DIGITS = "digits"


@dataclass(frozen=True)
class PreTokenizer:
    """One way to split.

    patterns: applied one after the other, each match a piece of its own; `_DIGITS` stands for every digit alone.
    gpt2_words: whether GPT-2's own pattern follows. nfc: whether the text is normalized first. ignore_merges: whether
    a piece that is in the vocabulary is taken whole. adds_bos: what a file means that does not say.
    """

    patterns: tuple[str, ...] = ()
    gpt2_words: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """As the `tokenizers` library has it."""
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Digits(individual_digits=True)
            if pattern is _DIGITS
            else pre_tokenizers.Split(Regex(pattern), behavior="isolated")
            for pattern in self.patterns
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2_words))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        """As the `tokenizers` library has it, or None."""
        return normalizers.NFC() if self.nfc else None


_GPT2 = PreTokenizer(gpt2_words=True)
_DIGITS_THEN_GPT2 = PreTokenizer((_DIGITS,), gpt2_words=True)
_THREE_DIGITS = _WORDS % "{1,3}"
_QWEN2 = PreTokenizer((_WORDS % "",), nfc=True)
_LLAMA3 = PreTokenizer((_THREE_DIGITS,), ignore_merges=True, adds_bos=True)
_GPT4O = PreTokenizer((_CASED_WORDS % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}"),))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "jina-es", "jina-de", "granite-docling"), _GPT2),
    **dict.fromkeys(("mpt", "olmo"), PreTokenizer(gpt2_words=True, nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), _DIGITS_THEN_GPT2),
    "command-r": PreTokenizer((_DIGITS,), gpt2_words=True, nfc=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": PreTokenizer((_MARKED_WORDS,)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_THREE_DIGITS,))),
    **dict.fromkeys(("glm4", "chatglm-bpe"), PreTokenizer((_THREE_DIGITS,), ignore_merges=True)),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": PreTokenizer((_CASED_WORDS % ("", "", ""),), ignore_merges=True, adds_bos=True),
    "deepseek-llm": PreTokenizer(
        ("[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, r"\s+$", _DEEPSEEK_CJK, _DIGITS),
    ),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _DIGITS)),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", _DEEPSEEK_3_CJK, _DEEPSEEK_3)),
}


def pre_tokenizer(name: object, source: str) -> PreTokenizer:
    """The splitting of that name; raises `CheckpointError` for one that is not known."""
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        what = "the file does not say how its tokenizer splits text" if name is None else f"the pre-tokenizer {name!r}"
        raise CheckpointError(
            f"{source}: {what}{'' if name is None else ' is not supported'}; "
            "use the safetensors checkpoint with its tokenizer.json."
        )
    return PRE_TOKENIZERS[name]
