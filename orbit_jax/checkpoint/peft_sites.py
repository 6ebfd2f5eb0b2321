"""Where the matrices of a PEFT adapter stand in a file, and of which weights of our stacks.

PEFT adapts modules and, where a model holds all experts of a layer in one 3-D parameter,
parameters. The pair of a parameter stands at the module that holds it; of several parameters of
one module, all but the last registered stand under one more `base_layer` each. Whatever the
parameter's own orientation, A is `[E*R, in]` with the expert slow and B `[out, R*E]` with the
expert fast.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from orbit_jax.checkpoint.layout import Leaf, layout
from orbit_jax.model.config import ModelConfig

# The parameters of experts in the order in which a module registers them, and our weights in them,
# whose rows stand one after another unless a leaf says otherwise.
EXPERT_PARAMETERS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Part:
    """One weight, or all experts' of a layer, that a site is of.

    Attributes:
      stack: which stack of the adapter; path: module path in a layer.
      index: into the leading dimensions of the stack: a matrix, or `[E, ...]` for a parameter.
      rows: which rows of B, and of the weight that PEFT sees, are this part's.
      shape: `(out, in)` of one weight.
    """

    stack: int
    path: tuple[str, ...]
    index: tuple[int, ...]
    rows: slice
    shape: tuple[int, int]


@dataclass(frozen=True)
class Site:
    """One pair of A and B.

    Attributes:
      key: the module that the pair stands at.
      name: of the module or parameter, which targets and patterns are matched against.
      experts: E of a parameter, 0 for a module.
      parts: the weights; all read the same input.
    """

    key: str
    name: str
    experts: int
    parts: tuple[Part, ...]

    @property
    def out(self) -> int:
        """Rows of the weight that PEFT sees."""
        return sum(part.shape[0] for part in self.parts)

    def shapes(self, rank: int) -> dict[str, tuple[int, int]]:
        """Shapes of A and B in the file."""
        ranks = rank * max(self.experts, 1)
        return {"A": (ranks, self.parts[0].shape[1]), "B": (self.out, ranks)}

    def split(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A and B of the file as `[R, in]` and `[out, R]`, with E in front for a parameter."""
        if not self.experts:
            return a, b
        a = a.reshape(self.experts, -1, a.shape[1])
        return a, b.reshape(b.shape[0], -1, self.experts).transpose(2, 0, 1)

    def join(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The inverse of `split`."""
        if not self.experts:
            return a, b
        return a.reshape(-1, a.shape[2]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)


def sites(config: ModelConfig, parameters: Collection[str] = (), wrapper: str = "") -> list[Site]:
    """The sites of every linear weight of the layers.

    Args:
      parameters: those of `EXPERT_PARAMETERS` that are adapted as parameters; without any, each
        expert has modules of its own, unless the family's checkpoints have none.
      wrapper: what stands before the names where a model has more than language in it, as
        `language_model.`.
    """
    found = []
    for stack, leaves in enumerate(linear_leaves(config)):
        experts = {path[-1]: (path, leaf) for path, leaf in leaves.items() if is_expert(path)}
        fused = bool(parameters) or any(leaf.fused for _, leaf in experts.values())
        for path, leaf in leaves.items():
            if not (fused and is_expert(path)):
                found += _modules(stack, path, leaf)
        if experts and fused:
            found += _parameters(stack, experts, parameters)
    return [replace(s, key=wrapper + s.key, name=wrapper + s.name) for s in found]


def linear_leaves(config: ModelConfig) -> list[dict[tuple[str, ...], Leaf]]:
    """For each stack, the leaves that adapters may be attached to, by module path in a layer."""
    stacks = layout(config)["layers"]
    return [{p: leaf for p, leaf in _walk(s) if leaf.kind == "Linear"} for s in stacks]


def is_expert(path: tuple[str, ...]) -> bool:
    """Whether a weight is one of each routed expert."""
    return "experts" in path


def insert(tree: dict, path: tuple[str, ...], params: dict) -> None:
    """Puts the parameters of the weight at a module path into a stack's tree."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = params


def in_layer(module: str) -> str:
    """A module's name from its layer on: `self_attn.q_proj`."""
    parts = module.split(".")
    return ".".join(parts[parts.index("layers") + 2 :])


def _walk(tree: dict, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Leaf]]:
    for name, node in tree.items():
        if isinstance(node, dict):
            yield from _walk(node, (*path, name))
        else:
            yield (*path, name), node


def _modules(stack: int, path: tuple[str, ...], leaf: Leaf) -> Iterator[Site]:
    for i, module in enumerate(leaf.modules):
        index = tuple(int(k) for k in np.unravel_index(i, leaf.lead))
        yield Site(module, module, 0, (Part(stack, path, index, slice(None), leaf.shape),))


def _parameters(stack: int, experts: dict, parameters: Collection[str]) -> Iterator[Site]:
    layers, count = next(leaf.lead for _, leaf in experts.values())
    adapted = [name for name in EXPERT_PARAMETERS if name in parameters]
    for layer in range(layers):
        for depth, parameter in enumerate(reversed(adapted)):
            parts, start = [], 0
            for name in EXPERT_PARAMETERS[parameter]:
                path, leaf = experts[name]
                rows = slice(start, start := start + leaf.shape[0])
                if leaf.rows is not None:
                    rows = slice(leaf.rows[0], None, leaf.rows[1])
                parts.append(Part(stack, path, (layer,), rows, leaf.shape))
            # Models hold experts at the most common spelling, whatever their checkpoints say.
            first = leaf.modules[layer * (len(leaf.modules) // layers)].split(".")
            module = ".".join((*first[: first.index("layers") + 2], *path[:-1]))
            key = module + ".base_layer" * depth
            yield Site(key, f"{module}.{parameter}", count, tuple(parts))
