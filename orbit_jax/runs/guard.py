"""The guard over updates: which batches are kept to be looked at, and which stop a run.

The step itself has deselected what must not be applied; here it is told why, from its metrics.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

MOST_IDLE_STEPS = 3  # in a row without an update; then something is broken that goes on being so
KEPT_BATCHES = 3  # the newest; each lies beside the state that it met


class Trouble(NamedTuple):
    """What is wrong with a step.

    Attributes:
      text: what happened.
      remedy: what to do about it.
      keep: whether the batch is worth looking at.
      stop: whether the run ends.
    """

    text: str
    remedy: str
    keep: bool
    stop: bool


class Guard:
    """Looks at each step's metrics, and counts steps in a row that made no update."""

    def __init__(self) -> None:
        self._idle_steps = 0

    def trouble(self, metrics: Mapping[str, Any], recipe: str) -> Trouble | None:
        """What is wrong with the step that has these metrics, under a recipe of numerics.

        A log-prob gap stops the run at once, steps without an update after some in a row; one whose
        gradient is not finite is passed over, and kept.
        """
        self._idle_steps = 0 if metrics["update/applied"] else self._idle_steps + 1
        gap = float(metrics["parity/max_abs_diff"])
        if recipe != "corrected" and gap != 0:  # true for NaN too
            return Trouble(
                f"log-probs of sampler and trainer differ by {gap:g} under the recipe {recipe!r}; "
                "the update was not made",
                "--config.parity=tiles",
                keep=True,
                stop=True,
            )
        stop = self._idle_steps >= MOST_IDLE_STEPS
        in_a_row = f"no update was made for {self._idle_steps} steps; of the last, " * stop
        broken = [
            name.partition("/")[2]
            for name, value in metrics.items()
            if name.startswith("gradient_norm/") and not math.isfinite(value)
        ]
        if broken:
            return Trouble(
                f"{in_a_row}the gradient of {', '.join(broken)} is not finite; it was not applied",
                "a lower optimizer.learning_rate, or a loss that stays finite",
                keep=True,
                stop=stop,
            )
        if not stop:
            return None
        return Trouble(
            f"{in_a_row}{int(metrics['reward/infra_failures'])} rewards were infra failures, "
            f"{int(metrics['parity/tokens'])} tokens were left to train on, sampled by "
            f"{'this' if metrics['update/same_adapter'] else 'another'} adapter",
            "what is named here mended",
            keep=False,
            stop=True,
        )
