"""Which Hugging Face modules make up each leaf of the base.

A leaf of the base is a stack over layers, and over experts; a checkpoint holds each of them apart.
This is all that reading and writing share about names.
"""

import itertools
from dataclasses import dataclass

import jax

from orbit_jax.model.config import ModelConfig
from orbit_jax.model.families import FAMILIES
from orbit_jax.model.weights import Weight, weights


@dataclass(frozen=True)
class Leaf:
    """One leaf of the base before its bytes are read.

    Attributes:
      modules: module names in stack order, `prod(lead)` of them (of the layers alone if `fused`).
      lead: leading dimensions of the stack: `()`, `(layers,)` or `(layers, experts)`.
      shape: shape of one weight, `(out, in)`, or of one vector, `(width,)`.
      kind: `Linear` and `Embedding` are what quantisation targets call them; a `Router` and a
        `Vector` (norms, biases, sinks) are never quantised.
      parameter: what the tensor is called in its module; all of a module's tensors have it as
        their prefix, as `weight` and `weight_scale`.
      fused: a module holds all experts of its layer, in tensors with a leading dimension E.
      rows: `(start, step)` where a tensor interleaves the rows of several weights; None for all.
    """

    modules: tuple[str, ...]
    lead: tuple[int, ...]
    shape: tuple[int, ...]
    kind: str
    parameter: str = "weight"
    fused: bool = False
    rows: tuple[int, int] | None = None


# Parameters that stand in a module of another name, or, with an empty one, in none of their own.
_PARAMETERS = {
    "sinks": ("", "sinks"),
    "e_score_correction_bias": ("gate", "e_score_correction_bias"),
}


def layout(config: ModelConfig) -> dict:
    """The base as a tree of `Leaf`, of the structure that `load_base` returns."""
    starts = list(itertools.accumulate((count for _, count in config.stacks), initial=0))

    def leaf(path: tuple, weight: Weight) -> Leaf:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        if names[0] != "layers":
            prefix = "" if names[0] == "lm_head" else "model."
            return Leaf((prefix + names[0],), (), weight.shape, weight.kind)
        stack = next(key.idx for key in path if isinstance(key, jax.tree_util.SequenceKey))
        layers = range(starts[stack], starts[stack + 1])
        return _of_layers(config, names[1:], layers, weight)

    return jax.tree_util.tree_map_with_path(leaf, weights(config))


def _of_layers(config: ModelConfig, names: list[str], layers: range, weight: Weight) -> Leaf:
    family, (*groups, name) = FAMILIES[config.family], names
    is_bias = name.endswith("_bias") and name not in _PARAMETERS
    name = name.removesuffix("_bias") if is_bias else name
    module, parameter = _PARAMETERS.get(name, (name, "bias" if is_bias else "weight"))
    facts = {"lead": weight.lead, "shape": weight.shape, "kind": weight.kind}
    if "experts" in groups and family.fused:
        parameter, rows = family.fused[name]
        parameter += "_bias" if is_bias else ""
        modules = (f"model.layers.{l}.{'.'.join(groups)}" for l in layers)
        return Leaf(tuple(modules), parameter=parameter, fused=True, rows=rows, **facts)
    parts = [family.spelling.get(part, part) for part in (*groups, module)]
    path = ".".join(part for part in parts if part)
    if "experts" not in groups:
        modules = tuple(f"model.layers.{l}.{path}" for l in layers)
    else:
        path = path.replace(".experts.", ".experts.{}.")
        pairs = itertools.product(layers, range(config.num_experts))
        modules = tuple(f"model.layers.{l}.{path}".format(e) for l, e in pairs)
    return Leaf(modules, parameter=parameter, **facts)
