"""Starts contestants and lets them take turns; `worker.py` says what they speak."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

RIVALS = Path(__file__).resolve().parent
ROOT = RIVALS.parents[1]
# Threads that spin while they wait are the faster ones where nobody else uses the processor: the
# rivals' best setting. A value of the user's own goes before; on a busy machine take "passive".
OPENMP = {"OMP_WAIT_POLICY": "active"}
FIGURES = (
    "tokens_per_second",
    "seconds",
    "cpu_seconds",
    "peak_memory_bytes",
    "process_peak_memory_bytes",
)


class Worker:
    """A contestant's process, which stands still between requests."""

    def __init__(self, name: str, command: Sequence[str], settings: Mapping, log: Path):
        self.name, self.log = name, log
        environment = (
            OPENMP
            | os.environ
            | {
                "PYTHONPATH": str(ROOT) if name == "ours" else "",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
            }
        )
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        began = time.monotonic()
        ready = self.ask(settings)
        self.cases, self.facts = ready["cases"], ready["facts"]
        self.facts["load_seconds"] = round(time.monotonic() - began, 2)

    def ask(self, request: Mapping) -> dict:
        """The answer to one request.

        Raises:
          ChildProcessError: if the process ends instead.
        """
        self.process.send_signal(signal.SIGCONT)
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        # One that waits stands still: threads that spin would take a processor from the others.
        self.process.send_signal(signal.SIGSTOP)
        if not line:
            self.close()
            said = "".join(self.log.read_text().strip().splitlines()[-1:])
            raise ChildProcessError(
                f"{self.name} ended without an answer; the last line of {self.log}: {said}"
            )
        return json.loads(line)

    def run(self, case: str) -> dict:
        """A case, once, with its rate."""
        took = self.ask({"case": case})
        return took | {"tokens_per_second": took["tokens"] / took["seconds"]}

    def close(self) -> None:
        """Ends the process."""
        self.process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def compete(workers: Mapping[str, Worker], cases: Sequence[str], repeats: int) -> dict:
    """Runs each case in turn on each worker, and compares; a case that one lacks is left out."""
    results = {}
    for case in cases:
        if not all(case in worker.cases for worker in workers.values()):
            continue
        first = {name: worker.run(case) for name, worker in workers.items()}
        runs = {name: [] for name in workers}
        for _ in range(repeats):
            for name, worker in workers.items():
                runs[name].append(worker.run(case))
                print(f"  {case:13} {name:6} {runs[name][-1]['seconds']:8.2f} s", flush=True)
        results[case] = {
            name: {
                **{f: statistics.median(run[f] for run in runs[name]) for f in FIGURES},
                "tokens": runs[name][0]["tokens"],
                "first_seconds": first[name]["seconds"],
                "runs": runs[name],
            }
            for name in workers
        }
        if "rival" in workers:
            ours, rival = results[case]["ours"], results[case]["rival"]
            results[case]["ratio"] = {f: ours[f] / rival[f] for f in FIGURES}
    return results


def rival_command(name: str, python: str) -> list[str]:
    """How to start a rival, in an environment of its own that is made when it is first needed."""
    folder = ROOT / f".venv-{name}"
    if not python:
        python = str(folder / "bin" / "python")
        requirements = RIVALS / f"{name}.txt"
        ready = folder / "installed.txt"
        if not ready.exists() or ready.read_text() != requirements.read_text():
            print(f"Setting up {folder.name} from {requirements.name}; this takes a while.")
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([python, "-m", "pip", "install", "-q", "-r", requirements], check=True)
            ready.write_text(requirements.read_text())
    return [python, str(RIVALS / f"{name}_worker.py")]
