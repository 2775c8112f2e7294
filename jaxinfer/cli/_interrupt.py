"""Ctrl-C: while a model generates the round ends, then the program decides; while modules are imported it ends all."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from jaxinfer.cli._errors import INTERRUPTED

_SHOW_CURSOR = "\033[?25h"


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


@contextmanager
def imports_interruptible() -> Iterator[None]:
    """End the process when Ctrl-C comes in the middle of an import.

    A KeyboardInterrupt there may come out as any other error, or be passed over: libraries catch it, and so does the
    initialization of modules that are not Python.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread only
        return
    before = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            leave_at_once()
        frame = frame.f_back
    raise KeyboardInterrupt


def leave_at_once() -> NoReturn:
    """End without waiting for compilations that run in the background."""
    if sys.stderr.isatty():
        sys.stderr.write(_SHOW_CURSOR)  # progress bars hide it
    sys.stderr.flush()
    os._exit(INTERRUPTED)
