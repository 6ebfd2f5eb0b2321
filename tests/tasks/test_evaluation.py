"""From samples to measures, tables and comparisons."""

import dataclasses
import json
import math

import pytest

from orbit_jax.runs import evaluations
from orbit_jax.runs.files import to_json
from orbit_jax.tasks import comparison, evaluation
from orbit_jax.tasks.evaluation import Sample, Settings, of_problem, of_problems, samples_of, table
from orbit_jax.tasks.statistics import pass_at_k, wilson
from orbit_jax.tasks.task import Example

NAN = math.nan


def sample(value, vote="1", outcome="scored", problem="a"):
    outcome = "infra_failure" if math.isnan(value) else outcome
    return Sample(problem, "1 + 1", "2", (), 3, value, outcome, "eos", vote)


def test_a_sample_has_the_vote_of_its_last_turn_and_a_program_none():
    turns = [["assistant", "<tool>1*2</tool>"], ["tool", "2"], ["assistant", r"\boxed{2.0}"]]
    verdict = {
        "task": "products",
        "problem": "a",
        "prompt": "1*2",
        "answer": "2",
        "turns": turns,
        "outcome": "scored",
        "reward": 1.1,
        "parts": {"correctness": 1.0, "format": 1.0},
    }
    (one, program) = samples_of([verdict, verdict | {"answer": ""}], [9, 9], ["eos", "eos"])
    assert (one.problem, one.value, one.tokens, one.stop) == ("products/a", 1.0, 9, "eos")
    assert (one.vote, program.vote) == ("2", None)


def test_what_has_no_answer_has_no_majority():
    programs = [dataclasses.replace(sample(1.0), answer="") for _ in range(2)]
    found = of_problem({"sampled": programs}, (1, 2))
    assert found["pass@2"] == 1
    assert math.isnan(found["majority@2"])


def test_splits_that_hold_nothing_are_refused_when_they_are_named():
    splits = {"heldout": [1], "unseen": []}
    assert evaluation.choose(splits.get, []) == {"heldout": [1]}
    with pytest.raises(ValueError, match=r"no task .* has examples of 'unseen'"):
        evaluation.choose(splits.get, ["heldout", "unseen"])


def test_a_problem_has_one_greedy_measure_and_two_for_each_k():
    sampled = [sample(1, "2"), sample(0, "3"), sample(1, "2"), sample(0, "4")]
    found = of_problem({"greedy": [sample(0)], "sampled": sampled}, (1, 2, 4))
    assert found == pytest.approx(
        {
            "greedy": 0,
            "pass@1": 0.5,
            "pass@2": 5 / 6,
            "majority@2": 0.5,
            "pass@4": 1,
            "majority@4": 1,
        }
    )


def test_an_infra_failure_is_no_sample_of_its_problem():
    found = of_problem({"greedy": [sample(NAN)], "sampled": [sample(1), sample(NAN)]}, (1, 2))
    assert found["pass@1"] == 1
    assert all(math.isnan(found[name]) for name in ("greedy", "pass@2", "majority@2"))


def test_partial_credit_is_no_pass_and_what_cannot_be_read_votes_for_nothing():
    unread = [sample(0, "7", "parse_failure"), sample(0, "7", "truncated")]
    found = of_problem({"sampled": [sample(1, "2"), *unread, sample(0.9, "3")]}, (1, 4))
    assert found["pass@1"] == 0.25
    assert found["majority@4"] == 0.5  # of 2 and 3


def evaluated(name, values, difficulties="xxyy", ks=(1, 2), **settings):
    """An evaluation of four problems with (greedy, first and second sample) as they are given."""
    problems = [Example(f"{i}", f"{i} + 1", "2", "math", d) for i, d in enumerate(difficulties)]
    greedy = [sample(float(g), problem=f"math/{i}") for i, (g, _, _) in enumerate(values)]
    sampled = [
        sample(float(x), problem=f"math/{i}") for i, row in enumerate(values) for x in row[1:]
    ]
    by_mode = {"greedy": greedy, "sampled": sampled}
    settings = vars(Settings(samples=2, ks=ks, **settings))
    return {
        "name": name,
        "settings": settings,
        "problems": of_problems("heldout", problems, by_mode, ks),
    }


def write(path, found):
    path.mkdir()
    (path / evaluation.FILE).write_text(to_json(found))
    return str(path)


def test_a_table_has_all_problems_and_each_difficulty_with_intervals():
    values = [(1, 1, 0), (0, 0, 0), (1, 1, 1), (NAN, 1, NAN)]
    rows = table(evaluated("a", values)["problems"], samples=2)
    assert [(r["split"], r["task"], r["difficulty"]) for r in rows[::4]] == [
        ("heldout", "", ""),
        ("heldout", "math", "x"),
        ("heldout", "math", "y"),
    ]
    greedy, once = rows[0], rows[1]
    assert (greedy["measure"], greedy["problems"], greedy["left_out"]) == ("greedy", 3, 1)
    assert (greedy["value"], greedy["low"]) == pytest.approx((2 / 3, wilson(2, 3).low))
    assert (once["measure"], once["problems"]) == ("pass@1", 4)
    assert once["value"] == pytest.approx(2.5 / 4)
    assert once["low"] < once["value"] < once["high"] <= 1


