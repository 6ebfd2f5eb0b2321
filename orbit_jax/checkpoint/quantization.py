"""How each weight of a Hugging Face folder is stored: from its configuration and its headers.

compressed-tensors names the modules that are quantised. The other methods do so loosely, if at all,
but a quantised module cannot be mistaken: it has tensors that a plain one has not.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from orbit_jax.checkpoint.compressed_tensors_config import Targets, blocks, read_targets
from orbit_jax.checkpoint.fields import only, section
from orbit_jax.checkpoint.formats import FORMATS, FORMATS_OF_PACKAGE, WeightFormat
from orbit_jax.checkpoint.safetensors_io import TensorRef, read_json
from orbit_jax.checkpoint.scheme import I8, PLAIN, U8, Scheme

# The tensor of a module with a suffix, as `weight_scale`; None where there is none.
Find = Callable[[str], TensorRef | None]
# How the weight of a module is stored, by the module's names, its `Leaf.kind` and its tensors.
FindScheme = Callable[[Sequence[str], str, Find], Scheme]

_MODELOPT_FILE = "hf_quant_config.json"


@dataclass(frozen=True)
class Method:
    """One way in which checkpoints are quantised.

    Attributes:
      name: its `quant_method`.
      read: from a `quantization_config`, how the scheme of a module is found.
      formats: the weight formats that it alone uses, by the names that its schemes give.
    """

    name: str
    read: Callable[[dict], FindScheme]
    formats: Mapping[str, WeightFormat] = field(default_factory=dict)


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint says about its quantisation: the method, and how it finds a scheme.

    `config` is the `quantization_config`, empty where nothing is quantised.
    """

    method: str
    find_scheme: FindScheme
    config: dict

    def scheme(self, names: Sequence[str], kind: str, find: Find) -> Scheme:
        """How the weight of a module is stored.

        Args:
          names: of the module, as it stands in the files and without their prefix.
          kind: as `Leaf.kind`; routers and vectors are plain.
          find: its tensors.
        """
        return PLAIN if kind in ("Router", "Vector") else self.find_scheme(names, kind, find)


def read_quantization(folder: Path, hf: dict) -> Quantization:
    """Reads the quantisation of a folder, whose `config.json` is `hf`; there may be none.

    Raises:
      ValueError: for a method, a format or a strategy that is not supported.
    """
    config = _config(folder, hf)
    if config is None:
        return Quantization("", lambda names, kind, find: PLAIN, {})
    only(config, "quant_method", *_METHODS)
    method = config["quant_method"]
    return Quantization(method, _METHODS[method](config), config)


def add_method(method: Method) -> None:
    """Makes a method of one's own known, in place of an earlier one of its name.

    Raises:
      ValueError: if it, or one of its formats, has the name of one of this package.
    """
    if method.name in _OF_PACKAGE:
        raise ValueError(f"quant_method {method.name!r} is one of this package: take another name")
    for name in method.formats:
        if name in FORMATS_OF_PACKAGE:
            raise ValueError(f"format {name!r} is one of this package: take another name")
    _METHODS[method.name] = method.read
    FORMATS.update(method.formats)


def _config(folder: Path, hf: dict) -> dict | None:
    text = hf.get("text_config") if isinstance(hf.get("text_config"), dict) else {}
    found = [part["quantization_config"] for part in (hf, text) if part.get("quantization_config")]
    if any(config != found[0] for config in found):
        raise ValueError(
            "config.json: quantization_config and text_config.quantization_config contradict each "
            "other: keep one"
        )
    if found:
        return section({"quantization_config": found[0]}, "quantization_config")
    if hf.get("quantization_config") is not None or not (folder / _MODELOPT_FILE).is_file():
        section(hf, "quantization_config")  # an empty one says nothing, but must be one
        return None
    return section(read_json(folder / _MODELOPT_FILE), "quantization") | {
        "quant_method": "modelopt"
    }


def _compressed_tensors(config: dict) -> FindScheme:
    targets: Targets = read_targets(config)
    return lambda names, kind, find: targets.scheme(names, kind)


