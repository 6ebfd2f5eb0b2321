"""The tasks of a run, by name: those of this package, and one's own from a file.

`config.task.mixture` lists names, each with a weight before it or without: `sums`, `2*products`. A
name is `sums`, `products`, `lookups`, `functions` or `guesses`; `data:PATH` for a file or folder of
examples; `reasoning_gym:FAMILY?SETTING=VALUE` for generated ones (see `families`); or
`my_task.py:MyTask`, a class that is a `task.Task` and takes no arguments.
"""

import contextlib
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orbit_jax.config import Config, RewardConfig
from orbit_jax.rl.rollouts import Rollouts
from orbit_jax.tasks import families
from orbit_jax.tasks.builtin_tools import open_tools
from orbit_jax.tasks.chats import ChatTokenizer, chat_of
from orbit_jax.tasks.data import content_hash
from orbit_jax.tasks.dialogues import Asked, Dialogues
from orbit_jax.tasks.functions import Functions
from orbit_jax.tasks.grading import Grader
from orbit_jax.tasks.guesses import Guesses
from orbit_jax.tasks.judging import Verdict, judge
from orbit_jax.tasks.lookups import Lookups
from orbit_jax.tasks.mixture import Mixture, Source
from orbit_jax.tasks.own_data import OwnData
from orbit_jax.tasks.products import Products
from orbit_jax.tasks.rewards import Rewards, matches, overlong
from orbit_jax.tasks.sandbox import Sandbox
from orbit_jax.tasks.sandbox_link import Limits
from orbit_jax.tasks.sums import Sums
from orbit_jax.tasks.task import Example, Score, Task, Turn

_NEEDED = ("name", "tools", "examples", "messages", "grade")
_ENTRY = re.compile(r"(?:(\d+(?:\.\d+)?)\*)?(.+)")


