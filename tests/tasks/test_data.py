import json

import pytest

from orbit_jax.tasks.data import load_examples
from orbit_jax.tasks.problems import is_heldout
from orbit_jax.tasks.task import Example


def row(i, **more):
    return {"prompt": f"What is {i} + 1?", "answer": str(i + 1)} | more


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def ids(examples):
    return [example.id for example in examples]


def test_a_file_without_splits_is_split_by_its_prompts_alone(tmp_path):
    rows = [row(i) for i in range(200)]
    one = load_examples(write(tmp_path / "a.jsonl", *rows))
    two = load_examples(write(tmp_path / "b.jsonl", *rows[::-1]))
    for data in (one, two):
        assert all(is_heldout(e.prompt) for e in data.splits["heldout"])
        assert not any(is_heldout(e.prompt) for e in data.splits["train"])
    heldout = [{e.prompt for e in data.splits["heldout"]} for data in (one, two)]
    assert heldout[0] == heldout[1]
    assert 5 < len(heldout[0]) < 40
    assert sum(map(len, one.splits.values())) == 200
    assert one.report.lines() == ["read as all rows: question and answer"]


def test_an_example_has_what_its_row_says(tmp_path):
    more = {"data_source": "s", "difficulty": "easy", "hint": "h"}
    data = load_examples(write(tmp_path / "a.jsonl", *[row(i, **more) for i in range(50)]))
    assert data.splits["train"][0] == Example(
        "a:1", "What is 0 + 1?", "1", "math", "easy", "s", {"hint": "h"}
    )


def test_given_splits_are_kept_and_the_test_split_is_held_out(tmp_path):
    for start, name in enumerate(("train", "test", "dev")):
        write(tmp_path / f"{name}.jsonl", *[row(100 * start + i) for i in range(5)])
    splits = load_examples(tmp_path).splits
    assert {name: ids(examples)[:2] for name, examples in splits.items()} == {
        "train": ["train:1", "train:2"],
        "heldout": ["test:1", "test:2"],
        "validation": ["dev:1", "dev:2"],
    }
    assert {name: len(examples) for name, examples in splits.items()} == {
        "train": 5,
        "heldout": 5,
        "validation": 5,
    }


def test_without_a_test_split_the_validation_split_is_held_out(tmp_path):
    write(tmp_path / "train.jsonl", row(1))
    write(tmp_path / "validation.jsonl", row(2))
    splits = load_examples(tmp_path).splits
    assert {name: ids(e) for name, e in splits.items()} == {
        "train": ["train:1"],
        "heldout": ["validation:1"],
    }


def test_a_train_split_alone_is_split_by_its_prompts(tmp_path):
    write(tmp_path / "train.jsonl", *[row(i) for i in range(100)])
    splits = load_examples(tmp_path).splits
    assert splits["heldout"]
    assert len(splits["train"]) + len(splits["heldout"]) == 100


def test_a_test_split_alone_leaves_nothing_to_train_on(tmp_path):
    write(tmp_path / "test.jsonl", row(1))
    assert load_examples(tmp_path).splits["train"] == ()


def test_splits_may_be_named_with_a_path_each(tmp_path):
    paths = {"train": tmp_path / "x" / "a.jsonl", "test": tmp_path / "y" / "a.jsonl"}
    write(paths["train"], row(1))
    write(paths["test"], row(2))
    splits = load_examples(paths).splits
    assert {name: ids(e) for name, e in splits.items()} == {
        "train": ["train/a:1"],
        "heldout": ["test/a:1"],
    }
    with pytest.raises(ValueError, match="'heldout' is test again"):
        load_examples(paths | {"heldout": paths["test"]})
    write(tmp_path / "z" / "train.jsonl", row(1))
    write(tmp_path / "z" / "test.jsonl", row(2))
    with pytest.raises(ValueError, match=r"given for 'train', have splits .* \(test, train\)"):
        load_examples({"train": tmp_path / "z"})


def test_repeated_prompts_are_left_out_and_told(tmp_path):
    rows = [row(i) for i in range(60)]
    again = {"prompt": [{"role": "user", "content": "What is  3 + 1?"}], "answer": "4"}
    data = load_examples(write(tmp_path / "a.jsonl", *rows, again, row(4, answer="7")))
    assert sum(map(len, data.splits.values())) == 60
    assert data.report.duplicates == ("a:61", "a:62")
    assert data.report.contradictions == ("a:62",)
    assert data.report.lines()[1:] == [
        "2 have a prompt of their split again and were left out: a:61, a:62",
        "1 of these have another answer than the first: a:62",
    ]


