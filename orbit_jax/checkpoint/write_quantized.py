"""Writing a plain checkpoint in low bits, tensor by tensor.

A weight is read from a map of its file, quantised, and measured against what readers will make of
it. The host holds a few weights besides the file that is being filled.
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from orbit_jax import compile as compiler
from orbit_jax.checkpoint.common import copy_tokenizer
from orbit_jax.checkpoint.integer_formats import words_from_codes
from orbit_jax.checkpoint.leaf_tensors import tensor_name
from orbit_jax.checkpoint.quantized_plan import Plan, Weight
from orbit_jax.checkpoint.safetensors_io import INDEX_FILE, SINGLE_FILE, write_safetensors
from orbit_jax.checkpoint.scheme import BF16, E4M3, F32, I64, Scheme
from orbit_jax.quant.qtensor import QTensor, dequantize
from orbit_jax.quant.quantize import quantize
from orbit_jax.quant.quantize_floats import (
    nvfp4_levels,
    nvfp4_overall,
    quantize_e4m3,
    quantize_mxfp4,
    quantize_nvfp4,
)

MAX_FILE_BYTES = 2_000_000_000

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Error:
    """How far low-bit weights Q are from the original W; errors of several weights add up.

    Attributes:
      squared: the sum of (W - Q)^2; norm: of W^2.
      largest: |W - Q|.
      weights: how many matrices.
      bytes_before, bytes_after: of what is stored.
    """

    squared: float
    norm: float
    largest: float
    weights: int
    bytes_before: int
    bytes_after: int

    def __add__(self, other: "Error") -> "Error":
        return Error(
            self.squared + other.squared,
            self.norm + other.norm,
            max(self.largest, other.largest),
            self.weights + other.weights,
            self.bytes_before + other.bytes_before,
            self.bytes_after + other.bytes_after,
        )

    @property
    def relative(self) -> float:
        """||W - Q|| / ||W||, of Frobenius norms."""
        return (self.squared / self.norm) ** 0.5 if self.norm else 0.0


def save_quantized(
    folder: str | Path,
    plan: Plan,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Error]:
    """Writes the folder of a plan; `config.json` comes last, so that half a folder does not load.

    Args:
      folder: new or empty.
      max_file_bytes: of one file, all of which is held on the host; a larger tensor has its own.
      tell: called with the bytes of the plain tensors that are done, and of all.

    Returns:
      Each low-bit tensor's error, by the name of the plain tensor.

    Raises:
      ValueError: if there is something in the folder, or if a weight is not a number.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already exists: name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    errors: dict[str, Error] = {}
    done, whole = 0, sum(ref.nbytes for ref in plan.refs.values())

    def converted() -> Iterator[Tensors]:
        nonlocal done
        for name, ref in plan.refs.items():
            if name in plan.weights:
                tensors, errors[name] = quantise(plan, plan.weights[name])
                yield tensors
            else:
                yield {name: ref.map()}
            done += ref.nbytes
            tell(done, whole)

    _write_files(folder, converted(), max_file_bytes)
    copy_tokenizer(plan.folder, folder)
    _write_json(folder / "config.json", plan.config)
    return errors


def quantise(plan: Plan, weight: Weight) -> tuple[Tensors, Error]:
    """The tensors that a weight is stored as, by name, and their error.

    Raises:
      ValueError: if the weight holds an infinity or a NaN.
    """
    overall = _overall(plan, weight) if plan.scheme.format == "nvfp4" else None
    levels = None if overall is None else nvfp4_levels(overall)
    original, parts, sums = weight.ref.map(), [], []
    # All experts of a layer in one tensor: inputs come before outputs there.
    matrices = (matrix.T for matrix in original) if weight.leaf.fused else (original,)
    for matrix in matrices:
        q, measured = _quantise(jnp.asarray(matrix), overall, levels, scheme=plan.scheme)
        squared, norm, largest = map(float, measured)
        if not np.isfinite(norm):
            raise ValueError(
                f"{weight.ref.name} holds values that are no finite numbers: mend the checkpoint"
            )
        parts.append(_stored(plan.scheme, q, overall))
        sums.append((squared, norm, largest))
    tensors = {
        tensor_name(weight.leaf, weight.module, suffix): (
            np.stack([part[suffix] for part in parts]) if weight.leaf.fused else parts[0][suffix]
        )
        for suffix in parts[0]
    }
    after = sum(tensor.nbytes for tensor in tensors.values())
    squared, norm, largest = zip(*sums, strict=True)
    error = Error(sum(squared), sum(norm), max(largest), len(sums), original.nbytes, after)
    return tensors, error


