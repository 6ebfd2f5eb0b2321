r"""Grading a completion against a reference answer: exact, bounded in time, honest about failures.

A reference that is a plain number or fraction is compared in process, as exact rationals, and only
a plain number answers it: an unevaluated `27 + 35` copied from the prompt does not. Any other
reference (`x^2+1`, `\sqrt{2}`, intervals) goes to math-verify in a worker process with a wall-clock
limit; so do answers that a generated family's own function scores. Outcomes: `scored` (1.0 or 0.0;
a family may give a part), `parse_failure` (0.0: the completion holds no answer that can be read, or
one that the worker cannot grade within the limit), `infra_failure` (NaN: the grader itself failed
or cannot grade this reference; the sample must be masked, never scored 0).
"""

import contextlib
import json
import logging
import math
import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from orbit_jax.tasks import families
from orbit_jax.tasks.answers import extract_answer, normalise_answer, read_number
from orbit_jax.tasks.decoration import split_unit

START_SECONDS = 60.0  # a cold import of math-verify on a loaded machine; not part of the limit
MAX_SYMBOLIC_CHARACTERS = 2000  # longer formulas only run into the time limit
WORKER_FILE = Path(__file__).with_name("grading_worker.py")

_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{([^{}]*)\}")
_WORDS = re.compile(r"(?:[^\W\d_]|[ ,;.])+")  # a hyphen may subtract
_BASE = re.compile(r"(?<=\d)_\{?(\d+)\}?")  # of a number such as 101_2

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grade:
    """Reward of one completion: `value` from 0 to 1, or NaN, and the `outcome` that explains it."""

    value: float
    outcome: str


RIGHT = Grade(1.0, "scored")
WRONG = Grade(0.0, "scored")
PARSE_FAILURE = Grade(0.0, "parse_failure")
INFRA_FAILURE = Grade(math.nan, "infra_failure")


def grade(completion: str, answer: str) -> Grade:
    """Grade one completion; for many symbolic answers keep a `Grader`, which keeps its workers."""
    with Grader() as grader:
        return grader.grade(completion, answer)


