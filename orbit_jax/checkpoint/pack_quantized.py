"""compressed-tensors' `pack-quantized` format: which modules are quantised, and how bits are laid.

Codes are stored as unsigned numbers (value + 8 for 4 bits, value + 128 for 8), packed into int32
words with the lowest bits first: weights along `in`, zero points along `out`. On a little-endian
host, as JAX's are, a row's words are therefore the bytes of a `QTensor`: only zero points move.
"""

import math
import re
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from orbit_jax.checkpoint.layout import Leaf

FLOATS = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32))
_WORDS = (np.dtype(np.int32),)
_SHAPES = (np.dtype(np.int64), np.dtype(np.int32))


@dataclass(frozen=True)
class Scheme:
    """How the weights of a module are quantised; `group_size` None: one group per output row."""

    bits: int
    group_size: int | None
    symmetric: bool


@dataclass(frozen=True)
class Quantization:
    """The `quantization_config` of a checkpoint: `(target, scheme)` pairs, and what they skip."""

    targets: tuple[tuple[str, Scheme], ...] = ()
    ignore: tuple[str, ...] = ()

    def scheme(self, module: str, kind: str) -> Scheme | None:
        """The scheme of a module, None if it is plain; names go before patterns before classes."""
        if any(_matches(target, module, kind) for target in self.ignore):
            return None
        found = [pair for pair in self.targets if _matches(pair[0], module, kind)]
        found.sort(key=lambda pair: (pair[0] != module, not pair[0].startswith("re:")))
        return found[0][1] if found else None


def read_quantization(hf: dict) -> Quantization:
    """Reads `quantization_config` of a Hugging Face `config.json`; without one, nothing matches.

    Raises:
      ValueError: for a method, format or strategy that is not supported.
    """
    config = hf.get("quantization_config")
    if config is None:
        return Quantization()
    _only(config, "quant_method", "compressed-tensors")
    _only(config, "kv_cache_scheme", None)
    targets = []
    for name, group in (config.get("config_groups") or {}).items():
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise ValueError(
                f"config.json: quantization_config.config_groups.{name} says nothing about weights "
                "that can be read: write its scheme out"
            )
        # A group may name its own format; then the one above is `mixed-precision`.
        _only({"format": group.get("format") or config.get("format")}, "format", "pack-quantized")
        _only(group, "input_activations", None)
        _only(group, "output_activations", None)
        targets += [(target, _scheme(group["weights"])) for target in group.get("targets") or ()]
    return Quantization(tuple(targets), tuple(config.get("ignore") or ()))


def write_quantization(schemes: dict[Scheme, list[str]], ignore: list[str]) -> dict:
    """The `quantization_config` that `read_quantization` reads as these targets of each scheme."""
    groups = {}
    for i, (scheme, targets) in enumerate(schemes.items()):
        weights = {
            "num_bits": scheme.bits,
            "type": "int",
            "symmetric": scheme.symmetric,
            "strategy": "channel" if scheme.group_size is None else "group",
            "group_size": scheme.group_size,
            "dynamic": False,
        }
        groups[f"group_{i}"] = {
            "targets": targets,
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
    }


def group_of(leaf: Leaf, scheme: Scheme) -> int:
    """G of a leaf under a scheme.

    Raises:
      ValueError: if the group size does not divide the input width, or if the width is odd at 4
        bits.
    """
    width = leaf.shape[-1]
    group = scheme.group_size or width
    if width % group:
        raise ValueError(
            f"{leaf.modules[0]}: group_size={group} does not divide the input width {width}: "
            "quantise the model with a divisor"
        )
    if scheme.bits == 4 and width % 2:
        raise ValueError(
            f"{leaf.modules[0]}: the input width {width} is odd, 4-bit codes come in pairs: "
            "keep this module in 8 bits or plain"
        )
    return group


def stored_tensors(leaf: Leaf, scheme: Scheme | None) -> dict[str, tuple[tuple, tuple[int, ...]]]:
    """What a checkpoint holds for one module of a leaf: suffix to `(dtypes allowed, shape)`."""
    if scheme is None:
        return {"weight": (FLOATS, leaf.shape)}
    out, width = leaf.shape
    groups = width // group_of(leaf, scheme)
    stored = {
        "weight_packed": (_WORDS, (out, math.ceil(width * scheme.bits / 32))),
        "weight_scale": (FLOATS, (out, groups)),
        "weight_shape": (_SHAPES, (2,)),
    }
    if not scheme.symmetric:
        words = math.ceil(out * scheme.bits / 32)
        stored["weight_zero_point"] = (_WORDS, (words, groups))
    return stored


def codes_from_words(words: np.ndarray, width: int, bits: int) -> np.ndarray:
    """int32 `[out, ceil(width*bits/32)]` to the uint8 codes `[out, width*bits/8]` of a QTensor."""
    return words.view(np.uint8)[:, : width * bits // 8]


def offset_from_words(words: np.ndarray, out: int, bits: int) -> np.ndarray:
    """int32 `[ceil(out*bits/32), in/G]` to the uint8 offset `[ceil(out*bits/8), in/G]`."""
    count, groups = words.shape
    by_row = words.view(np.uint8).reshape(count, groups, 4).swapaxes(1, 2)
    return by_row.reshape(count * 4, groups)[: math.ceil(out * bits / 8)]


def words_from_codes(codes: np.ndarray) -> np.ndarray:
    """The inverse of `codes_from_words`; bits past the width are 0."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4)))
    return np.ascontiguousarray(padded).view(np.int32)


def words_from_offset(offset: np.ndarray) -> np.ndarray:
    """The inverse of `offset_from_words`; bits past the last row are 0."""
    padded = np.pad(offset, ((0, -offset.shape[0] % 4), (0, 0)))
    by_word = padded.reshape(-1, 4, padded.shape[1]).swapaxes(1, 2)
    return np.ascontiguousarray(by_word).view(np.int32)[..., 0]


def _scheme(weights: dict) -> Scheme:
    _only(weights, "type", "int")
    _only(weights, "num_bits", 4, 8)
    _only(weights, "strategy", "group", "channel")
    group = weights.get("group_size") if weights["strategy"] == "group" else None
    if weights["strategy"] == "group" and not (isinstance(group, int) and group > 0):
        raise ValueError(
            f"config.json: quantization_config: group_size={group!r} with strategy 'group': "
            "give a positive number"
        )
    return Scheme(weights["num_bits"], group, bool(weights.get("symmetric", True)))


def _matches(target: str, module: str, kind: str) -> bool:
    if kind in ("Router", "Vector"):
        return False
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target in (module, kind)


def _only(config: dict, field: str, *allowed: object) -> None:
    if config.get(field) not in allowed:
        names = " or ".join(map(repr, allowed))
        raise ValueError(
            f"config.json: quantization_config: {field}={config.get(field)!r} is not supported: "
            f"use a checkpoint with {names}"
        )
