"""What describes a family of models: those of `families.py`, and one's own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orbit_jax.model.fields import count


@dataclass(frozen=True)
class Family:
    """What sets one family apart.

    Attributes:
      name: its `model_type`.
      facts: from a `config.json`, the fields of `ModelConfig` that are not common to all families,
        or that it reads otherwise; `sparse` among them.
      fields: how its `config.json` spells a field, where not as others do: its word to theirs.
      spelling: how its files spell a part of a module's name, where it is not spelt like the path
        in the base (`model/weights.py`).
      fused: where a tensor holds all experts of a layer: by weight its parameter, and the
        `(start, step)` of its rows among those of the tensor, None for all.
    """

    name: str
    facts: Callable[[dict], dict[str, Any]]
    fields: Mapping[str, str] = field(default_factory=dict)
    spelling: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, tuple[int, int] | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values are made from one latent.

    Attributes:
      q_rank: width of the queries' latent, 0 where queries are projected at once.
      kv_rank: width of the latent that is cached.
      nope: width of the part of a head's query and key that is not rotated.
      rope: width of the rotated part; one rotated key serves all heads.
      value: width of a head's value.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


def experts(hf: dict) -> dict:
    """What every mixture of experts says; all layers are sparse unless its family knows better."""
    return {
        "sparse": (True,) * count(hf, "num_hidden_layers"),
        "num_experts": count(hf, "num_experts", "num_local_experts", "n_routed_experts"),
        "top_k": count(hf, "num_experts_per_tok", "experts_per_token"),
    }


def windows(hf: dict, common_window: bool = False) -> tuple[int, ...]:
    """Positions that each layer looks back over, 0 for all; `()` if no layer is limited.

    `layer_types` says which are; without them all are, or none, by `common_window`.
    """
    kinds, window = hf.get("layer_types"), hf.get("sliding_window")
    layers = count(hf, "num_hidden_layers")
    if kinds is None:
        limited = [common_window and window is not None] * layers
    else:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or not all(kind in known for kind in kinds):
            raise ValueError(f"config.json: layer_types={kinds!r} must be a list of {known}")
        if len(kinds) != layers:
            raise ValueError(
                f"config.json: layer_types has {len(kinds)} entries for {layers} layers"
            )
        limited = [kind == "sliding_attention" for kind in kinds]
    if not any(limited):
        return ()
    return tuple(count(hf, "sliding_window") if yes else 0 for yes in limited)
