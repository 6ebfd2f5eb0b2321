"""What a deployed checkpoint holds, told by its `config.json` alone.

Where the configuration leaves something open that a file's headers would say (which modules are
quantised, the types of scales), it is taken to be as in the checkpoints that are deployed in that
format. What differs between those is refused.
"""

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from orbit_jax.checkpoint.fields import only, section, strings
from orbit_jax.checkpoint.language_tensors import module_names
from orbit_jax.checkpoint.layout import Leaf, layout
from orbit_jax.checkpoint.leaf_tensors import expected_tensors
from orbit_jax.checkpoint.quantization import Quantization, read_quantization
from orbit_jax.checkpoint.safetensors_io import TensorRef, read_json
from orbit_jax.checkpoint.scheme import E4M3, E8M0, F16, F32, FLOATS, I8, PLAIN, U8, Scheme, Stored
from orbit_jax.checkpoint.stacks import split
from orbit_jax.model.config import ModelConfig

_WRAPPED = "language_model."  # before the names of a model that is a part of a larger one
_DEEPSEEK = ("deepseek_v3", "kimi_k2")
_EXCLUDED = ("modules_to_not_convert", "exclude_modules", "ignore")


@dataclass(frozen=True)
class Assumed:
    """A folder's contents as its `config.json` implies them.

    Attributes:
      config: of the language model; stacks begin where the format of weights changes.
      layout: the base as a tree of `Leaf`.
      scheme: how the weights of a leaf are stored.
      method: of quantisation, empty for none; float_dtype: of what is not quantised.
    """

    config: ModelConfig
    layout: dict
    scheme: dict[Leaf, Scheme]
    method: str
    float_dtype: np.dtype

    def tensors(self, leaf: Leaf, module: str) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """The tensors of a module by name: type and shape."""
        stored = expected_tensors(leaf, module, self.scheme[leaf])
        return {
            name: (self._dtype(leaf, part), part.shapes[0])
            for name, part in stored.items()
            if not part.optional
        }

    def _dtype(self, leaf: Leaf, stored: Stored) -> np.dtype:
        scheme, first = self.scheme[leaf], stored.dtypes[0]
        if not set(FLOATS) <= set(stored.dtypes) or first == F16:
            return first  # GPTQ's and AWQ's scales are fp16 before they are another float
        if leaf.parameter == "e_score_correction_bias":
            return F32
        if scheme == PLAIN:
            return self.float_dtype
        if scheme.format == "fp8" and (scheme.scale == "scale" or scheme.rows == 1 < scheme.group):
            return E8M0  # DeepSeek-V4, and groups of one row, which are MXFP8's alone
        if self.method == "modelopt" or (self.method == "fp8" and self.config.family in _DEEPSEEK):
            return F32
        return self.float_dtype


def assume(folder: str | Path) -> Assumed:
    """Reads the `config.json` of a folder, and what it implies.

    Raises:
      ValueError: if the model or its quantisation is not supported, or if how it is quantised
        cannot be known without the files.
    """
    folder = Path(folder)
    hf = read_json(folder / "config.json")
    config = ModelConfig.from_hf(hf)
    quantization = read_quantization(folder, hf)
    prefix = _WRAPPED if isinstance(hf.get("text_config"), dict) else ""
    text = hf["text_config"] if prefix else hf
    marks = _MARKS[quantization.method](quantization.config, text)
    known: dict[tuple[str, str], Scheme] = {}

    def scheme_of(leaf: Leaf, module: str) -> Scheme:
        key = (module, leaf.parameter)
        if key not in known:
            names = module_names(module, prefix)
            found = {} if _is_excluded(quantization, leaf, names) else marks(leaf)
            known[key] = quantization.scheme(names, leaf.kind, found.get)
        return known[key]

    config = split(config, scheme_of, Scheme.words)
    tree = layout(config)
    return Assumed(
        config=config,
        layout=tree,
        scheme={leaf: scheme_of(leaf, leaf.modules[0]) for leaf in jax.tree.leaves(tree)},
        method=quantization.method,
        float_dtype=_float_dtype(text),
    )


def _float_dtype(hf: dict) -> np.dtype:
    name = hf.get("dtype") or hf.get("torch_dtype") or "bfloat16"
    found = next((dtype for dtype in FLOATS if dtype.name == name), None)
    if found is None:
        raise ValueError(
            f"config.json: torch_dtype={name!r}: use one of {[dtype.name for dtype in FLOATS]}"
        )
    return found


def _is_excluded(quantization: Quantization, leaf: Leaf, names: tuple[str, ...]) -> bool:
    """Whether a module is plain by what all methods but compressed-tensors leave out."""
    if leaf.kind != "Linear" or not leaf.lead:  # the head has no layers
        return True
    config = quantization.config
    patterns = [pattern for field in _EXCLUDED for pattern in strings(config, field)]
    # Names of modules or parts of them, with `*` for any text.
    if any(fnmatch.fnmatchcase(f".{n}.", f"*.{p}.*") for p in patterns for n in names):
        return True
    skipped = [p.removeprefix("-:") for p in section(config, "dynamic") if p.startswith("-:")]
    return any(re.match(pattern, name) for pattern in skipped for name in names)


Marks = Callable[[Leaf], dict[str, TensorRef]]


def _mark(dtype: np.dtype = F32, shape: tuple[int, ...] = ()) -> TensorRef:
    """A tensor by which a quantised module is known; no more is read of it than this."""
    return TensorRef("", np.dtype(dtype), shape, Path(), 0)


def _none(config: dict, hf: dict) -> Marks:
    """Plain, or compressed-tensors, whose configuration names the modules."""
    return lambda leaf: {}


def _fp8(config: dict, hf: dict) -> Marks:
    scale = "scale" if hf.get("expert_dtype") else "weight_scale_inv"
    shape = (1, 1) if config.get("weight_block_size") is not None else ()
    eight = {"weight": _mark(E4M3), scale: _mark(F32, shape)}
    only(hf, "expert_dtype", None, "fp4", "fp8")
    if hf.get("expert_dtype") != "fp4":
        return lambda leaf: eight
    four = {"weight": _mark(I8), scale: _mark(E8M0)}
    return lambda leaf: four if ".experts." in leaf.modules[0] else eight


def _modelopt(config: dict, hf: dict) -> Marks:
    only(config, "quant_algo", "NVFP4", "FP8")
    if config["quant_algo"] == "FP8":
        return lambda leaf: {"weight_scale": _mark()}
    return lambda leaf: {"weight_scale_2": _mark()}


def _mxfp4(config: dict, hf: dict) -> Marks:
    return lambda leaf: {"weight_blocks": _mark(U8)} if leaf.fused else {}


def _gptq(config: dict, hf: dict) -> Marks:
    only(config, "lm_head", None, False)
    if config.get("desc_act") and config.get("group_size") != -1:
        raise ValueError(
            "config.json: quantization_config: desc_act=true orders the columns of each weight in "
            "a way that only the files say: download the checkpoint, or use one without act-order"
        )
    return lambda leaf: {"qweight": _mark()}


def _awq(config: dict, hf: dict) -> Marks:
    return lambda leaf: {"qweight": _mark()}


# What marks a quantised module, by method.
_MARKS: dict[str, Callable[[dict, dict], Marks]] = {
    "": _none,
    "compressed-tensors": _none,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
}
