"""jax's persistent compilation cache, on by default: the second start compiles nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax

from checkpoints import cache_directory


def compilation_cache_directory() -> Path:
    """Where compiled programs are kept: JAX_COMPILATION_CACHE_DIR, or a folder in the user's cache directory."""
    settings: Any = jax.config  # its attributes are made at run time
    chosen = settings.jax_compilation_cache_dir or os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return Path(chosen) if chosen else cache_directory() / "compiled"


def enable_compilation_cache() -> None:
    """Keep every compiled program on disk, unless the user chose another directory or switched the cache off."""
    settings: Any = jax.config
    if not settings.jax_enable_compilation_cache or settings.jax_compilation_cache_dir:
        return
    jax.config.update("jax_compilation_cache_dir", str(compilation_cache_directory()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
