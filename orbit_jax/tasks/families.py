"""Generated families with settings of their difficulty, from the package reasoning-gym.

A family is named with its settings, `reasoning_gym:chain_sum?size=500&seed=1&max_terms=4`; without
them it has 500 examples of seed 0. Answers are graded by the family's own function, in a worker
process (`grading.Grader.score`). The package is optional.
"""

import importlib
import inspect
import json
import re
from typing import Any
from urllib.parse import parse_qsl

from orbit_jax.tasks.task import Example

PREFIX = "reasoning_gym:"
TASK = "reasoning_gym"
PACKAGE = "reasoning-gym==0.1.25"
# Its score function hands the package's own answer to eval, never the model's.
_EVALUATES_ITS_OWN = {"number_sorting"}


def generate(spec: str) -> tuple[Example, ...]:
    """Return a family's examples, a function of its name and settings alone.

    Their difficulty is the settings but for size and seed.

    Raises:
        ValueError: when the package is missing, it has no such family or refuses a setting, or
            the family's score function would run what the model writes as Python.
    """
    name, settings = read_spec(spec)
    family = _open(spec)
    told = "&".join(f"{k}={v}" for k, v in settings.items() if k not in ("size", "seed"))
    return tuple(
        Example(
            id=f"{name}:{number}",
            prompt=entry["question"],
            answer=str(entry["answer"]),
            task=TASK,
            difficulty=told,
            source=name,
            extra={"family": spec, "number": number},
        )
        for number, entry in ((number, family[number]) for number in range(len(family)))
    )


def name_of(spec: str) -> str:
    """Return the name of the family that a spec names; empty for what is none."""
    return read_spec(spec)[0] if spec.startswith(PREFIX) else ""


def _open(spec: str) -> Any:
    name, settings = read_spec(spec)
    try:
        # By name: what this package's modules import by statement is required, this is not.
        package = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ValueError(
            f"{spec} takes the package reasoning-gym, which cannot be imported ({error}); run "
            f"`pip install {PACKAGE}`, or name other data."
        ) from None
    known = importlib.import_module("reasoning_gym.factory").DATASETS
    if name not in known:
        raise ValueError(f"{spec}: no family {name!r}; there are {', '.join(sorted(known))}.")
    code = inspect.getsource(known[name][0].score_answer)
    if re.search(r"\b(eval|exec|parse_expr|sympify)\(", code) and name not in _EVALUATES_ITS_OWN:
        raise ValueError(
            f"{spec}: the score function of {name} runs answers as Python code; choose another "
            "family."
        )
    try:
        return package.create_dataset(name, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{spec}: the family refuses its settings: {error}.") from None


def read_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a family and its settings."""
    name, _, query = spec.removeprefix(PREFIX).partition("?")
    settings: dict[str, Any] = {"size": 500, "seed": 0}
    for key, value in parse_qsl(query, keep_blank_values=True):
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return name, settings
