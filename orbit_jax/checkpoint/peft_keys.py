"""The keys of a PEFT folder, each of which is accounted for before a tensor is read."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from orbit_jax.checkpoint.common import few
from orbit_jax.checkpoint.peft_sites import Site
from orbit_jax.checkpoint.safetensors_io import TensorRef

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."

_DTYPES = ("float32", "bfloat16", "float16")
# Parts of keys that tell what a key is, besides an update of a linear weight.
_REASONS = {
    "lora_magnitude_vector": "DoRA is not supported",
    "lora_embedding_": "an embedding is never adapted",
    "oft_embedding_": "an embedding is never adapted",
    "embed_tokens": "an embedding is never adapted",
    "lm_head": "the head is never adapted",
    ".gate.": "a router is never adapted",
    ".router.": "a router is never adapted",
    "modules_to_save": "a weight of its own is no update",
    ".bias": "biases are not supported",
}


def check_keys(
    folder: Path,
    config_file: Path,
    refs: dict[str, TensorRef],
    found: list[Site],
    shapes: Callable[[Site], dict[str, tuple[int, ...]]],
    targets: Callable[[str], bool],
) -> list[Site]:
    """The sites that a file has.

    Args:
      found: all sites that it may have.
      shapes: the keys of a site with their shapes.
      targets: whether the config says that the module of a name is adapted.

    Raises:
      ValueError: for a key that is unknown, missing or of another shape or type, or if none
        matches.
    """
    file = folder / WEIGHTS_FILE
    expected = {key for site in found for key in shapes(site)}
    unknown = [f"{key} ({_reason(key)})" for key in sorted(refs.keys() - expected)]
    if refs and not refs.keys() & expected:
        raise ValueError(
            f"{file}: none of its {len(refs)} keys is of a weight of this model "
            f"({few(unknown)}): load it with the base it was trained on"
        )
    if not refs:
        raise ValueError(f"{file} has no tensors: save the adapter again")
    groups: dict[tuple, list[Site]] = defaultdict(list)
    for site in found:
        groups[site.parts[0].stack, site.parts[0].path, site.experts > 0].append(site)
    present, missing, wrong = [], [], []
    for group in groups.values():
        expects = group[0].experts or any(targets(site.name) for site in group)
        if not expects and not any(key in refs for site in group for key in shapes(site)):
            continue
        present += group
        for site in group:
            for key, shape in shapes(site).items():
                ref = refs.get(key)
                if ref is None:
                    missing.append(key)
                elif ref.shape != shape:
                    wrong.append(f"{ref.name} has shape {list(ref.shape)}, not {list(shape)}")
                elif ref.dtype.name not in _DTYPES:
                    wrong.append(f"{ref.name} has type {ref.dtype.name}, not one of {_DTYPES}")
    faults = {"unknown": unknown, "missing": missing, "wrong": wrong}
    listed = "; ".join(f"{what}: {few(names)}" for what, names in faults.items() if names)
    if listed:
        raise ValueError(
            f"{file}: the keys are not those of {config_file.name} and this model "
            f"({listed}): every key must be of an adapted linear weight"
        )
    return present


def _reason(key: str) -> str:
    return next((why for part, why in _REASONS.items() if part in key), "no such weight")
