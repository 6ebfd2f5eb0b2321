"""The tasks of a run, by name: those of this package, and one's own from a file.

`config.task.mixture` lists names, each with a weight before it or without: `sums`, `2*products`. A
name is `sums`, `products`, `lookups`, `functions` or `guesses`; `data:PATH` for a file or folder of
examples; `reasoning_gym:FAMILY?SETTING=VALUE` for generated ones (see `families`); or
`my_task.py:MyTask`, a class that is a `task.Task` and takes no arguments.
"""

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from orbit_jax.config import Config, RewardConfig
from orbit_jax.tasks import families
from orbit_jax.tasks.builtin_tools import open_tools
from orbit_jax.tasks.chats import ChatTokenizer, chat_of
from orbit_jax.tasks.data import content_hash, prompt_key
from orbit_jax.tasks.dialogues import Asked, Dialogues
from orbit_jax.tasks.functions import Functions
from orbit_jax.tasks.grading import Grader
from orbit_jax.tasks.guesses import Guesses
from orbit_jax.tasks.judging import Rollouts, Verdict, judge
from orbit_jax.tasks.lookups import Lookups
from orbit_jax.tasks.mixture import Mixture, Source
from orbit_jax.tasks.own_data import OwnData
from orbit_jax.tasks.own_task import load_task
from orbit_jax.tasks.products import Products
from orbit_jax.tasks.rewards import Rewards, matches, overlong
from orbit_jax.tasks.sandbox import Sandbox
from orbit_jax.tasks.sandbox_link import Limits
from orbit_jax.tasks.sums import Sums
from orbit_jax.tasks.task import Example, Task

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
        """The examples of a split of all tasks; of `heldout` at most as many as the config says."""
        most = self.config.task.heldout_problems if name == "heldout" else None
        return tuple(e for task in self.by_name.values() for e in task.examples(name)[:most])

    def some(self, name: str, count: int) -> tuple[Example, ...]:
        """The first examples of a split of each task, about `count` in all."""
        each, found = -(-count // len(self.by_name)), []
        for task in self.by_name:
            found += [e for e in self.split(name) if e.task == task][:each]
        return tuple(found)

    def lines(self) -> list[str]:
        """For the log: how many examples there are, and what reading data has to report."""
        lines, heldout = [], Counter(e.task for e in self.split("heldout"))
        for source in self.mixture.sources:
            name, train = source.name, len(source.examples)
            lines.append(f"task {name}: {train:,} examples to train on, {heldout[name]:,} held out")
            lines += [f"task {name}: {line}" for line in getattr(self.by_name[name], "lines", ())]
            if left_out := len(self.by_name[name].examples("train")) - train:
                lines.append(f"task {name}: {left_out:,} were not trained on, as they are held out")
        return lines

    def content_hash(self) -> str:
        """Of what is trained on and held out: a resumed run must have the same."""
        train = tuple(e for source in self.mixture.sources for e in source.examples)
        return content_hash({"train": train, "heldout": self.split("heldout")})

    def pose(self, examples: Sequence[Example], tokenizer: ChatTokenizer) -> dict[str, Asked]:
        """By `Example.key` how each is asked, in the chat of its task."""
        syntax = self.config.tools.syntax
        chats = {name: chat_of(tokenizer, t.tools, syntax) for name, t in self.by_name.items()}
        asked = {}
        for example in examples:
            task = self.by_name[example.task]
            messages, user = task.messages(example), getattr(task, "user", None)
            _require_messages(example, messages)
            asked[example.key] = Asked(example, messages, chats[example.task], user)
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
        tasks, weights = {}, {}
        for entry in task.mixture:
            weight, name = _ENTRY.fullmatch(entry).groups()
            if name.startswith(("data:", families.PREFIX)) and name != "data:":
                found = own_data(name.removeprefix("data:"))
            elif ".py:" in name:
                found = load_task(name, min(task.max_grading_seconds, 60.0))
            elif name in known:
                found = known[name]()
            else:
                raise ValueError(
                    f"config.task.mixture={entry!r}: no task {name!r}; use {', '.join(known)}, "
                    "data:PATH of a file or folder, reasoning_gym:FAMILY, or a class of your own "
                    "as my_task.py:MyTask; a weight, a number above 0, goes before it, as '2*sums'"
                )
            if found.name in tasks:
                raise ValueError(f"config.task.mixture: the task {found.name!r} is named twice")
            tasks[found.name] = found
            weights[found.name] = float(weight or 1)
        held_back = {
            prompt_key(example.prompt)
            for one in tasks.values()
            for split in ("heldout", "unseen")
            for example in one.examples(split)
        }
        sources = [Source(n, _train(one, held_back), weights[n]) for n, one in tasks.items()]
        yield Tasks(config, tasks, Mixture(sources), _rewards(config))


def _train(task: Task, held_back: Collection[str]) -> tuple[Example, ...]:
    """What is trained on: no prompt that any task of the run holds back."""
    examples: Sequence[Example] = task.examples("train")
    for split in ("train", "heldout"):
        ids = Counter(example.id for example in task.examples(split))
        twice = [name for name, count in ids.items() if count > 1]
        if twice:
            raise ValueError(
                f"task {task.name}: {split} has the ids {twice[:3]} more than once: give each "
                "example an id of its own"
            )
    both = {e.id for e in task.examples("heldout")} & {e.id for e in examples}
    if both:
        raise ValueError(
            f"task {task.name}: examples {sorted(both)[:3]} are in train and in heldout: keep them "
            "apart"
        )
    kept = tuple(e for e in examples if prompt_key(e.prompt) not in held_back)
    if not kept:
        raise ValueError(
            f"task {task.name}: of {len(examples)} examples to train on none is left that no task "
            "holds out: give it others"
        )
    return kept


def _require_messages(example: Example, messages: object) -> None:
    good = isinstance(messages, Sequence) and len(messages) > 0
    if not good or not all(
        isinstance(one, Mapping)
        and one.get("role") in ("system", "developer", "user", "assistant", "tool")
        and isinstance(one.get("content"), str)
        for one in messages
    ):
        raise ValueError(
            f"task {example.task}: the messages of example {example.id!r} are {messages!r:.120}; "
            "give a list of at least one {'role': system, user or assistant, 'content': text}"
        )


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
