"""What people see of a run while it goes: the view, metrics, samples, alerts, the machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orbit_jax.alerts_config import AlertsConfig
from orbit_jax.runs import alerts, faults, wandb_run
from orbit_jax.runs.files import read_rows
from orbit_jax.runs.folder import RunFolder
from orbit_jax.runs.hardware import Hardware
from orbit_jax.runs.metrics import FILE, MetricsWriter, read_metrics
from orbit_jax.runs.plots import learning_curve
from orbit_jax.runs.progress import Progress
from orbit_jax.runs.sample_text import as_texts

FILES = (FILE, alerts.FILE)  # that a checkpoint brings along


class Watch:
    """Shows a run and writes down its steps, from `start` on.

    Args:
      folder: the run's.
      config: the run's, as a plain dict.
      start: steps that are done.
      checkpoint: which the run goes on from; it brings the rows of the steps before.
    """

    def __init__(
        self, folder: RunFolder, config: Mapping[str, Any], start: int, checkpoint: Path | None
    ):
        self._folder, self._config = folder, config
        kept = read_metrics(checkpoint) if checkpoint else []
        told = read_rows(checkpoint / alerts.FILE) if checkpoint else []
        rules = AlertsConfig(**config.get("alerts", {}))
        self._progress = Progress(config["steps"], folder.log, start=start)
        self._progress.remember(kept)
        wandb = wandb_run.begin(config, folder.path, self.note)
        self._metrics = MetricsWriter(folder.path, kept, wandb)
        self._alerts = alerts.Alerts(
            folder.path, rules, self._metrics, self._progress, rows=kept, told=told
        )
        self._hardware = Hardware(folder.path, rules.hardware_seconds)
        self._progress.__enter__()

    def note(self, text: str) -> None:
        """A line for the terminal and the log."""
        self._progress.note(text)

    def start_clock(self) -> None:
        """The steps begin."""
        self._progress.start_clock()

    def before(self, evaluation: Mapping[str, float]) -> None:
        """The evaluation before training."""
        self._metrics.write(0, evaluation)
        self._progress.remember([evaluation])

    def step(self, done: int, row: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """A step's metrics and samples, `done` counting it."""
        row = {**row, **self._hardware.read()}
        self._metrics.write(done, row)
        if (done - 1) % self._config["run"]["samples_every_steps"] == 0:
            self._folder.write_samples(done, samples)
            for name, text in as_texts(samples).items():
                self._metrics.text(done, name, text)
        self._progress.update(done, row)
        self._progress.show_sample(samples)
        self._alerts.look(done, row)

    def stops(self, done: int, metrics: Mapping[str, Any]) -> None:
        """A step that stops the run: it has no row, and its alerts are told all the same."""
        self._alerts.look(done, metrics)

    def after(self, evaluation: Mapping[str, float]) -> None:
        """The evaluation after training."""
        self._metrics.write(self._config["steps"], evaluation)

    def draw(self) -> Path:
        """The learning curve as it is now, for `plots/` and TensorBoard."""
        rows = read_metrics(self._folder.path)
        path = self._folder.plots / "learning_curve.png"
        learning_curve({self._folder.path.name: rows}, path)
        self._metrics.picture(rows[-1]["step"] if rows else 0, "learning_curve", path)
        return path

    def close(self, error: BaseException | None) -> None:
        """Ends all of it; an error that ends the run is told to the alerts' command."""
        self._progress.__exit__(type(error), error, None)
        with faults.not_instead_of(error):
            self._alerts.close(error)
            self._metrics.close()
