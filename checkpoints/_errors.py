"""The one exception of this package."""

from __future__ import annotations

_LONGEST, _END = 700, 200


class CheckpointError(ValueError):
    """A checkpoint cannot be found, fetched, read or written; `str()` is one sentence for the user.

    The sentence may quote a stranger's file, so it is made one line of bounded length that cannot drive a terminal.
    """

    def __init__(self, sentence: str) -> None:
        line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(sentence.split()))
        if len(line) > _LONGEST:
            line = f"{line[: _LONGEST - _END]} … {line[-_END:]}"
        super().__init__(line)
