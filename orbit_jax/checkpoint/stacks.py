"""Stacks of layers whose weights are stored alike.

Layers run as one stack if their weights have one format. A checkpoint may hold layers of one kind
in several (an ignore list, a mix of types): stacks then begin where the format changes.
"""

import dataclasses
from collections.abc import Callable, Hashable

import jax

from orbit_jax.checkpoint.layout import Leaf, layout
from orbit_jax.model.config import ModelConfig


def split(
    config: ModelConfig, stored: Callable[[Leaf, str], Hashable], words: Callable[[Hashable], str]
) -> ModelConfig:
    """The config with stacks of equal layers.

    Args:
      stored: how the weight of a module of a leaf is stored.
      words: says so, for messages.

    Raises:
      ValueError: if the experts of one layer are stored differently.
    """
    splits, first = [], 0
    for (_, count), stack in zip(config.stacks, layout(config)["layers"], strict=True):
        kinds = [_of_layer(stack, i, count, stored, words) for i in range(count)]
        splits += [first + i for i in range(1, count) if kinds[i] != kinds[i - 1]]
        first += count
    return dataclasses.replace(config, splits=tuple(splits))


def _of_layer(
    stack: dict,
    layer: int,
    layers: int,
    stored: Callable[[Leaf, str], Hashable],
    words: Callable[[Hashable], str],
) -> list[Hashable]:
    kinds = []
    for leaf in jax.tree.leaves(stack):
        each = len(leaf.modules) // layers  # experts, unless they are fused
        modules = leaf.modules[layer * each : (layer + 1) * each]
        found = {module: stored(leaf, module) for module in modules}
        first = found[modules[0]]
        for module, other in found.items():
            if other != first:
                raise ValueError(
                    f"{module} ({words(other)}) and {modules[0]} ({words(first)}) differ in how "
                    "they are stored: the experts of a layer run as one stack and must share it"
                )
        kinds.append(first)
    return kinds
