"""Which weights of a plain checkpoint become low-bit, and how the result says so.

Linear layers do, or the experts alone; router, norms, embedding and head never. What is left out is
left out by the names and patterns of compressed-tensors' `ignore`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from orbit_jax.checkpoint.common import few
from orbit_jax.checkpoint.compressed_tensors_config import Targets, read_ignore, write_targets
from orbit_jax.checkpoint.gguf_file import is_gguf
from orbit_jax.checkpoint.huggingface import Contents, open_base
from orbit_jax.checkpoint.layout import Leaf
from orbit_jax.checkpoint.leaf_tensors import expected_tensors, tensor_name
from orbit_jax.checkpoint.quantization import read_quantization
from orbit_jax.checkpoint.safetensors_io import TensorRef, open_checkpoint, read_json
from orbit_jax.checkpoint.scheme import Scheme

# Format to its scheme; only whole numbers have a group to choose. Eight-bit floats have a scale for
# each row: blocks of 128x128 would be as good, but transformers 5.24 cannot read experts in them.
SCHEMES = {
    "int4": Scheme("pack-quantized", bits=4, group=32),
    "fp8": Scheme("fp8"),
    "mxfp4": Scheme("mxfp4"),
    "nvfp4": Scheme("nvfp4", scale="weight_global_scale"),
}
_FUSED = Scheme("mxfp4-blocks")  # gpt-oss'
_GROUPS = {"fp8": 0, "mxfp4": 32, "nvfp4": 16}
# Layers that serving engines run as one weight: all are low-bit or none, under one overall scale.
_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)


@dataclass(frozen=True)
class Weight:
    """A tensor that becomes low-bit.

    Attributes:
      leaf: of the base, which says how experts and rows lie in it.
      module: as the files name it.
      ref: where it lies.
      group: the weights that are quantised or left alone together, as a pattern for `ignore`.
      together: names of the tensors, this one among them, that share an overall scale.
    """

    leaf: Leaf
    module: str
    ref: TensorRef
    group: str
    together: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What a quantised folder will hold.

    Attributes:
      contents: of the plain folder; refs: all its tensors, those that are not read among them.
      scheme: of all low-bit weights; group: columns that share a scale, 0 for a whole row.
      weights: those, by the names of their tensors.
      config: the new `config.json`.
    """

    folder: Path
    contents: Contents
    refs: dict[str, TensorRef]
    scheme: Scheme
    group: int
    weights: dict[str, Weight]
    config: dict


def make_plan(
    folder: str | Path,
    form: str,
    group: int | None = None,
    only: str = "",
    ignore: Sequence[str] = (),
) -> Plan:
    """Decides what becomes low-bit.

    Args:
      folder: a Hugging Face folder of bf16, fp16 or f32 weights.
      form: a key of `SCHEMES`.
      group: columns that share a scale; None for the format's own.
      only: `experts`, or empty for all linear layers.
      ignore: module names, or patterns after `re:`, that stay as they are.

    Raises:
      ValueError: if the folder cannot be read or is quantised already, if a weight does not fit the
        format, or if the choice makes no sense.
    """
    folder = Path(folder)
    if is_gguf(folder):
        raise ValueError(f"{folder} is a GGUF file: start from the model's Hugging Face folder")
    hf = read_json(folder / "config.json")
    if method := read_quantization(folder, hf).method:
        raise ValueError(
            f"{folder} is quantised already (quant_method={method!r}): start from its bf16 original"
        )
    contents = open_base(folder)
    scheme = _scheme(form, group, any(leaf.fused for leaf in jax.tree.leaves(contents.layout)))
    weights = _candidates(contents, scheme, only)
    if not weights:
        raise ValueError(f"--only={only}: {folder} has none of these layers: leave --only out")
    weights = _without_ignored(weights, ignore)
    for weight in weights.values():
        expected_tensors(weight.leaf, weight.module, scheme)  # refuses what does not fit
    refs = open_checkpoint(folder)
    config = hf | {"quantization_config": _quantization(refs, scheme, weights)}
    columns = scheme.group or _GROUPS.get(form, 0)
    return Plan(folder, contents, refs, scheme, columns, weights, config)


def low_bit_group(module: str) -> str:
    """The weights that are quantised or left alone together, as a pattern: a layer's experts,
    projections that are run as one, or one alone.
    """
    inside, experts, _ = module.partition(".experts")
    if experts:
        return f"re:.*{re.escape(_short(inside))}\\.experts\\b"
    parent, name = module.rsplit(".", 1)
    names = next((names for names in _TOGETHER if name in names), (name,))
    last = names[0] if len(names) == 1 else f"({'|'.join(names)})"
    return f"re:.*{re.escape(_short(parent))}\\.{last}$"


