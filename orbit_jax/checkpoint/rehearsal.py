"""A base out of `config.json` alone: its shapes, or random weights for a rehearsal.

Tensors that a deployed checkpoint would hold are made up one by one and take the way of those that
are read from files. So the base has the structure that loading gives, to the last static field.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
from jax.sharding import Sharding

from orbit_jax.checkpoint.assumed import Assumed, assume
from orbit_jax.checkpoint.common import file_digest
from orbit_jax.checkpoint.layout import Leaf
from orbit_jax.checkpoint.leaf_tensors import pieces
from orbit_jax.checkpoint.made_up import MadeUpTensor
from orbit_jax.checkpoint.placing import DEFAULT_PLACEMENT, OfShapes, Placement, fill
from orbit_jax.model.config import ModelConfig


def abstract_base(
    folder: str | Path, sharding: Callable[[str, tuple[int, ...]], Sharding] | None = None
) -> tuple[ModelConfig, dict]:
    """What `load_base` would return for the checkpoint that a `config.json` describes.

    Args:
      folder: where the `config.json` is; nothing else is read.
      sharding: of each array, as that of a `Placement`.

    Returns:
      The config and the base with `jax.ShapeDtypeStruct` leaves. Whether some products are
      subnormal is a matter of the values; here none is.

    Raises:
      ValueError: as `assume`, or if the mesh does not divide an array.
    """
    assumed, placement = assume(folder), OfShapes(sharding)

    def shapes(path: tuple, leaf: Leaf) -> jax.ShapeDtypeStruct:
        first = dataclasses.replace(leaf, modules=leaf.modules[:1])
        tensors = _tensors(assumed, leaf, first.modules)
        piece = next(pieces(first, assumed.scheme[leaf], tensors))
        return _fill(path, leaf, [piece], placement)

    return assumed.config, jax.tree_util.tree_map_with_path(shapes, assumed.layout)


def random_base(
    folder: str | Path, seed: int, placement: Placement = DEFAULT_PLACEMENT
) -> tuple[ModelConfig, dict]:
    """A base of random weights in the structure of a `config.json`, as `load_base` returns one.

    Weights are drawn one by one and go where they stay: the host holds no more than one besides.
    Their bits depend on the seed alone, not on the placement.

    Raises:
      ValueError: as `assume`, or if the mesh does not divide an array.
    """
    assumed, done = assume(folder), 0
    total = sum(map(functools.partial(_leaf_bytes, assumed), jax.tree.leaves(assumed.layout)))

    def told(count: int) -> None:
        nonlocal done
        done += count
        if placement.progress is not None:
            placement.progress(done, total)

    def draw(path: tuple, leaf: Leaf) -> jax.Array:
        tensors = _tensors(assumed, leaf, leaf.modules, seed)
        return _fill(path, leaf, pieces(leaf, assumed.scheme[leaf], tensors), placement, told)

    return assumed.config, jax.tree_util.tree_map_with_path(draw, assumed.layout)


def random_hash(folder: str | Path, seed: int) -> str:
    """sha256 over what a base of random weights follows from: its `config.json` and the seed."""
    digest = file_digest(Path(folder) / "config.json")
    return hashlib.sha256(f"{digest} seed {seed}\n".encode()).hexdigest()


def _tensors(
    assumed: Assumed, leaf: Leaf, modules: Sequence[str], seed: int = 0
) -> dict[str, MadeUpTensor]:
    """The tensors of modules of a leaf, by name."""
    found = {}
    for module in dict.fromkeys(modules):
        for name, (dtype, shape) in assumed.tensors(leaf, module).items():
            suffix = name.removeprefix(f"{module}.")
            found[name] = MadeUpTensor(name, dtype, shape, leaf, assumed.scheme[leaf], suffix, seed)
    return found


def _leaf_bytes(assumed: Assumed, leaf: Leaf) -> int:
    """Of the tensors of a leaf, of which others may own the rows between."""
    first = _tensors(assumed, leaf, leaf.modules[:1])
    step = leaf.rows[1] if leaf.rows else 1
    return len(leaf.modules) * sum(tensor.nbytes for tensor in first.values()) // step


def _fill(
    path: tuple,
    leaf: Leaf,
    pieces: Iterable[tuple],
    placement: Placement,
    told: Callable[[int], None] = lambda count: None,
) -> jax.Array:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return fill(name, (*leaf.lead, *leaf.shape), pieces, placement, told)
