"""The tensors of a folder that a leaf of the base is made of: their names, shapes and pieces."""

from collections.abc import Iterator, Mapping

import jax
import numpy as np

from orbit_jax.checkpoint.formats import check_shape, stored_tensors, unpack
from orbit_jax.checkpoint.layout import Leaf
from orbit_jax.checkpoint.safetensors_io import TensorRef
from orbit_jax.checkpoint.scheme import FLOATS, PLAIN, Scheme, Stored
from orbit_jax.quant.qtensor import QTensor, from_float

_CHUNK = 4_000_000  # bytes of a plain weight that are read at once
_FUSED_FORMATS = ("plain", "mxfp4-blocks")


def tensor_name(leaf: Leaf, module: str, suffix: str) -> str:
    """The tensor of a module with a suffix: `weight` stands for the parameter's own name."""
    if suffix.startswith("weight"):
        suffix = leaf.parameter + suffix.removeprefix("weight")
    return f"{module}.{suffix}"


def expected_tensors(leaf: Leaf, module: str, scheme: Scheme) -> dict[str, Stored]:
    """Names of the tensors of a module to what they may be.

    Raises:
      ValueError: if the weight cannot be stored by this scheme.
    """
    shape = _stored_shape(leaf)
    if leaf.kind == "Vector":
        stored = {"weight": Stored(FLOATS, (shape,))}
    else:
        check_shape(module, scheme, shape)
        stored = stored_tensors(scheme, shape)
    if leaf.fused:
        if scheme.format not in _FUSED_FORMATS:
            raise ValueError(
                f"{module}.{leaf.parameter} holds all experts in {scheme.words()}, which is not "
                f"supported: use a checkpoint with one of {_FUSED_FORMATS}"
            )
        stored = {suffix: _of_experts(leaf, scheme, part) for suffix, part in stored.items()}
    return {tensor_name(leaf, module, suffix): part for suffix, part in stored.items()}


def pieces(
    leaf: Leaf, scheme: Scheme, refs: Mapping[str, TensorRef]
) -> Iterator[tuple[tuple[int, ...], QTensor | np.ndarray, int]]:
    """Reads a leaf weight by weight, large plain ones in parts.

    Yields:
      Where each piece begins in the stack, the piece (a `QTensor` of host arrays `[out, in]`, or a
      vector `[width]`), and the bytes that were read for it.
    """
    lead = leaf.lead[:1] if leaf.fused else leaf.lead
    for index, module in zip(np.ndindex(lead), leaf.modules, strict=True):
        if leaf.fused:
            for expert in range(leaf.lead[1]):
                yield (*index, expert), *_fused(leaf, module, scheme, refs, expert)
        elif scheme == PLAIN:
            ref = refs[tensor_name(leaf, module, "weight")]
            rows = max(1, _CHUNK * ref.shape[0] // max(ref.nbytes, 1))
            for start in range(0, ref.shape[0], rows):
                part = ref.map(start, start + rows)
                whole = leaf.kind == "Vector"
                yield (*index, start), part if whole else from_float(part), part.nbytes
        else:
            found = _suffixes(leaf, module, scheme, refs)
            tensors = {suffix: ref.map() for suffix, ref in found.items()}
            read = sum(ref.nbytes for ref in found.values())
            yield index, _unpack(module, scheme, leaf.shape, tensors), read


def _fused(
    leaf: Leaf, module: str, scheme: Scheme, refs: Mapping[str, TensorRef], expert: int
) -> tuple[QTensor | np.ndarray, int]:
    """One expert's weight out of the tensors of all, of which others may own the rows between."""
    start, step = leaf.rows or (0, 1)
    found = _suffixes(leaf, module, scheme, refs)
    tensors = {suffix: ref.map(expert, expert + 1)[0] for suffix, ref in found.items()}
    read = sum(tensor.nbytes for tensor in tensors.values()) // step
    if leaf.kind == "Vector":
        return tensors["weight"][start::step], read
    if scheme == PLAIN:
        return from_float(np.ascontiguousarray(tensors["weight"].T[start::step])), read
    q = _unpack(module, scheme, _stored_shape(leaf), tensors)
    return jax.tree.map(lambda field: field[start::step], q), read


def _unpack(
    module: str, scheme: Scheme, shape: tuple[int, ...], tensors: dict[str, np.ndarray]
) -> QTensor:
    try:
        return unpack(scheme, shape, tensors)
    except ValueError as error:
        raise ValueError(f"{module}: {error}") from None


def _suffixes(
    leaf: Leaf, module: str, scheme: Scheme, refs: Mapping[str, TensorRef]
) -> dict[str, TensorRef]:
    """The tensors of a module that are there, by suffix."""
    if leaf.kind == "Vector":
        return {"weight": refs[tensor_name(leaf, module, "weight")]}
    names = {s: tensor_name(leaf, module, s) for s in stored_tensors(scheme, _stored_shape(leaf))}
    return {suffix: refs[name] for suffix, name in names.items() if name in refs}


def _stored_shape(leaf: Leaf) -> tuple[int, ...]:
    """Of the tensor that a weight is in, with the rows of the weights that it shares it with."""
    step = leaf.rows[1] if leaf.rows else 1
    return (leaf.shape[0] * step, *leaf.shape[1:])


def _of_experts(leaf: Leaf, scheme: Scheme, stored: Stored) -> Stored:
    """With a dimension of experts; plain weights stand as `[E, in, out]`."""
    experts = leaf.lead[1]
    turn = scheme == PLAIN and leaf.kind != "Vector"
    shapes = [tuple(reversed(shape)) if turn else shape for shape in stored.shapes]
    return Stored(stored.dtypes, tuple((experts, *shape) for shape in shapes), stored.optional)
