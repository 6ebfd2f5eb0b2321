"""The task of one's own file or folder: programs are executed, other answers are mathematics."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from orbit_jax.config import TaskConfig
from orbit_jax.tasks import families
from orbit_jax.tasks.code import CodeGrader
from orbit_jax.tasks.data import load_examples
from orbit_jax.tasks.grading import Grader
from orbit_jax.tasks.sandbox import Sandbox
from orbit_jax.tasks.task import Example, Score, Tool, Transcript, posed


class OwnData:
    """The task `data:PATH`, named after the file or folder; or a generated family, after that.

    Args:
      where: as of `data.load_examples`.
      grader: of answers.
      sandbox: makes the one that programs run in; called if there are any.
      config: of the system message before prompts that are text, and of whether programs that pass
        some of their tests have a part of the reward.
      tools: that a rollout may call.

    Attributes:
      lines: what reading the data has to report, for the log.

    Raises:
      ValueError: as `data.load_examples`.
    """

    def __init__(
        self,
        where: str,
        grader: Grader,
        sandbox: Callable[[], Sandbox],
        config: TaskConfig,
        tools: tuple[Tool, ...] = (),
    ):
        data = load_examples(where)
        self.name, self.lines = families.name_of(where) or Path(where).stem, data.report.lines()
        self._splits = {
            split: tuple(dataclasses.replace(one, task=self.name) for one in examples)
            for split, examples in data.splits.items()
        }
        self.tools = tools
        self._grader, self._system = grader, config.system
        programs = any("tests" in e.extra for es in self._splits.values() for e in es)
        self._code = CodeGrader(sandbox(), config.partial_credit) if programs else None

    def examples(self, split: str) -> Sequence[Example]:
        """Those of a split that the data has, or of the one in ten that is held out."""
        return self._splits.get(split, ())

    def messages(self, example: Example) -> list[dict[str, str]]:
        """The messages of a chat as they are; text as the user's."""
        return posed(example, self._system)

    def grade(self, example: Example, transcript: Transcript) -> Score:
        """Of the last turn: its program against the tests, or its answer against the reference."""
        said = transcript[-1].text
        if "tests" in example.extra:
            return self._code.grade(example, said)
        if "family" in example.extra:
            found = self._grader.score(example.extra["family"], example.extra["number"], said)
        else:
            found = self._grader.grade(said, example.answer)
        return Score(found.value, found.outcome)
