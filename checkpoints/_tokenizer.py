"""The tokenizer every checkpoint offers, whatever file it comes from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from checkpoints._chat_template import plain_messages
from checkpoints._errors import CheckpointError
from checkpoints._template_process import TemplateProcess


class Backend(Protocol):
    """What a tokenizer library must do for `Tokenizer`."""

    @property
    def size(self) -> int:
        """Number of ids, added tokens included."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` skips on request."""
        ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text in which special tokens may be spelled out."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of ids."""
        ...

    def piece(self, token_id: int) -> str | None:
        """The vocabulary entry of one id."""
        ...

    def find(self, piece: str) -> int | None:
        """The id of one vocabulary entry."""
        ...

    def serialized(self) -> str | None:
        """The content of a tokenizer.json, or None when the tokenizer has no such form."""
        ...


class Tokenizer:
    """Text to ids and back, and chat messages to text.

    `bos_id` is None when the model has no beginning-of-text token; `eos_ids` holds every id that ends a generation;
    `special_ids` the ids without text of their own; `chat_template` the jinja source or None.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None,
        eos_ids: Iterable[int],
        add_bos: bool,
        chat_template: str | None,
        tool_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.adds_bos = add_bos and bos_id is not None
        self.chat_template = chat_template
        self._tool_template = tool_template
        self.special_ids = backend.special_ids
        self._special_tokens = dict(special_tokens or {})
        self._templates = TemplateProcess()

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows; a model's logits may be padded beyond it."""
        return self._backend.size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with `add_special_tokens`, a model that wants a BOS gets exactly one, at the start.

        Raises `CheckpointError` for a text with lone surrogates, which no UTF-8 can hold.
        """
        # When BOS is switched off in the settings, the file's own post-processor may still want to add one.
        _check_text(text)
        ids = self._backend.encode(text, add_special_tokens and self.adds_bos)
        return self._with_one_bos(ids) if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; raises `CheckpointError` for an id outside the 32-bit range."""
        if any(not 0 <= token_id < 1 << 32 for token_id in ids):
            raise CheckpointError("token ids must lie between 0 and 2**32 - 1.")
        return self._backend.decode(list(ids), skip_special_tokens)

    def id_to_piece(self, token_id: int) -> str:
        """The vocabulary entry of an id, in the tokenizer's own spelling; empty for an id it does not know."""
        return (self._backend.piece(token_id) or "") if 0 <= token_id < 1 << 32 else ""

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json as transformers reads them.

        Raises `CheckpointError` for a sentencepiece tokenizer.
        """
        text = self._backend.serialized()
        if text is None:
            raise CheckpointError("this tokenizer cannot be written as tokenizer.json; copy its own files instead.")
        settings = {
            # Any other class of transformers would put its own splitting in place of the file's.
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self._special_tokens,
            "add_bos_token": self.adds_bos,
            "chat_template": self.chat_template,
            "clean_up_tokenization_spaces": False,
        }
        for name, content in (("tokenizer.json", text), ("tokenizer_config.json", json.dumps(settings, indent=2))):
            (directory / name).write_text(content + "\n", encoding="utf-8")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text of a conversation; raises `CheckpointError` without a template or when it refuses.

        The content of a message is text or a list of {"type": "text", "text": ...} parts, which become its lines.
        """
        template = self._tool_template if tools and self._tool_template else self.chat_template
        if template is None:
            raise CheckpointError("this model has no chat template; give a plain prompt instead of messages.")
        values = {
            **self._special_tokens,
            "messages": plain_messages(messages),
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._templates.render(template, values)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Ids of a conversation, with exactly one BOS for a model that wants one, whether the template writes it."""
        text = self.apply_chat_template(messages, add_generation_prompt, tools)
        _check_text(text)
        return self._with_one_bos(self._backend.encode(text, False))

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        if not self.adds_bos or self.bos_id is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == self.bos_id:
            start += 1
        return [self.bos_id, *ids[start:]]


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(error.start - 10, 0) : error.start + 10]
        raise CheckpointError(f"the text is not valid Unicode at {around!a}; give UTF-8 text.") from None
