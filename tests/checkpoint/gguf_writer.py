"""Writes GGUF files for tests: goldens with one thing changed, tokenizers of a few words."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from orbit_jax.checkpoint.gguf_blocks import TYPES
from orbit_jax.checkpoint.gguf_file import open_gguf

# name: (number of the type, dimensions with the row's width first, bytes)
Tensors = dict[str, tuple[int, list[int], bytes]]
_NUMBERS = {block.name: number for number, block in TYPES.items()}


def write_gguf(path: Path, metadata: dict[str, Any], tensors: Tensors | None = None) -> Path:
    """One file of version 3; ints are written as uint32 (in lists as int32), floats as f32."""
    tensors = tensors or {}
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += _text(key) + _value(value)
    offset = 0
    for name, (kind, widths, data) in tensors.items():
        out += _text(name) + struct.pack(f"<I{len(widths)}Q", len(widths), *widths)
        out += struct.pack("<IQ", kind, offset)
        offset += len(data) + -len(data) % 32
    for _, _, data in tensors.values():
        out += bytes(-len(out) % 32) + data
    path.write_bytes(out)
    return path


def read_all(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Metadata and tensors of a file, to be changed and written again."""
    file = open_gguf(path)
    tensors = {
        name: (_NUMBERS[t.type.name], list(t.shape[::-1]), np.array(t.map()).tobytes())
        for name, t in file.tensors.items()
    }
    return file.metadata, tensors


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
