"""Which tensors of a folder belong to its language model, and which are left unread on purpose."""

import re
from collections.abc import Iterable

from orbit_jax.checkpoint.safetensors_io import TensorRef

# Where models with more than language in them keep the language model.
_PREFIXES = ("language_model.", "model.language_model.")

# What a language model does not need: eyes and ears, and layers that guess further tokens.
_OTHER_PARTS = (
    "vision_tower.",
    "vision_model.",
    "visual.",
    "mm_projector.",
    "multi_modal_projector.",
    "audio_tower.",
    "model.vision_tower.",
    "model.visual.",
    "model.multi_modal_projector.",
    "mtp.",
    "model.mtp.",
)
# What follows from the config, or is of use only where activations or the cache are quantised.
_SUFFIXES = (
    "rotary_emb.inv_freq",
    ".input_scale",
    ".input_global_scale",
    ".activation_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
)


def language_tensors(refs: dict[str, TensorRef]) -> dict[str, TensorRef]:
    """Tensors by the names that they have in a model of language alone.

    Raises:
      ValueError: if two tensors have the same name then.
    """
    prefix = language_prefix(refs)
    named: dict[str, TensorRef] = {}
    for name, ref in refs.items():
        own = _plain_name(name, prefix)
        if own in named:
            raise ValueError(f"{name} and {named[own].name} are the same weight: remove one")
        named[own] = ref
    return named


def language_prefix(names: Iterable[str]) -> str:
    """What stands before the names of the language model's tensors in the files; often nothing."""
    names = tuple(names)
    return next((p for p in _PREFIXES if any(name.startswith(p) for name in names)), "")


def module_names(module: str, prefix: str) -> tuple[str, ...]:
    """The names that a configuration may call a module by; `prefix` as of `language_prefix`."""
    if prefix == _PREFIXES[1] and module.startswith("model."):
        return (module, prefix + module.removeprefix("model."))
    return (module, prefix + module) if prefix == _PREFIXES[0] else (module,)


def is_left_unread(name: str, num_layers: int, hf: dict) -> bool:
    """Whether a tensor that no weight of the model is made of may be there all the same."""
    if name.startswith(_OTHER_PARTS) or name.endswith(_SUFFIXES):
        return True
    extra = hf.get("num_nextn_predict_layers")
    layer = re.match(r"model\.layers\.(\d{1,6})\.", name)
    if layer is None or type(extra) is not int:
        return False
    return num_layers <= int(layer[1]) < num_layers + extra


def unread_part(name: str) -> str:
    """What a tensor that is left unread belongs to: `vision_tower`, `*.input_scale`, a layer.

    `name` is that in the files.
    """
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return f"*.{suffix.removeprefix('.')}"
    layer = re.match(r"(?:.*\.)?model\.layers\.\d+", name)
    other = next((part for part in _OTHER_PARTS if name.startswith(part)), "")
    return other.removesuffix(".") or (layer[0] if layer else name)


def _plain_name(name: str, prefix: str) -> str:
    if not prefix or not name.startswith(prefix):
        return name
    return ("model." if prefix == _PREFIXES[1] else "") + name.removeprefix(prefix)
