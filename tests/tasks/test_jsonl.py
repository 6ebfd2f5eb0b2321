import json

import pytest

from orbit_jax.tasks.jsonl import load_jsonl, split_heldout


def write(path, *lines):
    path.write_bytes(
        b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines)
    )
    return path


def test_reads_text_and_chat_prompts(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    rows = [{"prompt": "1 + 1", "answer": "2", "source": "x"}, {"prompt": chat, "answer": 4}]
    first, second = load_jsonl(write(tmp_path / "a.jsonl", *rows))
    assert (first.id, first.prompt, first.answer) == ("line-1", "1 + 1", "2")
    assert (second.prompt, second.answer) == (tuple(chat), "4")


def test_numeric_answers_keep_their_digits(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"prompt": "p", "answer": 0.10000000000000000001}')
    assert load_jsonl(path)[0].answer == "0.10000000000000000001"


def test_bad_rows_are_refused_together_with_their_line_numbers(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "1 + 1", "answer": "2"},
        b"{not json",
        {"prompt": "x"},
        b"",
        {"prompt": "", "answer": "2"},
        {"prompt": "y", "answer": ["2"]},
        b'{"prompt": "\xff", "answer": "1"}',
        {"prompt": "1  + 1", "answer": "3"},
        b"7",
        {"prompt": [{"role": "user"}], "answer": "3"},
    )
    with pytest.raises(ValueError, match="8 bad rows") as error:
        load_jsonl(path)
    for line, reason in [
        (2, "not valid JSON"),
        (3, "no `answer`"),
        (5, "`prompt` has a message without"),
        (6, "`answer` is neither text nor a number"),
        (7, "not UTF-8 text"),
        (8, "the prompt of line 1 again"),
        (9, "not a JSON object"),
        (10, "`prompt` has a message without"),
    ]:
        assert f"line {line}: {reason}" in str(error.value)


def test_at_most_twenty_bad_rows_are_listed(tmp_path):
    path = write(tmp_path / "a.jsonl", *[{"prompt": f"{i}"} for i in range(27)])
    with pytest.raises(ValueError, match=r"27 bad rows.*line 20: no `answer`; and 7 more") as error:
        load_jsonl(path)
    assert "line 21:" not in str(error.value)


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="holds no problems"):
        load_jsonl(write(tmp_path / "a.jsonl", b"\n\n"))


def test_heldout_split_ignores_the_order_of_rows_and_never_overlaps(tmp_path):
    rows = [{"prompt": f"What is {i} + 1?", "answer": i + 1} for i in range(300)]
    one = split_heldout(load_jsonl(write(tmp_path / "a.jsonl", *rows)))
    two = split_heldout(load_jsonl(write(tmp_path / "b.jsonl", *rows[::-1])))
    assert {p.prompt for p in one.heldout} == {p.prompt for p in two.heldout}
    assert not {p.prompt for p in one.heldout} & {p.prompt for p in one.train}
    assert 10 < len(one.heldout) < 60
    assert len(one.heldout) + len(one.train) == 300


def test_a_split_with_an_empty_part_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "0 - 4", "answer": "-4"})
    with pytest.raises(ValueError, match="1 train and 0 held-out"):
        split_heldout(load_jsonl(path))
