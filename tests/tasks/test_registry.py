"""Tasks by name, mixed by weights, and one's own from a file."""

import json
from collections import Counter

import pytest

from orbit_jax.config import Config, TaskConfig
from orbit_jax.tasks.functions import function_examples, lazy_program, program
from orbit_jax.tasks.problems import is_heldout
from orbit_jax.tasks.registry import load_task, open_tasks
from orbit_jax.tasks.task import Turn

OWN = """
from orbit_jax.tasks.task import Example, Score

class Echo:
    name = "echo"
    tools = ()

    def examples(self, split):
        return [Example(f"{split}-{i}", f"say {i}", str(i), "echo") for i in range(4)]

    def messages(self, example):
        return [{"role": "user", "content": example.prompt}]

    def grade(self, example, transcript):
        return Score(float(transcript[-1].text == example.answer), "scored")

class Half:
    name = "half"
"""


def config(*mixture: str) -> Config:
    return Config(task=TaskConfig(mixture=mixture, train_problems=50, heldout_problems=10))


@pytest.fixture
def own(tmp_path) -> str:
    path = tmp_path / "my_task.py"
    path.write_text(OWN)
    return str(path)


def test_tasks_are_mixed_by_their_weights():
    with open_tasks(config("sums", "products=3")) as (tasks, mixture):
        assert set(tasks) == {"sums", "products"}
        drawn = [e for step in range(4) for e in mixture.examples_of_step(step, 10, seed=0)]
        assert Counter(e.task for e in drawn) == {"sums": 10, "products": 30}
        heldout = {e.prompt for task in tasks.values() for e in task.examples("heldout")}
        assert len(heldout) == 20
        assert not heldout & {e.prompt for e in drawn}


def test_ones_own_task_is_a_class_in_a_file(own):
    with open_tasks(config(f"{own}:Echo")) as (tasks, mixture):
        (example, *_) = mixture.examples_of_step(0, 4, seed=0)
        assert tasks["echo"].grade(example, [Turn("assistant", example.answer)]).value == 1


def test_ones_own_file_may_hold_programs_and_answers(tmp_path):
    rows = [{"prompt": f"{i}+1", "answer": str(i + 1)} for i in range(40)]
    tests = [{"kind": "function", "name": "f", "cases": [{"args": [2], "expected": 4}]}]
    programs = [{"prompt": f"double {i}", "tests": tests} for i in range(40)]
    for name, content in (("sums.jsonl", rows), ("double.jsonl", programs)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    names = (f"data:{tmp_path / 'sums.jsonl'}", f"data:{tmp_path / 'double.jsonl'}")
    with open_tasks(config(*names)) as (tasks, mixture):
        assert set(tasks) == {"sums", "double"}
        drawn = mixture.examples_of_step(0, 20, seed=0)
        assert Counter(e.task for e in drawn) == {"sums": 10, "double": 10}
        sums, double = (next(e for e in drawn if e.task == name) for name in ("sums", "double"))
        right = rf"\boxed{{{sums.answer}}}"
        assert tasks["sums"].grade(sums, [Turn("assistant", right)]).value == 1
        assert tasks["sums"].grade(sums, [Turn("assistant", r"\boxed{0}")]).value == 0
        program = "def f(x):\n    return 2 * x"
        assert tasks["double"].grade(double, [Turn("assistant", program)]).value == 1
        assert tasks["double"].grade(double, [Turn("assistant", "def f(x): pass")]).value == 0
        assert tasks["sums"].examples("heldout")


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ((), r"mixture=\(\): name at least one task"),
        (("poems",), "no task 'poems'; use sums, products, functions"),
        (("sums=x",), "'x' is no weight"),
        (("sums", "sums"), "'sums' is named twice"),
        (("no.py:Echo",), "there is no file no.py"),
    ],
)
def test_what_is_no_task_is_one_clear_sentence(mixture, message):
    with pytest.raises(ValueError, match=message), open_tasks(config(*mixture)):
        pass


def test_a_class_that_is_no_task_is_refused_with_what_it_lacks(own):
    with pytest.raises(ValueError, match="has no class Poem"):
        load_task(f"{own}:Poem")
    with pytest.raises(ValueError, match="Half lacks tools, examples, messages, grade"):
        load_task(f"{own}:Half")


def test_functions_are_split_by_their_prompts_and_graded_by_execution():
    train, heldout = function_examples("train"), function_examples("heldout")
    assert len(train) + len(heldout) == 2 * 8 * 99
    assert all(is_heldout(e.prompt) for e in heldout)
    assert not any(is_heldout(e.prompt) for e in train)
    with open_tasks(config("functions")) as (tasks, _):
        for example in heldout[:3]:
            right, lazy = program(example), lazy_program(example)
            values = [
                tasks["functions"].grade(example, [Turn("assistant", text)]).value
                for text in (right, lazy, f"```python\n{right}\n```", "none")
            ]
            assert values == [1, 0, 1, 0]
