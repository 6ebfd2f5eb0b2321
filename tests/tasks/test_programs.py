import json

import pytest

from orbit_jax.tasks import programs
from orbit_jax.tasks.programs import humaneval_tests, read_input_output, read_tests

FORMS = [
    {"kind": "function", "name": "f", "cases": [{"args": [1, [2]], "expected": None}]},
    {"kind": "stdio", "cases": [{"input": "1\n", "expected": "2\n"}]},
    {"kind": "asserts", "setup": "import math", "asserts": ["assert f(1)"]},
]


def run(program, form):
    """Whether a program passes asserts, run as a grader does."""
    scope = {}
    exec(program + "\n" + form["setup"], scope)
    try:
        for statement in form["asserts"]:
            exec(statement, scope)
    except AssertionError:
        return False
    return True


def test_all_three_forms_are_read_as_they_are_or_from_json():
    assert read_tests(FORMS) == FORMS
    assert read_tests(json.dumps(FORMS)) == FORMS
    assert read_tests(FORMS[0]) == FORMS[:1]


def test_a_list_of_texts_is_a_list_of_asserts():
    form = {"kind": "asserts", "setup": "", "asserts": ["assert f(1)", "assert f(2)"]}
    assert read_tests(form["asserts"]) == [form]


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "neither a list of tests"),
        (7, "neither a list of tests"),
        ("{", "not valid JSON"),
        ([{"kind": "doctest"}], "kind 'doctest'; kinds are function, stdio and asserts"),
        ([{"kind": "stdio", "cases": []}], "stdio test without `cases`"),
        ([{"kind": "stdio", "cases": [{"input": 1, "expected": "2"}]}], "texts `input` and"),
        ([FORMS[0] | {"name": "f()"}], "`name` of a function"),
        ([FORMS[0] | {"cases": [{"args": [1]}]}], "`args` .* and `expected`"),
        ([{"kind": "asserts", "asserts": []}], "no assert statements"),
        (["assert f()", " "], "is not text"),
    ],
)
def test_malformed_tests_say_why(tests, message):
    with pytest.raises(ValueError, match=message):
        read_tests(tests)


def test_inputs_and_outputs_are_texts_or_lists_of_lines():
    tests = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}
    assert read_input_output(json.dumps(tests)) == [
        {
            "kind": "stdio",
            "cases": [{"input": "1 2\n", "expected": "3\n"}, {"input": "3\n4", "expected": "7"}],
        }
    ]


def test_a_named_function_has_its_arguments_as_json_lines():
    tests = {"fn_name": "add", "inputs": ["[1]\n2"], "outputs": ["[1, 2]"]}
    assert read_input_output(tests) == [
        {"kind": "function", "name": "add", "cases": [{"args": [[1], 2], "expected": [1, 2]}]}
    ]


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ({"inputs": ["1"]}, "no lists `inputs` and `outputs`"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [1], "outputs": ["1"]}, "neither text nor a list of lines"),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [[1]]}, "not JSON texts"),
        ("[", "not valid JSON"),
    ],
)
def test_malformed_inputs_and_outputs_say_why(tests, message):
    with pytest.raises(ValueError, match=message):
        read_input_output(tests)


PROMPT = '''import math

def helper(x):
    return math.floor(x) + 1

def double(x):
    """Return \\d times two."""
'''
CHECK = "def check(candidate):\n    assert candidate(helper(1)) == 4\n"


def test_a_humaneval_check_judges_programs_and_has_the_helpers_of_the_prompt():
    (form,) = humaneval_tests(PROMPT, CHECK, "double")
    assert run("def double(x): return 2 * x", form)
    assert not run("def double(x): return x", form)


def test_a_humaneval_prompt_that_is_no_python_has_no_helpers():
    (form,) = humaneval_tests("Write double.", CHECK, "Solution().double")
    assert form["setup"] == CHECK
    assert form["asserts"] == ["assert check(Solution().double) is None"]


@pytest.mark.parametrize(
    ("test", "entry_point", "message"),
    [("assert True", "f", "defines no `check`"), (CHECK, "f); import os; (f", "not the name")],
)
def test_malformed_humaneval_rows_say_why(test, entry_point, message):
    with pytest.raises(ValueError, match=message):
        humaneval_tests("", test, entry_point)


def test_mbpp_setup_comes_after_the_program():
    row = {"test_list": ["assert total(root) == 3"], "test_setup_code": "root = Node(3)"}
    (form,) = programs.tests_of_row(row, "test_list", "text")
    program = "class Node:\n  def __init__(self, x): self.x = x\ndef total(n): return n.x"
    assert run(program, form)


def test_a_row_without_its_tests_says_so():
    with pytest.raises(ValueError, match="no `test_list`"):
        programs.tests_of_row({"text": "p"}, "test_list", "text")
