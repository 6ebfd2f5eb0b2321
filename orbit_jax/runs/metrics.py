"""Metrics of a run: one JSON line per step, and the same numbers for TensorBoard and W&B.

TensorBoard also has texts and pictures, which `metrics.jsonl` does not: alerts, samples, the
learning curve.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tensorboardX import summary

from orbit_jax.runs.events import Events, png
from orbit_jax.runs.files import read_rows, to_json, write_atomic
from orbit_jax.runs.wandb_run import WandbRun

FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends rows to `metrics.jsonl` and to `tensorboard/` in a run's folder, and to `wandb`."""

    def __init__(
        self,
        folder: Path,
        kept: Sequence[Mapping[str, Any]] = (),
        wandb: WandbRun | None = None,
    ):
        """Opens both files for a run that has the rows `kept`.

        These, which a checkpoint has brought along, take the place of what is there: rows that a
        run left after its last checkpoint are written again, and none is missing of a file that was
        cut.
        """
        path = folder / FILE
        write_atomic(path, "".join(f"{to_json(row)}\n" for row in kept))
        self._file = path.open("a", encoding="utf-8")
        self._events = Events(folder / "tensorboard", kept[-1]["step"] + 1 if kept else 0)
        self._wandb = wandb

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one row, on disk when this returns; a value that is not finite becomes null."""
        row = json.loads(to_json({"step": step, **metrics}))
        self._file.write(f"{json.dumps(row)}\n")
        self._file.flush()
        numbers = {k: v for k, v in row.items() if k != "step" and isinstance(v, int | float)}
        self._events.write(step, *(summary.scalar(name, value) for name, value in numbers.items()))
        if self._wandb:
            self._wandb.log(step, numbers)

    def text(self, step: int, name: str, markdown: str) -> None:
        """Adds a text to the events."""
        self._events.write(step, summary.text(name, markdown))

    def picture(self, step: int, name: str, path: Path) -> None:
        """Adds a PNG to the events."""
        self._events.write(step, png(name, path.read_bytes()))

    def close(self) -> None:
        """Closes both files, and then W&B's run, which may wait for its network."""
        self._file.close()
        self._events.close()
        if self._wandb:
            self._wandb.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` in a folder, a run's or a checkpoint's, up to one that is cut."""
    return read_rows(folder / FILE)
