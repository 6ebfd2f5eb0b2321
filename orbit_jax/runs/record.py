"""What a run leaves behind and goes on from: folder, metrics, progress, samples, checkpoints.

The experiment calls one method at each point of its loop. Metric row k holds what is known after k
steps; row 0 is the evaluation before training.
"""

import dataclasses
import resource
import shlex
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import jax
import numpy as np

from orbit_jax.checkpoint import run_state
from orbit_jax.runs.folder import RunFolder
from orbit_jax.runs.metrics import MetricsWriter, read_metrics
from orbit_jax.runs.plots import learning_curve
from orbit_jax.runs.progress import Progress

State = TypeVar("State")

MOST_IDLE_STEPS = 3  # in a row without an update; then something is broken that goes on being so

# Fields of a config that a resumed run may change: they alter neither shapes nor meaning.
MAY_DIFFER = (
    "steps",
    "parity",  # every recipe but `corrected`, which warns, is held to the same difference: 0
    "evaluation.every_steps",
    "run.checkpoint_every_steps",
    "run.keep_checkpoints",
    "run.samples_every_steps",
    "run.root",
    "run.compilation_cache",
    "task.grader_workers",
    "task.grader_max_seconds",
    "base.path",  # the base's hash is compared instead
)


@dataclasses.dataclass
class Totals:
    """Running figures of the summary; they travel with each checkpoint.

    `seconds` is the run's wall time, start-up and evaluations included; `step_seconds` counts
    rollouts, rewards and updates alone.
    """

    seconds: float = 0.0
    step_seconds: float = 0.0
    tokens: int = 0
    parity_max_abs_diff: float = 0.0
    parity_tokens: int = 0


