"""Writing an adapter as a PEFT folder, which `load_adapter` reads back bit for bit."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orbit_jax.adapters.adapter import Adapter, Method, at
from orbit_jax.adapters.lora import LoRA
from orbit_jax.adapters.oft import OFT
from orbit_jax.checkpoint.layout import layout as base_layout
from orbit_jax.checkpoint.peft import FACTS_FILE
from orbit_jax.checkpoint.peft_config import CONFIG_FILE, scale_ratio, write_peft_config
from orbit_jax.checkpoint.peft_keys import PREFIX, WEIGHTS_FILE
from orbit_jax.checkpoint.peft_oft import write_rotations
from orbit_jax.checkpoint.peft_sites import (
    EXPERT_PARAMETERS,
    Part,
    Site,
    in_layer,
    is_expert,
    linear_leaves,
    sites,
)
from orbit_jax.checkpoint.safetensors_io import write_safetensors
from orbit_jax.model.config import ModelConfig

LAYOUTS = ("per_module", "fused")
DTYPES = ("float32", "bfloat16")

_Methods = dict[tuple[str, ...], LoRA]


def save_adapter(
    folder: str | Path,
    adapter: Adapter,
    config: ModelConfig,
    facts: Mapping[str, Any],
    *,
    layout: str = "per_module",
    dtype: str = "float32",
    wrapper: str = "",
) -> None:
    """Writes `adapter_config.json`, `adapter_model.safetensors` and `orbit.json`.

    Args:
      folder: made if it is missing; files of the same names are replaced.
      adapter: of LoRA throughout, or of OFT, whose experts have modules of their own.
      facts: of `adapter_facts`, stored in `orbit.json` and in the header of the weights.
      layout: `per_module` gives each expert keys of its own, which serving engines load; `fused`
        gives a layer's experts those of two 3-D parameters, which is how models hold them since
        transformers 5. A family whose checkpoints hold experts so has the latter only. PEFT 0.19
        to 0.21 fuse either under transformers 5, but want gate and up of experts both adapted if
        they are per module, and leave out dense and shared feed-forward layers beside experts.
      dtype: `float32`, the masters, or `bfloat16`, what a bf16 forward pass sees of them.
      wrapper: what stands before the names where a model has more than language in it, as
        `language_model.`.

    Raises:
      ValueError: for an unknown layout or dtype, another method, experts' gate and up of different
        scales, which readers take as one weight, or rotations that PEFT does not have.
    """
    for name, value, known in (("layout", layout, LAYOUTS), ("dtype", dtype, DTYPES)):
        if value not in known:
            raise ValueError(f"{name}={value!r}: must be one of {known}")
    adapter = _written_out(adapter.replace(params=jax.device_get(adapter.params)), config)
    fused = layout == "fused" or _holds_experts_together(config)
    if isinstance(adapter.method, OFT):
        fused = False
        if layout == "fused":
            raise ValueError("layout='fused': PEFT rotates modules only, use 'per_module'")
        peft_config, tensors = write_rotations(
            *(adapter, config, facts["base"], wrapper),
            lambda names: _targets(names, config, fused, wrapper),
        )
    else:
        peft_config, tensors = _pairs(adapter, config, facts["base"], fused, wrapper)

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: values.astype(jnp.dtype(dtype)) for key, values in tensors.items()}
    header = {"format": "pt", "orbit": json.dumps(dict(facts), sort_keys=True)}
    write_safetensors(folder / WEIGHTS_FILE, tensors, header)
    facts = {**facts, "layout": "fused" if fused else layout, "dtype": dtype}
    for name, value in ((CONFIG_FILE, peft_config), (FACTS_FILE, facts)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _pairs(
    adapter: Adapter, config: ModelConfig, base: str, fused: bool, wrapper: str
) -> tuple[dict, dict[str, np.ndarray]]:
    """The fields of `adapter_config.json` and the f32 tensors of an adapter of LoRA."""
    methods = _methods(adapter, config)
    # For each parameter of experts: the weights of it that are adapted, and its rank and alpha.
    paths = {
        name: [path for path in methods if is_expert(path) and path[-1] in parts]
        for name, parts in EXPERT_PARAMETERS.items()
    }
    paths = {name: found for name, found in paths.items() if found}
    shared = {name for name in paths if fused and _one_input_side(adapter, paths[name])}
    joint = {
        name: _joint([methods[path] for path in found], name in shared)
        for name, found in paths.items()
    }
    written = [s for s in sites(config, joint if fused else (), wrapper) if _adapted(adapter, s)]

    patterns = {_pattern(s.name): methods[s.parts[0].path] for s in written if not s.experts}
    patterns = {name: method for name, method in patterns.items() if method != adapter.method}
    for name, found in paths.items():
        # Readers that fuse experts look for the parameter's name even where keys are per module,
        # and would otherwise take twice the common rank for gate and up.
        if fused or any(methods[path] != adapter.method for path in found):
            patterns[re.escape(".".join((*found[0][:-1], name)))] = joint[name]
    peft_config = write_peft_config(
        adapter.method,
        patterns.items(),
        _targets([site.name for site in written if not site.experts], config, fused, wrapper),
        sorted({in_layer(site.name) for site in written if site.experts}),
        base,
    )
    tensors = {}
    for site in written:
        pair = site.join(*_pair(adapter, site, site.name.rpartition(".")[2] in shared))
        for matrix, values in zip("AB", pair, strict=True):
            tensors[f"{PREFIX}{site.key}.lora_{matrix}.weight"] = values
    return peft_config, tensors


def _written_out(adapter: Adapter, config: ModelConfig) -> Adapter:
    """What the experts of a layer share is repeated for each of them: PEFT knows no other way."""

    def spread(path: tuple, leaf: np.ndarray) -> np.ndarray:
        if jax.tree_util.DictKey("experts") not in path:
            return leaf
        return np.broadcast_to(leaf, (len(leaf), config.num_experts, *leaf.shape[2:]))

    def own(method: Method) -> Method:
        known = isinstance(method, LoRA | OFT)
        return dataclasses.replace(method, shared="") if known else method

    return adapter.replace(
        params=jax.tree_util.tree_map_with_path(spread, adapter.params),
        method=own(adapter.method),
        overrides=tuple((name, own(method)) for name, method in adapter.overrides),
    )


def _methods(adapter: Adapter, config: ModelConfig) -> _Methods:
    """The method of every adapted weight, by module path in a layer."""
    methods = {}
    for leaves, params in zip(linear_leaves(config), adapter.params["layers"], strict=True):
        for path in leaves:
            if not (found := at(params, *path)):
                continue
            method = adapter.method_at(*path)
            if not isinstance(method, LoRA) or method.rank != found["a"].shape[-2]:
                raise ValueError(
                    f"{'.'.join(path)} has the method {method}, which has no layout in PEFT here: "
                    "only LoRA of the parameters' rank can be written"
                )
            if method.rank_stabilized != adapter.method.rank_stabilized:
                raise ValueError(
                    f"{'.'.join(path)} has rank_stabilized={method.rank_stabilized} and the "
                    "adapter another: PEFT has one use_rslora for all, choose alpha instead"
                )
            methods[path] = method
    return methods


def _holds_experts_together(config: ModelConfig) -> bool:
    return any(leaf.fused for leaves in linear_leaves(config) for leaf in leaves.values())


def _adapted(adapter: Adapter, site: Site) -> list[tuple[Part, dict]]:
    """The parts of a site that have parameters, with those of their stack."""
    layers = adapter.params["layers"]
    found = [(part, at(layers[part.stack], *part.path)) for part in site.parts]
    return [(part, params) for part, params in found if params]


def _one_input_side(adapter: Adapter, paths: list[tuple[str, ...]]) -> bool:
    """Whether two weights share A everywhere, as those read from one parameter do."""
    pairs = [[at(params, *path) for path in paths] for params in adapter.params["layers"]]
    pairs = [pair for pair in pairs if any(pair)]
    return len(paths) == 2 and all(
        all(pair) and np.array_equal(pair[0]["a"], pair[1]["a"]) for pair in pairs
    )


def _joint(methods: list[LoRA], shared: bool) -> LoRA:
    """The method of weights that stand in one parameter, side by side or on one A."""
    first = methods[0]
    if any(scale_ratio(method, first) != 1 for method in methods):
        raise ValueError(
            f"the experts' gate_proj and up_proj have scales {[m.scale for m in methods]}: readers "
            "take them as one weight, give both the same alpha / rank"
        )
    rank = first.rank if shared else sum(method.rank for method in methods)
    growth = Fraction(rank, first.rank)
    if first.rank_stabilized:
        alpha = first.alpha * math.sqrt(growth)
    else:
        alpha = float(Fraction(first.alpha) * growth)
    return LoRA(rank, alpha, first.rank_stabilized)


def _pair(adapter: Adapter, site: Site, shared: bool) -> tuple[np.ndarray, np.ndarray]:
    """A and B of a site; weights that share no A stand as blocks of B's rows and columns."""
    parts = _adapted(adapter, site)
    sides = [params["a"][part.index] for part, params in parts]
    a = sides[0] if shared else np.concatenate(sides, axis=-2)
    b = np.zeros((*a.shape[:-2], site.out, a.shape[-2]), np.float32)
    first = 0
    for (part, params), side in zip(parts, sides, strict=True):
        ranks = slice(first, first + side.shape[-2])
        b[..., part.rows, ranks] = params["b"][part.index]
        first = 0 if shared else ranks.stop
    return a, b


def _pattern(module: str) -> str:
    """What matches a module's name in every layer, and for every expert."""
    numbered = re.sub(r"\.experts\.\d+\.", ".experts.#.", in_layer(module))
    return re.escape(numbered).replace(r"\#", r"\d+")


def _targets(modules: list[str], config: ModelConfig, fused: bool, wrapper: str) -> list[str]:
    """The shortest names that pick these modules and no others, by PEFT's rule of dotted ends."""
    every = [
        wrapper + module
        for leaf in jax.tree.leaves(base_layout(config))
        if leaf.kind != "Vector" and not leaf.fused
        for module in leaf.modules
        if not (fused and ".experts." in module)
    ]
    forms = (_last, lambda module: in_layer(module) if ".layers." in module else module, str)
    adapted, chosen, left = set(modules), set(), set(modules)
    for form in forms:
        others = {form(module) for module in every if module not in adapted}
        exact = {module for module in left if form(module) not in others}
        chosen |= {form(module) for module in exact}
        left -= exact
    return sorted(chosen)


def _last(module: str) -> str:
    return module.rpartition(".")[2]
