"""The Hugging Face view every checkpoint format is presented as."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from checkpoints._errors import CheckpointError
from checkpoints._quantized import QuantizedTensor
from checkpoints._tokenizer import Tokenizer

if TYPE_CHECKING:
    import jax

Format = Literal["safetensors", "gguf", "orbax"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What `Checkpoint.read` returns for a tensor, and how the file stores it.

    `shape`, `dtype` and `nbytes` describe the array that is read; `stored_as` names the type in the file (for a
    quantized GGUF tensor "Q4_1", otherwise the dtype) and `stored_nbytes` is its size there.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    nbytes: int
    stored_as: str
    stored_nbytes: int


class TensorStore(Protocol):
    """Lazy access to the tensors of one checkpoint."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Shape and type by Hugging Face tensor name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, read from the file now."""
        ...

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        """The tensor as integers with scales, or None when it is not stored so."""
        ...

    def read_sharded(self, name: str, sharding: Any) -> Any:
        """The tensor as a `jax.Array` of a `jax.sharding.Sharding`."""
        ...

    def close(self) -> None:
        """Release the files."""
        ...


class Checkpoint:
    """An open checkpoint: configuration, tensors by Hugging Face name, tokenizer.

    `config` and `generation_config` have the keys of Hugging Face's `config.json` and `generation_config.json`
    whatever the file format; `directory` is where the files lie when the checkpoint is a directory.  Nothing is read
    from a tensor until `read` asks for it.  Use it as a context manager or call `close`.
    """

    def __init__(
        self,
        *,
        source: str,
        format: Format,
        config: dict[str, Any],
        generation_config: dict[str, Any],
        store: TensorStore,
        load_tokenizer: Callable[[], Tokenizer],
        directory: Path | None = None,
    ) -> None:
        self.source = source
        self.format: Format = format
        self.config = config
        self.generation_config = generation_config
        self.directory = directory
        self._store = store
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Tokenizer | None = None

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by Hugging Face name."""
        return self._store.infos

    def read(self, name: str) -> np.ndarray:
        """Read one tensor; raises `CheckpointError` when the checkpoint has no tensor of that name.

        Quantized GGUF tensors come as float32, everything else in the stored dtype (bfloat16 is
        `ml_dtypes.bfloat16`).  The array may be a read-only view of the file, whose pages are in memory as long as it.
        """
        self._require(name)
        return self._store.read(name)

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        """A matrix as the integers and scales that the file holds; None for a tensor that is stored otherwise.

        GGUF's Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K and Q8_0 are such formats.  Nothing is rounded again: its
        `dequantized()` is what `read` returns.  Raises `CheckpointError` as `read` does.
        """
        self._require(name)
        return self._store.read_quantized(name)

    def read_sharded(self, name: str, sharding: jax.sharding.Sharding) -> jax.Array:
        """One tensor straight onto the devices of a sharding, in the dtype of `read`.

        A process reads what its own devices hold: of safetensors exactly that, of Orbax the chunks it lies in, of a
        GGUF matrix its rows.  Raises `CheckpointError` as `read` does, ValueError when the sharding does not divide
        the tensor.
        """
        self._require(name)
        return self._store.read_sharded(name, sharding)

    def _require(self, name: str) -> None:
        if name not in self.tensors:
            raise CheckpointError(f"{self.source}: the checkpoint has no tensor named {name!r}.")

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built on the first call; raises `CheckpointError` when there is none."""
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer

    def close(self) -> None:
        """Release the files; arrays that were read stay valid."""
        self._store.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
