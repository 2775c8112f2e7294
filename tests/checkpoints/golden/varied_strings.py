"""2,000 texts of many kinds for comparing tokenizers, the same on every run."""

from __future__ import annotations

import random

CODE = [
    "def f(x: int) -> list[int]:\n    return [i ** 2 for i in range(x) if i % 2 == 0]\n",
    'for (int i = 0; i < n; ++i) { printf("%d\\n", a[i]); }',
    "SELECT name, COUNT(*) FROM users WHERE id >= 10 GROUP BY name;",
    '<html><body class="a b">&nbsp;</body></html>\t<!-- x -->',
    "if err != nil {\n\treturn fmt.Errorf(`x: %w`, err)\n}\r\n",
    "snake_case camelCase PascalCase kebab-case SCREAMING_CASE $x @y #z",
]
ALPHABETS = {
    "letters": "abcdefghijklmnopqrstuvwxyz ABC     .,",
    "code": "{}()[];:=<>!&|^~+-*/%\\\"'#@`$_.,0az \n    \t",
    "digits": "0123456789 .,-+eE%$€½²Ⅳ٣१",
    "cjk": "的一是不了人我在有他这为之大来以个中上们到说国和地也子时道。，！？",  # noqa: RUF001
    "kana": "あいうえおアイウエオ漢字仮名 。、ーｱｲ",
    "hangul": "한국어문장입니다 가나다ㄱㄴ",
    "emoji": "😀🎉🚀👍🏽❤️‍🔥🇫🇷👩‍👩‍👧‍👦 a1",
    "spaces": " \t\n\r\u00a0\u2003\u3000\u200b\u2028x1",
    "control": "\u0001\u0008\u000b\u001b\u001f\u007f\u0085ab 1",
    "accents": "éèêñüßøåçİıſ'sS e\u0301a\u0308Åℵ",
    "scripts": "абвгд αβγδ אבגד ابجد कखग กขค ქართ",
    "special": "<s></s><|im_start|><|im_end|><unk><pad>> <0x0A>[INST]\n ▁",
}
SPECIAL = [
    "<s>",
    "</s>",
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
    "<bos>",
    "<eos>",
    "<|x|>",
    "<0x41>",
    "[INST]",
    "▁",
    "\u2581a",
]
WORDS = [
    "the",
    "The",
    "Model's",
    "tokens,",
    "42",
    "3.5",
    "isn't",
    "(x)",
    "->",
    "==",
    "\n\n",
    "",
    "\t你好",
    "😀",
    "2nd",
    "naïve",
]


def varied_strings(count: int = 2000) -> list[str]:
    """Short and long texts: code, CJK, emoji, control characters, long unbroken runs, special-token text."""
    source = random.Random(20260229)
    result = ["", " ", "  ", "\n", "\r\n", *CODE]
    # Long unbroken runs.
    result += [piece * 300 for piece in ("a", " ", "\n", "1", "=", "-*", "ab", "😀", "你", "é", "\t", "A", "ZW")]
    for special in SPECIAL:
        result += [special, special * 2, f"a{special}b", f"{special} {special}", f" {special}x", f"{special}\n"]
    while len(result) < count:
        choice = source.random()
        if choice < 0.7:
            alphabet = list(source.choice(list(ALPHABETS.values())))
            result.append("".join(source.choices(alphabet, k=source.randint(1, 40))))
        elif choice < 0.85:
            result.append(source.choice(" \n").join(source.choices(WORDS + SPECIAL, k=source.randint(2, 12))))
        else:
            points = [source.choice((source.randint(32, 0xD7FF), source.randint(0xE000, 0x2FFFF))) for _ in range(6)]
            result.append("".join(map(chr, points)))
    return result[:count]
