"""A tokenizer of the `tokenizers` library as a `Backend`."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers


class TokenizersBackend:
    """Wraps a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # Truncation and padding of the file are for training batches; a prompt must never be cut silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of ids."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int) -> str | None:
        """The vocabulary entry of one id."""
        return self._tokenizer.id_to_token(token_id)

    def find(self, piece: str) -> int | None:
        """The id of one vocabulary entry."""
        return self._tokenizer.token_to_id(piece)

    def serialized(self) -> str | None:
        """The content of a tokenizer.json."""
        return self._tokenizer.to_str()
