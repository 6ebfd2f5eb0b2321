"""Arrays of the base, filled piece by piece in the memory in which they stay.

A base may be larger than the host. Each shard of an array is allocated on the device that owns it
and its pieces are copied there as they are read. Where the device is the host itself, a shard is an
aligned host array that the device takes over as it is.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding

from orbit_jax import compile as compiler
from orbit_jax.quant.qtensor import FORMATS, QTensor

_IN_FLIGHT = 16_000_000  # bytes of pieces that may wait for a device
_SMALL = 4_000_000  # bytes of a shard that is rather filled on the host and moved as a whole


@dataclass(frozen=True)
class Placement:
    """Where a loader puts arrays, and whom it tells how far it is.

    Attributes:
      sharding: gives the sharding of an array by its path in the base (as
        `layers.0.self_attn.q_proj.codes`) and its shape; None: the default device has it all.
      progress: called with the bytes done and the bytes in total after each weight.
      on_device: whether shards are filled on the device; None: where it is not the host.
    """

    sharding: Callable[[str, tuple[int, ...]], Sharding] | None = None
    progress: Callable[[int, int], None] | None = None
    on_device: bool | None = None

    def array(self, path: str, shape: tuple[int, ...], dtype: np.dtype) -> "Filling":
        """An array to be filled."""
        sharding = None if self.sharding is None else self.sharding(path, shape)
        return Filling(shape, dtype, sharding, self.on_device)


DEFAULT_PLACEMENT = Placement()


class OfShapes(Placement):
    """Places nothing: an array is its `jax.ShapeDtypeStruct`, with its sharding if there is one."""

    def array(self, path: str, shape: tuple[int, ...], dtype: np.dtype) -> "_Shape":
        """An array that is never made."""
        sharding = None if self.sharding is None else self.sharding(path, shape)
        return _Shape(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))


def fill(
    path: str,
    shape: tuple[int, ...],
    pieces: Iterable[tuple[tuple[int, ...], QTensor | np.ndarray, int]],
    placement: Placement,
    told: Callable[[int], None],
) -> QTensor | jax.Array:
    """A leaf of the base out of pieces of it.

    Args:
      path: of the leaf; its fields are placed by theirs.
      shape: logical shape of the leaf, `[..., out, in]` or of a vector.
      pieces: where each begins in the stack, itself, and bytes read; all fields of the first are of
        the shapes and types of the others', or it is a part of a plain weight.
      told: takes the bytes read after each piece.
    """
    arrays, subnormal = None, False
    for start, piece, count in pieces:
        if isinstance(piece, QTensor):
            subnormal |= piece.subnormal
            piece = _within(piece.replace(subnormal=False), path, shape, placement)
        fields, structure = jax.tree_util.tree_flatten_with_path(piece)
        if arrays is None:
            arrays = [_array(path, at, field, piece, shape, placement) for at, field in fields]
            first = structure
        if structure != first:
            raise ValueError(f"{path}: weights of one stack differ in format: {structure}, {first}")
        for array, (_, field) in zip(arrays, fields, strict=True):
            array.write(start, field)
        told(count)
    weight = jax.tree.unflatten(first, [array.finish() for array in arrays])
    return weight.replace(subnormal=subnormal) if isinstance(weight, QTensor) else weight


def _array(
    path: str,
    at: tuple,
    field: np.ndarray,
    piece: QTensor | np.ndarray,
    shape: tuple[int, ...],
    placement: Placement,
) -> "Filling":
    name = ".".join(
        part for part in (path, jax.tree_util.keystr(at, simple=True, separator=".")) if part
    )
    plain = not isinstance(piece, QTensor) or FORMATS[piece.format].plain
    own = shape if plain else (*shape[:-2], *field.shape)
    return placement.array(name, own, field.dtype)


def _within(q: QTensor, path: str, shape: tuple[int, ...], placement: Placement) -> QTensor:
    """`q` with blocks of so many rows that none lies across two devices."""
    if q.block_rows == 1 or q.scales.shape[0] == 1 or placement.sharding is None:
        return q
    codes = (*shape[:-2], *q.codes.shape)
    rows = placement.sharding(f"{path}.codes", codes).shard_shape(codes)[-2]
    if rows == codes[-2] or rows % q.block_rows == 0:
        return q
    block = math.gcd(q.block_rows, rows)
    scales = np.repeat(q.scales, q.block_rows // block, axis=0)
    return q.replace(scales=scales[: codes[-2] // block], block_rows=block)


class Filling:
    """An array that is written piece by piece; `finish` gives it."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        sharding: Sharding | None = None,
        on_device: bool | None = None,
    ):
        self._shape, self._sharding = shape, sharding
        owners: dict[tuple, list[jax.Device | None]] = {}  # None: the default device
        if sharding is None:
            owners[tuple((0, n) for n in shape)] = [None]
        else:
            for device, index in sharding.addressable_devices_indices_map(shape).items():
                bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
                owners.setdefault(bounds, []).append(device)
        if on_device is None:
            on_device = jax.default_backend() != "cpu"
        self._shards = {}
        for bounds, devices in owners.items():
            own = tuple(high - low for low, high in bounds)
            large = math.prod(own) * np.dtype(dtype).itemsize > _SMALL
            kind = _OnDevice if on_device and large else _OnHost
            self._shards[bounds] = kind(own, dtype, devices)

    def write(self, start: Sequence[int], piece: np.ndarray) -> None:
        """Puts a piece where it begins at `start`; missing last dimensions begin at 0."""
        start = (*start, *(0,) * (len(self._shape) - len(start)))
        piece = piece.reshape((1,) * (len(self._shape) - piece.ndim) + piece.shape)
        for bounds, shard in self._shards.items():
            both = [
                (max(low, at), min(high, at + n))
                for (low, high), at, n in zip(bounds, start, piece.shape, strict=True)
            ]
            if all(low < high for low, high in both):
                own = tuple(slice(l - at, h - at) for (l, h), at in zip(both, start, strict=True))
                place = [l - low for (l, _), (low, _) in zip(both, bounds, strict=True)]
                shard.write(place, piece[own])

    def finish(self) -> jax.Array:
        """The array; nothing may be written after."""
        arrays = [array for shard in self._shards.values() for array in shard.finish()]
        if self._sharding is None:
            return arrays[0]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, arrays)


