"""Alerts of a run: told once when a condition begins, and once more when it is over.

The rules look at the rows of `metrics.jsonl`; what has been told is in those of `alerts.jsonl`. A
checkpoint brings both along, so that a resumed run neither repeats an alert nor misses one.
"""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orbit_jax.alerts_config import AlertsConfig
from orbit_jax.runs.alert_command import AlertCommand
from orbit_jax.runs.alert_rules import RULES, WINDOW, Rule, Seen
from orbit_jax.runs.files import to_json, write_atomic
from orbit_jax.runs.metrics import MetricsWriter
from orbit_jax.runs.progress import Progress

FILE = "alerts.jsonl"
QUIET_STEPS = 5  # in a row, after which a condition is over
_STEP = "update/applied"  # is in each row of a step, and in none of an evaluation alone
_MACHINE = "hardware/"


class Alerts:
    """Looks at each step of a run, and writes `alerts.jsonl` in its folder.

    Its rows are `{"step", "rule", "state", "message"}`, where `state` is `begins` or `over`.

    Args:
      folder: the run's.
      config: thresholds and the command.
      metrics: gets the alerts as texts.
      progress: shows and logs them.
      rows, told: of `metrics.jsonl` and `alerts.jsonl`, as a run has them that is gone on with.
    """

    def __init__(
        self,
        folder: Path,
        config: AlertsConfig,
        metrics: MetricsWriter,
        progress: Progress,
        rows: Sequence[Mapping[str, Any]] = (),
        told: Sequence[Mapping[str, Any]] = (),
    ):
        self._config, self._metrics, self._progress = config, metrics, progress
        self._rules = {name: rule for name, rule in RULES.items() if name not in config.off}
        self._command = AlertCommand(config.command, config.command_seconds, progress.note)
        self._first: list[Mapping[str, Any]] = []
        self._rows = deque(maxlen=max(2 * WINDOW, config.stuck_steps) + QUIET_STEPS)
        self._machine: dict[str, Any] = {}  # as it was read last
        for row in rows:
            if _STEP in row:
                self._see(row)
        newest = {row["rule"]: row for row in told}.values()
        self._active = {r["rule"]: r["step"] for r in newest if r["state"] == "begins"}
        write_atomic(folder / FILE, "".join(f"{to_json(row)}\n" for row in told))
        self._file = (folder / FILE).open("a", encoding="utf-8")

    def look(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Tells what begins, and what is over, with a step that has these metrics."""
        self._see(json.loads(to_json({"step": step, **metrics})))
        for name, rule in self._rules.items():
            message = rule(self._seen(), self._config)
            if message and name not in self._active:
                self._active[name] = step
                self._write(step, name, "begins", message)
            elif name in self._active and self._is_over(rule):
                steps = step - self._active.pop(name)
                self._write(step, name, "over", f"it is over, {steps} steps after it began")
        self._command.look_after()

    def close(self, error: BaseException | None = None) -> None:
        """Waits for the command; an error that ends the run is one alert more, for it alone."""
        if isinstance(error, Exception):
            step = self._rows[-1]["step"] if self._rows else 0
            ended = {"step": step, "rule": "run_ended", "state": "begins"}
            self._command.call(ended | {"message": f"{type(error).__name__}: {error!s:.500}"})
        self._command.close()
        self._file.close()

    def _see(self, row: Mapping[str, Any]) -> None:
        """Takes a row in; the machine is not read with each, then its last reading stands."""
        machine = {name: value for name, value in row.items() if name.startswith(_MACHINE)}
        self._machine = machine or self._machine
        self._rows.append({**row, **self._machine})
        if len(self._first) < WINDOW:
            self._first.append(row)

    def _seen(self, ago: int = 0) -> Seen:
        """What was known so many steps ago."""
        return Seen(self._first, list(self._rows)[: len(self._rows) - ago])

    def _is_over(self, rule: Rule) -> bool:
        """Whether a rule has been silent for some steps, as those that see them now judge."""
        steps = min(QUIET_STEPS, len(self._rows))
        return all(rule(self._seen(ago), self._config) is None for ago in range(steps))

    def _write(self, step: int, rule: str, state: str, message: str) -> None:
        alert = {"step": step, "rule": rule, "state": state, "message": message}
        self._file.write(f"{to_json(alert)}\n")
        self._file.flush()
        if state == "begins":
            self._progress.alert(f"ALERT {rule}: {message}")
        else:
            self._progress.note(f"alert {rule}: {message}")
        self._metrics.text(step, f"alerts/{rule}", message)
        self._command.call(alert)