@dataclass(frozen=True)
class Tasks:
    """The tasks of a run.

    Attributes:
      by_name: as the mixture lists them.
      mixture: of their train splits.
      rewards: how a rollout's reward is made up.
    """

    config: Config
    by_name: Mapping[str, Task]
    mixture: Mixture
    rewards: Rewards

    def split(self, name: str) -> tuple[Example, ...]:
        """The examples of a split of all tasks."""
        return tuple(e for task in self.by_name.values() for e in task.examples(name))

    def some(self, name: str, count: int) -> tuple[Example, ...]:
        """The first examples of a split of each task, about `count` in all."""
        each = -(-count // len(self.by_name))
        return tuple(e for task in self.by_name.values() for e in task.examples(name)[:each])

    def lines(self) -> list[str]:
        """For the log: how many examples there are, and what reading data has to report."""
        lines = []
        for name, task in self.by_name.items():
            train, heldout = (len(task.examples(split)) for split in ("train", "heldout"))
            lines.append(f"task {name}: {train:,} examples to train on, {heldout:,} held out")
            lines += [f"task {name}: {line}" for line in getattr(task, "lines", ())]
        return lines

    def content_hash(self) -> str:
        """Of what is trained on and held out: a resumed run must have the same."""
        return content_hash({name: self.split(name) for name in ("train", "heldout")})

    def pose(self, examples: Sequence[Example], tokenizer: ChatTokenizer) -> dict[str, Asked]:
        """By `Example.key` how each is asked, in the chat of its task."""
        syntax = self.config.tools.syntax
        chats = {name: chat_of(tokenizer, t.tools, syntax) for name, t in self.by_name.items()}
        asked = {}
        for example in examples:
            task = self.by_name[example.task]
            user = getattr(task, "user", None)
            asked[example.key] = Asked(example, task.messages(example), chats[example.task], user)
        return asked

    def judge(self, dialogues: Dialogues, rollouts: Rollouts) -> list[Verdict]:
        """What became of each rollout: see `judging.judge`."""
        task, tools = self.config.task, self.config.tools
        workers = max(task.grader_workers, tools.sandbox_workers)
        return judge(
            self.by_name, self.rewards, dialogues, rollouts, workers, task.max_grading_seconds
        )


@contextlib.contextmanager
def open_tasks(config: Config) -> Iterator[Tasks]:
    """The tasks of `config.task.mixture`. What they share, as a sandbox, ends with the context.

    Raises:
      ValueError: for a name that is no task, a file without it, or a task without examples.
    """
    task, tools = config.task, config.tools
    if not task.mixture:
        raise ValueError(
            "config.task.mixture=(): name at least one task, such as 'products' or '2*sums'"
        )
    size = (task.data_seed, task.train_problems, task.heldout_problems)
    with contextlib.ExitStack() as stack:

        @functools.cache
        def sandbox() -> Sandbox:
            limits = Limits(wall_seconds=tools.program_seconds, cpu_seconds=tools.program_seconds)
            made = Sandbox(tools.sandbox_workers, limits, tools.isolation)
            return stack.enter_context(made)

        @functools.cache
        def grader() -> Grader:
            return stack.enter_context(Grader(task.grader_workers, task.grader_max_seconds))

        given = open_tools(tools.use, sandbox)

        def own_data(where: str) -> Task:
            return OwnData(where, grader(), sandbox, task, given)

        kinds = (task.unseen_problems, task.difficulties, task.unseen_difficulty, task.system)
        known = {
            "sums": lambda: Sums(*size, *kinds, tools=given),
            "products": lambda: Products(*size),
            "lookups": lambda: Lookups(task.data_seed),
            "guesses": Guesses,
            "functions": lambda: Functions(sandbox(), task.partial_credit),
        }
        tasks, sources = {}, []
        for entry in task.mixture:
            weight, name = _ENTRY.fullmatch(entry).groups()
            if ".py:" in name:
                found = load_task(name)
            elif name.startswith(("data:", families.PREFIX)):
                found = own_data(name.removeprefix("data:"))
            elif name in known:
                found = known[name]()
            else:
                raise ValueError(
                    f"config.task.mixture={entry!r}: no task {name!r}; use {', '.join(known)}, "
                    "data:PATH of a file or folder, reasoning_gym:FAMILY, or a class of your own "
                    "as my_task.py:MyTask; a weight goes before it, as '2*sums'"
                )
            if found.name in tasks:
                raise ValueError(f"config.task.mixture: the task {found.name!r} is named twice")
            tasks[found.name] = found
            sources.append(Source(found.name, _train(found), float(weight or 1)))
        yield Tasks(config, tasks, Mixture(sources), _rewards(config))


def load_task(name: str) -> Task:
    """The task of `my_task.py:MyTask`, tried on an empty answer to its first example.

    Raises:
      ValueError: if there is no such file or class, or the class lacks something of a task.
    """
    path, _, kind = name.partition(":")
    field = f"config.task.mixture={name!r}"
    if not Path(path).is_file():
        raise ValueError(f"{field}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, kind):
        raise ValueError(f"{field}: {path} has no class {kind}")
    task = getattr(module, kind)()
    missing = [needed for needed in _NEEDED if not hasattr(task, needed)]
    if missing:
        raise ValueError(
            f"{field}: {kind} lacks {', '.join(missing)}; a task has what "
            "orbit_jax.tasks.task.Task lists"
        )
    for split in ("train", "heldout"):
        for example in task.examples(split):
            if not isinstance(example, Example) or example.task != task.name:
                raise ValueError(
                    f"{field}: {split} holds {example!r:.120}; give Examples whose task is "
                    f"{task.name!r}, the name of {kind}"
                )
    for example in task.examples("train")[:1]:
        found = task.grade(example, [Turn("assistant", "")])
        if not isinstance(found, Score):
            raise ValueError(f"{field}: {kind}.grade gave {found!r:.80}; it must give a Score")
    return task


def _train(task: Task) -> tuple[Example, ...]:
    examples: Sequence[Example] = task.examples("train")
    heldout = {example.id for example in task.examples("heldout")}
    both = heldout & {example.id for example in examples}
    if both:
        raise ValueError(
            f"task {task.name}: examples {sorted(both)[:3]} are in train and in heldout: keep them "
            "apart"
        )
    return tuple(examples)


def _rewards(config: Config) -> Rewards:
    reward: RewardConfig = config.reward
    limit = config.sampler.max_completion_tokens
    parts = []
    if reward.format:
        try:
            parts.append(matches(reward.format, reward.format_weight))
        except ValueError as error:
            raise ValueError(f"config.reward.{error}") from None
    if reward.length_buffer:
        parts.append(overlong(limit - reward.length_buffer, limit, reward.length_weight))
    return Rewards(reward.correctness, tuple(parts))
