"""From rollouts to verdicts: every transcript is graded, within a time, and its reward made up.

A grader that raises, is late or gives no `Score` makes an `infra_failure`: the rollout is masked
and counted, never scored 0.
"""

import collections
import functools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from orbit_jax.tasks.dialogues import Dialogues
from orbit_jax.tasks.rewards import CORRECTNESS, Rewards, Sampled, means
from orbit_jax.tasks.task import Example, Score, Task, Transcript

# A rollout as a row of JSON: task, problem, difficulty, prompt, answer, turns, reward, outcome; the
# reward's parts, of which `correctness` is the grader's value; and the grader's details.
Verdict = dict[str, Any]


class Rollouts(Protocol):
    """What is read of rollouts [B] with tokens [B, S]; `rl.rollouts.Rollouts` are some.

    Attributes:
      tokens, lengths: [B, S] and [B] int32, prompt and completion.
      sampled: [B, S] bool, tokens that the model drew.
      stops: [B] why each row ended.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    sampled: np.ndarray
    stops: Sequence[str]


def judge(
    tasks: Mapping[str, Task],
    rewards: Rewards,
    dialogues: Dialogues,
    rollouts: Rollouts,
    workers: int,
    max_seconds: float,
) -> list[Verdict]:
    """What became of each row of `rollouts`, whose conversations `dialogues` has.

    Args:
      tasks: by name.
      workers: rows that are graded at the same time.
      max_seconds: wall-clock limit of grading one row.
    """
    examples = [row.example for row in dialogues.rows]
    transcripts = [
        dialogues.transcript(row, rollouts.tokens[row, :length].tolist())
        for row, length in enumerate(rollouts.lengths)
    ]
    calls = [
        functools.partial(tasks[example.task].grade, example, transcript)
        for example, transcript in zip(examples, transcripts, strict=True)
    ]
    graded = grade_all(calls, workers, max_seconds)
    for row, why in dialogues.failed.items():
        graded[row] = _failed(f"the user failed: {why}")
    tokens, stops = rollouts.sampled.sum(axis=1).tolist(), rollouts.stops
    verdicts = []
    for i, example in enumerate(examples):
        said = "\n".join(turn.text for turn in transcripts[i] if turn.role == "assistant")
        score = rewards.score(graded[i], Sampled(said, tokens[i], stops[i]))
        verdicts.append(_verdict(example, transcripts[i], score, rewards.names))
    return verdicts


def grade_all(
    calls: Sequence[Callable[[], Score]], workers: int, max_seconds: float
) -> list[Score]:
    """The scores that the calls give, side by side in threads.

    One that is late is left behind, as its thread cannot be ended; another thread takes its place.
    """
    scores: list[Score | None] = [None] * len(calls)
    began: dict[int, float] = {}  # of calls under way
    waiting = collections.deque(range(len(calls)))
    changed = threading.Condition()

    def work() -> None:
        while True:
            with changed:
                if not waiting:
                    return
                i = waiting.popleft()
                began[i] = time.monotonic()
            score = _score_of(calls[i])
            with changed:
                if scores[i] is not None:  # it came too late
                    return
                scores[i] = score
                del began[i]
                changed.notify()

    def start() -> None:
        threading.Thread(target=work, daemon=True).start()

    for _ in range(min(workers, len(calls))):
        start()
    with changed:
        while waiting or began:
            now = time.monotonic()
            for i in [i for i, begin in began.items() if now - begin >= max_seconds]:
                del began[i]
                scores[i] = _failed(f"not graded within {max_seconds:g} seconds")
                start()
            oldest = min(began.values(), default=now)
            changed.wait(max(0.0, oldest + max_seconds - now) if began else 0.01)
    return scores


def measures(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Metrics of a step: means of reward parts and details; of several tasks reward, outcomes."""
    found = means([one["parts"] for one in verdicts], "reward")
    found |= means([one["details"] for one in verdicts], "details")
    by_task = _by_task(verdicts)
    if len(by_task) > 1:
        for task, members in by_task.items():
            found[f"task_{task}/reward"] = _mean([one["reward"] for one in members])
            counts = collections.Counter(one["outcome"] for one in members)
            found |= {f"task_{task}/{outcome}": count for outcome, count in counts.items()}
    return found


def pass_rates(verdicts: Sequence[Verdict], split: str, how: str) -> dict[str, float]:
    """The share of right answers, infra failures left out; of several tasks also of each.

    Raises:
      RuntimeError: when nothing of a task could be graded.
    """
    found = {}
    by_task = _by_task(verdicts)
    groups = {split: verdicts} | {f"{split}_{task}": of for task, of in by_task.items()}
    for name, members in groups.items():
        values = [one["parts"][CORRECTNESS] for one in members]
        known = [float(value >= 1) for value in values if not math.isnan(value)]
        if not known:
            raise RuntimeError(
                f"task {members[0]['task']}: none of {len(members)} rollouts of {split} could be "
                f"graded: {members[0]['details'].get('error', 'the grader failed')}"
            )
        found[f"{name}/pass_{how}"] = sum(known) / len(known)
    return found if len(by_task) > 1 else {f"{split}/pass_{how}": found[f"{split}/pass_{how}"]}


def _score_of(call: Callable[[], Score]) -> Score:
    try:
        score = call()
        if not isinstance(score, Score):
            raise TypeError(f"grade gave {type(score).__name__}, not a Score")
    except BaseException as error:  # a task of one's own may raise anything; it is told, counted
        return _failed(f"{type(error).__name__}: {error}")
    return score


def _failed(why: str) -> Score:
    return Score(math.nan, "infra_failure", {"error": why})


def _verdict(
    example: Example, transcript: Transcript, score: Score, parts: Sequence[str]
) -> Verdict:
    return {
        "task": example.task,
        "problem": example.id,
        "difficulty": example.difficulty,
        "prompt": example.prompt,
        "answer": example.answer,
        "turns": [[turn.role, turn.text] for turn in transcript],
        "reward": score.value,
        "outcome": score.outcome,
        "parts": {name: score.details[name] for name in parts},
        "details": {name: v for name, v in score.details.items() if name not in parts},
    }


def _by_task(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    found: dict[str, list[Verdict]] = {}
    for one in verdicts:
        found.setdefault(one["task"], []).append(one)
    return found


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not np.isnan(value)]
    return sum(known) / len(known) if known else math.nan
