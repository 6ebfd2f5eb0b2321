"""The section `adapter` of the configuration: methods of weights, and what must hold of it."""

import dataclasses
import re
from collections.abc import Iterator

from orbit_jax.adapters.adapter import LINEAR_LAYERS, Method, is_named
from orbit_jax.adapters.lora import INITIALIZATIONS, LoRA
from orbit_jax.adapters.oft import FEWEST_TERMS, OFT
from orbit_jax.own_code import is_own, load_own

# By `adapter.experts`: the factors of LoRA that all experts of a layer have in common. The outer
# ones lie on the side of the residual stream. OFT's rotation lies where `a` does.
_SHARED = {
    "each": {},
    "outer": {"gate_proj": "a", "up_proj": "a", "down_proj": "b"},
    "all": {"gate_proj": "ab", "up_proj": "ab", "down_proj": "ab"},
}
# By `adapter.method`: what follows a weight's name in `adapter.overrides`, and in words.
_OVERRIDES = {
    "lora": (
        r"[1-9]\d*(:\d+(\.\d+)?)?",
        "rank, or with rank and alpha, as 'experts.gate_proj:2' or 'experts.gate_proj:2:4.0'",
    ),
    "oft": (r"([2-9]|[1-9]\d+)", "block size from 2 on, as 'experts.gate_proj:8'"),
}
CHOICES = {
    "adapter.method": tuple(_OVERRIDES),
    "adapter.experts": tuple(_SHARED),
    "adapter.initialization": tuple(INITIALIZATIONS),
}


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """LoRA or OFT on the policy: a fresh one, or that of the PEFT folder `initial`.

    `method` may also be `my_file.py:name`, which is called with this section and returns a
    `Method` (`adapters/adapter.py`), as a frozen dataclass is one; all weights have it.
    `overrides` gives weights ranks or block sizes of their own, `experts` says what the routed
    experts of a layer share, `critic_targets` gives the critic fewer weights.
    """

    initial: str = ""
    method: str = "lora"
    rank: int = 16
    alpha: float = 32.0
    rank_stabilized: bool = False
    initialization: str = "kaiming"
    block_size: int = 32
    neumann_terms: int = 5
    block_share: bool = False
    targets: tuple[str, ...] = LINEAR_LAYERS
    overrides: tuple[str, ...] = ()
    experts: str = "each"
    critic_targets: tuple[str, ...] = ()

    @property
    def common(self) -> Method:
        """The method of every weight that no override names."""
        if is_own(self.method):
            return load_own(self.method)(self)
        if self.method == "oft":
            return OFT(self.block_size, self.neumann_terms, self.block_share)
        return self._lora(self.rank, self.alpha)

    @property
    def overriding(self) -> tuple[tuple[str, Method], ...]:
        """`overrides` as `attach` takes them, with what experts share.

        Where no alpha is given, the scale is that of the other weights.
        """
        given = tuple(map(self._override, self.overrides))
        shared = []
        for weight, factor in _SHARED[self.experts].items():
            path = ("experts", weight)
            method = next((m for name, m in reversed(given) if is_named(name, path)), self.common)
            shared.append((".".join(path), dataclasses.replace(method, shared=factor)))
        return (*given, *shared)

    def _override(self, text: str) -> tuple[str, Method]:
        name, rank, *alpha = text.split(":")
        if self.method == "oft":
            return name, dataclasses.replace(self.common, block_size=int(rank))
        power = 0.5 if self.rank_stabilized else 1
        own = float(alpha[0]) if alpha else self.alpha * (int(rank) / self.rank) ** power
        return name, self._lora(int(rank), own)

    def _lora(self, rank: int, alpha: float) -> LoRA:
        return LoRA(rank, alpha, self.rank_stabilized, initialization=self.initialization)


def requirements(adapter: AdapterConfig) -> Iterator[tuple[bool, str, str]]:
    """What must hold of the section, whose choices are valid.

    Yields:
      Whether it does, the field that is to blame, and the remedy.
    """
    if is_own(adapter.method):
        yield from _requirements_of_own(adapter)
        return
    names, (form, meaning) = "|".join(LINEAR_LAYERS), _OVERRIDES[adapter.method]
    for text in adapter.overrides:
        yield (
            re.fullmatch(rf"(\w+\.)*({names}):{form}", text) is not None,
            "adapter.overrides",
            f"{text!r} is not a weight with its {meaning}; the weights are those of "
            "adapter.targets",
        )
    yield adapter.block_size > 1, "adapter.block_size", "a rotation needs at least 2"
    yield (
        adapter.neumann_terms == 0 or adapter.neumann_terms >= FEWEST_TERMS,
        "adapter.neumann_terms",
        f"use at least {FEWEST_TERMS}, or 0 for the exact rotation",
    )


def _requirements_of_own(adapter: AdapterConfig) -> Iterator[tuple[bool, str, str]]:
    """The same of a method in a file."""
    try:
        method, fault = adapter.common, "lacks something of"
        right = isinstance(method, Method) and isinstance(hash(method), int)
    except Exception as error:  # of one's own code
        method, right, fault = f"{type(error).__name__}: {error}", False, "is not"
    yield (
        right,
        "adapter.method",
        f"called with the section `adapter` it gives {method!r:.160}, which {fault} an "
        "orbit_jax.adapters.adapter.Method, as a frozen dataclass can be one",
    )
    yield (
        not adapter.overrides and (adapter.experts == "each" or hasattr(method, "shared")),
        "adapter.method",
        "takes no adapter.overrides, and adapter.experts only with a field `shared`, as LoRA's: "
        "leave them out",
    )
