"""The one exception of this package."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be found, fetched, read or written; `str()` is one sentence for the user."""