def test_what_another_split_has_is_not_trained_on(tmp_path):
    write(tmp_path / "train.jsonl", *[row(i) for i in range(12)])
    write(tmp_path / "test.jsonl", *[row(i) for i in range(6, 8)], row(50))
    write(tmp_path / "dev.jsonl", *[row(i) for i in range(7, 12)])
    data = load_examples(tmp_path)
    assert ids(data.splits["train"]) == [f"train:{i}" for i in range(1, 7)]
    assert len(data.splits["heldout"]) == 3
    assert data.report.overlap == tuple(f"train:{i}" for i in range(7, 13))
    assert data.report.lines()[-1] == (
        "6 were not trained on, since another split has their prompt: "
        "train:7, train:8, train:9, train:10, train:11, ..."
    )


def test_bad_rows_are_told_with_their_places_and_left_out(tmp_path):
    write(tmp_path / "train.jsonl", row(1), "{bad", "", {"prompt": "p"}, row(2))
    write(tmp_path / "test.jsonl", row(3), row(4, answer=[]))
    data = load_examples(tmp_path)
    assert ids(data.splits["train"]) == ["train:1", "train:5"]
    assert sorted(data.report.bad_rows) == [
        "test.jsonl line 2: `answer` is neither text nor a number",
        "train.jsonl line 2: not valid JSON",
        "train.jsonl line 4: no `answer`",
    ]
    assert data.report.lines()[1].startswith("3 bad rows left out: ")


def test_more_bad_rows_than_the_limit_are_refused(tmp_path):
    rows = [row(i) for i in range(60)]
    load_examples(write(tmp_path / "a.jsonl", *rows, *["{"] * 20))
    path = write(tmp_path / "a.jsonl", *rows, *["{"] * 21)
    with pytest.raises(ValueError, match=r"21 bad rows, more than max_bad_rows=20.*and 1 more"):
        load_examples(path)
    load_examples(path, max_bad_rows=21)
    with pytest.raises(ValueError, match=r"line 61: not valid JSON; and 20 more\."):
        load_examples(path, max_bad_rows=0)


def test_data_of_nothing_but_bad_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no examples; .* can be read: a.jsonl line 1: not valid"):
        load_examples(write(tmp_path / "a.jsonl", "{"))
    with pytest.raises(ValueError, match="no examples; they need at least one row"):
        load_examples(write(tmp_path / "a.jsonl"))


def test_a_layout_that_is_not_understood_is_refused_with_its_split(tmp_path):
    write(tmp_path / "train.jsonl", row(1))
    write(tmp_path / "test.jsonl", {"text": "a"})
    with pytest.raises(ValueError, match=r"split test: no column that is the prompt; .* are text"):
        load_examples(tmp_path)


def test_columns_and_task_may_be_named(tmp_path):
    path = write(tmp_path / "a.jsonl", *[{"q": f"{i}?", "a": i} for i in range(50)])
    data = load_examples(path, columns={"prompt": "q", "answer": "a"}, task="riddles")
    example = data.splits["train"][0]
    assert (example.prompt, example.answer, example.task) == ("0?", "0", "riddles")


def test_a_split_by_prompts_with_an_empty_part_is_refused(tmp_path):
    with pytest.raises(ValueError, match="1 examples split into 1 train and 0 held-out ones"):
        load_examples(write(tmp_path / "a.jsonl", row(1)))


def test_splits_of_unknown_names_alone_are_refused(tmp_path):
    paths = {"easy": write(tmp_path / "a.jsonl", row(1))}
    with pytest.raises(ValueError, match="the splits easy, none of which is train or test"):
        load_examples(paths)


def test_the_hash_is_of_what_tasks_are_made_of(tmp_path):
    def hashed(*rows, **arguments):
        path = write(tmp_path / "a.jsonl", *rows)
        return load_examples({"train": path, "test": path}, **arguments).content_hash

    program = {"prompt": "p", "tests": ["assert f(1)"]}
    base = hashed(row(1), row(2))
    assert base == hashed(row(1, note="x"), row(2))
    others = [
        hashed(row(2), row(1)),
        hashed(row(1)),
        hashed(row(1, answer="5"), row(2)),
        hashed(row(1, prompt="Add 1 and 1."), row(2)),
        hashed(row(1), row(2), task="riddles"),
        hashed(program),
        hashed(program | {"tests": ["assert f(2)"]}),
    ]
    assert len({base, *others}) == 1 + len(others)
