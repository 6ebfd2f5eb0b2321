"""The `quantization_config` of compressed-tensors: which modules are quantised, and how."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from orbit_jax.checkpoint.fields import only, section, strings
from orbit_jax.checkpoint.scheme import PLAIN, Scheme


@dataclass(frozen=True)
class Targets:
    """`(target, scheme)` pairs, and the targets that are skipped."""

    pairs: tuple[tuple[str, Scheme], ...] = ()
    ignore: tuple[str, ...] = ()

    def scheme(self, names: Sequence[str], kind: str) -> Scheme:
        """The scheme of a module by its names; a name goes before a pattern before a class."""
        if kind in ("Router", "Vector") or self.ignores(names, kind):
            return PLAIN
        found = [pair for pair in self.pairs if _matches(pair[0], names, kind)]
        found.sort(key=lambda pair: (pair[0] not in names, not pair[0].startswith("re:")))
        return found[0][1] if found else PLAIN

    def ignores(self, names: Sequence[str], kind: str = "Linear") -> bool:
        """Whether a module is skipped."""
        return any(_matches(target, names, kind) for target in self.ignore)


def read_targets(config: dict) -> Targets:
    """Reads a `quantization_config`.

    Activations may be quantised: they are left as they are, and only weights are read.

    Raises:
      ValueError: for a format, a strategy or a transform that is not supported.
    """
    only(section(config, "sparsity_config"), "format", None, "dense")
    only(section(config, "transform_config"), "config_groups", None, {})
    pairs: list[tuple[str, Scheme]] = []
    for name in section(config, "config_groups"):
        group = section(section(config, "config_groups"), name)
        if not isinstance(group.get("weights"), dict):
            raise ValueError(
                f"config.json: quantization_config.config_groups.{name} says nothing about weights "
                "that can be read: write its scheme out"
            )
        only(group, "output_activations", None)
        # A group may name its own format; then the one above is `mixed-precision`.
        form = {"format": group.get("format") or config.get("format")}
        only(form, "format", *_READ)
        scheme = _READ[form["format"]](group["weights"])
        pairs += [(_checked(target), scheme) for target in strings(group, "targets")]
    return Targets(tuple(pairs), read_ignore(strings(config, "ignore")).ignore)


def read_ignore(ignore: Sequence[str]) -> Targets:
    """Targets of which only these are skipped.

    Raises:
      ValueError: for a pattern that is none.
    """
    return Targets(ignore=tuple(map(_checked, ignore)))


def write_targets(schemes: dict[Scheme, list[str]], ignore: list[str]) -> dict:
    """The `quantization_config` that `read_targets` reads as these targets of each scheme.

    All schemes are of one format: `pack-quantized`, `nvfp4`, `mxfp4`, or `fp8` by channel.
    """
    groups, form = {}, ""
    for i, (scheme, targets) in enumerate(schemes.items()):
        form, weights, inputs = _WRITE[scheme.format](scheme)
        groups[f"group_{i}"] = {
            "targets": targets,
            "weights": weights | {"symmetric": scheme.symmetric, "dynamic": False},
            "input_activations": inputs,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
    }


def _write_words(scheme: Scheme) -> tuple[str, dict, dict | None]:
    strategy = {"strategy": "group" if scheme.group else "channel"}
    weights = {"num_bits": scheme.bits, "type": "int", "group_size": scheme.group or None}
    return "pack-quantized", weights | strategy, None


def _write_fp8(scheme: Scheme) -> tuple[str, dict, dict | None]:
    """Serving engines run experts of 8-bit floats only with inputs that they quantise themselves.

    Readers that widen weights, as this project, leave the inputs as they are.
    """
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
    tokens = {"strategy": "token", "symmetric": True, "dynamic": True}
    return "float-quantized", weights, weights | tokens


def _write_nvfp4(scheme: Scheme) -> tuple[str, dict, dict | None]:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return "nvfp4-pack-quantized", weights | {"scale_dtype": "torch.float8_e4m3fn"}, None


def _write_mxfp4(scheme: Scheme) -> tuple[str, dict, dict | None]:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    return "mxfp4-pack-quantized", weights | {"scale_dtype": "torch.uint8"}, None


# The format, the weights and the inputs of a group, by the format of its scheme.
_WRITE = {
    "pack-quantized": _write_words,
    "fp8": _write_fp8,
    "nvfp4": _write_nvfp4,
    "mxfp4": _write_mxfp4,
}


def _pack_quantized(weights: dict) -> Scheme:
    only(weights, "type", "int")
    only(weights, "num_bits", 4, 8)
    only(weights, "strategy", "group", "channel")
    only(weights, "symmetric", True, False, None)
    only(weights, "actorder", None, False, "weight", "static")
    group = _group(weights) if weights["strategy"] == "group" else 0
    symmetric = weights.get("symmetric") is not False
    return Scheme("pack-quantized", bits=weights["num_bits"], group=group, symmetric=symmetric)


def _int_quantized(weights: dict) -> Scheme:
    only(weights, "type", "int")
    only(weights, "num_bits", 8)
    only(weights, "strategy", "channel", "tensor")
    only(weights, "symmetric", True, None)
    return Scheme("int-quantized", bits=8, rows=int(weights["strategy"] == "channel"))


def _float_quantized(weights: dict) -> Scheme:
    only(weights, "type", "float")
    only(weights, "num_bits", 8)
    only(weights, "strategy", "tensor", "channel", "group", "block")
    only(weights, "symmetric", True, None)
    if weights["strategy"] == "block":
        rows, group = blocks(weights, "block_structure")
        return Scheme("fp8", rows=rows, group=group)
    if weights["strategy"] == "group":
        return Scheme("fp8", group=_group(weights))
    return Scheme("fp8", rows=int(weights["strategy"] == "channel"))


def _naive_quantized(weights: dict) -> Scheme:
    return (_int_quantized if weights.get("type") == "int" else _float_quantized)(weights)


def _mxfp8(weights: dict) -> Scheme:
    only(weights, "strategy", "group")
    only(weights, "group_size", 32)
    return _float_quantized(weights)


def _nvfp4(weights: dict) -> Scheme:
    _four_bit_floats(weights, "tensor_group", 16)
    return Scheme("nvfp4", scale="weight_global_scale")


def _mxfp4(weights: dict) -> Scheme:
    _four_bit_floats(weights, "group", 32)
    return Scheme("mxfp4", scale="weight_scale")


def _four_bit_floats(weights: dict, strategy: str, group: int) -> None:
    only(weights, "type", "float")
    only(weights, "num_bits", 4)
    only(weights, "strategy", strategy)
    only(weights, "group_size", group)
    only(weights, "symmetric", True, None)


# How the weights of each format are read out of a group.
_READ = {
    "pack-quantized": _pack_quantized,
    "int-quantized": _int_quantized,
    "float-quantized": _float_quantized,
    "naive-quantized": _naive_quantized,
    "mxfp8-quantized": _mxfp8,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
}


def blocks(config: dict, name: str) -> tuple[int, int]:
    """Rows and columns of a block, powers of two as in every deployed checkpoint."""
    value = config.get(name)
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(n) is int and n >= 1 and n & (n - 1) == 0 for n in value)
    ):
        raise ValueError(
            f"config.json: quantization_config: {name}={value!r} is not supported: use a "
            "checkpoint with two powers of two, as [128, 128]"
        )
    return value[0], value[1]


def _group(weights: dict) -> int:
    group = weights.get("group_size")
    if type(group) is not int or group < 1:
        raise ValueError(
            f"config.json: quantization_config: group_size={group!r} with strategy 'group': "
            "give a positive number"
        )
    return group


def _checked(target: str) -> str:
    """A target whose pattern, if it is one, can be compiled."""
    try:
        re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"config.json: quantization_config: the target {target!r} is no pattern ({error}): "
            "correct it"
        ) from None
    return target


def _matches(target: str, names: Sequence[str], kind: str) -> bool:
    if target.startswith("re:"):
        return any(re.match(target.removeprefix("re:"), name) for name in names)
    return target in (*names, kind)
