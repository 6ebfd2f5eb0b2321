"""The tasks of a run, by name: those of this package, and one's own from a file.

`config.task.mixture` lists `name` or `name=weight`. A name is `sums`, `products`, `functions`,
`data:PATH` for a file or folder of examples, or `my_task.py:MyTask`, a class that is a `task.Task`
and takes no arguments.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from orbit_jax.config import Config
from orbit_jax.tasks.functions import Functions
from orbit_jax.tasks.grading import Grader
from orbit_jax.tasks.math import Sums
from orbit_jax.tasks.mixture import Mixture, Source
from orbit_jax.tasks.own_data import OwnData
from orbit_jax.tasks.products import Products
from orbit_jax.tasks.sandbox import Sandbox
from orbit_jax.tasks.task import Example, Task

_NEEDED = ("name", "tools", "examples", "messages", "grade")


@contextlib.contextmanager
def open_tasks(config: Config) -> Iterator[tuple[dict[str, Task], Mixture]]:
    """The tasks of `config.task.mixture` by name, and their train splits mixed.

    What they share, such as a sandbox, ends with the context.

    Raises:
      ValueError: for a name that is no task, a file without it, or a task without examples.
    """
    task = config.task
    if not task.mixture:
        raise ValueError(
            "config.task.mixture=(): name at least one task, such as 'products' or 'sums=2'"
        )
    size = (task.data_seed, task.train_problems, task.heldout_problems)
    with contextlib.ExitStack() as stack:

        @functools.cache
        def sandbox() -> Sandbox:
            made = Sandbox(config.tools.sandbox_workers, isolation=config.tools.isolation)
            return stack.enter_context(made)

        def own_data(where: str) -> Task:
            grader = stack.enter_context(Grader(task.grader_workers, task.grader_max_seconds))
            return OwnData(where, grader, sandbox, task.system)

        known = {
            "sums": lambda: Sums(*size, task.difficulties),
            "products": lambda: Products(*size),
            "functions": lambda: Functions(sandbox()),
        }
        tasks, sources = {}, []
        for entry in task.mixture:
            name, _, weight = entry.partition("=")
            if ".py:" in name:
                found = load_task(name)
            elif name.startswith("data:"):
                found = own_data(name.removeprefix("data:"))
            elif name in known:
                found = known[name]()
            else:
                raise ValueError(
                    f"config.task.mixture={entry!r}: no task {name!r}; use {', '.join(known)}, "
                    "data:PATH of a file or folder, or a class of your own as my_task.py:MyTask"
                )
            if found.name in tasks:
                raise ValueError(f"config.task.mixture: the task {found.name!r} is named twice")
            tasks[found.name] = found
            sources.append(Source(found.name, _train(found), _weight(entry, weight)))
        yield tasks, Mixture(sources)


def load_task(name: str) -> Task:
    """The task of `my_task.py:MyTask`.

    Raises:
      ValueError: if there is no such file or class, or the class lacks something of a task.
    """
    path, _, kind = name.partition(":")
    if not Path(path).is_file():
        raise ValueError(f"config.task.mixture={name!r}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, kind):
        raise ValueError(f"config.task.mixture={name!r}: {path} has no class {kind}")
    task = getattr(module, kind)()
    missing = [field for field in _NEEDED if not hasattr(task, field)]
    if missing:
        raise ValueError(
            f"config.task.mixture={name!r}: {kind} lacks {', '.join(missing)}; a task has what "
            "orbit_jax.tasks.task.Task lists"
        )
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


def _weight(entry: str, weight: str) -> float:
    try:
        return float(weight or 1)
    except ValueError:
        raise ValueError(
            f"config.task.mixture={entry!r}: {weight!r} is no weight; write a number, as 'sums=2'"
        ) from None
