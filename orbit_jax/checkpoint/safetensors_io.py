"""Safetensors files: headers first, bytes only when a tensor is asked for.

The format is a little-endian u64 (length of the header), a JSON header with dtype, shape and byte
range of every tensor, and the bytes. Each tensor is mapped by itself and unmapped with its array,
so that a 600 GB checkpoint passes through a host tensor by tensor.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

# Types that bases, adapters and their by-products use. Others are refused, not guessed.
_DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PAIRS = "F4"  # two elements a byte; their bytes are what is read
_MAX_HEADER = 100_000_000  # bytes, the format's own limit


@dataclass(frozen=True)
class TensorRef:
    """Where a tensor lies: what its header says, without its bytes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    path: Path
    start: int  # byte offset in the file

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def map(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The tensor as a read-only map of the file, `shape` of `dtype`; drop it to unmap.

        With `start` and `stop`, only these of its first dimension.
        """
        if start == 0 and stop is None:
            shape = self.shape
        else:
            shape = (len(range(self.shape[0])[start:stop]), *self.shape[1:])
        if 0 in shape:
            return np.empty(shape, self.dtype)
        begin = self.start + start * math.prod(self.shape[1:]) * self.dtype.itemsize
        return np.memmap(self.path, self.dtype, mode="r", offset=begin, shape=shape)


def open_checkpoint(folder: str | Path) -> dict[str, TensorRef]:
    """Reads the headers of a Hugging Face folder: one `model.safetensors`, or an index of shards.

    Raises:
      ValueError: if the folder, the file or a shard is missing, if a file is truncated or is not
        safetensors, if a dtype is unknown, or if the index and the shards contradict each other.
    """
    folder = Path(folder)
    refs: dict[str, TensorRef] = {}
    for path in checkpoint_files(folder):
        for name, ref in open_file(path).items():
            if name in refs:
                raise ValueError(f"{name} stands in both {refs[name].path} and {path}: remove one")
            refs[name] = ref
    index = folder / INDEX_FILE
    if index.exists():
        for name, shard in _weight_map(index).items():
            if name not in refs or refs[name].path.name != shard:
                raise ValueError(f"{index}: {name} is not in {shard}: download that shard again")
    return refs


def checkpoint_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder, sorted by name.

    Raises:
      ValueError: if the folder, its weights or a shard of its index is missing.
    """
    files = expected_files(folder)
    for path in files:
        if not path.is_file():
            has_index = (Path(folder) / INDEX_FILE).exists()
            reason = f"{INDEX_FILE} names it" if has_index else f"there is no {INDEX_FILE}"
            raise ValueError(f"{path} is missing and {reason}: download the checkpoint again")
    return files


def expected_files(folder: str | Path) -> list[Path]:
    """The safetensors files that a Hugging Face folder should have, sorted by name.

    Raises:
      ValueError: if the folder is missing or its index cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"the checkpoint folder {folder} does not exist: check the path")
    index = folder / INDEX_FILE
    if not index.exists():
        return [folder / SINGLE_FILE]
    return sorted(folder / shard for shard in set(_weight_map(index).values()))


def open_file(path: str | Path) -> dict[str, TensorRef]:
    """Reads the header of one safetensors file.

    Raises:
      ValueError: if the file is missing, truncated or not safetensors, or if a dtype is unknown.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is missing: check the path")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin = 8 + length
        if size < 8 or begin > size:
            raise ValueError(f"{path} has {size} bytes, fewer than its header: download it again")
        if length > _MAX_HEADER:
            raise ValueError(f"{path}: a header of {length} bytes is too large: download it again")
        header = _parse(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{path} has no safetensors header: download it again")
    header.pop("__metadata__", None)
    refs = {name: _ref(path, begin, name, entry) for name, entry in header.items()}
    _check_tiling(path, begin, size, list(refs.values()))
    return refs


def read_small(refs: Iterable[TensorRef]) -> dict[str, np.ndarray]:
    """Small tensors by name, where there are so many that a map for each would take long.

    Each file is opened once.
    """
    by_file: dict[Path, list[TensorRef]] = {}
    for ref in refs:
        by_file.setdefault(ref.path, []).append(ref)
    found = {}
    for path, of_file in by_file.items():
        with path.open("rb") as file:
            for ref in sorted(of_file, key=lambda ref: ref.start):
                file.seek(ref.start)
                found[ref.name] = np.frombuffer(file.read(ref.nbytes), ref.dtype).reshape(ref.shape)
    return found


def write_safetensors(
    path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes host arrays to one file; the same arrays in any order give the same bytes.

    Raises:
      ValueError: if an array has a dtype that safetensors does not know.
    """
    header: dict[str, dict] = {"__metadata__": dict(metadata)} if metadata else {}
    # Widest types first keeps every tensor aligned to its type, which other readers rely on.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    end = 0
    for name, array in ordered:
        if array.dtype not in _NAMES:
            raise ValueError(f"{name}: dtype {array.dtype} cannot be written: convert it first")
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the bytes to begin at a multiple of 8
    with Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in ordered:
            # ml_dtypes arrays have no buffer protocol of their own, their bytes have.
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def read_json(path: Path) -> dict:
    """Reads a JSON object.

    Raises:
      ValueError: if the file is missing or does not hold a JSON object.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing: check the path, or download the checkpoint again")
    value = _parse(path.read_bytes())
    if value is None:
        raise ValueError(f"{path} is not valid JSON: download it again")
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object: replace it")
    return value


def _parse(text: bytes) -> Any:
    """What JSON says; None if it is broken, or names a thing twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("twice")
        return found

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError):  # a UnicodeDecodeError is a ValueError too
        return None


def _ref(path: Path, begin: int, name: str, entry: Any) -> TensorRef:
    if not name.isprintable():
        raise ValueError(f"{path}: the name {name!r} cannot be printed: download it again")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(
            f"{path} has no safetensors header: {name} lacks a dtype, a shape or offsets: "
            "download it again"
        )
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or (kind not in _DTYPES and kind != _PAIRS):
        raise ValueError(
            f"{path}: {name} has the unknown dtype {kind}: use one of {(*_DTYPES, _PAIRS)}"
        )
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(
            f"{path}: {name} has shape={shape!r} and data_offsets={offsets!r}, which must be whole "
            "numbers of at least 0, two of them for the offsets: download it again"
        )
    if kind == _PAIRS:
        if not shape or shape[-1] % 2:
            raise ValueError(f"{path}: {name} of F4{shape} has no pairs of codes: convert it")
        shape = [*shape[:-1], shape[-1] // 2]
    ref = TensorRef(
        name, _DTYPES.get(kind, np.dtype(np.uint8)), tuple(shape), path, begin + offsets[0]
    )
    if ref.nbytes != offsets[1] - offsets[0]:
        raise ValueError(
            f"{path}: {name} of {ref.dtype}{list(ref.shape)} needs {ref.nbytes} bytes, its header "
            f"gives it {offsets[1] - offsets[0]}: download it again"
        )
    return ref


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_tiling(path: Path, begin: int, size: int, refs: list[TensorRef]) -> None:
    """Tensors lie one behind the other to the end of the file, as the format demands."""
    ordered = sorted(refs, key=lambda ref: (ref.start, ref.nbytes))
    ends = [begin, *(ref.start + ref.nbytes for ref in ordered)]
    if ends[-1] > size:
        raise ValueError(
            f"{path} has {size} of {ends[-1]} bytes, it is truncated: download it again"
        )
    for ref, end in zip(ordered, ends, strict=False):
        if ref.start != end:
            what = "overlaps the tensor before it" if ref.start < end else "leaves bytes before it"
            raise ValueError(f"{path}: {ref.name} {what}: download it again")
    if ends[-1] < size:
        raise ValueError(
            f"{path} has {size} bytes where its tensors end at {ends[-1]}: download it again"
        )


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map: download it again")
    checked: set[str] = set()  # a large index names few files, each of them very often
    for name, shard in weight_map.items():
        if isinstance(shard, str) and shard in checked:
            continue
        if not isinstance(shard, str) or not shard.isprintable() or Path(shard).name != shard:
            raise ValueError(
                f"{index}: {name!r} is in {shard!r}, which is no file name: download it again"
            )
        checked.add(shard)
    return weight_map
