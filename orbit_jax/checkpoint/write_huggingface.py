"""Writing a base as the Hugging Face folder that it could have been loaded from."""

import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from orbit_jax.checkpoint.compressed_tensors_config import write_targets
from orbit_jax.checkpoint.integer_formats import words_from_codes, words_from_offset
from orbit_jax.checkpoint.layout import Leaf, layout
from orbit_jax.checkpoint.leaf_tensors import tensor_name
from orbit_jax.checkpoint.safetensors_io import SINGLE_FILE, write_safetensors
from orbit_jax.checkpoint.scheme import PLAIN, Scheme
from orbit_jax.model.config import ModelConfig
from orbit_jax.quant.qtensor import FORMATS, QTensor


def save_base(
    folder: str | Path, hf_config: dict, base: dict, extra_files: Sequence[str | Path] = ()
) -> None:
    """Writes `config.json` and `model.safetensors`; `load_base` reads back the same bits.

    Args:
      folder: made if it is missing; files of the same names are replaced.
      hf_config: the `config.json` of the model; its `quantization_config` is made from `base`.
      base: a base of the structure that `load_base` returns.
      extra_files: copied beside it under their own names (`tokenizer.json` and its like).

    Raises:
      ValueError: if `base` does not have the leaves that `hf_config` implies, if a weight is in a
        format that is not written, or if a family holds its experts in one tensor.
    """
    folder = Path(folder)
    config = _with_stacks_of(base, ModelConfig.from_hf(hf_config))
    leaves, structure = jax.tree.flatten(layout(config))
    weights, found = jax.tree.flatten(base, is_leaf=lambda node: isinstance(node, QTensor))
    if found != structure:
        raise ValueError(
            f"save_base: the base has the structure {found}, hf_config implies {structure}: "
            "use the config of that base"
        )
    pairs = list(zip(leaves, weights, strict=True))
    tensors: dict[str, np.ndarray] = {}
    for leaf, weight in pairs:
        if (shape := weight.shape) != (*leaf.lead, *leaf.shape):
            raise ValueError(
                f"save_base: {leaf.modules[0]} and its stack have shape {list(shape)}, hf_config "
                f"implies {[*leaf.lead, *leaf.shape]}: use the config of that base"
            )
        if leaf.fused:
            raise ValueError(
                f"save_base: {leaf.modules[0]} holds all experts in one tensor, which is not "
                "written: keep the folder that the base came from"
            )
        tensors |= _tensors(leaf, weight)
    written = {key: value for key, value in hf_config.items() if key != "quantization_config"}
    if quantization := _quantization(pairs):
        written["quantization_config"] = quantization
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / SINGLE_FILE, tensors, {"format": "pt"})
    text = json.dumps(written, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    for path in map(Path, extra_files):
        shutil.copyfile(path, folder / path.name)


def _with_stacks_of(base: dict, config: ModelConfig) -> ModelConfig:
    """The config with stacks that begin where those of the base do."""
    counts = [stack["input_layernorm"].shape[0] for stack in base.get("layers", ())]
    return dataclasses.replace(config, splits=tuple(itertools.accumulate(counts))[:-1])


def _tensors(leaf: Leaf, weight: QTensor | jax.Array) -> dict[str, np.ndarray]:
    """The tensors of all modules of one leaf, by name."""
    if not isinstance(weight, QTensor):
        return _unstack(leaf, "weight", weight)
    if _scheme(weight) == PLAIN:
        values = np.asarray(weight.codes).view(jnp.dtype(FORMATS[weight.format].float_dtype))
        return _unstack(leaf, "weight", values)
    tensors = {f"{module}.weight_shape": np.array(leaf.shape, np.int64) for module in leaf.modules}
    for name, codes in _unstack(leaf, "weight_packed", weight.codes).items():
        tensors[name] = words_from_codes(codes)
    scales = np.asarray(weight.scales).view(jnp.dtype(weight.scale_dtype))
    tensors |= _unstack(leaf, "weight_scale", scales)
    if weight.offset is not None:
        for name, offset in _unstack(leaf, "weight_zero_point", weight.offset).items():
            tensors[name] = words_from_offset(offset)
    return tensors


def _unstack(leaf: Leaf, suffix: str, stack: jax.Array | np.ndarray) -> dict[str, np.ndarray]:
    stack = np.asarray(stack)
    parts = stack.reshape(len(leaf.modules), *stack.shape[len(leaf.lead) :])
    names = (tensor_name(leaf, module, suffix) for module in leaf.modules)
    return dict(zip(names, parts, strict=True))


def _quantization(pairs: list[tuple[Leaf, QTensor | jax.Array]]) -> dict | None:
    """`quantization_config` as deployed checkpoints spell it: a class where one scheme is used."""
    plain: list[Leaf] = []
    quantised: dict[Scheme, list[Leaf]] = {}
    for leaf, weight in pairs:
        scheme = _scheme(weight)
        if scheme != PLAIN:
            quantised.setdefault(scheme, []).append(leaf)
        elif leaf.kind in ("Linear", "Router"):
            plain.append(leaf)  # named for readers that count the router as a linear layer
    if not quantised:
        return None
    targets = {}
    for scheme, leaves in quantised.items():
        by_class = len(quantised) == 1
        names = [
            "Linear" if by_class and leaf.kind == "Linear" else name
            for leaf in leaves
            for name in _patterns(leaf)
        ]
        targets[scheme] = list(dict.fromkeys(names))
    ignore = [name for leaf in plain for name in _patterns(leaf)]
    return write_targets(targets, ignore)


def _scheme(weight: QTensor | jax.Array) -> Scheme:
    """How compressed-tensors stores a weight."""
    if not isinstance(weight, QTensor) or FORMATS[weight.format].plain:
        return PLAIN
    is_known = weight.format in ("int4", "int8") and not isinstance(weight.scales, QTensor)
    if not is_known or weight.columns is not None or weight.block_rows > 1:
        raise ValueError(
            f"save_base: a weight of {weight.format} with these scales has no spelling in "
            "compressed-tensors: keep the file that it came from"
        )
    return Scheme(
        "pack-quantized",
        bits=FORMATS[weight.format].bits,
        group=weight.group_size,
        symmetric=weight.offset is None,
    )


def _patterns(leaf: Leaf) -> list[str]:
    """The names of a leaf's modules, with one pattern for all experts of a layer."""
    return list(dict.fromkeys(map(_pattern, leaf.modules)))


def _pattern(module: str) -> str:
    name, is_expert = re.subn(r"\.experts\.\d+\.", ".experts.#.", module)
    return "re:" + re.escape(name).replace(r"\#", r"\d+") + "$" if is_expert else module
