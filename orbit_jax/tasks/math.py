"""The math task: what a problem says to the model, and what a completion earns.

It joins `problems` and `grading`. A reward is 1.0 for a right answer, 0.0 for a wrong one or one
that cannot be read, NaN where the grader failed (the trainer masks and counts those).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from orbit_jax.tasks.grading import Grader
from orbit_jax.tasks.problems import Problem


@dataclass(frozen=True)
class MathTask:
    """Prompts and rewards of math problems; `grader` sets workers and time limit."""

    grader: Grader = field(default_factory=Grader)

    def messages(self, problem: Problem) -> list[dict[str, str]]:
        """Return the chat messages that pose the problem; plain text becomes one user message."""
        if isinstance(problem.prompt, str):
            return [{"role": "user", "content": problem.prompt}]
        return [dict(message) for message in problem.prompt]

    def rewards(
        self, problems: Sequence[Problem], completions: Sequence[str]
    ) -> tuple[np.ndarray, list[str]]:
        """Return values [B] (float32: 1, 0 or NaN) and outcomes [B], one per completion.

        Raises:
            ValueError: when there is not one problem per completion.
        """
        if len(problems) != len(completions):
            raise ValueError(
                f"rewards needs one problem per completion, got {len(problems)} problems and "
                f"{len(completions)} completions."
            )
        pairs = [(c, p.answer) for p, c in zip(problems, completions, strict=True)]
        grades = self.grader.grade_batch(pairs)
        values = np.array([grade.value for grade in grades], dtype=np.float32)
        return values, [grade.outcome for grade in grades]
