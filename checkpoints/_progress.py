"""Progress bars on standard error for the `progress` callbacks of downloading, loading and compiling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from checkpoints._named_models import Progress as ProgressCallback

_MOST_STEPS = 1_000_000
"""Anything longer counts bytes."""


class _Amount(ProgressColumn):
    """Done and total, as a count or as bytes."""

    def render(self, task: Task) -> Text:
        """The column's text."""
        if task.total is None or task.total > _MOST_STEPS:
            total = "" if task.total is None else f" of {decimal(int(task.total))}"
            return Text(f"{decimal(int(task.completed))}{total}")
        return Text(f"{int(task.completed)} of {int(task.total)}")


@contextmanager
def progress_bar() -> Iterator[ProgressCallback | None]:
    """A callback (description, done, total or None) that draws one bar per description; None without a terminal.

    The bars are gone at the end of the block.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), _Amount(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(description: str, done: int, total: int | None) -> None:
            if description not in tasks:
                tasks[description] = bars.add_task(description, total=total)
            bars.update(tasks[description], completed=done, total=total)

        yield show
