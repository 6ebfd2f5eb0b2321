"""GGUF files: the header first, bytes only when a tensor is asked for.

A file is the magic, a version, counts, key-value metadata, a list of tensors (name, dimensions with
the row's width first, type, offset) and, from the next multiple of the alignment, their bytes. Each
tensor is mapped by itself and unmapped with its array.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orbit_jax.checkpoint.gguf_blocks import OTHER_TYPES, TYPES, BlockType

_SCALARS = dict(enumerate("BbHhIif?")) | dict(zip((10, 11, 12), "Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies and how it is stored, without its bytes."""

    name: str
    type: BlockType
    shape: tuple[int, ...]  # the row's width last
    path: Path
    start: int  # byte offset in the file

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) // self.type.elements * self.type.nbytes

    def map(self) -> np.ndarray:
        """Its blocks as a read-only map of the file, uint8 `[..., blocks, bytes of a block]`."""
        blocks = self.shape[-1] // self.type.elements
        shape = (*self.shape[:-1], blocks, self.type.nbytes)
        return np.memmap(self.path, np.uint8, mode="r", offset=self.start, shape=shape)


@dataclass(frozen=True)
class GGUFFile:
    """What the header of a file says: metadata by key and tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The metadata under a key, of one of the given types.

        Raises:
          ValueError: if it has another type, or is missing and there is no default.
        """
        value = self.metadata.get(key, default)
        if value is None:
            raise ValueError(f"{self.path}: the metadata {key} is missing: convert the model again")
        wrong_bool = isinstance(value, bool) and kind is not bool
        if value is not default and (wrong_bool or not isinstance(value, kind)):
            raise ValueError(
                f"{self.path}: the metadata {key}={str(value)[:40]} has the wrong type: convert "
                "the model again"
            )
        return value


def is_gguf(path: str | Path) -> bool:
    """Whether a path is to be read as a GGUF file rather than as a Hugging Face folder."""
    path = Path(path)
    return path.is_file() or (path.suffix == ".gguf" and not path.is_dir())


def open_gguf(path: str | Path) -> GGUFFile:
    """Reads the header of a GGUF file.

    Raises:
      ValueError: if the file is missing, truncated, not GGUF, of another version or one of several
        parts, if a name stands twice, or if a tensor has a type or shape that cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is missing: check the path")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(
                f"{path} is not a GGUF file: give a .gguf file or a Hugging Face folder"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_header(path, data)


class _Cursor:
    """Reads a header front to back; every read is checked against the size of the file."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 4

    def take(self, nbytes: int) -> int:
        """Moves on by a number of bytes and returns where they begin."""
        start, self.at = self.at, self.at + nbytes
        if self.at > len(self.data):
            raise ValueError(
                f"{self.path} has {len(self.data)} bytes, fewer than its header: download it again"
            )
        return start

    def numbers(self, form: str, count: int) -> tuple:
        layout = struct.Struct(f"<{count}{form}")
        return layout.unpack_from(self.data, self.take(layout.size))

    def number(self, form: str) -> int:
        return self.numbers(form, 1)[0]

    def text(self) -> str:
        length = self.number("Q")
        start = self.take(length)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            raise ValueError(
                f"{self.path}: the text at byte {start} is not UTF-8: download it again"
            ) from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind, count = self.number("I"), self.number("Q")
            if kind in _SCALARS:
                return list(self.numbers(_SCALARS[kind], count))
            return [self.value(kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(
                f"{self.path}: the value type {kind} at byte {self.at} is unknown: download the "
                "file again"
            )
        return self.number(_SCALARS[kind])


def _read_header(path: Path, data: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(path, data)
    version = cursor.number("I")
    if version not in (2, 3):
        raise ValueError(
            f"{path}: GGUF version {version} is not supported (a big-endian file reads as a large "
            "one): convert the model to version 3, little-endian"
        )
    tensor_count, entry_count = cursor.numbers("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"{path}: the metadata {key} stands twice: convert the model again")
        metadata[key] = cursor.value(cursor.number("I"))
    if metadata.get("split.count", 1) > 1:
        raise ValueError(
            f"{path} is one of {metadata['split.count']} parts: merge them with "
            "llama-gguf-split --merge"
        )
    entries = [_read_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"{path}: general.alignment={alignment!r} must be a positive number")
    begin = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"{path}: the tensor {name} stands twice: convert the model again")
        tensors[name] = GGUFTensor(
            name, _type(path, name, shape, kind), shape, path, begin + offset
        )
    end = max((tensor.start + tensor.nbytes for tensor in tensors.values()), default=0)
    if end > len(data):
        raise ValueError(
            f"{path} has {len(data)} of {end} bytes, it is truncated: download it again"
        )
    return GGUFFile(path, metadata, tensors)


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset of one tensor."""
    name = cursor.text()
    widths = cursor.numbers("Q", cursor.number("I"))
    return name, widths[::-1], cursor.number("I"), cursor.number("Q")


def _type(path: Path, name: str, shape: tuple[int, ...], kind: int) -> BlockType:
    if kind not in TYPES:
        names = ", ".join(known.name for known in TYPES.values())
        raise ValueError(
            f"{path}: {name} has the type {OTHER_TYPES.get(kind, kind)}, which is not supported: "
            f"quantise the model to one of {names}"
        )
    if not shape or shape[-1] % TYPES[kind].elements:
        raise ValueError(
            f"{path}: {name} of shape {list(shape)} does not consist of {TYPES[kind].name} blocks "
            f"of {TYPES[kind].elements}: download it again"
        )
    return TYPES[kind]
