"""OFT as PEFT stores it: `oft_R`, the strictly upper triangles of each module's blocks.

PEFT has one block size, one series and one way of sharing blocks for all modules of an adapter, and
no rotations of 3-D parameters, as which models hold experts since transformers 5. Its exact
rotation turns the other way than its series, so those triangles have the other sign.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from orbit_jax.adapters.adapter import Adapter, at
from orbit_jax.adapters.oft import OFT
from orbit_jax.checkpoint.peft_config import (
    CONFIG_FILE,
    HARMLESS,
    LAYOUT_VERSION,
    check_fields,
    modules_of,
)
from orbit_jax.checkpoint.peft_keys import PREFIX, check_keys
from orbit_jax.checkpoint.peft_sites import Site, insert, is_expert, linear_leaves, sites
from orbit_jax.checkpoint.safetensors_io import TensorRef, read_json
from orbit_jax.model.config import ModelConfig

_READ = (
    *("peft_type", "r", "oft_block_size", "block_share"),
    *("use_cayley_neumann", "num_cayley_neumann_terms"),
)
# Dropout is of training; eps, of a constrained rotation, which is refused.
_HARMLESS = (*HARMLESS, "module_dropout", "eps", "init_weights")


def load_rotations(
    folder: Path, config: ModelConfig, refs: dict[str, TensorRef], wrapper: str
) -> Adapter:
    """`load_adapter` of a folder whose `peft_type` is OFT; `refs` are its tensors."""
    path = folder / CONFIG_FILE
    raw = read_json(path)
    check_fields(path, raw, (*_READ, *_HARMLESS))
    method_of, modules = _method_of(path, raw), modules_of(raw)

    def shapes(site: Site) -> dict[str, tuple[int, ...]]:
        out_and_width = site.parts[0].shape
        return {_key(site): method_of(out_and_width[1]).shape(out_and_width)}

    def targets(name: str) -> bool:
        return any(name == target or name.endswith(f".{target}") for target in modules)

    present = check_keys(folder, path, refs, sites(config, (), wrapper), shapes, targets)
    layers: list[dict] = [{} for _ in config.stacks]
    leaves, methods, exact = linear_leaves(config), {}, not raw.get("use_cayley_neumann", True)
    for site in present:
        (part,) = site.parts
        leaf, method = leaves[part.stack][part.path], method_of(part.shape[1])
        methods[part.path] = method
        stored = at(layers[part.stack], *part.path)
        if stored is None:
            stored = {"skew": np.zeros(method.shape((*leaf.lead, *leaf.shape)), np.float32)}
            insert(layers[part.stack], part.path, stored)
        triangles = refs[_key(site)].map().astype(np.float32)
        stored["skew"][part.index] = -triangles if exact else triangles
    common = next(iter(methods.values()))
    overrides = tuple((".".join(path), m) for path, m in methods.items() if m != common)
    return Adapter({"layers": layers}, common, overrides)


def write_rotations(
    adapter: Adapter,
    config: ModelConfig,
    base: str,
    wrapper: str,
    name_targets: Callable[[list[str]], list[str]],
) -> tuple[dict, dict[str, np.ndarray]]:
    """The fields of `adapter_config.json` and the f32 tensors of an adapter of OFT throughout.

    Args:
      adapter: host arrays; what experts share is written out for each.
      base: path or name of the base.
      wrapper: as of `save_adapter`.
      name_targets: `target_modules` of the modules of these names.

    Raises:
      ValueError: for weights of other methods, or of experts that are no modules.
    """
    method, found, tensors = adapter.method, [], {}
    for leaves, params in zip(linear_leaves(config), adapter.params["layers"], strict=True):
        for path, leaf in leaves.items():
            if not at(params, *path):
                continue
            name, own = ".".join(path), adapter.method_at(*path)
            if own != method:
                raise ValueError(
                    f"{name} has the method {own} and others {method}: PEFT has one block size and "
                    "one series for all, train without overrides or export it merged"
                )
            if leaf.fused and is_expert(path):
                raise ValueError(
                    f"{name}: this family holds experts as parameters, which PEFT cannot rotate: "
                    "export it merged"
                )
    sign = 1 if method.neumann_terms else -1
    for site in sites(config, (), wrapper):
        (part,) = site.parts
        if stored := at(adapter.params["layers"][part.stack], *part.path):
            found.append(site.name)
            tensors[_key(site)] = sign * stored["skew"][part.index]
    fields = {
        "peft_type": "OFT",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": 0,
        "oft_block_size": method.block_size,
        "block_share": method.block_share,
        "use_cayley_neumann": bool(method.neumann_terms),
        "num_cayley_neumann_terms": method.neumann_terms or OFT(2).neumann_terms,
        "coft": False,
        "module_dropout": 0.0,
        "target_modules": name_targets(found),
        "bias": "none",
        "inference_mode": True,
        "peft_version": LAYOUT_VERSION,
    }
    return fields, tensors


def _method_of(path: Path, raw: dict) -> Callable[[int], OFT]:
    """The method of a weight by its input width: the size of blocks is given, or their number."""
    size, number = raw.get("oft_block_size") or 0, raw.get("r") or 0
    for name, value in (("oft_block_size", size), ("r", number)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{path}: {name}={value!r}: must be a whole number")
    if bool(size) == bool(number):
        raise ValueError(
            f"{path}: r={number} and oft_block_size={size}: one of them must be 0, the other not"
        )
    terms = raw.get("num_cayley_neumann_terms", OFT(2).neumann_terms)
    terms = terms if raw.get("use_cayley_neumann", True) else 0

    def method(width: int) -> OFT:
        if number and width % number:
            raise ValueError(f"{path}: r={number} does not divide an input width of {width}")
        try:
            return OFT(size or width // number, terms, bool(raw.get("block_share")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    return method


def _key(site: Site) -> str:
    return f"{PREFIX}{site.key}.oft_R.weight"
