"""Rotary position embedding: what a config says of it, its tables by position, the rotation.

Su et al., 2021; stretched for longer contexts by interpolation (`linear`), by wavelength
(`llama3`) or by yarn (Peng et al., 2023).
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orbit_jax.model.fields import count, number, positive


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: its base, and how it is stretched beyond the trained length.

    Attributes:
      theta: base of the wavelengths.
      kind: `default`, `linear`, `llama3` or `yarn` (Peng et al., 2023).
      factor: how many times longer contexts become.
      original: positions of the unstretched model.
      low, high: `llama3`: low_freq_factor and high_freq_factor; `yarn`: beta_slow and beta_fast.
      truncate: `yarn`: the ramp begins and ends at whole dimensions.
      magnitude: what cos and sin are multiplied by.
      interleaved: pairs are neighbours instead of the two halves of a head.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0
    interleaved: bool = False


def angles(rope: Rope, width: int, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin `[num_positions, width/2]` f32 for `width` rotated dimensions, made in f64."""
    turns = np.arange(num_positions)[:, None] * _frequencies(rope, width)
    return tuple((f(turns) * rope.magnitude).astype(np.float32) for f in (np.cos, np.sin))


def rotate(rope: Rope, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates f32 `x[N, heads, width]` by `cos, sin[N, width/2]`.

    Interleaved pairs come out as halves: queries and keys are permuted alike, scores do not change.
    """
    a, b = (x[..., ::2], x[..., 1::2]) if rope.interleaved else jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _frequencies(rope: Rope, width: int) -> np.ndarray:
    """Radians per position of each pair, `[width/2]` f64."""
    half = width // 2
    plain = rope.theta ** (-np.arange(half) / half)
    if rope.kind == "llama3":
        # Long waves are stretched, short ones not, those between in proportion.
        waves = rope.original * plain / (2 * math.pi)  # that fit into the trained context
        keep = np.clip((waves - rope.low) / (rope.high - rope.low), 0, 1)
    elif rope.kind == "yarn":
        keep = 1 - np.clip((np.arange(half) - (ends := _ramp(rope, width))[0]) / ends[1], 0, 1)
    else:
        keep = 0.0
    return plain / rope.factor * (1 - keep) + plain * keep


def _ramp(rope: Rope, width: int) -> tuple[float, float]:
    """`yarn`: the first pair that is stretched, and over how many the stretch sets in."""

    def pair(turns: float) -> float:
        """The pair that makes that many turns over the trained context."""
        return width * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(rope.high), pair(rope.low)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    return first, (last - first) or 0.001


def rope_fields(hf: dict) -> dict[str, Any]:
    """`rope_scaling` (older files) and `rope_parameters` (transformers 5) as one."""
    merged: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        fields = hf.get(name) or {}
        if not isinstance(fields, dict):
            raise ValueError(f"config.json: {name}={fields!r} must be an object")
        for key, value in fields.items():
            if value is None:
                continue
            if merged.setdefault(key, value) != value:
                raise ValueError(
                    f"config.json: {key} is contradictory: {merged[key]!r} in rope_scaling, "
                    f"{value!r} in rope_parameters"
                )
    return merged


def read_rope(hf: dict, interleaved: bool = False) -> Rope:
    """Reads a `config.json`; `rope_theta` stands at its top (older files) or in `rope_fields`.

    Raises:
      ValueError: for a kind that is not supported, or a missing or contradictory field.
    """
    fields = rope_fields(hf)
    thetas = [v for v in (hf.get("rope_theta"), fields.get("rope_theta")) if v is not None]
    if not thetas or any(theta != thetas[0] for theta in thetas):
        raise ValueError(f"config.json: rope_theta is missing or contradictory: {thetas}")
    theta = positive("rope_theta", thetas[0])
    if not 1 < theta < math.inf:
        raise ValueError(f"config.json: rope_theta={theta!r} must be a finite number above 1")
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"config.json: partial_rotary_factor={fields['partial_rotary_factor']!r} is not "
            "supported: only 1.0"
        )
    kind = fields.get("rope_type", fields.get("type", "default"))
    if fields.get("type", kind) != kind:
        raise ValueError(
            f"config.json: type={fields['type']!r} and rope_type={kind!r} contradict each other"
        )
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(
            f"config.json: rope_type={kind!r} is not supported: only 'default', 'linear', "
            "'llama3' and 'yarn'"
        )
    if kind == "default":
        return Rope(theta, interleaved=interleaved)
    factor = positive("factor", fields.get("factor"))
    if kind == "linear":
        return Rope(theta, kind, factor, interleaved=interleaved)
    original = count(fields, "original_max_position_embeddings")
    low, high = (
        ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
    )
    defaults = (None, None) if kind == "llama3" else (1.0, 32.0)
    magnitude = number(fields, "attention_factor", 0.0) if kind == "yarn" else 1.0
    if not magnitude:
        of_queries, of_keys = (number(fields, n, 0.0) for n in ("mscale", "mscale_all_dim"))
        magnitude = yarn_magnitude(factor, of_queries if of_queries and of_keys else 1.0)
        magnitude /= yarn_magnitude(factor, of_keys) if of_queries and of_keys else 1.0
    return Rope(
        theta,
        kind,
        factor,
        original,
        low=positive(low, fields.get(low, defaults[0])),
        high=positive(high, fields.get(high, defaults[1])),
        truncate=bool(fields.get("truncate", True)),
        magnitude=magnitude,
        interleaved=interleaved,
    )


def yarn_magnitude(factor: float, slope: float) -> float:
    """How much larger a context stretched by yarn makes what it multiplies."""
    return 1.0 if factor <= 1 else 0.1 * slope * math.log(factor) + 1.0