class Recorder:
    """Writes down a run. Use as a context manager.

    Args:
      config: the run's config as a plain dict, with `experiment`, `seed`, `steps` and `run`.
      facts: `base_hash`, `base_bytes`, `adapter_bytes` and whatever else belongs in the log.
      resume: an earlier run's folder, or "".
    """

    def __init__(self, config: Mapping[str, Any], facts: Mapping[str, Any], resume: str = ""):
        self.config, self.facts = config, facts
        if resume:
            self.folder = RunFolder.open(resume, config, MAY_DIFFER)
        else:
            self.folder = RunFolder.create(config["run"]["root"], config["experiment"], config)
        self._lock = self.folder.lock()
        self.totals = Totals()
        self._found = run_state.latest(self.folder.checkpoints)
        self._saved: int | None = None  # step of the newest checkpoint that is known
        self._idle_steps = 0
        self._tick = self._step_began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self.folder.log("".join(traceback.format_exception(*exception)))
        if hasattr(self, "_progress"):
            self._progress.__exit__(*exception)
            self._metrics.close()
        self._lock.close()

    @property
    def resumed(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self._found.path is not None

    def restore(self, state: State) -> tuple[State, int]:
        """The newest checkpoint's state and number of steps done, or `state` and 0.

        Raises:
          ValueError: if the checkpoint belongs to another base, or is of a later step than the
            config's last.
        """
        start = 0
        if self._found.path is not None:
            state, facts = run_state.restore(self._found.path, state)
            if facts["base_hash"] != self.facts["base_hash"]:
                raise ValueError(
                    f"resume: {self._found.path.name} was trained on the base "
                    f"{facts['base_hash'][:12]}, base.path holds {self.facts['base_hash'][:12]}: "
                    "name the right base"
                )
            run_state.check_adapter(facts, self.facts.get("adapter_method", ""))
            self.totals = Totals(**facts["totals"])
            start = self._saved = facts["step"]
            if start > self.config["steps"]:
                raise ValueError(
                    f"config.steps={self.config['steps']}: {self.folder.path.name} has already "
                    f"done {start}; ask for more"
                )
        self._metrics = MetricsWriter(self.folder.path, start=start + 1 if self.resumed else 0)
        self._progress = Progress(self.config["steps"], self.folder.log, start=start)
        self._progress.__enter__()
        self.note(f"run folder: {self.folder.path}")
        if self.resumed:
            self.note(f"goes on after step {start}")
        for name in self._found.half_written:
            self.note(f"ignored the half-written checkpoint {name}")
        for name, value in self.facts.items():
            self.folder.log(f"{name}: {value}")
        return state, start

    def note(self, text: str) -> None:
        """A line for the terminal and the log."""
        self._progress.note(text)

    def before(self, evaluation: Mapping[str, float]) -> None:
        """The evaluation before training."""
        self._metrics.write(0, evaluation)
        self.note(f"before training: {_readable(evaluation)}")

    def timed(self, steps: Iterable[int]) -> Iterator[int]:
        """The same steps, each timed from here to its `check`: neither start-up nor evaluations."""
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
        self._finish(None, finished=False)
        if exact:
            raise RuntimeError(
                f"step {step}: no update was made for {self._idle_steps} steps; of the last, "
                f"{int(metrics['reward/infra_failures'])} rewards were infra failures, "
                f"{int(metrics['parity/tokens'])} tokens were left to train on, sampled by "
                f"{'this' if metrics['update/same_adapter'] else 'another'} adapter; mend that and "
                f"go on with --resume {self.folder.path}"
            )
        path = self.folder.path / f"parity_failure_step_{step:06d}.npz"
        leaves, _ = jax.tree_util.tree_flatten_with_path(batch)
        np.savez(path, **{jax.tree_util.keystr(k).strip("."): np.asarray(v) for k, v in leaves})
        raise RuntimeError(
            f"step {step}: log-probs of sampler and trainer differ by {gap:g} on the bucket of "
            f"{batch.stream.tokens.shape} tokens under the recipe {recipe!r}; the update was not "
            f"made, the batch is in {path}; go on with --config.parity=tiles and "
            f"--resume {self.folder.path}"
        )

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
        }
        self._metrics.write(step + 1, row)
        if step % self.config["run"]["samples_every_steps"] == 0:
            self.folder.write_samples(step + 1, samples)
        self._progress.update(step + 1, row)

    def checkpoint(self, steps_done: int, state: Any) -> None:
        """Saves everything that decides the future, unless that step is already saved."""
        if steps_done == self._saved:
            return
        self._saved = steps_done
        self._take_time()
        facts = {
            "base_hash": self.facts["base_hash"],
            "adapter_method": self.facts.get("adapter_method"),
            "totals": dataclasses.asdict(self.totals),
        }
        keep = self.config["run"]["keep_checkpoints"]
        run_state.save(self.folder.checkpoints, steps_done, state, facts, keep)

    def stopped(self, steps_done: int, state: Any) -> dict[str, Any]:
        """Ends an interrupted run: saves it and says how to go on."""
        self.checkpoint(steps_done, state)
        self.note(f"stopped after {steps_done} steps; go on with:")
        self.note(f"  {_command()} --resume {self.folder.path}")
        return self._finish(None, finished=False)

    def after(self, evaluation: Mapping[str, float]) -> dict[str, Any]:
        """Ends a whole run with the evaluation after training."""
        self._metrics.write(self.config["steps"], evaluation)
        self.note(f"after training:  {_readable(evaluation)}")
        return self._finish(evaluation["heldout/pass_greedy"], finished=True)

    def _finish(self, passed: float | None, finished: bool) -> dict[str, Any]:
        rows = read_metrics(self.folder.path)
        rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
        self._take_time()
        totals = self.totals
        summary = {
            "experiment": self.config["experiment"],
            "config": self.config,
            "seed": self.config["seed"],
            "steps": self.config["steps"],
            "seconds": totals.seconds,
            "heldout_pass_before": next((r.get("heldout/pass_greedy") for r in rows), None),
            "heldout_pass_after": passed,
            "reward_first": rewards[0] if rewards else None,
            "reward_last": rewards[-1] if rewards else None,
            "parity_max_abs_diff": totals.parity_max_abs_diff,
            "parity_tokens": totals.parity_tokens,
            "tokens_per_second": totals.tokens / max(totals.step_seconds, 1e-9),
            "peak_memory_bytes": _peak_memory_bytes(),
            "base_bytes": self.facts["base_bytes"],
            "adapter_bytes": self.facts["adapter_bytes"],
            "finished": finished,
        }
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


def _peak_memory_bytes() -> int:
    """Of the device where it keeps count, else of this process."""
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