@dataclass(frozen=True)
class _Shape:
    """What stands in for a `Filling` where only shapes are wanted."""

    struct: jax.ShapeDtypeStruct

    def write(self, start: Sequence[int], piece: np.ndarray) -> None:
        """Nothing is kept."""

    def finish(self) -> jax.ShapeDtypeStruct:
        return self.struct


class _OnHost:
    """A shard in host memory, shared by the devices that have it."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, devices: list[jax.Device | None]):
        self._buffer, self._devices = _allocate(shape, np.dtype(dtype)), devices

    def write(self, start: list[int], piece: np.ndarray) -> None:
        place = tuple(slice(at, at + n) for at, n in zip(start, piece.shape, strict=True))
        self._buffer[place] = piece

    def finish(self) -> list[jax.Array]:
        return [jax.device_put(self._buffer, device) for device in self._devices]


class _OnDevice:
    """A shard in the memory of each device that has it."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, devices: list[jax.Device | None]):
        self._devices, self._in_flight = devices, 0
        self._buffers = []
        for device in devices:
            # Made where they stay: given as an argument, they would be moved there.
            with jax.default_device(device):
                self._buffers.append(jax.device_put(jnp.zeros(shape, dtype), device))

    def write(self, start: list[int], piece: np.ndarray) -> None:
        at = tuple(np.int32(i) for i in start)
        self._buffers = [
            _update(buffer, jax.device_put(piece, device), at)
            for buffer, device in zip(self._buffers, self._devices, strict=True)
        ]
        self._in_flight += piece.nbytes * len(self._devices)
        if self._in_flight > _IN_FLIGHT:
            jax.block_until_ready(self._buffers)
            self._in_flight = 0

    def finish(self) -> list[jax.Array]:
        return jax.block_until_ready(self._buffers)


def _write_slice(buffer: jax.Array, piece: jax.Array, start: tuple) -> jax.Array:
    return lax.dynamic_update_slice(buffer, piece, start)


_update = compiler.jit(_write_slice, {}, donate_argnames=("buffer",))


def _allocate(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that `device_put` takes over on a CPU instead of copying: aligned to 64 bytes."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)
