"""Chat templates in jinja2's immutable sandbox, with bounds on what a stranger's template may use.

Bounds: the template source is at most 1 MiB; `range` may produce one million numbers per rendering in all; `*` and `**`
may not build a sequence or number of more than a million elements or bits; `+` and `~` no text of more than 16 million
characters, which is also the limit of the output; no text is padded to an excessive width; and a rendering may take 10
seconds, looked at whenever it calls something or yields output.
"""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from checkpoints._errors import CheckpointError

MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_OUTPUT_CHARACTERS = 1 << 24
MAX_RANGE_ITEMS = 1_000_000
MAX_PRODUCT = 1_000_000
MAX_SECONDS = 10.0
_PADDING_METHODS = frozenset({"format", "format_map", "center", "ljust", "rjust", "zfill", "expandtabs"})
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*\d{5}|\{[^{}]*[:.]\D{0,9}\d{5}")


class _Refusal(Exception):
    """Raised by the template's own raise_exception, or for a bound it passes."""


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Sends `~` through the environment, which is the only operator jinja2 does not let a sandbox intercept."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        """Compile a ~ b ~ c to one bounded call."""
        self.write("environment.bounded_join((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Hugging Face's environment plus bounds; a fresh one per rendering, because the budgets are spent."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    code_generator_class = _CodeGenerator

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        self.deadline = time.monotonic() + MAX_SECONDS
        self.range_left = MAX_RANGE_ITEMS
        self.filters["tojson"] = _to_json
        self.filters["format"] = _format
        del self.filters["center"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
        self.globals["range"] = self.budgeted_range

    def budgeted_range(self, *bounds: int) -> range:
        result = range(*bounds)
        self.range_left -= len(result)
        if self.range_left < 0:
            raise _Refusal(f"it loops over more than {MAX_RANGE_ITEMS} numbers")
        return result

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise _Refusal(f"it takes more than {MAX_SECONDS:g} seconds")

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.check_time()
        # args are the context, what is called, and its arguments.
        # The sandbox wraps str.format, and the wrapped method knows its text.
        method = getattr(args[1], "__wrapped__", args[1])
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str) and name in _PADDING_METHODS:
            _check_width(owner, *args[2:], *kwargs.values())
        return super().call(*args, **kwargs)

    def bounded_join(self, parts: Sequence[Any]) -> str:
        texts = [str(part) for part in parts]
        _check_text(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        size = 0
        if operator == "+":
            _check_text(_length(left) + _length(right))
        elif operator == "%" and isinstance(left, str):
            _check_width(left, right)
        elif operator == "**":
            size = left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0
        elif operator == "*":
            size = max(_length(left) * _count(right), _length(right) * _count(left))
        if size > MAX_PRODUCT:
            raise _Refusal(f"an operation {operator} gives more than {MAX_PRODUCT} elements")
        return super().call_binop(context, operator, left, right)


def _check_text(size: int) -> None:
    if size > MAX_OUTPUT_CHARACTERS:
        raise _Refusal(f"it builds a text of more than {MAX_OUTPUT_CHARACTERS} characters")


def _check_width(pattern: str, *arguments: Any) -> None:
    arguments = tuple(item for value in arguments for item in (value if isinstance(value, tuple) else (value,)))
    numbers = [value for value in arguments if isinstance(value, int)]
    largest = max(numbers, default=0)
    if _WIDE_FIELD.search(pattern) or largest > MAX_PRODUCT:
        raise _Refusal("it pads a text to an excessive width")


def _format(pattern: Any, *arguments: Any, **named: Any) -> str:
    _check_width(str(pattern), *arguments, *named.values())
    return str(pattern) % (named or arguments)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(f"it says: {message}")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own tojson escapes HTML characters, which no model was trained on.
    allowed = {key: options[key] for key in ("separators", "sort_keys") if key in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)


def render_chat(template: str, values: Mapping[str, Any]) -> str:
    """Render a chat template; raises `CheckpointError` when the template is broken, refuses or passes a bound."""
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise CheckpointError(
            f"the chat template is longer than {MAX_TEMPLATE_CHARACTERS} characters; use another one."
        )
    environment = _Environment()
    pieces: list[str] = []
    size = 0
    try:
        for piece in environment.from_string(template).generate(**values):
            environment.check_time()
            size += len(piece)
            if size > MAX_OUTPUT_CHARACTERS:
                raise _Refusal(f"it writes more than {MAX_OUTPUT_CHARACTERS} characters")
            pieces.append(piece)
    except _Refusal as refusal:
        raise CheckpointError(f"the chat template refuses these messages: {_one_line(refusal)}.") from None
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"the chat template is malformed at line {error.lineno}: {_one_line(error)}.") from None
    except Exception as error:
        # A template is a stranger's program: whatever it does wrong is the template's failure, never ours.
        raise CheckpointError(f"the chat template cannot render these messages: {_one_line(error)}.") from None
    return "".join(pieces)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")[:500]
    return text or "it needs too much memory" if isinstance(error, MemoryError) else text or type(error).__name__


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with text for content; refuses what is none before the template fails on it obscurely."""
    check_messages(messages)
    return [{**message, **_plain_content(index, message)} for index, message in enumerate(messages)]


def _plain_content(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {}
    if content is None and message.get("tool_calls"):
        return {}  # an assistant's call has no text of its own
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise CheckpointError(
            f"the content of message {index} must be text or a list of text parts, not {type(content).__name__}."
        )
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise CheckpointError(
                f'the content of message {index} may have only {{"type": "text", "text": ...}} parts, '
                f"not {repr(part)[:80]}."
            )
    return {"content": "\n".join(part["text"] for part in content)}


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what is no list of messages."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise CheckpointError('messages must be a non-empty list of {"role": ..., "content": ...} objects.')
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise CheckpointError(f'message {index} must be an object with a "role" that is text.')
