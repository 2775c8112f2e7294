"""Tables on standard output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = ()) -> None:
    """Print rows under their columns, never cut; columns named in `left` are aligned left, the others right."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    # Figures must not be cut where standard output is a file or a narrow terminal.
    needed = console.measure(table, options=console.options.update(max_width=1000)).maximum
    wide = Console(width=max(console.width, needed), highlight=False)
    with wide.capture() as captured:  # rich would end the program by itself when a pipe is closed
        wide.print(table, markup=False)
    print(captured.get(), end="")
