"""Ctrl-C while a model generates: the round ends, then the program decides."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed since.

    An exception out of the middle of a round would leave the device's state half handed over, so the first Ctrl-C only
    sets a mark. The second one is a KeyboardInterrupt, for a round that does not end.
    """
    pressed = threading.Event()

    def mark(signum: int, frame: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set  # signals reach the main thread only
        return
    before = signal.signal(signal.SIGINT, mark)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
