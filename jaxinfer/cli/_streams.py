"""Standard input, output and error, whatever the program was started with."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What a write to standard output may fail with."""


def open_standard_streams() -> None:
    """Replace streams that are closed by empty ones, and let output replace what its encoding does not have."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def discard_output() -> None:
    """Give the interpreter nowhere to fail when it flushes standard output at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def writes_unicode() -> bool:
    """Whether standard output takes every character."""
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
