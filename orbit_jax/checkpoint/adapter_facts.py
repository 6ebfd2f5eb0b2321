"""What is stored with every adapter: which base it belongs to, and which weights it touches.

Which weights are quantised and which are adapted is data that can be printed and compared, not a
pattern that a reader may understand in another way.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from orbit_jax.adapters.adapter import Adapter, at
from orbit_jax.checkpoint import gguf, huggingface
from orbit_jax.checkpoint.gguf_file import is_gguf, open_gguf
from orbit_jax.checkpoint.layout import Leaf, layout
from orbit_jax.checkpoint.peft_sites import linear_leaves
from orbit_jax.checkpoint.scheme import PLAIN
from orbit_jax.model.config import ModelConfig


def adapter_facts(
    config: ModelConfig,
    path: str | Path,
    adapter: Adapter,
    *,
    base: str,
    base_hash: str,
    step: int,
) -> dict[str, Any]:
    """The facts as JSON values.

    Args:
      path: of the base, whose headers are read.
      base: what the base is called, such as its path in the run's config.
      base_hash: `checkpoint.base.base_hash` of it.
      step: training steps that the adapter has seen.
    """
    adapted = {
        weight_name(place, leaf): getattr(adapter.method_at(*place), "scale", 1.0)
        for leaves, params in zip(linear_leaves(config), adapter.params["layers"], strict=True)
        for place, leaf in leaves.items()
        if at(params, *place)
    }
    return {
        "base": base,
        "base_hash": base_hash,
        "step": step,
        "scales": dict(sorted(adapted.items())),
        **_listed("adapted_weights", adapted),
        **_listed("quantised_weights", quantised_weights(config, path)),
    }


def quantised_weights(config: ModelConfig, path: str | Path) -> list[str]:
    """Names of the weights that a base holds in low bits, by its headers.

    Raises:
      ValueError: if the checkpoint cannot be read.
    """
    if is_gguf(path):
        types = open_gguf(path).tensors

        def plain(leaf: Leaf) -> bool:
            return types[gguf.tensor_name(leaf.modules[0])].type.is_float
    else:
        schemes = huggingface.open_base(path).scheme

        def plain(leaf: Leaf) -> bool:
            return leaf.kind == "Vector" or schemes[leaf] == PLAIN

    return [
        weight_name(tuple(k.key for k in at if isinstance(k, jax.tree_util.DictKey))[1:], leaf)
        for at, leaf in jax.tree_util.tree_leaves_with_path(layout(config))
        if not plain(leaf)
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