def _fp8(config: dict) -> FindScheme:
    """DeepSeek, Qwen: blocks, or one scale where the configuration has no block size."""
    only(config, "fmt", None, "e4m3", "float8_e4m3fn")
    block = None
    if config.get("weight_block_size") is not None:
        block = blocks(config, "weight_block_size")

    def find_scheme(names: Sequence[str], kind: str, find: Find) -> Scheme:
        suffixes = ("weight_scale_inv", "scale", "weight_scale")
        suffix = next((suffix for suffix in suffixes if find(suffix)), None)
        weight = find("weight")
        if suffix is None or weight is None:
            return PLAIN
        if weight.dtype in (I8, U8):
            return Scheme("mxfp4", scale=suffix)
        return _eight_bits(find(suffix), suffix, block)

    return find_scheme


def _modelopt(config: dict) -> FindScheme:
    only(config, "quant_algo", None, "NVFP4", "FP8", "MIXED_PRECISION")

    def find_scheme(names: Sequence[str], kind: str, find: Find) -> Scheme:
        if find("weight_scale_2"):
            return Scheme("nvfp4", scale="weight_scale_2")
        scale = find("weight_scale")
        return _eight_bits(scale, "weight_scale", None) if scale else PLAIN

    return find_scheme


def _mxfp4(config: dict) -> FindScheme:
    """gpt-oss."""
    return lambda names, kind, find: Scheme("mxfp4-blocks") if find("weight_blocks") else PLAIN


def _gptq(config: dict) -> FindScheme:
    only(config, "checkpoint_format", None, "gptq", "gptq_v2")
    minus_one = config.get("checkpoint_format") != "gptq_v2"
    own = {
        pattern: section(section(config, "dynamic"), pattern)
        for pattern in section(config, "dynamic")
    }

    def find_scheme(names: Sequence[str], kind: str, find: Find) -> Scheme:
        if not find("qweight"):
            return PLAIN
        facts = config
        for pattern, changes in own.items():
            if any(_is_match(pattern.removeprefix("+:"), name) for name in names):
                facts = config | changes
                break
        only(facts, "bits", 4, 8)
        only(facts, "sym", True, False, None)
        group = _group(facts, "group_size")
        if facts.get("desc_act") and group and not find("g_idx"):
            raise ValueError(
                f"config.json: quantization_config: desc_act=true but {names[0]} has no g_idx, "
                "which says the group of each column: download the checkpoint again"
            )
        return Scheme(
            "gptq",
            bits=facts["bits"],
            group=group,
            symmetric=facts.get("sym") is True,
            minus_one=minus_one,
            ordered=_is_ordered(find("g_idx"), group),
        )

    return find_scheme


def _awq(config: dict) -> FindScheme:
    only({"bits": config.get("bits", config.get("w_bit"))}, "bits", 4)
    only(config, "version", None, "gemm", "GEMM")
    only(config, "zero_point", None, True)
    group = _group(config, "group_size" if "group_size" in config else "q_group_size")
    scheme = Scheme("awq", bits=4, group=group, symmetric=False)
    return lambda names, kind, find: scheme if find("qweight") else PLAIN


_METHODS: dict[str, Callable[[dict], FindScheme]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
}
_OF_PACKAGE = frozenset(_METHODS)


def _eight_bits(scale: TensorRef, suffix: str, block: tuple[int, int] | None) -> Scheme:
    if math.prod(scale.shape) == 1 and len(scale.shape) < 2:
        return Scheme("fp8", rows=0, scale=suffix)
    rows, group = block or (1, 0)
    return Scheme("fp8", rows=rows, group=group, scale=suffix)


def _group(config: dict, name: str) -> int:
    """Columns of a group; -1 is the whole row, which a `Scheme` calls 0."""
    group = config.get(name)
    if type(group) is not int or (group < 1 and group != -1):
        raise ValueError(
            f"config.json: quantization_config: {name}={group!r} must be a positive number or -1"
        )
    return max(group, 0)


def _is_ordered(columns: TensorRef | None, group: int) -> bool:
    """Whether the columns of each group lie side by side: not so with GPTQ's act-order."""
    if columns is None or len(columns.shape) != 1:
        return True
    width = columns.shape[0]
    return np.array_equal(columns.map(), np.arange(width) // (group or max(width, 1)))


def _is_match(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"config.json: quantization_config: dynamic names the pattern {pattern!r}, which is "
            f"none ({error}): correct it"
        ) from None
