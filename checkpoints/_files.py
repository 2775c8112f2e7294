"""Reading the small files of a checkpoint directory without trusting them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import numpy as np

from checkpoints._errors import CheckpointError

MAX_JSON_BYTES = 1 << 26
_LONGEST_NAME, _LONGEST_PATH = 255, 1000


def child(directory: Path, name: str) -> Path:
    """The path of a file named by the checkpoint; raises `CheckpointError` when it lies outside the directory.

    Links are followed before the check.  In a Hugging Face cache the files are links into the repository's `blobs`,
    so there the repository's folder is the limit.
    """
    parts = Path(name).parts
    if not name or "\0" in name or "\\" in name or Path(name).is_absolute() or ".." in parts:
        raise CheckpointError(
            f"{directory}: the file name {name[:80]!r} leaves the directory and is refused; get the checkpoint again."
        )
    longest = max(len(part.encode(errors="replace")) for part in parts)
    if longest > _LONGEST_NAME or len(name) > _LONGEST_PATH or not name.isprintable():
        raise CheckpointError(f"{directory}: {name[:80]!r} is no name of a file; get the checkpoint again.")
    path = directory / name
    root = directory.resolve()
    allowed = [root]
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        allowed.append((root.parent.parent / "blobs").resolve())
    target = path.resolve()
    if not any(target.is_relative_to(place) for place in allowed):
        raise CheckpointError(
            f"{path}: the file is a link that leaves the directory, which is refused; replace it with the file itself."
        )
    return path


def map_bytes(file: IO[bytes], offset: int, count: int) -> np.ndarray:
    """A part of a file, uint8[count], read-only.

    Every call maps the part anew, so its pages leave the process's memory with the last array that views them.
    """
    if count == 0:
        return np.empty(0, np.uint8)
    return np.asarray(np.memmap(file, np.uint8, "r", offset, (count,)))  # type: ignore[call-overload]


def open_file(path: Path) -> IO[bytes]:
    """Open a file for reading; raises `CheckpointError` when that is not possible."""
    try:
        return path.open("rb")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror}); check the path.") from None


def read_text(path: Path, limit: int = MAX_JSON_BYTES) -> str:
    """The UTF-8 text of a file of at most `limit` bytes."""
    try:
        if path.stat().st_size > limit:
            raise CheckpointError(f"{path}: the file is larger than the {limit} bytes allowed; get a correct one.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check the checkpoint.") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: the file is not UTF-8 text; get a correct one.") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises `CheckpointError` when it is none."""
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path}: malformed JSON at line {error.lineno}, column {error.colno} ({error.msg}); get a correct file."
        ) from None
    except (RecursionError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path}: malformed JSON (nested too deep or a number too long); get a correct file."
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: the file holds no JSON object; get a correct file.")
    return value


def read_optional_json(directory: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the directory, or an empty one when there is no such file."""
    path = child(directory, name)
    return read_json(path) if path.exists() else {}
