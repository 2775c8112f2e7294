"""Ctrl-C waits while a round runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C (SIGINT) back until the block ends, then raise its KeyboardInterrupt.

    The second one interrupts the block at once, in case it does not end. Does nothing outside the main thread, which
    alone gets signals, and where the program handles SIGINT itself: a handler of its own need not raise.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = threading.Event()

    def hold(signum: int, frame: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if pressed.is_set():
            raise KeyboardInterrupt
