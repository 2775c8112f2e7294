"""What is kept in jax's persistent compilation cache, by what the user set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import jax
from jaxinfer.runtime.compilation_cache import enable_compilation_cache
enable_compilation_cache()
jax.jit(lambda x: x * 3 + 1)(2.0).block_until_ready()
"""
"""A program that compiles faster than jax's own threshold of one second."""


def kept_in(directory: Path, **settings: str) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment | settings, check=True)
    return sum(path.is_file() for path in directory.rglob("*"))


def test_the_default_directory(tmp_path):
    assert kept_in(tmp_path / "compiled", JAXINFER_CACHE_DIR=str(tmp_path)) > 0


@pytest.mark.parametrize(
    ("settings", "keeps"),
    [
        ({}, True),
        ({"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1"}, False),
        ({"JAX_ENABLE_COMPILATION_CACHE": "false"}, False),
    ],
)
def test_the_users_directory(tmp_path, settings, keeps):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    kept = kept_in(theirs, JAX_COMPILATION_CACHE_DIR=str(theirs), JAXINFER_CACHE_DIR=str(ours), **settings)
    assert (kept > 0) == keeps
    assert not ours.exists()
