"""What a run comes to: running totals, and from them `summary.json`."""

import dataclasses
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax


@dataclasses.dataclass
class Totals:
    """Running figures of the summary; they travel with each checkpoint.

    `seconds` is the run's wall time, start-up and evaluations included; `step_seconds` counts
    rollouts, rewards and updates alone, `saving_seconds` what checkpoints kept the run from going
    on.
    """

    seconds: float = 0.0
    step_seconds: float = 0.0
    saving_seconds: float = 0.0
    tokens: int = 0
    parity_max_abs_diff: float = 0.0
    parity_tokens: int = 0


def summarise(
    config: Mapping[str, Any],
    facts: Mapping[str, Any],
    totals: Totals,
    rows: Sequence[Mapping[str, Any]],
    evaluation: Mapping[str, float] | None,
) -> dict[str, Any]:
    """What `summary.json` holds.

    Args:
      config, facts: as the recorder has them.
      rows: all metric rows.
      evaluation: that after training, or None for a run that is not finished.
    """
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    return {
        "experiment": config["experiment"],
        "config": config,
        "seed": config["seed"],
        "steps": config["steps"],
        "seconds": totals.seconds,
        "heldout_pass_before": next((r.get("heldout/pass_greedy") for r in rows), None),
        "heldout_pass_after": evaluation and evaluation["heldout/pass_greedy"],
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "parity_max_abs_diff": totals.parity_max_abs_diff,
        "parity_tokens": totals.parity_tokens,
        "tokens_per_second": totals.tokens / max(totals.step_seconds, 1e-9),
        "peak_memory_bytes": _peak_memory_bytes(),
        "base_bytes": facts["base_bytes"],
        "adapter_bytes": facts["adapter_bytes"],
        "finished": evaluation is not None,
    }


def _peak_memory_bytes() -> int:
    """Of the device where it keeps count, else of this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
