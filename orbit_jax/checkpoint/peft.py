"""Loading a PEFT folder as an adapter, value for value.

Every key of the file is accounted for before a tensor is read. Layers and experts that run as one
stack share a rank and a scale: smaller ranks are padded with zeros, and scales that differ by a
power of two are folded into B. Both are exact; what is not is refused.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from orbit_jax.adapters.adapter import Adapter
from orbit_jax.adapters.lora import LoRA
from orbit_jax.checkpoint.peft_config import (
    CONFIG_FILE,
    PeftConfig,
    is_oft,
    read_peft_config,
    scale_ratio,
)
from orbit_jax.checkpoint.peft_keys import PREFIX, WEIGHTS_FILE, check_keys
from orbit_jax.checkpoint.peft_oft import load_rotations
from orbit_jax.checkpoint.peft_sites import (
    EXPERT_PARAMETERS,
    Part,
    Site,
    insert,
    is_expert,
    linear_leaves,
    sites,
)
from orbit_jax.checkpoint.safetensors_io import open_file, read_json
from orbit_jax.model.config import ModelConfig

FACTS_FILE = "orbit.json"
WRAPPER = "language_model."  # where models with more than language in them keep it


def load_adapter(folder: str | Path, config: ModelConfig, base_hash: str | None = None) -> Adapter:
    """Reads LoRA or OFT that PEFT, or `save_adapter`, wrote for a model of this config.

    Args:
      folder: with `adapter_config.json` and `adapter_model.safetensors`; per-module keys, and
        experts as 3-D parameters (`target_parameters`) as PEFT 0.19 and later lay them out.
      base_hash: of the base that it will be attached to; compared with that in `orbit.json` where
        the folder has one. None leaves it unchecked.

    Returns:
      An adapter of f32 host arrays; `mesh.place` puts it on the devices.

    Raises:
      ValueError: if a file is missing or broken, if the config has a feature that is not
        supported, if a key is unknown, missing or of another shape or type, if none matches, if
        scales within one stack cannot be made equal exactly, or if the base is another.
    """
    folder = Path(folder)
    peft = None if is_oft(folder) else read_peft_config(folder)
    _check_base(folder, base_hash)
    refs = open_file(folder / WEIGHTS_FILE)
    wrapper = WRAPPER if any(key.startswith(PREFIX + WRAPPER) for key in refs) else ""
    if peft is None:
        return load_rotations(folder, config, refs, wrapper)

    def shapes(site: Site) -> dict[str, tuple[int, ...]]:
        matrices = site.shapes(peft.method_of(site.name).rank)
        return {_key(site, matrix): shape for matrix, shape in matrices.items()}

    found = sites(config, _parameters(folder, peft, config), wrapper)
    present = check_keys(folder, folder / CONFIG_FILE, refs, found, shapes, peft.targets)

    parts: dict[tuple[str, ...], list[tuple[Site, Part, LoRA]]] = defaultdict(list)
    for site in present:
        for part in site.parts:
            parts[part.path].append((site, part, peft.method_of(site.name)))
    layers: list[dict] = [{} for _ in config.stacks]
    leaves, overrides = linear_leaves(config), []
    for path, pieces in sorted(parts.items()):
        method = max((method for _, _, method in pieces), key=lambda m: m.rank)
        ratios = _ratios(folder, pieces, method)
        if method != peft.method:
            overrides.append((".".join(path), method))
        stacks = {}
        for stack in {part.stack for _, part, _ in pieces}:
            leaf = leaves[stack][path]
            (out, width), lead = leaf.shape, leaf.lead
            stacks[stack] = {
                "a": np.zeros((*lead, method.rank, width), np.float32),
                "b": np.zeros((*lead, out, method.rank), np.float32),
            }
            insert(layers[stack], path, stacks[stack])
        for (site, part, own), ratio in zip(pieces, ratios, strict=True):
            a, b = site.split(refs[_key(site, "A")].map(), refs[_key(site, "B")].map())
            stacks[part.stack]["a"][part.index][..., : own.rank, :] = a
            b = b[..., part.rows, :].astype(np.float32) * np.float32(ratio)
            stacks[part.stack]["b"][part.index][..., : own.rank] = b
    return Adapter({"layers": layers}, peft.method, tuple(overrides))


def _check_base(folder: Path, base_hash: str | None) -> None:
    path = folder / FACTS_FILE
    if base_hash is None or not path.is_file():
        return
    facts = read_json(path)
    if facts.get("base_hash") != base_hash:
        raise ValueError(
            f"{path}: the adapter belongs to the base {facts.get('base')!r} with base_hash="
            f"{facts.get('base_hash')}, this base has {base_hash}: load the base it was trained on"
        )


def _parameters(folder: Path, peft: PeftConfig, config: ModelConfig) -> set[str]:
    """Which of the experts' parameters `target_parameters` names."""
    where = f"{folder / CONFIG_FILE}: target_parameters"
    held = [site.name for site in sites(config, EXPERT_PARAMETERS) if site.experts]
    names = set()
    for target in peft.parameters:
        hits = {n.rpartition(".")[2] for n in held if n == target or n.endswith(f".{target}")}
        if not hits:
            raise ValueError(
                f"{where} names {target!r}, which is no weight of this model's experts; a router, "
                "an embedding and biases are never adapted: train without it"
            )
        names |= hits
    # Families that hold experts with inputs first are laid out alike by every version.
    inputs_first = any(
        leaf.fused for leaves in linear_leaves(config) for p, leaf in leaves.items() if is_expert(p)
    )
    if names and not peft.orders_by_meaning and not inputs_first:
        raise ValueError(
            f"{where}: peft_version={'.'.join(map(str, peft.version))} laid experts out by the "
            "order of dimensions, which cannot be told apart: load and save it with PEFT 0.19 or "
            "later"
        )
    return names


def _ratios(folder: Path, pieces: list[tuple[Site, Part, LoRA]], method: LoRA) -> Iterable[float]:
    ratios = [scale_ratio(own, method) for _, _, own in pieces]
    if None in ratios:
        site, _, own = pieces[ratios.index(None)]
        raise ValueError(
            f"{folder / CONFIG_FILE}: {site.name} has the scale {own.scale:g} and others that run "
            f"in one stack with it {method.scale:g}: their ratio must be a power of two, choose "
            "alpha_pattern so"
        )
    return ratios


def _key(site: Site, matrix: str) -> str:
    return f"{PREFIX}{site.key}.lora_{matrix}.weight"