def test_several_tasks_have_rows_of_their_own():
    found = evaluated("a", [(1, 1, 0)] * 4, "xxxx")["problems"]
    found[0]["task"] = "code"
    groups = [group for group, _ in evaluation.groups(found)]
    assert [(g["task"], g["difficulty"]) for g in groups] == [("", ""), ("code", ""), ("math", "")]


def test_two_evaluations_are_compared_problem_by_problem(tmp_path, capsys):
    before = evaluated("before", [(0, 0, 0), (0, 1, 0), (1, 1, 1), (NAN, 0, 1)])
    after = evaluated("after", [(1, 1, 0), (1, 1, 1), (1, 1, 1), (1, 0, 1)], temperature=0.5)
    after["problems"] = after["problems"][::-1]  # in any order
    paths = [write(tmp_path / "a", before), write(tmp_path / "b", after) + "/results.json"]
    first, second = comparison.read_two(paths)
    rows = comparison.compare(first, second)
    greedy, once = rows[0], rows[1]
    assert (greedy["measure"], greedy["problems"], greedy["method"]) == ("greedy", 3, "mcnemar")
    assert (greedy["first"], greedy["second"]) == (pytest.approx(1 / 3), 1)
    assert (greedy["better"], greedy["worse"], greedy["p_value"]) == (2, 0, 0.5)
    assert (once["measure"], once["problems"], once["method"]) == ("pass@1", 4, "sign flips")
    assert (once["first"], once["second"]) == (0.5, 0.75)
    assert once["difference"] == pytest.approx(0.25)
    assert {row["difficulty"] for row in rows} == {"", "x", "y"}
    remarks = comparison.differences(first, second)
    assert remarks == ["sampled otherwise: temperature 1.0 against 0.5"]
    evaluations.show_comparison("before", "after", rows, evaluation.shown(rows), remarks)
    out = capsys.readouterr().out
    assert "heldout math x greedy" in out
    assert "2 / 0" in out
    assert out.endswith("temperature 1.0 against 0.5\n")


def test_only_problems_and_measures_of_both_are_compared():
    before = evaluated("before", [(0, 0, 0)] * 4)
    after = evaluated("after", [(1, 1, 1)] * 4, ks=(2,))
    del after["problems"][0]
    rows = comparison.compare(before, after)
    whole = [row for row in rows if not row["difficulty"]]
    assert [row["measure"] for row in whole] == ["greedy", "pass@2", "majority@2"]
    assert {row["problems"] for row in whole} == {3}
    assert comparison.differences(before, after) == [
        "left out: 1 problems of the first alone, 0 of the second"
    ]


def test_a_problem_is_known_by_its_text_and_not_by_its_number():
    before, after = evaluated("before", [(0, 0, 0)] * 4), evaluated("after", [(1, 1, 1)] * 4)
    for i, one in enumerate(after["problems"]):
        one["digest"] = evaluation.digest(f"{i} + 2", "3")
    with pytest.raises(ValueError, match="'before' and 'after' share no problem"):
        comparison.compare(before, after)
    assert evaluation.digest("1  + 1", "2") == evaluation.digest("1 + 1", "2")
    assert evaluation.digest("1 + 1", "2") != evaluation.digest("1 + 1", "3")


def test_samples_that_count_as_wrong_or_not_at_all_are_told():
    found = evaluated("a", [(1, 1, NAN)] * 4)["problems"]
    assert evaluation.remarks(found) == [
        "4 of 12 completions could not be graded (infra failures) and are left out"
    ]
    found[0]["outcomes"] = {"truncated": 2, "parse_failure": 1}
    assert len(evaluation.remarks(found)) == 3


def test_by_default_k_is_every_power_of_two_and_all_samples():
    assert Settings(samples=8).ks == (1, 2, 4, 8)
    assert Settings(samples=6).ks == (1, 2, 4, 6)
    assert Settings(samples=0).ks == ()
    assert list(Settings(samples=0).modes) == ["greedy"]
    assert pass_at_k(6, 3, 6) == 1.0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Settings(samples=-1), "--samples=-1"),
        (lambda: Settings(temperature=0.0), "--temperature=0.0: must be above 0"),
        (lambda: Settings(top_k=-1), "--top_k=-1"),
        (lambda: Settings(top_p=1.5), "--top_p=1.5"),
        (lambda: Settings(samples=4, ks=(1, 8)), "--samples=4"),
        (lambda: evaluation.read_ks(["1", "two"]), "'two' is no whole number"),
        (lambda: comparison.read_two(["a"]), "takes two evaluations, got 1"),
        (lambda: comparison.read_two(["a", "b"]), "a is no results.json"),
    ],
)
def test_bad_input_is_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"problems": [{"measures": 1}]})])
def test_a_file_that_is_no_evaluation_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json is no results\.json of an evaluation"):
        comparison.read_two([str(tmp_path / "x.json")] * 2)
