"""A sentencepiece model file as a tokenizer `Backend`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from checkpoints._errors import CheckpointError

_SPACE = "\u2581"
_APART = "\ue000"  # of the private use area, so that it joins with nothing that follows it


class SentencePieceBackend:
    """Wraps a `SentencePieceProcessor` and the special tokens Hugging Face keeps beside it."""

    def __init__(self, path: Path, settings: Mapping[str, Any], added_tokens: Mapping[str, Any]) -> None:
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError, ValueError):
            raise CheckpointError(f"{path}: not a readable sentencepiece model; download it again.") from None
        model = self._model
        self._added = {i: t for t, i in added_tokens.items() if type(i) is int and i >= 0} | _declared(settings)
        special = {i for i in range(model.get_piece_size()) if model.is_control(i) or model.is_unknown(i)}
        for token_id in special:
            self._added.setdefault(token_id, model.id_to_piece(token_id))
        self._ids = {text: token_id for token_id, text in self._added.items()}
        self.special_ids = frozenset(special | _declared_special(settings))
        # Longest first, so that no special token hides another that begins with it.
        ordered = sorted(self._ids, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None
        # Only `legacy: false` keeps a text after a special token from getting a space of its own.
        self._space_after_special = settings.get("legacy") is not False
        # Whether sentencepiece puts a space before a text; Gemma's model does not.
        self._adds_space = model.encode("a", out_type=str)[:1] != ["a"]
        self._adds_eos = settings.get("add_eos_token") is True

    @property
    def size(self) -> int:
        """Number of ids, added tokens included."""
        return max(self._model.get_piece_size(), max(self._added, default=-1) + 1)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text in which special tokens may be spelled out; BOS as the model was trained with one."""
        ids: list[int] = []
        if add_special_tokens and self._model.bos_id() >= 0:
            ids.append(self._model.bos_id())
        after_special = False
        for part in self._split.split(text) if self._split else [text]:
            if part in self._ids:
                ids.append(self._ids[part])
                after_special = True
            elif part:
                ids += self._encode_plain(part, spaced=self._space_after_special or not after_special)
                after_special = False
        if add_special_tokens and self._adds_eos and self._model.eos_id() >= 0:
            ids.append(self._model.eos_id())
        return ids

    def _encode_plain(self, text: str, spaced: bool) -> list[int]:
        if spaced:
            return self._model.encode(text)
        # A prefix takes the space sentencepiece adds to the start of a text, and is cut off again; it is in no piece.
        return self._model.encode(_APART + text)[len(self._model.encode(_APART)) :]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of ids; bytes are joined before they are decoded, and the leading space of a text is dropped."""
        joined = bytearray()
        for token_id in ids:
            if token_id in self._added:
                joined += (
                    b"" if skip_special_tokens and token_id in self.special_ids else self._added[token_id].encode()
                )
            elif token_id < self._model.get_piece_size():
                joined += self._bytes(token_id)
        text = joined.decode("utf-8", errors="replace")
        first = next((i for i in ids if not (skip_special_tokens and i in self.special_ids)), None)
        spaced = first is not None and first not in self._added and (self.piece(first) or "").startswith(_SPACE)
        return text[1:] if spaced and self._adds_space else text

    def _bytes(self, token_id: int) -> bytes:
        piece = self._model.id_to_piece(token_id)
        if self._model.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_SPACE, " ").encode()

    def piece(self, token_id: int) -> str | None:
        """The vocabulary entry of one id."""
        if token_id in self._added:
            return self._added[token_id]
        return self._model.id_to_piece(token_id) if token_id < self._model.get_piece_size() else None

    def find(self, piece: str) -> int | None:
        """The id of one vocabulary entry."""
        if piece in self._ids:
            return self._ids[piece]
        token_id = self._model.piece_to_id(piece)
        return token_id if self._model.id_to_piece(token_id) == piece else None

    def serialized(self) -> str | None:
        """None: the model file is its only form."""
        return None


def _entries(settings: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    declared = settings.get("added_tokens_decoder")
    if not isinstance(declared, dict):
        return {}
    return {
        int(key): entry
        for key, entry in declared.items()
        if key.isascii() and key.isdigit() and len(key) < 10 and isinstance(entry, dict)
        if isinstance(entry.get("content"), str) and entry["content"]
    }


def _declared(settings: Mapping[str, Any]) -> dict[int, str]:
    return {token_id: entry["content"] for token_id, entry in _entries(settings).items()}


def _declared_special(settings: Mapping[str, Any]) -> set[int]:
    return {token_id for token_id, entry in _entries(settings).items() if entry.get("special")}
