"""Ways to damage a file: bytes anywhere, and values in places where the file stays well formed."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator

NUMBERS = (0, 1, 2, 3, 7, 8, 9, 12, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, 1 << 62, (1 << 64) - 1)
PIECES = (
    *(b"", b"\0" * 8, b"\xff" * 8, b"{", b"}", b"[" * 3000, b"null", b"-1", b"1e999", b"NaN", b'"', b",", b"\xc3\x28"),
    *(b'{"a":' * 2000, b'"__metadata__":{"x":"y"},', b'"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'),
    *(b"9" * 5000, b'"../../etc/passwd"', b"GGUF", b"tokenizer.ggml.tokens", b"general.alignment", b"\n", b'"\\ud800"'),
)
TEXTS = (
    *(
        "",
        "x",
        "a" * 3000,
        "<|im_end|>",
        "../../x",
        "\0",
        "llama",
        "gpt2",
        "F32",
        "{{ 1/0 }}",
        "{% for a in b %}",
        "yarn",
    ),
    *(
        "{{ messages[0] }}" * 50,
        "[" * 500,
        "\u2581",
        "hello",
        "\n",
        "(" * 5000,
        "(a+)+$",
        "qwen2",
        "deepseek2",
        "<0x41>",
    ),
)
VALUES = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**70, -(2**63), 0.5, 1e308, [], {}, [[]], [0] * 300, {"a": {}}),
    *([1, 2], [-1, 2], [0, 2**40], [2**32, 2**32], ["a"], {"content": 5}, {"content": "x"}, [None], "BF16", "F8_E4M3"),
    *TEXTS,
)
KINDS = ("flip", "number", "cut", "remove", "repeat", "move", "insert")


def apply(content: bytes, change: tuple[str, int, int]) -> bytes:
    """One damage; `at` is taken modulo the number of places, so that small numbers hit the header."""
    kind, at, value = change
    if kind == "field":
        return change_field(content, at, value)
    at %= max(1, len(content))
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ (1 + value % 255)]) + content[at + 1 :] if content else content
    if kind == "number":
        width = (1, 4, 8)[value % 3]
        return content[:at] + wild_bytes(value // 3, width) + content[at + width :]
    if kind == "cut":
        return content[:at]
    if kind == "remove":
        return content[:at] + content[at + 1 + value % 64 :]
    if kind == "repeat":
        return content[:at] + content[at : at + value % 512] * (1 + value % 3) + content[at:]
    if kind == "move":
        return content[:at] + content[value : value + 256] + content[at:]
    return content[:at] + PIECES[value % len(PIECES)] + content[at:]


def wild_bytes(value: int, width: int) -> bytes:
    return struct.pack("<Q", NUMBERS[value % len(NUMBERS)])[:width]


def change_field(content: bytes, at: int, value: int) -> bytes:
    """Change one value of a GGUF header, a safetensors header or a JSON file, and nothing of the syntax."""
    try:
        if content[:4] == b"GGUF":
            return change_gguf(content, at, value)
        length = int.from_bytes(content[:8], "little")
        if content[8:9] == b"{" and length <= len(content) - 8:
            header = change_json(content[8 : 8 + length], at, value)
            return struct.pack("<Q", len(header)) + header + content[8 + length :]
        return change_json(content, at, value)
    except (ValueError, LookupError, ArithmeticError, struct.error, RecursionError):
        return content  # damaged beyond this already


def change_json(content: bytes, at: int, value: int) -> bytes:
    tree = json.loads(content)
    places = list(_places(tree))
    container, key = places[at % len(places)]
    action = value % 8
    if action == 0:
        del container[key]
    elif action == 1 and isinstance(container, dict):
        container[TEXTS[value // 8 % len(TEXTS)]] = container[key]
    elif action == 2:
        other, place = places[value // 8 % len(places)]
        container[key] = json.loads(json.dumps(other[place]))
    else:
        container[key] = VALUES[value // 8 % len(VALUES)]
    return json.dumps(tree).encode()


def _places(tree: object) -> Iterator[tuple[dict | list, str | int]]:
    # The long lists of a vocabulary would leave nothing for the rest.
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(entries)[:20]:
        yield tree, key
        yield from _places(value)


def change_gguf(content: bytes, at: int, value: int) -> bytes:
    spans = list(itertools.islice(gguf_spans(content), 5000))
    start, end, kind = spans[at % len(spans)]
    if kind == "text":
        text = TEXTS[value % len(TEXTS)].encode()
        return content[:start] + struct.pack("<Q", len(text)) + text + content[end:]
    if kind == "type" and value % 2:
        return content[:start] + struct.pack("<I", value % 45) + content[end:]
    return content[:start] + wild_bytes(value, end - start) + content[end:]


def gguf_spans(content: bytes) -> Iterator[tuple[int, int, str]]:
    """Every value of the header: where it lies, and whether it is a text, a type or a number."""
    widths = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    tensors, keys = struct.unpack_from("<QQ", content, 8)
    yield from ((4, 8, "number"), (8, 16, "number"), (16, 24, "number"))
    offset = 24

    def text(at: int) -> int:
        return at + 8 + struct.unpack_from("<Q", content, at)[0]

    for _ in range(keys):
        yield offset, text(offset), "text"
        offset = text(offset)
        yield offset, offset + 4, "type"
        kind = struct.unpack_from("<I", content, offset)[0]
        offset += 4
        count = 1
        if kind == 9:
            kind, count = struct.unpack_from("<IQ", content, offset)
            yield offset, offset + 4, "type"
            yield offset + 4, offset + 12, "number"
            offset += 12
        for index in range(min(count, len(content))):
            end = text(offset) if kind == 8 else offset + widths[kind]
            if index < 6:
                yield offset, end, "text" if kind == 8 else "number"
            offset = end
    for _ in range(tensors):
        yield offset, text(offset), "text"
        offset = text(offset)
        dimensions = struct.unpack_from("<I", content, offset)[0]
        yield offset, offset + 4, "number"
        offset += 4
        for _ in range(dimensions):
            yield offset, offset + 8, "number"
            offset += 8
        yield offset, offset + 4, "type"
        yield offset + 4, offset + 12, "number"
        offset += 12
