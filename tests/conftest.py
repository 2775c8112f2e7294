"""Fixtures shared by the tests of models, runtime and engine: the golden checkpoints, and runners compiled once."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_NAMES = tuple(sorted(path.parent.name for path in GOLDEN.glob("*/expected.npz")))

MOST_MAPPINGS = 20_000
"""Linux allows a process 65,530 memory mappings by default, and every program compiled for a CPU takes some hundreds of
them: the compiler crashes when there are no more."""
TESTS_BETWEEN_COUNTS = 25
tests_run = pytest.StashKey[int]()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Give up the programs of earlier tests in time."""
    stash = item.config.stash
    stash[tests_run] = stash.get(tests_run, 0) + 1
    if stash[tests_run] % TESTS_BETWEEN_COUNTS == 0 and memory_mappings() > MOST_MAPPINGS and "jax" in sys.modules:
        import jax

        jax.clear_caches()
        gc.collect()


def memory_mappings() -> int:
    """Of this process; 0 where that is not known."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


@dataclass(frozen=True)
class GoldenModel:
    """One tiny checkpoint of tests/golden and what Hugging Face computes from it."""

    name: str

    @property
    def path(self) -> Path:
        return GOLDEN / self.name

    @cached_property
    def config(self) -> Any:
        return self.config_as("float32")

    @cached_property
    def params(self) -> Any:
        return self.params_as("float32")

    def config_as(self, dtype: str) -> Any:
        from checkpoints import open_checkpoint
        from jaxinfer.runtime.loading import decoder_config

        with open_checkpoint(self.path) as checkpoint:
            return decoder_config(checkpoint, dtype=dtype)

    def params_as(self, dtype: str) -> Any:
        from checkpoints import open_checkpoint
        from jaxinfer.runtime.loading import load_params

        with open_checkpoint(self.path) as checkpoint:
            return load_params(checkpoint, self.config_as(dtype))

    @cached_property
    def _expected(self) -> dict[str, np.ndarray]:
        with np.load(self.path / "expected.npz") as archive:
            return dict(archive)

    def _series(self, name: str) -> list[np.ndarray]:
        count = sum(key.startswith(f"{name}_") for key in self._expected)
        assert count >= 4, f"{self.name} has {count} entries {name}"
        return [self._expected[f"{name}_{index}"] for index in range(count)]

    @property
    def prompts(self) -> list[np.ndarray]:
        """Token ids i32[P] of each prompt."""
        return self._series("prompt")

    @property
    def logits(self) -> list[np.ndarray]:
        """f32[P, vocab] of each prompt."""
        return self._series("logits")

    @property
    def greedy(self) -> list[np.ndarray]:
        """i32[64], the greedy continuation of each prompt."""
        return self._series("greedy")


@pytest.fixture(scope="session")
def golden_models() -> dict[str, GoldenModel]:
    return {name: GoldenModel(name) for name in GOLDEN_NAMES}


@pytest.fixture(scope="session")
def build_runner(golden_models):
    """build_runner(model name, **limits) -> a Runner, compiled once per session for the same arguments."""
    from jaxinfer.runtime.limits import RunnerLimits
    from jaxinfer.runtime.runner import Runner

    built: dict[Any, Any] = {}

    def build(name: str, dtype: str = "float32", **limits: int) -> Any:
        key = (name, dtype, *sorted(limits.items()))
        if key not in built:
            model = golden_models[name]
            config = model.config_as(dtype)
            limit = RunnerLimits(vocab_size=config.vocab_size, **limits)
            built[key] = Runner(config, model.params_as(dtype), limit)
        runner = built[key]
        runner.reset()
        return runner

    return build
