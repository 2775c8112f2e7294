"""Write smollm2_ids.json: strings and the ids transformers gives them with the default model's GGUF tokenizer.

Run it where transformers and gguf are installed: `python make_tokenizer_golden.py MODEL.gguf`.

transformers ignores `tokenizer.ggml.pre` and splits like GPT-2.  The file says `smollm`, whose published tokenizer.json
first splits every digit off, so that pre-tokenizer is put in place; `--plain` keeps transformers' own and only counts
the strings on which the two differ.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

WRITTEN = [
    "",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t\tindented\n    four\n        eight",
    "Hello, world!",
    "don't can't we're I'm you'll they'd IT'S",
    "def f(x: int) -> list[int]:\n    return [i ** 2 for i in range(x) if i % 2 == 0]\n",
    'for (int i = 0; i < n; ++i) { printf("%d\\n", a[i]); }',
    "SELECT name, COUNT(*) FROM users WHERE id >= 10 GROUP BY name;",
    '<html><body class="a b">&nbsp;</body></html>',
    "snake_case camelCase PascalCase kebab-case SCREAMING_CASE",
    "https://example.org/a/b?c=d&e=%20#frag",
    "3.14159 1,000,000 1e-05 0x1F 2024-02-29 12:34:56 ½ ² Ⅳ ٣٤ १२",
    "a1b22c333 4444d  55 \t66\n77",
    "你好，世界！今天天气很好。",  # noqa: RUF001
    "日本語のテキスト、カタカナ、ひらがな。",
    "한국어 문장입니다.",
    "Привет, мир! Ελληνικά العربية עברית हिन्दी ไทย",
    "naïve café e\u0301 a\u0308 \u00c5 \u212b",
    "😀😃 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪",
    "\u0000\u0001\u0007\u001b[31mred\u001b[0m\u007f",
    "zero\u200bwidth\u200djoin\ufeffbom\u00a0nbsp\u2003em\u3000ideographic",
    "\ufffd \ue000 \U0010ffff \U0001d54f",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|><|endoftext|>",
    "text<|im_end|>text <|im_start|> text",
    "<|im_start<|im_end|>|> <|IM_END|>",
    "<repo_name>a<reponame>b<file_sep>c<filename>d<gh_stars>",
    "<jupyter_script><jupyter_text> <empty_output>",
    "a" * 300,
    " " * 200,
    "\n" * 100,
    "ab " * 100,
    "1" * 100,
    "=" * 80,
    "-*" * 60,
    "😀" * 40,
    "你" * 60,
]
ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz     ",
    "ABCabc0123456789 .,;:!?'\"-_()[]{}\n\t",
    "0123456789 .,-+eE%$€",
    "的一是不了人我在有他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生",
    "あいうえおアイウエオ漢字仮名 。、",
    "😀🎉🚀👍🏽❤️‍🔥🇫🇷 a1",
    " \t\n\r\u00a0\u2003\u3000x1",
    "\u0000\u0001\u0008\u000b\u001f\u007f\u0085ab 1",
    "éèêñüßøåçİıſ'sS ",
    "абвгд αβγδ אבגד ابجد कखग กขค",
    "<|im_start|><|im_end|>> \n",
    "{}()[];:=<>!&|^~+-*/%\\\"'#@`$_.,0az \n    ",
]
WORDS = ["the", "The", "Model's", "tokens,", "42", "3.5", "isn't", "(x)", "->", "==", "\n\n", "", "", "\t你好", "😀"]
WORDS += ["<|im_end|>", "e.g.", "U.S.", "foo_bar", "fooBar", "2nd", "١٢", ""]


def strings() -> list[str]:
    """Texts of many kinds, the same on every run."""
    source = random.Random(20240229)
    result = list(WRITTEN)
    for alphabet in ALPHABETS:
        result += ["".join(source.choices(alphabet, k=source.randint(1, 24))) for _ in range(32)]
    result += [source.choice(" \n").join(source.choices(WORDS, k=source.randint(2, 12))) for _ in range(60)]
    while len(result) < 560:
        points = [source.choice((source.randint(32, 0xD7FF), source.randint(0xE000, 0x2FFFF))) for _ in range(6)]
        result.append("".join(map(chr, points)))
    return result


def entry(text: str, ids: list[int], decoded: str, visible: str) -> dict[str, object]:
    """One golden string; what equals the text is left out."""
    optional = {"decoded": decoded, "visible": visible}
    return {"text": text, "ids": ids} | {key: value for key, value in optional.items() if value != text}


def main() -> None:
    """Write the file beside this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model.parent, gguf_file=options.model.name)
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in strings()]
    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in strings()]
    print(
        len(ids),
        "strings,",
        sum(a != b for a, b in zip(plain, ids, strict=True)),
        "differ from transformers' own split",
    )
    if options.plain:
        return
    messages = [{"role": "user", "content": "What is 2+2?"}]
    conversations = [messages, [{"role": "system", "content": "Be brief."}, *messages]]
    golden = {
        "strings": [
            entry(text, row, tokenizer.decode(row), tokenizer.decode(row, skip_special_tokens=True))
            for text, row in zip(strings(), ids, strict=True)
        ],
        "chats": [
            {
                "messages": chat,
                "text": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
                "ids": tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"],
            }
            for chat in conversations
        ],
    }
    path = Path(__file__).with_name("smollm2_ids.json")
    path.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
