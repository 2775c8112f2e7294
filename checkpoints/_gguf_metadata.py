"""Typed access to the metadata of one GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints._errors import CheckpointError
from checkpoints._gguf_header import GGUFHeader


class Metadata:
    """The keys below one architecture's prefix; a missing or misfit value is a `CheckpointError`."""

    def __init__(self, values: Mapping[str, Any], prefix: str, source: str) -> None:
        self.values = values
        self.prefix = prefix
        self.source = source

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; an array is accepted when all layers agree."""
        value = self._scalar(key, default)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self._bad(key, value, "a positive integer")
        return value

    def count(self, key: str, default: int) -> int:
        """An integer that may be zero."""
        value = self._scalar(key, default)
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise self._bad(key, value, "a count")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.values.get(f"{self.prefix}.{key}", default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._bad(key, value, "a finite number")
        return float(np.float32(value)) if type(value) is int else _shortest(value)

    def layers(self, header: GGUFHeader) -> int:
        """The number of layers, each of which has tensors."""
        layers = self.integer("block_count")
        if layers > len(header.tensors):
            raise CheckpointError(
                f"{self.source}: the file claims {layers} layers and has {len(header.tensors)} tensors; "
                "download or convert it again."
            )
        return layers

    def has(self, key: str) -> bool:
        """Whether the file sets the key."""
        return f"{self.prefix}.{key}" in self.values

    def _scalar(self, key: str, default: int | None) -> Any:
        value = self.values.get(f"{self.prefix}.{key}", default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, np.ndarray):
            raise CheckpointError(
                f"{self.source}: metadata {self.prefix}.{key} differs between layers, which is not supported; "
                "use a model whose layers are alike."
            )
        return value

    def _bad(self, key: str, value: object, wanted: str) -> CheckpointError:
        found = "missing" if value is None else f"{str(value)[:40]!r}"
        return CheckpointError(
            f"{self.source}: metadata {self.prefix}.{key} is {found} but must be {wanted}; convert the file again."
        )


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32, so that 9.999999747378752e-06 reads 1e-05 again."""
    return float(str(np.float32(value)))
