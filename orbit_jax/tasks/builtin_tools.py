"""The tools of this package by name, for tasks that bring none of their own."""

from collections.abc import Callable, Sequence

from orbit_jax.tasks.calculator import Calculator
from orbit_jax.tasks.python_tool import PythonTool
from orbit_jax.tasks.sandbox import Sandbox
from orbit_jax.tasks.search import Search, load_corpus
from orbit_jax.tasks.task import Tool

SEARCH = "search:"  # what a corpus follows


def open_tools(names: Sequence[str], sandbox: Callable[[], Sandbox]) -> tuple[Tool, ...]:
    """The tools that `config.tools.use` names: `calculator`, `python`, `search:corpus.jsonl`.

    Args:
      names: each kind once, as a model calls tools by their names alone.
      sandbox: opens the sandbox, which its caller closes; it is asked for `python` only.

    Raises:
      ValueError: for another name, a tool that is named twice, or a corpus that cannot be read.
    """
    known = {"calculator": Calculator, "python": lambda: PythonTool(sandbox())}
    tools: dict[str, Tool] = {}
    for name in names:
        if not name.startswith(SEARCH) and name not in known:
            raise ValueError(
                f"config.tools.use={name!r}: there is no such tool; use calculator, python or "
                "search:PATH with the path of a JSONL corpus"
            )
        if name.startswith(SEARCH):
            try:
                tool = Search(load_corpus(name.removeprefix(SEARCH)))
            except ValueError as error:
                raise ValueError(f"config.tools.use={name!r}: {error}") from None
        else:
            tool = known[name]()
        if tool.name in tools:
            raise ValueError(f"config.tools.use={name!r}: {tool.name} is there twice; name it once")
        tools[tool.name] = tool
    return tuple(tools.values())
