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


_JAX_THRESHOLDS = {
    "jax_persistent_cache_min_compile_time_secs": (1.0, 0.0),
    "jax_persistent_cache_min_entry_size_bytes": (0, -1),
}
"""What jax keeps only above, by its own default, and what keeps everything."""


def enable_compilation_cache() -> None:
    """Keep every compiled program on disk, in the user's directory if one was chosen, unless the cache is switched off.

    Thresholds that the user set, by the environment or to another value than jax's own, stay.
    """
    settings: Any = jax.config
    if not settings.jax_enable_compilation_cache:
        return
    if not settings.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(compilation_cache_directory()))
    for name, (default, everything) in _JAX_THRESHOLDS.items():
        if name.upper() not in os.environ and getattr(settings, name) == default:
            jax.config.update(name, everything)
