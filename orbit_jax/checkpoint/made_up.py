"""Tensors of a checkpoint that was never written.

Codes are random bits, and scales bring the weights to a deviation of `in ** -0.5`, with which
activations stay of order 1.
"""

import math
from dataclasses import dataclass

import numpy as np

from orbit_jax.checkpoint.layout import Leaf
from orbit_jax.checkpoint.scheme import E4M3, E5M2, E8M0, PLAIN, U8, Scheme

_FLOAT8_BITS = 0xBF  # without the highest bit of the exponent: below 2, and no NaN
_FLOAT4_DEVIATION, _FLOAT8_DEVIATION = 2.9, 0.6  # of the numbers that random codes are
_MIDDLE = {4: 0x88, 8: 0x80}  # bytes of zero codes


@dataclass(frozen=True)
class MadeUpTensor:
    """What stands in for a `TensorRef`: the same bits for the same seed, name and part.

    Attributes:
      leaf: that the tensor is of; suffix: of its name, as `weight_scale`.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    leaf: Leaf
    scheme: Scheme
    suffix: str
    seed: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def map(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The tensor, or these of its first dimension: drawn anew each time."""
        shape = self.shape
        if start or stop is not None:
            shape = (len(range(shape[0])[start:stop]), *shape[1:])
        rng = np.random.Generator(np.random.SFC64([self.seed, start, *self.name.encode()]))
        if self.leaf.kind == "Vector":
            return self._vector(rng, shape)
        size = self.leaf.shape[-1] ** -0.5
        if self.scheme == PLAIN:
            return (size * rng.standard_normal(shape, np.float32)).astype(self.dtype)
        if "zero" in self.suffix:
            return self._zeros(shape)
        if "scale" in self.suffix:
            return self._scales(rng, shape, size)
        return self._codes(rng, shape)

    def _vector(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Norms around 1; biases, sinks and the like around 0."""
        centre = float(self.leaf.modules[0].endswith("norm") and self.suffix == "weight")
        return (centre + 0.1 * rng.standard_normal(shape, np.float32)).astype(self.dtype)

    def _codes(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        count = math.prod(shape) * self.dtype.itemsize
        words = rng.integers(0, 2**64, -(-count // 8), np.uint64)  # by far the fastest way
        codes = words.view(np.uint8)[:count]
        if self.dtype in (E4M3, E5M2):
            codes &= np.uint8(_FLOAT8_BITS)
        return codes.view(self.dtype).reshape(shape)

    def _scales(self, rng: np.random.Generator, shape: tuple[int, ...], size: float) -> np.ndarray:
        size /= self._deviation()
        if self.scheme.format == "nvfp4":  # the size is that of the one scale above the others
            if self.suffix != self.scheme.scale:
                size = 1.0
            elif self.suffix == "weight_global_scale":
                size = 1 / size
        dtype = E8M0 if self.dtype == U8 else self.dtype
        scales = np.asarray(size * (0.5 + rng.random(shape, np.float32)), np.float32)
        return scales.astype(dtype).view(self.dtype)

    def _zeros(self, shape: tuple[int, ...]) -> np.ndarray:
        """The middle of the codes, which a symmetric weight must have."""
        bits = self.scheme.bits
        middle = _MIDDLE[bits] - self.scheme.minus_one * (0x11 if bits == 4 else 1)
        zeros = np.full(math.prod(shape) * self.dtype.itemsize, middle, np.uint8)
        return zeros.view(self.dtype).reshape(shape)

    def _deviation(self) -> float:
        """Of the numbers that random codes are."""
        if self.scheme.format in ("pack-quantized", "int-quantized", "gptq", "awq"):
            return 2**self.scheme.bits / math.sqrt(12)
        return _FLOAT8_DEVIATION if self.scheme.format == "fp8" else _FLOAT4_DEVIATION
