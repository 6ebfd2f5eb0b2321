"""What a run leaves behind and goes on from: folder, metrics, progress, samples, checkpoints.

The experiment calls one method at each point of its loop. Metric row k holds what is known after k
steps; row 0 is the evaluation before training. Of several processes the first alone writes.
"""

import dataclasses
import shlex
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
import numpy as np

from orbit_jax import alerts_config, processes
from orbit_jax.checkpoint import run_state
from orbit_jax.last_words import LastWords
from orbit_jax.runs.alerts import Alerts
from orbit_jax.runs.folder import RunFolder
from orbit_jax.runs.hardware import Hardware
from orbit_jax.runs.metrics import MetricsWriter, read_metrics
from orbit_jax.runs.plots import learning_curve
from orbit_jax.runs.progress import Progress
from orbit_jax.runs.summary import Totals, summarise

State = TypeVar("State")

MOST_IDLE_STEPS = 3  # in a row without an update; then something is broken that goes on being so

# Fields of a config that a resumed run may change: they alter neither shapes nor meaning.
MAY_DIFFER = (
    "steps",
    "ppo.dynamic_sampling",  # how far a step may go on, not what it draws until then
    "parity",  # every recipe but `corrected`, which warns, is held to the same difference: 0
    "evaluation.every_steps",
    "run.checkpoint_every_steps",
    "run.keep_checkpoints",
    "run.samples_every_steps",
    "run.root",
    "run.compilation_cache",
    "task.grader_workers",
    "task.grader_max_seconds",
    "task.max_grading_seconds",
    "mesh.processes",
    "mesh.process",
    "mesh.coordinator",
    "base.path",  # the base's hash is compared instead
    *alerts_config.FIELDS,
)
_HASHED = {"data": "config.task.mixture", "code": "config's own code (my_file.py:name)"}


