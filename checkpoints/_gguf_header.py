"""Parse and validate the header of a GGUF file with bounded memory.

Files come from strangers, so every count and length is compared with the bytes the file really has before anything is
allocated for it.  The result is plain Python data; tensor bytes are never touched here.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from checkpoints._errors import CheckpointError

MAX_METADATA_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 1 << 16
MAX_STRING_BYTES = 1 << 26
MAX_ARRAY_ITEMS = 1 << 22
MAX_ALIGNMENT = 1 << 20
MAX_HEADER_BYTES = 1 << 28
DEFAULT_ALIGNMENT = 32

_SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor as the file stores it: `shape` in numpy order (slowest axis first), byte range in the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata (scalars, strings, lists of strings, numpy arrays) and tensor directory of one file."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    """Reads little-endian fields in order and refuses to pass the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.offset = 0
        self.end = min(len(data), MAX_HEADER_BYTES)

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}; download or convert the file again.")

    def need(self, count: int, what: str) -> None:
        if count > self.end - self.offset:
            if self.end == MAX_HEADER_BYTES < len(self.data):
                raise self.fail(f"the GGUF header is larger than {MAX_HEADER_BYTES} bytes at {what}")
            raise self.fail(f"the GGUF header is truncated, {what} reaches past the end of the file")

    def take(self, code: str, what: str) -> int:
        size = struct.calcsize(code)
        self.need(size, what)
        (value,) = struct.unpack_from(code, self.data, self.offset)
        self.offset += size
        return value

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        length = self.take("<Q", what)
        self.need(length, what)
        if length > limit:
            raise self.fail(f"{what} is {length} bytes long, more than the {limit} allowed")
        raw = self.data[self.offset : self.offset + length]
        self.offset += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not valid UTF-8") from None

    def value(self, kind: int, what: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string(what)
        if kind == GGUFValueType.ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            raise self.fail(f"{what} has the unknown value type {kind}")
        return self.numbers(kind, 1, what)[0].item()

    def numbers(self, kind: int, count: int, what: str) -> np.ndarray:
        dtype = np.dtype(_SCALARS[kind])
        self.need(count * dtype.itemsize, what)
        result = np.frombuffer(self.data, dtype, count, self.offset).copy()
        self.offset += count * dtype.itemsize
        return result

    def array(self, what: str) -> Any:
        kind = self.take("<I", what)
        count = self.take("<Q", what)
        if count > MAX_ARRAY_ITEMS:
            raise self.fail(f"{what} claims {count} items, more than the {MAX_ARRAY_ITEMS} allowed")
        if kind == GGUFValueType.STRING:
            self.need(8 * count, what)
            return [self.string(what) for _ in range(count)]
        if kind not in _SCALARS:
            raise self.fail(f"{what} is an array of the unsupported value type {kind}")
        return self.numbers(kind, count, what)


def parse_header(data: mmap.mmap, path: Path) -> GGUFHeader:
    """Parse the header of a mapped GGUF file; raises `CheckpointError` for anything malformed."""
    cursor = _Cursor(data, path)
    if data[:4] != b"GGUF":
        raise CheckpointError(f"{path}: this is not a GGUF file (it does not start with GGUF); give a .gguf file.")
    cursor.offset = 4
    version = cursor.take("<I", "the version")
    if version & 0xFFFF == 0 and version:
        raise CheckpointError(f"{path}: big-endian GGUF files are not supported; convert it to little-endian.")
    if version not in (2, 3):
        raise CheckpointError(f"{path}: GGUF version {version} is not supported; convert it to version 3.")
    tensor_count = cursor.take("<Q", "the tensor count")
    key_count = cursor.take("<Q", "the metadata count")
    if tensor_count > MAX_TENSORS:
        raise cursor.fail(f"it claims {tensor_count} tensors, more than the {MAX_TENSORS} allowed")
    if key_count > MAX_METADATA_KEYS:
        raise cursor.fail(f"it claims {key_count} metadata keys, more than the {MAX_METADATA_KEYS} allowed")
    metadata = _parse_metadata(cursor, key_count)
    entries = [_parse_tensor_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, not a power of two from 1 to {MAX_ALIGNMENT}")
    data_start = -(-cursor.offset // alignment) * alignment
    return GGUFHeader(version, metadata, _place_tensors(cursor, entries, data_start, alignment))


def _parse_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = cursor.string(f"the name of metadata key {index}", MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.fail(f"the metadata key {key[:80]!r} appears twice")
        what = f"the metadata value {key[:80]!r}"
        metadata[key] = cursor.value(cursor.take("<I", what), what)
    return metadata


def _parse_tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string("a tensor name", MAX_NAME_BYTES)
    what = f"the entry of tensor {name[:80]!r}"
    dimensions = cursor.take("<I", what)
    if dimensions > MAX_DIMENSIONS:
        raise cursor.fail(
            f"tensor {name[:80]!r} claims {dimensions} dimensions, more than the {MAX_DIMENSIONS} allowed"
        )
    shape = tuple(cursor.take("<Q", what) for _ in range(dimensions))[::-1]
    kind = cursor.take("<I", what)
    return name, shape, kind, cursor.take("<Q", what)


def _place_tensors(
    cursor: _Cursor, entries: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
) -> dict[str, GGUFTensor]:
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in entries:
        label = f"tensor {name[:80]!r}"
        if name in tensors:
            raise cursor.fail(f"{label} appears twice")
        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError:
            raise cursor.fail(f"{label} has the unknown type {kind}") from None
        block, block_bytes = GGML_QUANT_SIZES[quantization]
        if not all(shape) or (shape and shape[-1] % block):
            raise cursor.fail(f"{label} of shape {shape} does not fit the {block}-value blocks of {quantization.name}")
        nbytes = math.prod(shape) // block * block_bytes
        if offset % alignment:
            raise cursor.fail(f"{label} starts at {offset}, which is not a multiple of the alignment {alignment}")
        if start + offset + nbytes > len(cursor.data):
            raise cursor.fail(f"{label} of shape {shape} reaches past the end of the file, which may be truncated")
        tensors[name] = GGUFTensor(name, shape, quantization, start + offset, nbytes)
    _refuse_overlaps(cursor, tensors)
    return tensors


def _refuse_overlaps(cursor: _Cursor, tensors: dict[str, GGUFTensor]) -> None:
    """Overlapping tensors would let a small file expand into a model of any size."""
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise cursor.fail(f"tensors {before.name[:80]!r} and {after.name[:80]!r} overlap")
