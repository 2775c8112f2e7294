"""Turns token ids into text one by one, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol

_REPLACEMENT = "�"  # what decoders write for bytes that are not (yet) a character
_PROMPT_CONTEXT = 5  # prompt tokens decoded together with the output, so that a leading space is not lost
_WINDOW_LIMIT = 16
_CHARACTER_BYTES = 4


class TextDecoder(Protocol):
    """The part of a tokenizer the detokenizer uses."""

    @property
    def special_ids(self) -> Set[int]:
        """Ids of special tokens."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, /) -> str:
        """Text of these ids."""
        ...


class IncrementalDetokenizer:
    """The text that output tokens add to the prompt's text.

    It decodes a short window of the latest tokens, so a token's cost does not grow with the text. The window starts
    with some tokens whose text is out already: decoders treat the first token of a text differently.
    """

    def __init__(self, tokenizer: TextDecoder, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window = self._prompt_tail(prompt_ids)
        self._delivered = len(self._decode())  # characters of the window's text that are out
        self._clean = len(self._window)  # tokens of the window whose text is whole and out
        self._tokens_held = 0  # tokens since text last came out or was whole

    def push(self, token_id: int) -> str:
        """The text that is certain with one more token; bytes of an unfinished character wait for the rest."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        self._tokens_held += 1
        text = self._decode()
        whole = not text.endswith(_REPLACEMENT)
        delta = self._deliver(text, self._certain_length(text))
        if len(self._window) > _WINDOW_LIMIT and whole:
            self._shorten_window(self._clean)
        elif len(self._window) > 2 * _WINDOW_LIMIT:
            self._shorten_window(len(self._window) - _CHARACTER_BYTES)
        if whole:
            self._clean = len(self._window)
            self._tokens_held = 0
        return delta

    def finish(self) -> str:
        """The rest of the text, with replacement characters for bytes that never became a character."""
        text = self._decode()
        return self._deliver(text, len(text))

    def _prompt_tail(self, prompt_ids: Sequence[int]) -> list[int]:
        start = max(0, len(prompt_ids) - _PROMPT_CONTEXT)
        earliest = max(0, start - _CHARACTER_BYTES)
        while start > earliest and self._tokenizer.decode(prompt_ids[start:], False).startswith(_REPLACEMENT):
            start -= 1  # the window must not start within a character
        return [token_id for token_id in prompt_ids[start:] if token_id not in self._skipped]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip_special)

    def _certain_length(self, text: str) -> int:
        """How many leading characters of the window's text later tokens cannot change."""
        if not text.endswith(_REPLACEMENT):
            return len(text)
        if self._tokens_held >= _CHARACTER_BYTES:
            return len(text) - 1  # no character is unfinished after so many tokens: these bytes are invalid
        return len(text.rstrip(_REPLACEMENT))

    def _deliver(self, text: str, certain: int) -> str:
        if certain <= self._delivered:
            return ""
        delta = text[self._delivered : certain]
        self._delivered = certain
        self._tokens_held = 0
        return delta

    def _shorten_window(self, keep_from: int) -> None:
        """Drop the first tokens: up to the last whole text or, if that is long ago, up to what may be unfinished."""
        held = len(self._decode()) - self._delivered
        self._window = self._window[keep_from:]
        self._delivered = max(0, len(self._decode()) - held)
        self._clean = 0
