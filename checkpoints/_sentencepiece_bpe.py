"""A sentencepiece vocabulary with scores as a BPE tokenizer of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers

_NORMAL, _USER_DEFINED = 1, 4
_SPACE = "\u2581"
_LONGEST_PIECE = 256


def sentencepiece_bpe(
    pieces: list[str], scores: Sequence[float], kinds: Sequence[int], *, unknown: str | None, space_prefix: bool
) -> tokenizers.Tokenizer:
    """Build the tokenizer the way Hugging Face converts one.

    `kinds` are sentencepiece's token types (1 normal, 2 unknown, 3 control, 4 user defined, 6 byte); `space_prefix`
    says whether a text is encoded as if it began with a space.
    """
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    built = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            _merges(pieces, scores, kinds),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback="<0x0A>" in vocabulary,
        )
    )
    replace = normalizers.Replace(" ", _SPACE)
    built.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if space_prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps)
    return built


def _merges(pieces: list[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score first.

    sentencepiece joins the neighbours whose union has the best score, so the union's score ranks the merge.
    """
    mergeable = {
        piece: index
        for index, (piece, kind) in enumerate(zip(pieces, kinds, strict=True))
        if kind in (_NORMAL, _USER_DEFINED) and len(piece) <= _LONGEST_PIECE
    }
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, index in mergeable.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-scores[index], mergeable[left], mergeable[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
