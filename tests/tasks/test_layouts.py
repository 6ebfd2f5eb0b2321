import json
from decimal import Decimal

import pytest

from orbit_jax.tasks.layouts import recognise


def read(*rows, task="math", **columns):
    layout = recognise(rows, columns, task, "x.jsonl")
    return layout.name, [layout.read(row, f"x:{i}") for i, row in enumerate(rows, start=1)]


def read_one(row, **columns):
    name, (example,) = read(row, **columns)
    return name, example


USER = {"role": "user", "content": "1 + 1?"}


@pytest.mark.parametrize("prompt", ["prompt", "question", "problem", "instruction"])
@pytest.mark.parametrize("answer", ["answer", "ground_truth"])
def test_usual_columns_of_prompt_and_answer_are_understood(prompt, answer):
    name, example = read_one({prompt: "1 + 1?", answer: "2"})
    assert name == "question and answer"
    assert (example.id, example.prompt, example.answer) == ("x:1", "1 + 1?", "2")
    assert (example.task, dict(example.extra)) == ("math", {})


def test_the_task_of_plain_rows_is_the_one_asked_for():
    _, (example,) = read({"prompt": "p", "answer": "a"}, task="riddles")
    assert example.task == "riddles"


def test_prompts_may_be_messages_as_in_trl():
    for column in ("prompt", "messages"):
        _, example = read_one({column: [{**USER, "name": None}], "solution": "$2$"})
        assert example.prompt == (USER,)
        assert example.answer == "$2$"


def test_the_input_of_an_instruction_is_part_of_the_prompt():
    _, example = read_one({"instruction": "Add them.", "input": "1 and 1", "answer": 2})
    assert example.prompt == "Add them.\n\n1 and 1"


def test_numbers_are_answers_as_they_were_written():
    rows = [{"prompt": "p", "answer": value} for value in (Decimal("0.10"), 72, 0.5)]
    assert [e.answer for e in read(*rows)[1]] == ["0.10", "72", "0.5"]


def test_source_difficulty_and_other_columns_are_kept():
    row = {"prompt": "p", "answer": "a", "data_source": "s", "level": "Level 2"}
    _, example = read_one(row | {"weight": Decimal("0.5"), "more": {"x": [Decimal(1)]}})
    assert (example.source, example.difficulty) == ("s", "Level 2")
    assert json.dumps(example.extra) == '{"weight": 0.5, "more": {"x": [1.0]}}'


def test_gsm8k_answers_stand_after_the_hashes():
    row = {"question": "How many?", "answer": "40 + 2 = <<40+2=42>>42\n#### 1,042"}
    name, example = read_one(row)
    assert name == "GSM8K"
    assert (example.prompt, example.answer) == ("How many?", "1,042")
    assert example.extra["solution"] == row["answer"]


def test_a_gsm8k_row_without_hashes_is_bad_and_a_lone_one_with_them_is_text():
    row = {"question": "How many?", "answer": "#### 2"}
    bad = {"question": "Why?", "answer": "so"}
    layout = recognise([row, row, bad], {}, "math", "x")
    with pytest.raises(ValueError, match="no `#### answer`"):
        layout.read(bad, "x:3")
    name, examples = read(row, bad, bad)
    assert (name, examples[0].answer) == ("question and answer", "#### 2")


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"First \boxed{1}, so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"Hence $\fbox{7}$ of 9", "7"),
        (r"Hence $\boxed 3$ of 9", "3"),
    ],
)
def test_math_answers_are_the_last_box_of_the_solution(solution, answer):
    row = {"problem": "p", "solution": solution, "level": "Level 3", "type": "Algebra"}
    name, example = read_one(row)
    assert (name, example.answer, example.difficulty) == ("MATH", answer, "Level 3")
    assert dict(example.extra) == {"solution": solution, "type": "Algebra"}


@pytest.mark.parametrize("solution", ["The result is 7.", r"So \boxed{7 of 9"])
def test_a_math_solution_without_a_closed_box_is_bad(solution):
    with pytest.raises(ValueError, match=r"no `\\boxed\{...\}`"):
        read_one({"problem": "p", "solution": solution})


def test_beside_an_answer_a_solution_is_the_way_there():
    _, example = read_one({"problem": "p", "solution": r"\boxed{1}", "answer": "one"})
    assert example.answer == "one"
    assert example.extra["solution"] == r"\boxed{1}"


def test_verl_rows_have_their_answer_in_the_reward_model():
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [USER],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 0},
    }
    name, example = read_one(row)
    assert (name, example.prompt, example.answer) == ("verl", (USER,), "72")
    assert (example.source, example.task) == ("openai/gsm8k", "math")
    assert example.extra["extra_info"] == {"split": "train", "index": 0}


def test_verl_rows_of_programs_have_their_tests_there():
    truth = '{"inputs": ["1\\n"], "outputs": ["2\\n"]}'
    _, example = read_one({"prompt": [USER], "reward_model": {"ground_truth": truth}})
    assert (example.task, example.answer) == ("code", "")
    assert example.extra["tests"] == [
        {"kind": "stdio", "cases": [{"input": "1\n", "expected": "2\n"}]}
    ]


