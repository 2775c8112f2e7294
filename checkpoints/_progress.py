"""A progress bar on standard error for the `progress` callbacks of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from checkpoints._named_models import Progress as ProgressCallback


@contextmanager
def progress_bar() -> Iterator[ProgressCallback]:
    """Yield a callback that draws one bar per description; nothing is drawn until it is called."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(description: str, done: int, total: int | None) -> None:
            if description not in tasks:
                tasks[description] = bars.add_task(description, total=total)
            bars.update(tasks[description], completed=done, total=total)

        yield show
