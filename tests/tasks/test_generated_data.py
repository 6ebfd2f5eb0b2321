"""The package is optional: a stand-in of its interface serves where it is missing."""

import dataclasses
import sys
import types

import pytest

from orbit_jax.tasks import families
from orbit_jax.tasks.data import load_examples
from orbit_jax.tasks.grading import Grader


@dataclasses.dataclass
class Settings:
    seed: int | None = None
    size: int = 500
    most: int = 9


class Doubles:
    def __init__(self, config):
        assert config.most > 0, "most must be positive"
        self.config = config

    def __len__(self):
        return self.config.size

    def __getitem__(self, i):
        number = (self.config.seed * 31 + i * 7) % self.config.most
        metadata = {"number": number, "pair": (i, number)}
        return {"question": f"({i}) Double {number}.", "answer": 2 * number, "metadata": metadata}

    def score_answer(self, answer, entry):
        return 0.5 if answer is None else float(answer == str(2 * entry["metadata"]["number"]))


class Runs(Doubles):
    def score_answer(self, answer, entry):
        return float(eval(answer) == entry["answer"])


@pytest.fixture
def stand_in(monkeypatch):
    known = {"doubles": (Doubles, Settings), "runs": (Runs, Settings)}
    package = types.ModuleType("reasoning_gym")
    package.create_dataset = lambda name, **settings: known[name][0](known[name][1](**settings))
    factory = types.ModuleType("reasoning_gym.factory")
    factory.DATASETS = known
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


@pytest.mark.usefixtures("stand_in")
def test_examples_are_those_of_the_family_with_its_settings():
    first, *others = families.generate("reasoning_gym:doubles?size=30&seed=2&most=5")
    assert len(others) == 29
    assert (first.id, first.task, first.source) == ("doubles:0", "reasoning_gym", "doubles")
    assert (first.prompt, first.answer, first.difficulty) == ("(0) Double 2.", "4", "most=5")
    assert len(families.generate("reasoning_gym:doubles")) == 500


WORKERS_PACKAGE = """
import time

class Doubles:
    def __getitem__(self, number):
        return {"answer": 2 * number}

    def score_answer(self, answer, entry):
        if answer == "loop":
            time.sleep(60)
        if answer == "raise":
            raise RecursionError
        return 0.25 if answer != str(entry["answer"]) else 1.0

def create_dataset(name, **settings):
    assert (name, settings) == ("doubles", {"size": 500, "seed": 1, "most": 5})
    return Doubles()
"""


def test_the_family_scores_by_its_own_function_in_a_worker(monkeypatch, tmp_path):
    (tmp_path / "reasoning_gym.py").write_text(WORKERS_PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Grader(max_seconds=1.0) as grader:
        spec = "reasoning_gym:doubles?most=5&seed=1"
        boxed = [rf"\boxed{{{text}}}" for text in ("6", "7", "raise", "loop", "6")]
        grades = [grader.score(spec, 3, text) for text in [*boxed, "none"]]
    assert [grade.value for grade in grades] == [1.0, 0.25, 0.0, 0.0, 1.0, 0.0]
    assert [g.outcome == "parse_failure" for g in grades] == [False, False, True, True, False, True]


@pytest.mark.usefixtures("stand_in")
def test_families_are_loaded_as_other_data_are():
    data = load_examples("reasoning_gym:doubles?size=100")
    assert sum(map(len, data.splits.values())) == 100
    assert data.splits["heldout"]
    assert data.content_hash != load_examples("reasoning_gym:doubles?size=99").content_hash


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "no family 'nothing'; there are doubles, runs"),
        ("runs", "runs answers as Python code"),
        ("doubles?most=0", "refuses its settings: most must be positive"),
        ("doubles?least=1", "refuses its settings: .*'least'"),
    ],
)
def test_families_that_cannot_be_had_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        families.generate(f"reasoning_gym:{spec}")


def test_without_the_package_its_installation_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="run `pip install reasoning-gym=="):
        families.generate("reasoning_gym:doubles")


def test_the_package_itself_gives_what_the_stand_in_does():
    pytest.importorskip("reasoning_gym")
    spec = "reasoning_gym:chain_sum?size=20&seed=3&min_terms=3&max_terms=3"
    examples = families.generate(spec)
    assert examples == families.generate(spec)
    assert len({e.prompt for e in examples}) == 20
    assert {e.difficulty for e in examples} == {"min_terms=3&max_terms=3"}
    with Grader() as grader:
        assert all(grader.score(spec, e.extra["number"], e.answer).value == 1.0 for e in examples)
        assert grader.score(spec, 0, "7777").value < 1.0
    with pytest.raises(ValueError, match="runs answers as Python code"):
        families.generate("reasoning_gym:countdown")
    assert families.generate("reasoning_gym:number_sorting?size=2")
