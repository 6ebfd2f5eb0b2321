import numpy as np
import pytest

from orbit_jax.tasks import grading
from orbit_jax.tasks.math import MathTask, load_data
from orbit_jax.tasks.problems import Problem


def test_text_becomes_one_user_message_and_chat_stays():
    chat = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    task = MathTask()
    assert task.messages(Problem("a", "1 + 1", "2")) == [{"role": "user", "content": "1 + 1"}]
    assert task.messages(Problem("a", chat, "2")) == list(chat)


def test_a_system_message_goes_before_text_but_into_no_chat():
    chat = ({"role": "user", "content": "u"},)
    task = MathTask(system="Answer with a number.")
    assert task.messages(Problem("a", "1 + 1", "2")) == [
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": "1 + 1"},
    ]
    assert task.messages(Problem("a", chat, "2")) == list(chat)


def test_the_data_are_of_the_difficulties_that_are_named():
    data = load_data("", 0, 20, 5, 5, ("2x2", "max3x2"), "max4x2")
    assert {p.difficulty for p in data.train + data.heldout} == {"2x2", "max3x2"}
    assert {p.difficulty for p in data.unseen} == {"max4x2"}


def test_rewards_are_one_zero_or_nan_with_their_outcomes(monkeypatch, tmp_path):
    (tmp_path / "worker.py").write_text("raise SystemExit(1)")
    monkeypatch.setattr(grading, "WORKER_FILE", tmp_path / "worker.py")
    two, symbolic = Problem("a", "1 + 1", "2"), Problem("b", "simplify", "x+1")
    completions = [r"1+1=2;\boxed{2}", r"\boxed{3}", r"\boxed{2", r"\boxed{y}"]
    values, outcomes = MathTask().rewards([two, two, two, symbolic], completions)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, [1.0, 0.0, 0.0, np.nan])
    assert outcomes == ["scored", "scored", "parse_failure", "infra_failure"]


def test_one_problem_per_completion_is_required():
    with pytest.raises(ValueError, match="1 problems and 2 completions"):
        MathTask().rewards([Problem("a", "1 + 1", "2")], ["2", "2"])
