"""Tasks by name, mixed by weights, and one's own from a file."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from orbit_jax.checkpoint.tokenizer import Tokenizer
from orbit_jax.config import Config, RewardConfig, TaskConfig, ToolsConfig
from orbit_jax.tasks.functions import function_examples, lazy_program, program
from orbit_jax.tasks.own_task import load_task
from orbit_jax.tasks.problems import is_heldout
from orbit_jax.tasks.registry import open_tasks
from orbit_jax.tasks.rewards import Sampled
from orbit_jax.tasks.task import Score, Turn

ROOT = Path(__file__).parents[2]
OWN = """
import time

from orbit_jax.tasks.task import Example, Score

class Echo:
    name = "echo"
    tools = ()

    def examples(self, split):
        return [Example(f"{split}-{i}", f"say {split} {i}", str(i), "echo") for i in range(4)]

    def messages(self, example):
        return [{"role": "user", "content": example.prompt}]

    def grade(self, example, transcript):
        return Score(float(transcript[-1].text == example.answer), "scored")

class Half:
    name = "half"

class Stray(Echo):
    name = "stray"

class Raises(Echo):
    def grade(self, example, transcript):
        raise SystemExit(3)

class Hangs(Echo):
    def grade(self, example, transcript):
        time.sleep(600)

class Lazy(Echo):
    def examples(self, split):
        yield from Echo.examples(self, split)

class Needs(Echo):
    def __init__(self, more):
        self.more = more

class Tooled(Echo):
    tools = "calculator"

class Named(Echo):
    name = "a/b"

class Twice(Echo):
    def examples(self, split):
        return 2 * Echo.examples(self, split)

class Mute(Echo):
    def messages(self, example):
        return [{"content": "x"}]

class Same(Echo):
    def examples(self, split):
        prompts = ("say more 0", "say more 1", "say more 2", "say heldout 0")
        more = [Example(prompt, prompt, "4", "echo") for prompt in prompts]
        return Echo.examples(self, split) + (more if split == "train" else [])

class Number(Echo):
    def grade(self, example, transcript):
        return 1.0