def _overall(plan: Plan, weight: Weight) -> np.float32:
    """One scale for all weights that are run as one: engines keep a single one of theirs."""
    largest = 0.0
    for name in weight.together:
        if name in plan.weights:
            largest = max(largest, float(_largest(jnp.asarray(plan.weights[name].ref.map()))))
    return nvfp4_overall(largest)


def _of_scheme(
    w: jax.Array, overall: np.float32 | None, levels: np.ndarray | None, scheme: Scheme
) -> tuple[QTensor, tuple[jax.Array, jax.Array, jax.Array]]:
    """A weight in low bits, with its squared error, its squared norm and its largest error."""
    make = {
        "pack-quantized": lambda: quantize(w, scheme.bits, scheme.group),
        "fp8": lambda: quantize_e4m3(w),
        "mxfp4": lambda: quantize_mxfp4(w),
        "mxfp4-blocks": lambda: quantize_mxfp4(w),
        "nvfp4": lambda: quantize_nvfp4(w, overall, levels),
    }
    q, w = make[scheme.format](), w.astype(jnp.float32)
    error = w - dequantize(q, jnp.float32)
    return q, (jnp.square(error).sum(), jnp.square(w).sum(), jnp.abs(error).max())


_quantise = compiler.jit(_of_scheme, {}, static_argnames=("scheme",))


@functools.partial(compiler.jit, compiler_options={})
def _largest(w: jax.Array) -> jax.Array:
    return jnp.abs(w).max()


def _stored(scheme: Scheme, q: QTensor, overall: np.float32 | None) -> Tensors:
    """The tensors of one weight, by suffix: the inverse of `formats.unpack`."""
    codes, scales = np.asarray(q.codes), np.asarray(q.scales)
    if scheme.format == "pack-quantized":
        words = {"weight_packed": words_from_codes(codes), "weight_scale": scales.view(BF16)}
        return words | {"weight_shape": np.array(q.shape, I64)}
    if scheme.format == "fp8":
        return {"weight": codes.view(E4M3), "weight_scale": scales.view(BF16)}
    if scheme.format == "nvfp4":
        blocks = {"weight_packed": codes, "weight_scale": scales.view(E4M3)}
        return blocks | {"weight_global_scale": np.array([overall], F32)}
    if scheme.format == "mxfp4":
        return {"weight_packed": codes, "weight_scale": scales}
    return {"weight_blocks": codes.reshape(*scales.shape, 16), "weight_scales": scales}


def _write_files(folder: Path, parts: Iterator[Tensors], max_bytes: int) -> None:
    """Files in the order of the tensors, with an index if there are several."""
    files: list[list[str]] = []
    held: Tensors = {}
    size = total = 0

    def flush() -> None:
        write_safetensors(folder / _file_name(len(files), 0), held, {"format": "pt"})
        files.append(list(held))
        held.clear()

    for tensors in parts:
        more = sum(tensor.nbytes for tensor in tensors.values())
        if held and size + more > max_bytes:
            flush()
            size = 0
        held |= tensors
        size, total = size + more, total + more
    flush()
    names = [_file_name(i, len(files)) for i in range(len(files))]
    for i, name in enumerate(names):
        (folder / _file_name(i, 0)).rename(folder / name)
    if len(files) > 1:
        weight_map = {n: name for name, held in zip(names, files, strict=True) for n in held}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / INDEX_FILE, index)


def _file_name(i: int, count: int) -> str:
    """Of one file of `count`; 0 while that is not known."""
    if count == 1:
        return SINGLE_FILE
    return f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def by_group(plan: Plan, errors: dict[str, Error]) -> dict[str, Error]:
    """Errors of the weights that are quantised or left alone together."""
    found: dict[str, Error] = {}
    for name, error in errors.items():
        group = plan.weights[name].group
        found[group] = found[group] + error if group in found else error
    return found


def total(errors: Sequence[Error]) -> Error:
    """Of several weights together."""
    return functools.reduce(lambda a, b: a + b, errors)
