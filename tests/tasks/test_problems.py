import itertools
import re

import pytest

from orbit_jax.tasks.problems import (
    TRAINED_DIFFICULTIES,
    UNSEEN_DIFFICULTY,
    direct_solution,
    generate_problems,
    is_heldout,
    normalise_prompt,
    problem_stream,
    train_problem_stream,
    worked_solution,
)


@pytest.fixture(scope="module")
def data():
    return generate_problems(seed=0)


def texts(problems):
    return {normalise_prompt(p.prompt) for p in problems}


def test_has_ten_thousand_distinct_problems_and_five_hundred_of_each_other_part(data):
    assert len(texts(data["train"])) == len(data["train"]) == 10_000
    assert len(texts(data["heldout"])) == len(data["heldout"]) == 500
    assert len(texts(data["unseen"])) == len(data["unseen"]) == 500


def test_parts_never_overlap(data):
    assert not texts(data["train"]) & texts(data["heldout"])
    assert not texts(data["train"]) & texts(data["unseen"])


def test_heldout_covers_every_trained_difficulty_and_unseen_none(data):
    assert {p.difficulty for p in data["train"]} == set(TRAINED_DIFFICULTIES)
    assert {p.difficulty for p in data["heldout"]} == set(TRAINED_DIFFICULTIES)
    assert {p.difficulty for p in data["unseen"]} == {UNSEEN_DIFFICULTY}


def test_easiest_difficulty_is_not_exhausted_by_the_heldout_part(data):
    assert sum(p.difficulty == "3x1" for p in data["train"]) > 2000
    assert sum(p.difficulty == "3x1" for p in data["heldout"]) >= 100


def test_answers_are_right(data):
    for problem in data["train"][:500] + data["unseen"][:50]:
        assert int(problem.answer) == eval(problem.prompt)


def test_largest_of_three_has_thousands_of_distinct_problems_with_right_answers():
    data = generate_problems(0, 5000, 500, 50, ("max3x2",), "max4x2")
    assert len(texts(data["train"]) | texts(data["heldout"])) == 5500
    assert data["train"][0].prompt.startswith("the largest of ")
    for part, terms in ((data["heldout"], 3), (data["unseen"], 4)):
        for problem in part:
            numbers = [int(number) for number in re.findall(r"\d+", problem.prompt)]
            assert len(numbers) == terms
            assert all(10 <= number <= 99 for number in numbers)
            assert int(problem.answer) == max(numbers)


def test_products_of_two_digits_from_2_to_9_are_64_problems_with_right_answers():
    problems = itertools.islice(problem_stream(0, ("product2x1",)), 2000)
    found = {problem.prompt: problem.answer for problem in problems}
    assert found == {f"{a}*{b}": str(a * b) for a in range(2, 10) for b in range(2, 10)}


def test_families_take_turns_in_one_task():
    data = generate_problems(0, 40, 10, 0, ("2x2", "max3x2"))
    assert [p.difficulty for p in data["train"]].count("2x2") == 20


def test_same_seed_gives_the_same_problems_and_another_seed_others():
    sizes = dict(train=50, heldout=10, unseen=10)
    assert generate_problems(3, **sizes) == generate_problems(3, **sizes)
    assert generate_problems(3, **sizes)["train"] != generate_problems(4, **sizes)["train"]


def test_training_stream_of_any_seed_never_gives_a_heldout_problem(data):
    stream = texts(itertools.islice(train_problem_stream(seed=17), 20_000))
    assert not stream & (texts(data["heldout"]) | texts(data["unseen"]))
    assert stream & texts(data["train"])


def test_side_of_the_split_depends_on_the_text_alone():
    assert is_heldout("7+5-1-5")
    assert is_heldout(" 7+5-1-5\n")
    assert not is_heldout("7+9-0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(difficulties=("3y2",)), "'3y2' is not of the form"),
        (dict(difficulties=("min3x2",)), "'min3x2' is not of the form"),
        (dict(difficulties=("max3x2",), unseen_difficulty="product"), "'product' is not of"),
        (dict(difficulties=()), "difficulties is empty"),
        (dict(difficulties=("6x1",)), "among the trained"),
        (dict(difficulties=("2x1",), train=300, heldout=5), "too few distinct problems"),
    ],
)
def test_bad_requests_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate_problems(0, **arguments)


def test_solutions_go_from_left_to_right():
    assert worked_solution("27 + 35 - 14") == r"27+35=62;62-14=48;\boxed{48}"
    assert worked_solution("3 - 5 + 4") == r"3-5=-2;-2+4=2;\boxed{2}"
    assert direct_solution("27 + 35 - 14") == r"\boxed{48}"
    with pytest.raises(ValueError, match="not a sum"):
        worked_solution("2 * 3")