def _scheme(form: str, group: int | None, fused: bool) -> Scheme:
    if form not in SCHEMES:
        raise ValueError(f"--format={form}: use one of {', '.join(SCHEMES)}")
    if form != "int4" and group not in (None, _GROUPS[form]):
        has = f"groups of {_GROUPS[form]}" if _GROUPS[form] else "one scale a row"
        raise ValueError(f"--group={group}: {form} has {has}: leave --group out")
    if fused and form != "mxfp4":
        raise ValueError(
            f"--format={form}: this family holds all experts of a layer in one tensor, for which "
            "there is a layout in mxfp4 alone: use --format mxfp4"
        )
    if form == "int4":
        if group is not None and group < 1:
            raise ValueError(f"--group={group}: give a positive number of columns")
        return Scheme("pack-quantized", bits=4, group=group or SCHEMES[form].group)
    return _FUSED if fused else SCHEMES[form]


def _candidates(contents: Contents, scheme: Scheme, only: str) -> dict[str, Weight]:
    """Every candidate."""
    found: dict[str, Weight] = {}
    for leaf in jax.tree.leaves(contents.layout):
        if leaf.kind != "Linear" or not leaf.lead:  # a head has no layers
            continue
        for module in dict.fromkeys(leaf.modules):
            is_expert = leaf.fused or ".experts." in module
            if (only == "experts" or scheme == _FUSED) and not is_expert:
                continue
            ref = contents.refs[tensor_name(leaf, module, "weight")]
            own = ref.name.removesuffix(f".{leaf.parameter}")
            parent, name = own.rsplit(".", 1)
            names = next((names for names in _TOGETHER if name in names), (name,))
            together = tuple(f"{parent}.{other}.{leaf.parameter}" for other in names)
            found[ref.name] = Weight(leaf, own, ref, low_bit_group(own), together)
    return found


def _without_ignored(weights: dict[str, Weight], ignore: Sequence[str]) -> dict[str, Weight]:
    for pattern in ignore:
        targets = read_ignore([pattern])
        if not any(_is_ignored(targets, weight) for weight in weights.values()):
            raise ValueError(
                f"--ignore={pattern}: no weight that would be quantised has such a name: write a "
                "module's full name, or a pattern as re:.*self_attn.*"
            )
    targets = read_ignore(ignore)
    left = {n: w for n, w in weights.items() if not _is_ignored(targets, w)}
    split = {w.group for w in left.values()} & {
        w.group for n, w in weights.items() if n not in left
    }
    if split:
        raise ValueError(
            f"--ignore leaves a part of {few(sorted(split), 2)} as it is: engines run these as one "
            "weight, so ignore all of them, or none"
        )
    if not left:
        raise ValueError("--ignore leaves nothing to quantise: leave some of its patterns out")
    return left


def _is_ignored(targets: Targets, weight: Weight) -> bool:
    module = weight.module if not weight.leaf.fused else f"{weight.module}.{weight.leaf.parameter}"
    return targets.ignores((weight.module, module))


def _quantization(refs: dict[str, TensorRef], scheme: Scheme, weights: dict[str, Weight]) -> dict:
    """The `quantization_config`."""
    if scheme == _FUSED:
        plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": [*plain, "lm_head"]}
    low = {weight.module for weight in weights.values()}
    matrices = (r.name for r in refs.values() if len(r.shape) > 1 and r.name.endswith(".weight"))
    plain = [module for name in matrices if (module := name.removesuffix(".weight")) not in low]
    return write_targets({scheme: ["Linear"]}, _patterns([*plain, "lm_head"], low))


def _patterns(plain: Iterable[str], low: set[str]) -> list[str]:
    """One pattern for the same module of all layers and experts, if it is plain in all of them."""
    taken = {re.sub(r"\.\d+\b", ".#", module) for module in low}
    found: dict[str, None] = {}
    for module in plain:
        form = re.sub(r"\.\d+\b", ".#", module)
        name = re.escape(_short(module if form in taken else form)).replace(r"\#", r"\d+")
        found[f"re:.*{name}$"] = None
    return list(found)


def _short(module: str) -> str:
    """Without what stands before the layers, which engines spell in their own way."""
    return module[module.index("layers.") :] if re.search(r"\bmodel\.layers\.", module) else module
