r"""Generated arithmetic of graded difficulty, split so that train and held-out never meet.

Problems are chains of sums and differences, such as `7+8-3`. A difficulty is named terms x digits:
`3x1` adds or subtracts three one-digit numbers. Two other families bear a name in front: `max3x2`
asks for the largest of three two-digit numbers, `product2x1` for the product of two digits (from 2
to 9; nobody needs to learn factors 0 and 1). Which side of the split a problem is on depends on its
text alone (`is_heldout`, a hash), so every script that asks that function, the base's pretraining
included, keeps the same problems out of training.
"""

import hashlib
import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from orbit_jax.tasks.task import Example, Splits

TRAINED_DIFFICULTIES = ("3x1", "4x1", "5x1")
UNSEEN_DIFFICULTY = "6x1"
HELDOUT_ONE_IN = 10  # small enough to leave 3x1, which has only 4,000 problems, most of them


def generate_problems(
    seed: int,
    train: int = 10_000,
    heldout: int = 500,
    unseen: int = 500,
    difficulties: Sequence[str] = TRAINED_DIFFICULTIES,
    unseen_difficulty: str = UNSEEN_DIFFICULTY,
    task: str = "sums",
) -> Splits:
    """Return that many distinct problems per split, a function of the arguments alone.

    Splits are `train`, `heldout` of the same kind, and `unseen`, of a kind never trained on. Draws
    go round the difficulties, so the splits are balanced over them, except that a difficulty with
    few distinct problems (3x1) gives what it has and the others fill up.

    Raises:
        ValueError: when a difficulty is malformed or trained and unseen, or when the difficulties
            do not hold that many distinct problems.
    """
    if unseen_difficulty in difficulties:
        raise ValueError(
            f"unseen_difficulty {unseen_difficulty!r} is among the trained difficulties "
            f"{tuple(difficulties)}; choose another."
        )
    trained = problem_stream(seed, difficulties)
    parts = _draw_distinct(trained, {False: train, True: heldout})
    never_trained = problem_stream(seed, (unseen_difficulty,))
    splits = {
        "train": parts[False],
        "heldout": parts[True],
        "unseen": _draw_distinct(never_trained, {True: unseen})[True],
    }
    return {name: tuple(replace(e, task=task) for e in found) for name, found in splits.items()}


def train_problem_stream(
    seed: int, difficulties: Sequence[str] = TRAINED_DIFFICULTIES
) -> Iterator[Example]:
    """Yield train-side problems without end (with repeats), one difficulty after the other.

    A difficulty named twice comes twice as often.
    """
    return (p for p in problem_stream(seed, difficulties) if not is_heldout(p.prompt))


def problem_stream(seed: int, difficulties: Sequence[str]) -> Iterator[Example]:
    """Yield problems of both sides without end, one difficulty after the other.

    Raises:
        ValueError: when no difficulty is named, or one is not of the form `3x1` or `max3x2`.
    """
    if not difficulties:
        raise ValueError("difficulties is empty; name at least one, such as '3x1'.")
    return _draw(seed, difficulties)


def is_heldout(prompt: str | tuple[dict[str, str], ...]) -> bool:
    """Tell whether a prompt belongs to the held-out side: by its text alone, one in ten."""
    digest = hashlib.sha256(normalise_prompt(prompt).encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0


def normalise_prompt(prompt: str | tuple[dict[str, str], ...]) -> str:
    """Return the prompt's text with runs of white space as one space; equal text is one problem."""
    if not isinstance(prompt, str):
        prompt = " ".join(f"{message['role']}: {message['content']}" for message in prompt)
    return " ".join(prompt.split())


def worked_solution(expression: str) -> str:
    r"""Return the steps from left to right and the boxed result: `1+2` -> `1+2=3;\boxed{3}`.

    Raises:
        ValueError: when the expression is not a sum or difference of whole numbers.
    """
    first, *rest = _read_sum(expression)
    total, steps = first, []
    for term in rest:
        steps.append(f"{total}{term:+d}={total + term};")
        total += term
    return "".join(steps) + rf"\boxed{{{total}}}"


def direct_solution(expression: str) -> str:
    r"""Return the boxed result alone: `1+2` -> `\boxed{3}`; raises as `worked_solution`."""
    return rf"\boxed{{{sum(_read_sum(expression))}}}"


def _read_sum(expression: str) -> list[int]:
    terms = expression.replace(" ", "")
    if not re.fullmatch(r"\d+(?:[+-]\d+)*", terms):
        raise ValueError(
            f"expression {expression!r} is not a sum or difference of whole numbers, such as "
            "'27+35-14'."
        )
    return [int(term) for term in re.findall(r"[+-]?\d+", terms)]


def _read_difficulty(name: str) -> tuple[str, int, int]:
    match = re.fullmatch(r"(max|product|)([1-9]\d?)x([1-9]\d?)", name)
    if not match:
        raise ValueError(
            f"difficulty {name!r} is not of the form terms x digits, such as '3x1', with 'max' or "
            "'product' before it or nothing."
        )
    return match[1], int(match[2]), int(match[3])


def _draw(seed: int, difficulties: Sequence[str]) -> Iterator[Example]:
    rng = random.Random(seed)
    kinds = [(name, *_read_difficulty(name)) for name in difficulties]
    for number, (name, family, terms, digits) in enumerate(itertools.cycle(kinds)):
        lowest = 10 ** (digits - 1) if digits > 1 else 2 if family == "product" else 0
        values = [rng.randint(lowest, 10**digits - 1) for _ in range(terms)]
        text, answer = _pose(rng, family, values)
        yield Example(f"{name}-{number}", text, str(answer), difficulty=name)


def _pose(rng: random.Random, family: str, values: Sequence[int]) -> tuple[str, int]:
    """Return the text of a problem about these numbers, and its answer."""
    if family == "max":
        return "the largest of " + ", ".join(map(str, values)), max(values)
    if family == "product":
        return "*".join(map(str, values)), math.prod(values)
    text = str(values[0]) + "".join(rng.choice("+-") + str(v) for v in values[1:])
    return text, sum(_read_sum(text))


def _draw_distinct(
    stream: Iterator[Example], wanted: dict[bool, int]
) -> dict[bool, tuple[Example, ...]]:
    """Return `wanted[side]` distinct problems for each side of `is_heldout`."""
    found: dict[bool, dict[str, Example]] = {side: {} for side in wanted}
    draws = 100_000 + 50 * sum(wanted.values())
    for problem in itertools.islice(stream, draws):
        if all(len(found[side]) == count for side, count in wanted.items()):
            break
        side = is_heldout(problem.prompt)
        if side in wanted and len(found[side]) < wanted[side]:
            found[side].setdefault(normalise_prompt(problem.prompt), problem)
    else:
        counts = {
            "held-out" if side else "train": len(problems) for side, problems in found.items()
        }
        raise ValueError(
            f"the difficulties hold too few distinct problems: found {counts} in {draws} draws; "
            "ask for fewer or add difficulties."
        )
    return {side: tuple(problems.values()) for side, problems in found.items()}
