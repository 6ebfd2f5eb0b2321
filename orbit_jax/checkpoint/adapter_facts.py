"""What is stored with every adapter: which base it belongs to, and which weights it touches.

Which weights are quantised and which are adapted is data that can be printed and compared, not a
pattern that a reader may understand in another way.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import jax

from orbit_jax.adapters.adapter import Adapter, at
from orbit_jax.checkpoint.layout import Leaf, layout
from orbit_jax.checkpoint.peft_sites import linear_leaves
from orbit_jax.model.config import ModelConfig
from orbit_jax.quant.qtensor import QTensor


def adapter_facts(
    config: ModelConfig,
    base: dict,
    adapter: Adapter,
    *,
    base_path: str,
    base_hash: str,
    step: int,
) -> dict[str, Any]:
    """The facts as JSON values.

    Args:
      base: as `load_base` returns it, not a working copy; its arrays may be abstract.
      base_path: where the base lies, or its name.
      base_hash: `checkpoint.base.base_hash` of it.
      step: training steps that the adapter has seen.
    """
    return {
        "base": base_path,
        "base_hash": base_hash,
        "step": step,
        "scales": {
            name: adapter.method_at(*path).scale
            for name, path in sorted(_adapted(config, adapter).items())
        },
        **_listed("adapted_weights", _adapted(config, adapter)),
        **_listed("quantised_weights", _quantised(config, base)),
    }


def _adapted(config: ModelConfig, adapter: Adapter) -> dict[str, tuple[str, ...]]:
    """Names of adapted weights, and their module paths in a layer."""
    return {
        weight_name(path, leaf): path
        for leaves, params in zip(linear_leaves(config), adapter.params["layers"], strict=True)
        for path, leaf in leaves.items()
        if at(params, *path)
    }


def _quantised(config: ModelConfig, base: dict) -> list[str]:
    """Names of weights that are held in low bits: those with scales."""
    leaves = jax.tree_util.tree_leaves_with_path(layout(config))
    weights = jax.tree.leaves(base, is_leaf=lambda node: isinstance(node, QTensor))
    return [
        weight_name(tuple(k.key for k in path if isinstance(k, jax.tree_util.DictKey))[1:], leaf)
        for (path, leaf), weight in zip(leaves, weights, strict=True)
        if isinstance(weight, QTensor) and weight.scales is not None
    ]


def weight_name(path: tuple[str, ...], leaf: Leaf) -> str:
    """One name for all layers and experts of a leaf: `model.layers.[0-3].mlp.experts.[0-7]...`.

    `path` is the module path in a layer, in the project's spelling for every family.
    """
    if not leaf.lead:
        return leaf.modules[0]
    first, last = (module.split(".") for module in (leaf.modules[0], leaf.modules[-1]))
    at_layer = first.index("layers") + 1
    names = [*first[:at_layer], f"[{first[at_layer]}-{last[at_layer]}]", *path]
    if len(leaf.lead) == 2:
        names.insert(names.index("experts") + 1, f"[0-{leaf.lead[1] - 1}]")
    return ".".join(names)


def _listed(what: str, names: Iterable[str]) -> dict[str, Any]:
    names = sorted(names)
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    return {what: names, f"{what}_sha256": digest}
