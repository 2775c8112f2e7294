"""Mistakes of the user, told in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

BAD_USE = 2
"""Exit code after a user's mistake."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""


class UserMistake(Exception):
    """Something only the user can put right; the text is one sentence."""


@contextmanager
def user_mistakes() -> Iterator[None]:
    """Turn the errors that the library raises about its inputs (ValueError, OSError) into UserMistake.

    Put it around the calls that look at what the user gave, and nothing else: a ValueError from anywhere else is a
    fault of the program and keeps its traceback.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise UserMistake(f"{where}{error.strerror or error}.") from error
    except ValueError as error:
        raise UserMistake(str(error)) from error
