"""Keeps the libraries' chatter off the terminal."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from jaxinfer.cli._errors import UserMistake

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_OUR_LEVEL = "3"


def quiet_libraries() -> None:
    """Ask jax, XLA and absl for errors only, unless the user has asked for more by their own settings.

    To be called before jax is imported, which reads the level then.
    """
    os.environ.setdefault(_LEVEL, _OUR_LEVEL)
    if "JAX_LOGGING_LEVEL" not in os.environ:
        for name in ("jax", "absl", "orbax"):
            logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


@contextmanager
def native_messages_held() -> Iterator[None]:
    """Hold back what native code writes to file descriptor 2, and show it only if the program fails.

    XLA's alarm about slow compilation ignores the log level. Python's own standard error stays where it is.
    """
    if os.environ.get(_LEVEL) != _OUR_LEVEL:
        yield  # the user wants to see it
        return
    stderr = sys.stderr
    real = os.dup(2)
    with tempfile.TemporaryFile() as held, os.fdopen(real, "w", encoding=stderr.encoding, errors="replace") as shown:
        stderr.flush()
        os.dup2(held.fileno(), 2)
        if stderr is sys.__stderr__:
            sys.stderr = shown
        try:
            yield
        except UserMistake:
            raise
        except Exception:
            held.seek(0)
            os.write(real, held.read())
            raise
        finally:
            shown.flush()
            sys.stderr = stderr
            os.dup2(real, 2)
