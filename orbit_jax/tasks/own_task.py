"""A task of one's own: a class in a file, checked before anything long begins."""

import functools
import re
from collections.abc import Sequence

from orbit_jax.own_code import load_own
from orbit_jax.tasks.judging import grade_all
from orbit_jax.tasks.task import Example, Task, Turn

_NEEDED = ("name", "tools", "examples", "messages", "grade")


def load_task(name: str, max_seconds: float = 60.0) -> Task:
    """The task of `my_task.py:MyTask`, tried on an empty answer to its first example.

    Args:
      max_seconds: of grading that answer.

    Raises:
      ValueError: if there is no such file or class, or the class lacks something of a task.
    """
    kind, field = name.rpartition(":")[2], f"config.task.mixture={name!r}"
    try:
        task = load_own(name)()
        _require_task(task, kind)
        first = task.examples("train")[:1]
        tried = [functools.partial(task.grade, e, [Turn("assistant", "")]) for e in first]
    except Exception as error:  # whatever a file of one's own raises, the file is what to mend
        what = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{field}: {what}{error}") from error
    for score in grade_all(tried, 1, max_seconds):
        if score.outcome == "infra_failure":
            why = score.details.get("error", "it gave an infra failure")
            raise ValueError(f"{field}: {kind}.grade failed on an empty answer: {why}")
    return task


def _require_task(task: Task, kind: str) -> None:
    """Refuses what is no task, in words that go behind its name."""
    missing = [needed for needed in _NEEDED if not hasattr(task, needed)]
    if missing:
        raise ValueError(
            f"{kind} lacks {', '.join(missing)}; a task has what orbit_jax.tasks.task.Task lists"
        )
    if not isinstance(task.name, str) or not re.fullmatch(r"[\w.-]+", task.name):
        raise ValueError(f"{kind}.name={task.name!r}: use letters, digits, '_', '.' and '-'")
    if not isinstance(task.tools, Sequence) or isinstance(task.tools, str):
        raise ValueError(f"{kind}.tools={task.tools!r}: give a tuple of tools, () for none")
    for tool in task.tools:
        if not all(hasattr(tool, needed) for needed in ("name", "parameters", "start")):
            raise ValueError(
                f"{kind}.tools has {tool!r:.80}, which is no orbit_jax.tasks.task.Tool"
            )
    if getattr(task, "user", None) is not None and not hasattr(task.user, "reply"):
        raise ValueError(f"{kind}.user={task.user!r:.80} has no method reply")
    for split in ("train", "heldout"):
        found = task.examples(split)
        if not isinstance(found, Sequence):
            raise ValueError(f"{kind}.examples({split!r}) gave {found!r:.80}; give a list or tuple")
        for example in found:
            if not isinstance(example, Example) or example.task != task.name:
                raise ValueError(
                    f"{split} holds {example!r:.120}; give Examples whose task is "
                    f"{task.name!r}, the name of {kind}"
                )