class Recorder:
    """Writes down a run. Use as a context manager.

    Args:
      config: the run's config as a plain dict, with `experiment`, `seed`, `steps` and `run`.
      facts: `base_hash`, `base_bytes`, `adapter_bytes` and whatever else belongs in the log; a
        `data_hash` and a `code_hash` are compared when a run is resumed.
      resume: an earlier run's folder, or "".
    """

    def __init__(self, config: Mapping[str, Any], facts: Mapping[str, Any], resume: str = ""):
        self.config, self.facts = config, facts
        path, found, self._half_written = processes.by_first(self._open, resume)
        self.folder, self._found = RunFolder(Path(path)), found and Path(found)
        self.totals = Totals()
        self._saved: int | None = None  # step of the newest checkpoint that is known
        self._last_words = LastWords()
        self._idle_steps = 0
        self._tick = self._step_began = time.monotonic()

    def _open(self, resume: str) -> tuple[str, str | None, list[str]]:
        """The folder, the newest checkpoint in it, and names of half-written ones."""
        if resume:
            folder = RunFolder.open(resume, self.config, MAY_DIFFER)
        else:
            root, experiment = self.config["run"]["root"], self.config["experiment"]
            folder = RunFolder.create(root, experiment, self.config)
        self._lock = folder.lock()
        found = run_state.latest(folder.checkpoints)
        return str(folder.path), found.path and str(found.path), found.half_written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close(*exception)
        if not isinstance(exception[1], jax.errors.JaxRuntimeError):
            self._last_words.take_back()

    @processes.first_only
    def _close(self, *exception: object) -> None:
        if exception[0] is not None:
            self.folder.log("".join(traceback.format_exception(*exception)))
        if hasattr(self, "_progress"):
            self._alerts.close(exception[1])
            self._progress.__exit__(*exception)
            self._metrics.close()
        self._lock.close()

    @property
    def resumed(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self._found is not None

    def restore(self, state: State) -> tuple[State, int]:
        """The newest checkpoint's state and number of steps done, or `state` and 0.

        Raises:
          ValueError: if the checkpoint belongs to another base, other data or other code of
            one's own, or is of a later step than the config's last.
        """
        start = 0
        if self._found is not None:
            state, facts = run_state.restore(self._found, state)
            if facts["base_hash"] != self.facts["base_hash"]:
                raise ValueError(
                    f"resume: {self._found.name} was trained on the base "
                    f"{facts['base_hash'][:12]}, base.path holds {self.facts['base_hash'][:12]}: "
                    "name the right base"
                )
            for what, files in _HASHED.items():
                then, now = facts.get(f"{what}_hash"), self.facts.get(f"{what}_hash")
                if then != now:
                    raise ValueError(
                        f"resume: {self._found.name} was trained on other {what} (hash "
                        f"{then!s:.12}, now {now!s:.12}): put the files of {files} back as they "
                        "were"
                    )
            run_state.check_adapter(facts, self.facts.get("adapter_method", ""))
            self.totals = Totals(**facts["totals"])
            start = self._saved = facts["step"]
            if start > self.config["steps"]:
                raise ValueError(
                    f"config.steps={self.config['steps']}: {self.folder.path.name} has already "
                    f"done {start}; ask for more"
                )
        self._prepare_last_words()
        self._begin(start)
        return state, start

    @processes.first_only
    def _begin(self, start: int) -> None:
        path, next_row = self.folder.path, start + 1 if self.resumed else 0
        self._metrics = MetricsWriter(path, start=next_row)
        alerts = alerts_config.AlertsConfig(**self.config.get("alerts", {}))
        self._alerts = Alerts(path, alerts, self._metrics, self.note, start=next_row)
        self._hardware = Hardware(path, alerts.hardware_seconds)
        self._progress = Progress(self.config["steps"], self.folder.log, start=start)
        self._progress.__enter__()
        self.note(f"run folder: {self.folder.path}")
        if self.resumed:
            self.note(f"goes on after step {start}")
        for name in self._half_written:
            self.note(f"ignored the half-written checkpoint {name}")
        for name, value in self.facts.items():
            self.folder.log(f"{name}: {value}")

    @processes.first_only
    def note(self, text: str) -> None:
        """A line for the terminal and the log."""
        self._progress.note(text)

    @processes.first_only
    def before(self, evaluation: Mapping[str, float]) -> None:
        """The evaluation before training."""
        self._metrics.write(0, evaluation)
        self.note(f"before training: {_readable(evaluation)}")

    def timed(self, steps: Iterable[int]) -> Iterator[int]:
        """The same steps, each timed from here to its `check`: neither start-up nor evaluations."""
        if processes.is_first():
            self._progress.start_clock()
        for step in steps:
            self._step_began = time.monotonic()
            yield step

    def check(
        self, step: int, state: Any, metrics: Mapping[str, Any], batch: Any, recipe: str
    ) -> None:
        """Ends a step's time; stops the run at a batch whose log-probs differ.

        The step has already kept its state, which is saved here.

        Raises:
          RuntimeError: with the bucket, the difference and where the batch was saved; or if no
            update was made for some steps in a row, with what stood in its way.
        """
        self._step_seconds = time.monotonic() - self._step_began
        gap = float(metrics["parity/max_abs_diff"])
        exact = recipe == "corrected" or gap == 0
        self._idle_steps = 0 if metrics["update/applied"] else self._idle_steps + 1
        if exact and self._idle_steps < MOST_IDLE_STEPS:
            return
        self.checkpoint(step, state)
        if processes.is_first():  # the step has no row, what is wrong with it is told all the same
            self._alerts.look(step + 1, metrics)
        processes.by_first(self._finish, None)
        if exact:
            raise RuntimeError(
                f"step {step}: no update was made for {self._idle_steps} steps; of the last, "
                f"{int(metrics['reward/infra_failures'])} rewards were infra failures, "
                f"{int(metrics['parity/tokens'])} tokens were left to train on, sampled by "
                f"{'this' if metrics['update/same_adapter'] else 'another'} adapter; mend that and "
                f"go on with --resume {self.folder.path}"
            )
        path = self.folder.path / f"parity_failure_step_{step:06d}.npz"
        leaves, _ = jax.tree_util.tree_flatten_with_path(processes.read(batch))
        if processes.is_first():
            np.savez(path, **{jax.tree_util.keystr(k).strip("."): v for k, v in leaves})
        raise RuntimeError(
            f"step {step}: log-probs of sampler and trainer differ by {gap:g} on the bucket of "
            f"{batch.stream.tokens.shape} tokens under the recipe {recipe!r}; the update was not "
            f"made, the batch is in {path}; go on with --config.parity=tiles and "
            f"--resume {self.folder.path}"
        )

    @processes.first_only
    def step(
        self,
        step: int,
        metrics: Mapping[str, Any],
        rewards: np.ndarray,
        outcomes: Sequence[str],
        samples: Sequence[Mapping[str, Any]],
    ) -> None:
        """Records one step: `metrics` from the device, rewards [B], outcomes [B], sample rows."""
        seconds, tokens = self._step_seconds, int(metrics["tokens"])
        self.totals.step_seconds += seconds
        self.totals.tokens += tokens
        self.totals.parity_tokens += int(metrics["parity/tokens"])
        gap = float(metrics["parity/max_abs_diff"])
        self.totals.parity_max_abs_diff = float(np.maximum(self.totals.parity_max_abs_diff, gap))
        row = {name: float(value) for name, value in metrics.items()}
        row |= {
            "reward/mean": float(np.nanmean(rewards)),
            "seconds/step": seconds,
            "tokens_per_second": tokens / seconds,
            **{f"outcome/{name}": count for name, count in Counter(outcomes).items()},
            **self._hardware.read(),
        }
        self._metrics.write(step + 1, row)
        if step % self.config["run"]["samples_every_steps"] == 0:
            self.folder.write_samples(step + 1, samples)
        self._progress.update(step + 1, row)
        self._alerts.look(step + 1, row)

    def checkpoint(self, steps_done: int, state: Any) -> None:
        """Saves everything that decides the future, unless that step is already saved."""
        if steps_done == self._saved:
            return
        self._saved = steps_done
        self._take_time()
        facts = {
            "base_hash": self.facts["base_hash"],
            "adapter_method": self.facts.get("adapter_method"),
            **{f"{what}_hash": self.facts.get(f"{what}_hash") for what in _HASHED},
            "totals": dataclasses.asdict(self.totals),
        }
        keep = self.config["run"]["keep_checkpoints"]
        run_state.save(self.folder.checkpoints, steps_done, state, facts, keep)
        self._prepare_last_words()

    def _prepare_last_words(self) -> None:
        if jax.process_count() > 1:
            saved = "nothing is" if self._saved is None else f"step {self._saved} is"
            self._last_words.prepare(
                f"error: process {jax.process_index()} of {jax.process_count()} ended before its "
                "run did: it was stopped, or another was lost (what JAX says above tells which, as "
                f"far as it knows); {saved} saved: start all again with --resume "
                f"{self.folder.path}; a lower run.checkpoint_every_steps loses less"
            )

    def stopped(self, steps_done: int, state: Any) -> dict[str, Any]:
        """Ends an interrupted run: saves it and says how to go on."""
        self.checkpoint(steps_done, state)
        self.note(f"stopped after {steps_done} steps; go on with:")
        self.note(f"  {_command()} --resume {self.folder.path}")
        return processes.by_first(self._finish, None)

    def after(self, evaluation: Mapping[str, float]) -> dict[str, Any]:
        """Ends a whole run with the evaluation after training."""
        return processes.by_first(self._finish, evaluation)

    def _finish(self, evaluation: Mapping[str, float] | None) -> dict[str, Any]:
        """What all have in the end; the evaluation is that of a whole run."""
        if evaluation is not None:
            self._metrics.write(self.config["steps"], evaluation)
            self.note(f"after training:  {_readable(evaluation)}")
        rows = read_metrics(self.folder.path)
        self._take_time()
        totals = self.totals
        summary = summarise(self.config, self.facts, totals, rows, evaluation)
        self.folder.write_summary(summary)
        plot = self.folder.plots / "learning_curve.png"
        learning_curve({self.folder.path.name: rows}, plot)
        self.note(
            f"log-prob gap over {totals.parity_tokens} trained tokens: "
            f"{totals.parity_max_abs_diff:g}; learning curve: {plot}"
        )
        return summary

    def _take_time(self) -> None:
        now = time.monotonic()
        self.totals.seconds += now - self._tick
        self._tick = now


def _command() -> str:
    """What was typed to start this process, without a `--resume`."""
    resume = sys.argv.index("--resume") if "--resume" in sys.argv else len(sys.argv)
    typed = [*sys.argv[:resume], *sys.argv[resume + 2 :]]
    return shlex.join([sys.executable, *(a for a in typed if not a.startswith("--resume="))])


def _readable(evaluation: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1%}" for name, value in evaluation.items())