class Grader:
    """Grades from any thread; worker processes start when the first symbolic answer needs one.

    Args:
        workers: processes that grade symbolic answers at the same time.
        max_seconds: wall-clock limit for one symbolic answer; a worker that is late is killed with
            its whole process group and replaced.

    Raises:
        ValueError: when `workers` or `max_seconds` is not positive.
    """

    def __init__(self, workers: int = 1, max_seconds: float = 5.0):
        if workers < 1 or max_seconds <= 0:
            raise ValueError(
                f"Grader needs workers >= 1 and max_seconds > 0, got workers={workers} and "
                f"max_seconds={max_seconds}."
            )
        self._workers = [_Worker(max_seconds) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all worker processes; a later grade starts new ones."""
        for worker in self._workers:
            worker.stop()

    def grade(self, completion: str, answer: str) -> Grade:
        """Return the grade of one completion."""
        result = _grade_in_process(completion, answer)
        return result if isinstance(result, Grade) else self._grade_symbolic(*result)

    def grade_batch(self, pairs: list[tuple[str, str]]) -> list[Grade]:
        """Return the grades of (completion, answer) pairs, in their order."""
        results = [_grade_in_process(completion, answer) for completion, answer in pairs]
        symbolic = [i for i, result in enumerate(results) if not isinstance(result, Grade)]
        if symbolic:
            with ThreadPoolExecutor(len(self._workers)) as threads:
                grades = threads.map(lambda i: self._grade_symbolic(*results[i]), symbolic)
                for i, result in zip(symbolic, grades, strict=True):
                    results[i] = result
        return results

    def score(self, family: str, number: int, completion: str) -> Grade:
        """Return what a completion is worth to example `number` of a generated family, 0 to 1.

        Args:
            family: as of `families.generate`; its own function scores the completion's answer.
        """
        candidate = extract_answer(completion)
        if candidate is None:
            return PARSE_FAILURE
        name, settings = families.read_spec(family)
        asked = {"family": name, "settings": settings, "number": number, "candidate": candidate}
        with self._worker() as worker:
            return worker.grade(asked)

    def _grade_symbolic(self, candidate: str, answer: str) -> Grade:
        with self._worker() as worker:
            return worker.grade({"candidate": candidate, "answer": answer})

    @contextlib.contextmanager
    def _worker(self) -> Iterator["_Worker"]:
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)


def _grade_in_process(completion: str, answer: str) -> Grade | tuple[str, str]:
    """Return the grade, or (candidate, answer) when that takes symbolic mathematics."""
    candidate = extract_answer(completion)
    if candidate is None:
        return PARSE_FAILURE
    candidate, answer = normalise_answer(candidate), normalise_answer(answer)
    (plain, unit), (reference, expected_unit) = split_unit(candidate), split_unit(answer)
    expected = read_number(reference)
    if expected is not None:
        found = read_number(plain)
        if found is None:
            return PARSE_FAILURE
        # A unit may be left out, or be added, but not be another one.
        same_unit = not unit or not expected_unit or unit == expected_unit
        return RIGHT if found == expected and same_unit else WRONG
    if candidate.replace(" ", "") == answer.replace(" ", ""):
        return RIGHT
    # Where math-verify is too kind: it takes 50% for 50, the pair (1,2) for the set {1,2}, and
    # 101 in one base for 101 in another.
    if (
        ("%" in candidate) != ("%" in answer)
        or _set_meets_pair(candidate, answer)
        or _BASE.findall(candidate) != _BASE.findall(answer)
    ):
        return WRONG
    if len(candidate) > MAX_SYMBOLIC_CHARACTERS:
        return PARSE_FAILURE
    words, expected_words = _words(candidate), _words(answer)
    if words and expected_words:  # it would take their letters for factors, in any order
        return RIGHT if words == expected_words else WRONG
    return candidate, answer


def _words(text: str) -> list[str]:
    """The words of a text that consists of words, or of a list of letters; of others none."""
    text = _TEXT_COMMAND.sub(r"\1", text).strip(". ")
    words = re.findall(r"[^\W\d_]+|[,;]", text)
    several = len(words) > 1 or (words and len(words[0]) > 1)
    return [word.casefold() for word in words] if several and _WORDS.fullmatch(text) else []


def _set_meets_pair(candidate: str, answer: str) -> bool:
    texts = (candidate, answer)
    return any(t.startswith(r"\{") for t in texts) and any(t.startswith(("(", "[")) for t in texts)


class _Worker:
    """One worker process; used by one thread at a time."""

    def __init__(self, max_seconds: float):
        self.max_seconds = max_seconds
        self.process: subprocess.Popen | None = None
        self.broken = False

    def grade(self, asked: Mapping[str, Any]) -> Grade:
        """Return the grade of a candidate within `max_seconds` plus a worker's start."""
        request = json.dumps(asked).encode()
        for _ in range(2):  # a worker may have died while idle: ask a fresh one once
            try:
                return self._ask(request) if self._start() else INFRA_FAILURE
            except TimeoutError:
                self.stop()
                return PARSE_FAILURE if self.answer_was_read else INFRA_FAILURE
            except (EOFError, OSError):
                self.stop()
            except BaseException:  # Ctrl-C: a reply still under way must not meet the next request
                self.stop()
                raise
        _logger.warning(
            "The grading worker crashed twice on %r; it is not scored.", asked["candidate"][:80]
        )
        return INFRA_FAILURE

    def stop(self) -> None:
        """Kill the worker and everything it started."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        self.process = None

    def _ask(self, request: bytes) -> Grade:
        deadline = time.monotonic() + self.max_seconds
        self.answer_was_read = False
        self.connection.send_bytes(request)
        if not self._receive(deadline)["answer_read"]:
            return WRONG  # a reference that is no mathematics is text, and the texts differ
        self.answer_was_read = True
        value = self._receive(deadline)["value"]
        return PARSE_FAILURE if value is None else Grade(float(value), "scored")

    def _receive(self, deadline: float) -> dict:
        if not self.connection.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        return json.loads(self.connection.recv_bytes())

    def _start(self) -> bool:
        """Start the process if none runs; False, said once in the log, when that cannot be done."""
        if self.process is not None or self.broken:
            return not self.broken
        self.connection, theirs = Pipe()
        # By path and with -P, so that neither the current folder nor this one (it holds a math.py)
        # comes before the standard library; a fresh interpreter, as JAX's threads forbid a fork;
        # a session of its own, so that one signal ends the worker and all that it started.
        arguments = [str(theirs.fileno()), str(self.max_seconds)]
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", str(WORKER_FILE), *arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            problem = self._receive(time.monotonic() + START_SECONDS).get("error")
        except (EOFError, OSError) as error:
            problem = f"it ended or hung while starting ({type(error).__name__})"
        if problem:
            self.stop()
            self.broken = True
            _logger.error("The grading worker cannot start: %s.", problem)
        return not self.broken
