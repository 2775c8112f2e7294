"""The `jaxinfer` command.

This module imports next to nothing, so that Ctrl-C is dealt with from the first moment: the rest comes inside `main`.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 2, after one sentence on standard error, for a user's mistake."""
    try:
        from jaxinfer.cli._interrupt import imports_interruptible

        with imports_interruptible():
            from jaxinfer.cli._commands import run

            return run(arguments)
    except KeyboardInterrupt:
        from jaxinfer.cli._interrupt import leave_at_once

        leave_at_once()