"""


def config(*mixture: str) -> Config:
    return Config(task=TaskConfig(mixture=mixture, train_problems=50, heldout_problems=10))


@pytest.fixture
def own(tmp_path) -> str:
    path = tmp_path / "my_task.py"
    path.write_text(OWN)
    return str(path)


def test_tasks_are_mixed_by_their_weights():
    with open_tasks(config("sums", "3*products")) as tasks:
        assert set(tasks.by_name) == {"sums", "products"}
        drawn = [e for step in range(4) for e in tasks.mixture.examples_of_step(step, 10, seed=0)]
        assert Counter(e.task for e in drawn) == {"sums": 10, "products": 30}
        heldout = {e.prompt for e in tasks.split("heldout")}
        assert len(heldout) == 20
        assert not heldout & {e.prompt for e in drawn}


def test_ones_own_task_is_a_class_in_a_file(own):
    with open_tasks(config(f"{own}:Echo")) as tasks:
        (example, *_) = tasks.mixture.examples_of_step(0, 4, seed=0)
        assert tasks.by_name["echo"].grade(example, [Turn("assistant", example.answer)]).value == 1


def test_ones_own_file_may_hold_programs_and_answers(tmp_path):
    rows = [{"prompt": f"{i}+1", "answer": str(i + 1)} for i in range(40)]
    tests = [{"kind": "function", "name": "f", "cases": [{"args": [2], "expected": 4}]}]
    programs = [{"prompt": f"double {i}", "tests": tests} for i in range(40)]
    for name, content in (("sums.jsonl", rows), ("double.jsonl", programs)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    names = (f"data:{tmp_path / 'sums.jsonl'}", f"data:{tmp_path / 'double.jsonl'}")
    with open_tasks(config(*names)) as tasks:
        assert set(tasks.by_name) == {"sums", "double"}
        drawn = tasks.mixture.examples_of_step(0, 20, seed=0)
        assert Counter(e.task for e in drawn) == {"sums": 10, "double": 10}
        sums, double = (next(e for e in drawn if e.task == name) for name in ("sums", "double"))
        right = rf"\boxed{{{sums.answer}}}"
        assert tasks.by_name["sums"].grade(sums, [Turn("assistant", right)]).value == 1
        assert tasks.by_name["sums"].grade(sums, [Turn("assistant", r"\boxed{0}")]).value == 0
        program = "def f(x):\n    return 2 * x"
        assert tasks.by_name["double"].grade(double, [Turn("assistant", program)]).value == 1
        assert (
            tasks.by_name["double"].grade(double, [Turn("assistant", "def f(x): pass")]).value == 0
        )
        assert tasks.by_name["sums"].examples("heldout")


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ((), r"mixture=\(\): name at least one task"),
        (("poems",), "no task 'poems'; use sums, products, lookups, guesses, functions"),
        (("x*sums",), r"no task 'x\*sums'"),
        (("0*sums",), "weight 0.0 of source 'sums' is not positive"),
        (("sums", "sums"), "'sums' is named twice"),
        (("no.py:Echo",), "there is no file no.py"),
    ],
)
def test_what_is_no_task_is_one_clear_sentence(mixture, message):
    with pytest.raises(ValueError, match=message), open_tasks(config(*mixture)):
        pass


def test_a_class_that_is_no_task_is_refused_with_what_it_lacks(own):
    with pytest.raises(ValueError, match="has no Poem"):
        load_task(f"{own}:Poem")
    for kind, message in (
        ("Stray", "train holds Example.*whose task is 'stray'"),
        ("Number", "Number.grade failed on an empty answer: TypeError: grade gave float"),
        ("Raises", "Raises.grade failed on an empty answer: SystemExit: 3"),
        ("Hangs", "Hangs.grade failed on an empty answer: not graded within 1 seconds"),
        ("Lazy", "Lazy.examples.'train'. gave <generator"),
        ("Needs", "TypeError: .*missing 1 required positional argument"),
        ("Tooled", "Tooled.tools='calculator': give a tuple"),
        ("Named", "Named.name='a/b': use letters"),
    ):
        with pytest.raises(ValueError, match=message):
            load_task(f"{own}:{kind}", max_seconds=1)
    with pytest.raises(ValueError, match="Half lacks tools, examples, messages, grade"):
        load_task(f"{own}:Half")


def test_functions_are_split_by_their_prompts_and_graded_by_execution():
    train, heldout = function_examples("train"), function_examples("heldout")
    assert len(train) + len(heldout) == 2 * 8 * 99
    assert all(is_heldout(e.prompt) for e in heldout)
    assert not any(is_heldout(e.prompt) for e in train)
    with open_tasks(config("functions")) as tasks:
        for example in heldout[:3]:
            right, lazy = program(example), lazy_program(example)
            values = [
                tasks.by_name["functions"].grade(example, [Turn("assistant", text)]).value
                for text in (right, lazy, f"```python\n{right}\n```", "none")
            ]
            assert values == [1, 0, 1, 0]


def test_rewards_have_the_parts_that_the_config_names():
    reward = RewardConfig(format="<think>.*", format_weight=0.1, length_buffer=4, length_weight=0.5)
    with open_tasks(dataclasses.replace(config("sums"), reward=reward)) as tasks:
        graded = Score(1.0, "scored")
        found = tasks.rewards.score(graded, Sampled("<think>so</think>", 42, "eos"))
    assert found.details == {"correctness": 1.0, "format": 1.0, "length": -0.5}  # of 44 tokens
    assert found.value == pytest.approx(1 + 0.1 - 0.25)
    wrong = dataclasses.replace(config("sums"), reward=RewardConfig(format="("))
    with pytest.raises(ValueError, match=r"config.reward.format: pattern '\('"), open_tasks(wrong):
        pass


def test_a_share_of_each_task_is_some_of_a_split():
    with open_tasks(config("sums", "products")) as tasks:
        assert Counter(e.task for e in tasks.some("heldout", 7)) == {"sums": 4, "products": 4}
        assert tasks.lines()[0] == "task sums: 50 examples to train on, 10 held out"


def test_tools_are_given_to_tasks_that_bring_none(tmp_path):
    rows = [{"prompt": f"{i}+1", "answer": str(i + 1)} for i in range(40)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixture = ("sums", "products", f"data:{tmp_path / 'own.jsonl'}")
    use = ToolsConfig(use=("calculator", "python"), workers=2)
    with open_tasks(dataclasses.replace(config(*mixture), tools=use)) as tasks:
        names = {name: [t.name for t in task.tools] for name, task in tasks.by_name.items()}
        given = ["calculator", "python"]
        assert names == {"sums": given, "own": given, "products": ["multiply"]}
        session = tasks.by_name["own"].tools[1].start()
        assert session.call({"code": "x = 6\nx * 7"}) == "42"
        session.close()


def test_the_example_of_a_task_of_ones_own_grades_by_nearness():
    with open_tasks(config(f"{ROOT / 'experiments/own_task.py'}:Nearness")) as tasks:
        task = tasks.by_name["nearness"]
        assert len(task.examples("train")) + len(task.examples("heldout")) == 1000
        assert not task.examples("unseen")
        (example, *_) = task.examples("heldout")
        texts = [rf"\boxed{{{int(example.answer) + off}}}" for off in (0, 1, -2)] + ["none"]
        scores = [task.grade(example, [Turn("assistant", text)]) for text in texts]
        assert [score.value for score in scores] == [1, 1 / 2, 1 / 3, 0]
        assert scores[1].details == {"off_by": 1}


def test_ids_that_occur_twice_are_refused(own):
    message = r"task echo: train has the ids \['train-0', 'train-1', 'train-2'\] more than once"
    with pytest.raises(ValueError, match=message), open_tasks(config(f"{own}:Twice")):
        pass


def test_messages_that_are_none_are_refused_with_their_example(own):
    with open_tasks(config(f"{own}:Echo")) as tasks:
        example = tasks.split("train")[0]
        for wrong in ([{"content": "x"}], [], None, [{"role": "martian", "content": "x"}]):
            tasks.by_name["echo"].messages = lambda _, wrong=wrong: wrong
            with pytest.raises(ValueError, match="the messages of example 'train-0' are "):
                tasks.pose([example], Tokenizer.load(ROOT / "orbit_jax/assets/tiny_agent_int4"))


def test_no_prompt_is_trained_on_that_any_task_holds_back(own, tmp_path):
    rows = [{"prompt": f"say more {i}", "answer": "1"} for i in range(2)]
    rows += [{"prompt": f"{i}", "answer": "1"} for i in range(40)]
    for name, of in (("train", rows[2:]), ("test", rows[:2])):
        lines = "".join(json.dumps(row) + "\n" for row in of)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    with open_tasks(config(f"{own}:Same", f"data:{tmp_path}")) as tasks:
        trained = {e.prompt for e in tasks.mixture.sources[0].examples}
        # What it holds out itself is left out too, under whatever id.
        assert trained == {"say more 2", *(f"say train {i}" for i in range(4))}
        assert "task echo: 3 were not trained on, as they are held out" in tasks.lines()


def test_of_each_task_at_most_so_many_are_held_out():
    with open_tasks(config("lookups", "sums")) as tasks:
        counts = Counter(e.task for e in tasks.split("heldout"))
        assert counts == {"lookups": 10, "sums": 10}
