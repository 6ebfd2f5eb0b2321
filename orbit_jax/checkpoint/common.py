"""What the readers of checkpoints share: host arrays, digests, and lists that are cut short."""

import hashlib
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import numpy as np

# Places one host array on the devices, given its path in the base.
Put = Callable[[str, np.ndarray], jax.Array]


def to_default_device(_: str, array: np.ndarray) -> jax.Array:
    """The `Put` of a loader that is given none."""
    return jax.device_put(array)


def allocate(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that `device_put` takes over on a CPU instead of copying: aligned to 64 bytes."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def few(names: Iterable[str], most: int = 6) -> str:
    """The first names of a list, and how many more there are."""
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
