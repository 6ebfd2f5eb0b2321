"""What an adapter would be attached to and what it would take, before there is a base."""

import math
from dataclasses import dataclass

import jax

from orbit_jax.adapters.adapter import at, attach
from orbit_jax.adapters.lora import LoRA

COPY_BYTES = 2  # a parameter's bf16 copy, which the forward pass reads
STATE_BYTES = 12  # its f32 master and the optimiser's two f32 moments


@dataclass(frozen=True)
class AdaptedWeight:
    """LoRA on the weights of one name, in all layers.

    Attributes:
      name: module path in a layer.
      count: matrices that have a pair of their own.
      parameters: of all pairs.
    """

    name: str
    count: int
    rank: int
    parameters: int
    copy_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class Footprint:
    """An adapter by the weights that it is on."""

    weights: tuple[AdaptedWeight, ...]
    parameters: int
    copy_bytes: int
    state_bytes: int


def footprint(method: LoRA, base: dict, targets: tuple[str, ...]) -> Footprint:
    """What `attach` would do, without doing it.

    Args:
      base: of anything that has a shape, as `jax.ShapeDtypeStruct`.

    Raises:
      ValueError: as `attach`.
    """
    adapter = jax.eval_shape(lambda key: attach(method, key, base, targets), jax.random.key(0))
    counts: dict[str, list[int]] = {}  # of matrices and of parameters
    for stack, params in zip(base["layers"], adapter.params["layers"], strict=True):
        for path, weight in jax.tree_util.tree_leaves_with_path(stack):
            names = [key.key for key in path]
            if pair := at(params, *names):
                found = counts.setdefault(".".join(names), [0, 0])
                found[0] += math.prod(weight.shape[:-2])
                found[1] += sum(part.size for part in pair.values())
    weights = tuple(
        AdaptedWeight(name, count, method.rank, size, COPY_BYTES * size, STATE_BYTES * size)
        for name, (count, size) in counts.items()
    )
    total = sum(weight.parameters for weight in weights)
    return Footprint(weights, total, COPY_BYTES * total, STATE_BYTES * total)