def test_humaneval_rows_are_programs_with_a_check():
    prompt = 'def one():\n    """Return 1."""\n'
    row = {
        "task_id": "HumanEval/0",
        "prompt": prompt,
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
        "entry_point": "one",
    }
    name, example = read_one(row)
    assert (name, example.task, example.prompt) == ("HumanEval", "code", prompt)
    assert example.extra["tests"] == [
        {"kind": "asserts", "setup": row["test"], "asserts": ["assert check(one) is None"]}
    ]
    assert example.extra["starter_code"] == prompt
    assert example.extra["entry_point"] == "one"
    assert example.extra["task_id"] == "HumanEval/0"


@pytest.mark.parametrize("text", ["text", "prompt"])
def test_mbpp_rows_are_programs_with_asserts_and_show_the_first(text):
    row = {
        "task_id": 11,
        text: "Write a function that doubles.",
        "code": "def double(x): return 2 * x",
        "test_list": ["assert double(1) == 2", "assert double(2) == 4"],
        "challenge_test_list": [],
    } | ({"test_setup_code": ""} if text == "text" else {"test_imports": ["import math"]})
    name, example = read_one(row)
    assert (name, example.task) == ("MBPP", "code")
    assert example.prompt.startswith("Write a function that doubles.\n\n")
    assert example.prompt.endswith("assert double(1) == 2")
    assert "double(2)" not in example.prompt
    setup = "" if text == "text" else "import math"
    assert example.extra["tests"] == [
        {"kind": "asserts", "setup": setup, "asserts": row["test_list"]}
    ]
    assert example.extra["code"] == row["code"]


def test_programs_may_bring_tests_or_inputs_and_outputs():
    tests = [
        {"kind": "function", "name": "f", "cases": [{"args": [Decimal("0.5")], "expected": 1}]}
    ]
    name, example = read_one({"prompt": "p", "tests": tests})
    assert (name, example.task) == ("programs with tests", "code")
    assert example.extra["tests"][0]["cases"] == [{"args": [0.5], "expected": 1}]
    row = {"question": "p", "input_output": '{"inputs": ["1"], "outputs": ["2"]}', "solutions": ""}
    assert read_one(row)[1].extra["tests"][0]["kind"] == "stdio"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "p", "label": 1}, "no column that is the prompt; the columns are label, text"),
        ({"prompt": "p"}, "no column that is the answer; the columns are prompt"),
        ({"prompt": "p", "question": "q", "answer": "a"}, "prompt and question could each be the"),
        ({"prompt": "p", "answer": "a", "ground_truth": "b"}, "answer and ground_truth could"),
        ({"prompt": "p", "tests": [1], "test_list": ["a"]}, "test_list and tests could each be"),
        ({"question": "q", "choices": ["a", "b"], "answer": 1}, "'choices' would be left out"),
    ],
)
def test_unknown_and_ambiguous_layouts_are_refused_with_what_is_there(row, message):
    with pytest.raises(ValueError, match=message) as error:
        read_one(row)
    assert str(error.value).startswith("data x.jsonl: ")
    assert "Understood are a prompt (prompt, question," in str(error.value)


def test_named_columns_settle_what_is_ambiguous():
    row = {"prompt": "p", "question": "q", "answer": "a", "ground_truth": "b", "choices": ["c"]}
    _, example = read_one(row | {"text": "t"}, prompt="text", answer="ground_truth")
    assert (example.prompt, example.answer) == ("t", "b")
    assert example.extra["question"] == "q"


def test_data_without_references_name_no_answer():
    _, example = read_one({"prompt": "p", "label": 1}, answer="")
    assert (example.prompt, example.answer) == ("p", "")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": "text"}, "column 'text'.* is in no row"),
        ({"reward": "x"}, "'reward' is neither"),
    ],
)
def test_wrongly_named_columns_are_refused(columns, message):
    with pytest.raises(ValueError, match=message):
        read_one({"prompt": "p", "answer": "a"}, **columns)


def test_a_few_odd_rows_do_not_change_the_layout():
    rows = [{"prompt": "p", "answer": "a"}] * 3
    layout = recognise([*rows, {"question": "q"}], {}, "math", "x")
    with pytest.raises(ValueError, match="no `prompt`"):
        layout.read({"question": "q", "answer": "a"}, "x:4")
    with pytest.raises(ValueError, match="no `answer`"):
        layout.read({"prompt": "q"}, "x:4")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [USER, {"role": "assistant", "content": "2"}], "answer": 2}, "assistant's"),
        ({"prompt": [{"role": "user", "content": ["image"]}], "answer": 2}, "`role` and `content`"),
        ({"prompt": "p", "answer": ["2"]}, "`answer` is neither text nor a number"),
        ({"prompt": "p", "answer": float("nan")}, "`answer` is neither text nor a number"),
        ({"prompt": "p", "answer": " "}, "`answer` is empty"),
        ({"prompt": "p", "reward_model": {"style": "rule"}}, "no `reward_model.ground_truth`"),
    ],
)
def test_bad_rows_say_why(row, message):
    with pytest.raises(ValueError, match=message):
        read_one(row)
