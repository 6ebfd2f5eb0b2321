"""What a run leaves behind and goes on from: its folder, steps, checkpoints, summary.

The experiment calls one method at each point of its loop. Metric row k holds what is known after k
steps; row 0 is the evaluation before training. Of several processes the first alone writes.
"""

import dataclasses
import math
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
import numpy as np

from orbit_jax import processes
from orbit_jax.checkpoint import run_state
from orbit_jax.last_words import LastWords
from orbit_jax.rl.batch import save_batch
from orbit_jax.runs import faults, resuming
from orbit_jax.runs.environment import command
from orbit_jax.runs.folder import RunFolder
from orbit_jax.runs.guard import KEPT_BATCHES, Guard, Trouble
from orbit_jax.runs.metrics import read_metrics
from orbit_jax.runs.summary import Totals, summarise
from orbit_jax.runs.watch import FILES, Watch

State = TypeVar("State")

HELDOUT = "heldout/pass_greedy"  # what the best checkpoint has most of


class Recorder:
    """Writes down a run. Use as a context manager.

    Args:
      config: the run's config as a plain dict, with `experiment`, `seed`, `steps` and `run`.
      facts: `base_hash`, `base_bytes`, `adapter_bytes` and whatever else belongs in the log; a
        `data_hash` and a `code_hash` are compared when a run is resumed.
      resume: an earlier run's folder, or "".
      change: fields of the config that are to differ from that run's, beside MAY_DIFFER.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        facts: Mapping[str, Any],
        resume: str = "",
        change: Sequence[str] = (),
    ):
        self.config, self.facts = config, facts
        path, found, self._remarks = processes.by_first(self._open, resume, change)
        self.folder, self._found = RunFolder(Path(path)), found and Path(found)
        self._saver = run_state.Saver(self.folder.checkpoints, config["run"]["keep_checkpoints"])
        self.totals = Totals()
        self._saved: int | None = None  # step of the newest checkpoint that is known
        self._heldout: tuple[int, float] | None = None  # steps done, and the pass rate after them
        self._best = -math.inf
        self._last_words = LastWords()
        self._guard = Guard()
        self._tick = self._step_began = time.monotonic()

    def _open(self, resume: str, change: Sequence[str]) -> resuming.Opened:
        self._lock, opened = resuming.open_folder(self.config, resume, change)
        return opened

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        self._close(error)
        of_jax = isinstance(error, jax.errors.JaxRuntimeError)
        if not of_jax:
            self._last_words.take_back()
        fault = faults.sentence(error)
        if fault and not (of_jax and jax.process_count() > 1):  # there the last words say it
            saved = run_state.latest(self.folder.checkpoints).path
            raise RuntimeError(
                f"{fault}; the newest checkpoint is {saved and saved.name}, go on with --resume "
                f"{self.folder.path}"
            ) from error

    @processes.first_only
    def _close(self, error: BaseException | None) -> None:
        if hasattr(self, "_watch"):
            self._watch.close(error)
        with faults.not_instead_of(error):
            self._saver.finish()
        with faults.not_instead_of(error):
            if error is not None:
                self.folder.log("".join(traceback.format_exception(error)))
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
            state, facts = resuming.read_state(self._found, state, self.facts)
            self.totals = Totals(**facts["totals"])
            self._best = -math.inf if facts["best"] is None else facts["best"]
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
        self._watch = Watch(self.folder, self.config, start, self._found)
        self.note(f"run folder: {self.folder.path}")
        if self.resumed:
            self.note(f"goes on after step {start}")
        for remark in self._remarks:
            self.note(remark)
        for name, value in self.facts.items():
            self.folder.log(f"{name}: {value}")

    @processes.first_only
    def note(self, text: str) -> None:
        """A line for the terminal and the log."""
        self._watch.note(text)

    @processes.first_only
    def before(self, evaluation: Mapping[str, float]) -> None:
        """The evaluation before training."""
        self._watch.before(evaluation)
        self.note(f"before training: {_readable(evaluation)}")

    def timed(self, steps: Iterable[int]) -> Iterator[int]:
        """The same steps, each timed from here to its `check`: neither start-up nor evaluations."""
        seconds = time.monotonic() - self._tick
        self.note(f"ready after {seconds:.1f} s of compiling, comparing log-probs, evaluating")
        if processes.is_first():
            self._watch.start_clock()
        for step in steps:
            self._step_began = time.monotonic()
            yield step

    def check(
        self, step: int, state: Any, metrics: Mapping[str, Any], batch: Any, recipe: str
    ) -> None:
        """Ends a step's time; keeps a batch that no update could be made of, or stops the run.

        Raises:
          RuntimeError: at log-probs that differ, or after some steps in a row without an update;
            the state, which no update has touched, is saved.
        """
        self._step_seconds = time.monotonic() - self._step_began
        self._saver.settle()
        trouble = self._guard.trouble(metrics, recipe)
        if trouble is not None:
            told = self._keep(step, state, batch, trouble, recipe)
            if trouble.stop:
                self.checkpoint(step, state)
                if processes.is_first():
                    self._watch.stops(step + 1, metrics)
                self._saver.wait()
                processes.by_first(self._finish, None)
                raise RuntimeError(
                    f"{told}; go on with --resume {self.folder.path} and {trouble.remedy}"
                )
            self.note(f"WARNING: {told}; it takes {trouble.remedy}, if that goes on")

    def _keep(self, step: int, state: Any, batch: Any, trouble: Trouble, recipe: str) -> str:
        """The trouble in words, its batch kept for `replay.py` if it is worth that."""
        told = f"step {step}: {trouble.text}"
        if not trouble.keep:
            return told
        facts = self._facts() | {"recipe": recipe, "trouble": trouble.text}
        path = run_state.save(self.folder.replays, step, state, facts, KEPT_BATCHES)
        save_batch(path / "batch.npz", batch)
        return (
            f"{told}, on the bucket of {batch.stream.tokens.shape} tokens; look at the batch with "
            f"experiments/replay.py {path}"
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
        scored = rewards[~np.isnan(rewards)]  # where grading failed there is none
        if HELDOUT in row:
            self._heldout = (step + 1, row[HELDOUT])
        row |= {
            "reward/mean": float(scored.mean()) if scored.size else math.nan,
            "seconds/step": seconds,
            "tokens_per_second": tokens / seconds,
            **{f"outcome/{name}": count for name, count in Counter(outcomes).items()},
        }
        self._watch.step(step + 1, row, samples)

    def save_if_due(self, steps_done: int, state: Any) -> None:
        """A checkpoint every so many steps, at the last one, and of the best held-out pass rate."""
        run, best = self.config["run"], self._best
        if self._heldout and self._heldout[0] == steps_done:
            self._best = max(best, self._heldout[1])
        last = steps_done == self.config["steps"]
        if steps_done % run["checkpoint_every_steps"] == 0 or last or self._best > best:
            self.checkpoint(steps_done, state)

    def checkpoint(self, steps_done: int, state: Any) -> None:
        """Saves everything that decides the future, unless that step is already saved.

        Returns when the state has been copied; it is written while the run goes on.
        """
        if steps_done == self._saved:
            return
        self._take_time()
        at, rate = self._heldout or (None, None)
        quality = rate if at == steps_done else None
        paths = (self.folder.path / name for name in FILES)
        files = {path.name: path.read_bytes() for path in paths if path.exists()}
        began = time.monotonic()
        self._saver.save(steps_done, state, self._facts(), quality, files)
        self._saved = steps_done
        if jax.process_count() > 1:
            self._saver.wait()  # a lost process ends this one too, with what was being written
        self.totals.saving_seconds += time.monotonic() - began
        self._prepare_last_words()

    def _facts(self) -> dict[str, Any]:
        return {
            "base_hash": self.facts["base_hash"],
            "adapter_method": self.facts.get("adapter_method"),
            **{f"{what}_hash": self.facts.get(f"{what}_hash") for what in resuming.HASHED},
            "totals": dataclasses.asdict(self.totals),
            "best": None if math.isinf(self._best) else self._best,
        }

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
        self._saver.wait()
        self.note(f"stopped after {steps_done} steps; go on with:")
        self.note(f"  {command()} --resume {self.folder.path}")
        return processes.by_first(self._finish, None)

    def after(self, evaluation: Mapping[str, float]) -> dict[str, Any]:
        """Ends a whole run with the evaluation after training."""
        self._saver.wait()
        return processes.by_first(self._finish, evaluation)

    def _finish(self, evaluation: Mapping[str, float] | None) -> dict[str, Any]:
        """What all have in the end; the evaluation is that of a whole run."""
        if evaluation is not None:
            self._watch.after(evaluation)
            self.note(f"after training:  {_readable(evaluation)}")
        self._take_time()
        totals, rows = self.totals, read_metrics(self.folder.path)
        summary = summarise(self.config, self.facts, totals, rows, evaluation)
        self.folder.write_summary(summary)
        self.note(
            f"log-prob gap over {totals.parity_tokens} trained tokens: "
            f"{totals.parity_max_abs_diff:g}; checkpoints held it up for "
            f"{totals.saving_seconds:.1f} of {totals.seconds:.0f} s; learning curve: "
            f"{self._watch.draw()}"
        )
        return summary

    def _take_time(self) -> None:
        now = time.monotonic()
        self.totals.seconds += now - self._tick
        self._tick = now


def _readable(evaluation: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1%}" for name, value in evaluation.items())
