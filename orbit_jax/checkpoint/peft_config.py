"""`adapter_config.json` of PEFT: rank and alpha of each weight, and what is not supported."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from orbit_jax.adapters.lora import LoRA
from orbit_jax.checkpoint.common import few
from orbit_jax.checkpoint.safetensors_io import read_json

CONFIG_FILE = "adapter_config.json"
# PEFT before 0.19 reads a 3-D parameter's dimensions in order, whatever they mean.
LAYOUT_VERSION = "0.21.2"
_FIRST_VERSION = (0, 19)

_READ = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
# What says nothing about the update: where it came from, and how it was trained.
HARMLESS = (
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
    *("target_modules", "exclude_modules", "peft_version", "runtime_config", "layers_pattern"),
)
_HARMLESS = (
    *HARMLESS,
    *("target_parameters", "lora_dropout", "megatron_core", "qalora_group_size", "eva_config"),
)
# Fields with a value besides "no" that changes nothing. Other initialisations change the base.
_NEUTRAL = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True)
class PeftConfig:
    """What an `adapter_config.json` says about the update.

    Attributes:
      method: of every weight that no pattern names.
      ranks, alphas: `(pattern, value)` in the file's order; the first that matches counts.
      modules: `target_modules`, dotted ends of names, where it is a list.
      parameters: `target_parameters`, names of 3-D parameters.
      version: of PEFT that wrote it, `(0, 0)` if it does not say.
    """

    method: LoRA
    ranks: tuple[tuple[str, int], ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()
    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    version: tuple[int, ...] = (0, 0)

    def method_of(self, name: str) -> LoRA:
        """Rank and alpha of the module or parameter of that name."""
        rank = _first(self.ranks, name, self.method.rank)
        alpha = _first(self.alphas, name, self.method.alpha)
        return LoRA(rank, alpha, self.method.rank_stabilized)

    def targets(self, name: str) -> bool:
        """Whether the config says that the module of that name is adapted."""
        return any(name == target or name.endswith(f".{target}") for target in self.modules)

    @property
    def orders_by_meaning(self) -> bool:
        """Whether A of a 3-D parameter reads its inputs, whichever dimension they are."""
        return self.version >= _FIRST_VERSION


def read_peft_config(folder: Path) -> PeftConfig:
    """Reads `adapter_config.json`.

    Raises:
      ValueError: if the file is missing, is not of a LoRA, or has a field that changes the
        computation in a way that is not supported.
    """
    path = folder / CONFIG_FILE
    raw = read_json(path)
    if raw.get("peft_type") != "LORA":
        raise ValueError(
            f"{path}: peft_type={raw.get('peft_type')!r}: only 'LORA' and 'OFT' adapters can be "
            "read"
        )
    check_fields(path, raw, (*_READ, *_HARMLESS))
    if raw.get("use_rslora") not in (None, True, False):
        raise ValueError(f"{path}: use_rslora={raw['use_rslora']!r}: must be true or false")
    patterns = {name: raw.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    for name, given in patterns.items():
        if not isinstance(given, dict):
            raise ValueError(f"{path}: {name}={given!r}: must be an object of names and numbers")
        for pattern, value in given.items():
            _compile(f"{path}: {name}", pattern)
            _positive(f"{path}: {name}[{pattern!r}]", value, whole=name == "rank_pattern")
    rank = _positive(f"{path}: r", raw.get("r"), whole=True)
    alpha = _positive(f"{path}: lora_alpha", raw.get("lora_alpha"))
    return PeftConfig(
        LoRA(rank, alpha, bool(raw.get("use_rslora"))),
        tuple(patterns["rank_pattern"].items()),
        tuple((pattern, float(value)) for pattern, value in patterns["alpha_pattern"].items()),
        modules_of(raw),
        tuple(raw.get("target_parameters") or ()),
        tuple(int(n) for n in re.findall(r"\d+", str(raw.get("peft_version") or "0.0"))[:2]),
    )


def is_oft(folder: Path) -> bool:
    """Whether the adapter of a folder rotates inputs."""
    return read_json(folder / CONFIG_FILE).get("peft_type") == "OFT"


def check_fields(path: Path, raw: dict, known: tuple[str, ...]) -> None:
    """Refuses fields besides those known that may change the computation."""
    wrong = [
        f"{name}={value!r}"
        for name, value in raw.items()
        if name not in known
        and (value or (name == "layers_to_transform" and value is not None))  # 0 is a layer
        and value not in _NEUTRAL.get(name, ())
    ]
    if wrong:
        raise ValueError(
            f"{path}: {few(sorted(wrong))} may change the update and is not supported: train or "
            "convert the adapter without it"
        )


def modules_of(raw: dict) -> tuple[str, ...]:
    """`target_modules`, where they say what is adapted.

    A pattern, and a list with exceptions, say what may be.
    """
    modules = raw.get("target_modules")
    return tuple(modules) if isinstance(modules, list) and not raw.get("exclude_modules") else ()


def write_peft_config(
    method: LoRA,
    named: Iterable[tuple[str, LoRA]],
    target_modules: list[str],
    target_parameters: list[str],
    base: str,
) -> dict:
    """The fields of an `adapter_config.json` that PEFT reads back as these methods.

    Args:
      method: of every weight that no pattern names.
      named: methods by pattern.
      base: path or name of the base.
    """
    named = list(named)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": method.rank,
        "lora_alpha": _number(method.alpha),
        "use_rslora": method.rank_stabilized,
        "rank_pattern": {pattern: other.rank for pattern, other in named},
        "alpha_pattern": {pattern: _number(other.alpha) for pattern, other in named},
        "target_modules": target_modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "peft_version": LAYOUT_VERSION,
    }
    # Older readers do not know the field.
    return config | ({"target_parameters": target_parameters} if target_parameters else {})


def scale_ratio(method: LoRA, reference: LoRA) -> float | None:
    """`method.scale / reference.scale` where it is a power of two, so that it folds exactly."""
    squares = [
        Fraction(m.alpha) ** 2 / (m.rank if m.rank_stabilized else m.rank**2)
        for m in (method, reference)
    ]
    ratio = squares[0] / squares[1]
    for value in (ratio, 1 / ratio):
        power = value.numerator.bit_length() - 1
        if value == 1 << power and power % 2 == 0:
            return 2.0 ** (power // 2 if value == ratio else -(power // 2))
    return None


def _first(patterns: tuple[tuple[str, float], ...], name: str, otherwise: float) -> float:
    """The value of the first pattern that matches the name or a dotted end of it."""
    for pattern, value in patterns:
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", name):
            return value
    return otherwise


def _compile(where: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{where}: {pattern!r} is no regular expression ({error})") from None


def _positive(where: str, value: object, whole: bool = False) -> float:
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or value <= 0:
        kind = "whole number of at least 1" if whole else "number above 0"
        raise ValueError(f"{where}={value!r}: must be a {kind}")
    return value if whole else float(value)


def _number(value: float) -> float:
    """An integer where it is one: readers declare alpha so."""
    return int(value) if float(value).is_integer() else value
