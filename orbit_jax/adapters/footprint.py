"""What an adapter would be attached to and what it would take, before there is a base."""

import math
from dataclasses import dataclass

import jax

from orbit_jax.adapters.adapter import Adapter, Method, at, attach

COPY_BYTES = 2  # of each bf16 number that the forward pass reads
STATE_BYTES = 12  # its f32 master and the optimiser's two f32 moments


@dataclass(frozen=True)
class AdaptedWeight:
    """An adapter on the weights of one name, in all layers.

    Attributes:
      name: module path in a layer.
      count: matrices that it is on.
      size: the rank of LoRA, the block size of OFT, 0 of a method with neither.
      copy_bytes: of what the forward pass reads, which OFT makes of its parameters.
    """

    name: str
    count: int
    size: int
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


def footprint(method: Method, base: dict, targets: tuple[str, ...]) -> Footprint:
    """What `attach` would do, without doing it.

    Args:
      base: of anything that has a shape, as `jax.ShapeDtypeStruct`.

    Raises:
      ValueError: as `attach`.
    """
    adapter = jax.eval_shape(lambda key: attach(method, key, base, targets), jax.random.key(0))
    ready = jax.eval_shape(Adapter.prepared, adapter)
    counts: dict[str, list[int]] = {}  # of matrices, of parameters and of what is made of them
    layers = zip(base["layers"], adapter.params["layers"], ready.params["layers"], strict=True)
    for stack, params, read in layers:
        for path, weight in jax.tree_util.tree_leaves_with_path(stack):
            names = [key.key for key in path]
            if stored := at(params, *names):
                found = counts.setdefault(".".join(names), [0, 0, 0])
                found[0] += math.prod(weight.shape[:-2])
                found[1] += sum(part.size for part in stored.values())
                found[2] += sum(part.size for part in at(read, *names).values())
    size = getattr(method, "rank", getattr(method, "block_size", 0))
    weights = tuple(
        AdaptedWeight(name, count, size, trained, COPY_BYTES * made, STATE_BYTES * trained)
        for name, (count, trained, made) in counts.items()
    )
    fields = ("parameters", "copy_bytes", "state_bytes")
    return Footprint(weights, *(sum(getattr(w, field) for w in weights) for field in fields))
