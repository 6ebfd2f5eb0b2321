"""Metrics of a run: one JSON line per step, and the same numbers as TensorBoard events."""

import json
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tensorboardX import SummaryWriter

from orbit_jax.runs.files import read_rows, to_json, write_atomic


class MetricsWriter:
    """Appends rows to `metrics.jsonl` and scalars to `tensorboard/` in a run's folder."""

    def __init__(self, folder: Path, start: int = 0):
        """Opens both files for a run whose next step is `start`.

        Rows of `start` and later steps, left by a run that was killed after its last checkpoint,
        are dropped: the resumed run writes them again. So is a second row of a step: the evaluation
        at the end of a run that now goes on.
        """
        path = folder / "metrics.jsonl"
        rows = read_metrics(folder)
        kept = [
            row
            for before, row in zip([{"step": -1}, *rows], rows, strict=False)
            if before["step"] < row["step"] < start
        ]
        write_atomic(path, "".join(f"{to_json(row)}\n" for row in kept))
        self._file = path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=start or None)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one row, on disk when this returns; a value that is not finite becomes null."""
        row = json.loads(to_json({"step": step, **metrics}))
        self._file.write(f"{json.dumps(row)}\n")
        self._file.flush()
        for name, value in row.items():
            if name != "step" and isinstance(value, numbers.Real):
                self._events.add_scalar(name, value, step)
        self._events.flush()

    def text(self, step: int, name: str, text: str) -> None:
        """Adds a text to the events."""
        self._events.add_text(name, text, step)
        self._events.flush()

    def close(self) -> None:
        """Closes both files."""
        self._file.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`, in order; a last line cut off by a kill is left out."""
    return read_rows(folder / "metrics.jsonl")
