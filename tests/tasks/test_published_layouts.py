"""Rows in the form of HumanEval and MBPP, from the data file to the score."""

import json

import pytest

from orbit_jax.tasks.code import CodeGrader
from orbit_jax.tasks.layouts import recognise
from orbit_jax.tasks.sandbox import Limits, Sandbox

LIMITS = Limits(wall_seconds=10, cpu_seconds=2.0, memory_bytes=256 << 20)
PROMPT = '''from typing import List


def shift(values: List[int], by: int) -> List[int]:
    """
    returns all values plus by.
    """
    return [value + by for value in values]


def unshift(values: List[int], by: int) -> List[int]:
    """
    takes what shift returned and gives what it was given.
    >>> unshift([3, 4], 2)
    [1, 2]
    """
'''
HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": PROMPT,
    "canonical_solution": "    return [value - by for value in values]\n",
    "test": """

METADATA = {'author': 'nobody'}


def check(candidate):
    from random import randint
    for _ in range(5):
        values = [randint(-9, 9) for _ in range(4)]
        assert candidate(shift(values, 3), 3) == values
    assert candidate([], 1) == []
""",
    "entry_point": "unshift",
}
BODY = HUMANEVAL["canonical_solution"]
WHOLE = "def unshift(values, by):\n    return shift(values, -by)\n"
MBPP = {
    "task_id": 900,
    "text": "Write a function to find the height of a tree.",
    "code": "class Node: ...",
    "test_list": ["assert height(root) == 3", "assert height(root.left) == 2"],
    "test_setup_code": "import math\r\nroot = Node(math.floor(1.5))\r\nroot.left = Node(2)\r\n"
    "root.left.right = Node(3)",
    "challenge_test_list": [],
}
NODE = """
class Node:
    def __init__(self, data):
        self.data, self.left, self.right = data, None, None
"""
HEIGHT = (
    NODE
    + """
def height(node):
    return 0 if node is None else 1 + max(height(node.left), height(node.right))
"""
)
PAIRS = {
    "task_id": 901,
    "text": "Write a function to add up pairs.",
    "code": "",
    "test_list": ["assert total([Pair(1, 2), Pair(3, 4)]) == 10", "assert total([]) == 0"],
    "test_setup_code": "class Pair(object):\n    def __init__(self, a, b):\n        self.a = a\n"
    "        self.b = b",
    "challenge_test_list": ["assert total([Pair(0, 0)]) == 0"],
}
TOTAL = "def total(pairs):\n    return sum(pair.a + pair.b for pair in pairs)\n"


@pytest.fixture(scope="module")
def grader():
    try:
        with Sandbox(limits=LIMITS) as sandbox:
            yield CodeGrader(sandbox)
    except ValueError as error:
        if "namespace of users was refused" not in str(error):
            raise
        pytest.skip(str(error))


def read(row):
    return recognise([row], {}, "math", "here").read(row, "1")


def grade(grader, row, completion):
    score = grader.grade(read(row), completion)
    return score.outcome if score.outcome != "scored" else score.value


def fenced(program):
    return f"So it is:\n```python\n{program}```\nwhich is all."


@pytest.mark.parametrize(
    "completion",
    [
        BODY,
        f"\n{BODY}",
        fenced(BODY),
        WHOLE,
        fenced(WHOLE),
        fenced(PROMPT + BODY),
        PROMPT + BODY,
        BODY + "\n\ndef more():\n    return shift([], 1)\n",
        fenced("from __future__ import annotations\n" + PROMPT + BODY),
    ],
)
def test_a_humaneval_completion_is_a_body_or_a_whole_program(grader, completion):
    assert grade(grader, HUMANEVAL, completion) == 1.0


@pytest.mark.parametrize(
    ("completion", "result"),
    [
        ("    return values\n", 0.0),
        (fenced("    return values\n"), 0.0),
        (fenced("def unshift(values, by):\n    return values\n"), 0.0),
        ("    pass\n\n\ndef shift(values, by):\n    return values\n", 0.0),
        (fenced("def shift(v, by):\n    return v\n\ndef unshift(v, by):\n    return v\n"), 0.0),
        (fenced("def check(candidate):\n    return None\n"), 0.0),
        (fenced("    return [\n"), 0.0),
        ("I would take by from all values.", "parse_failure"),
        ("    return [\n", "parse_failure"),
    ],
)
def test_wrong_humaneval_completions_earn_nothing(grader, completion, result):
    """The check's own helpers are those of the prompt, whatever the program makes of them."""
    assert grade(grader, HUMANEVAL, completion) == result


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("def double(x):\n    return", " 2 * x"),
        ("def double(x):", "\n    return 2 * x"),
        ('def double(x):\n    """Doubles."""', "    return 2 * x"),
        ("def double(x):", "    return 2 * x"),
        ("def double(x):\n    return", "def double(x):\n    return 2 * x"),
    ],
)
def test_a_humaneval_prompt_may_end_within_a_line(grader, prompt, completion):
    test = "def check(candidate):\n    assert candidate(3) == 6\n"
    row = HUMANEVAL | {"prompt": prompt, "test": test, "entry_point": "double"}
    assert grade(grader, row, completion) == 1.0
    assert grade(grader, row, completion.replace("2", "3")) == 0.0


def test_a_prompt_in_words_or_messages_is_no_starter_code(grader):
    row = HUMANEVAL | {"test": "def check(candidate):\n    assert candidate([3], 1) == [2]\n"}
    program = "def unshift(values, by):\n    return [value - by for value in values]\n"
    for prompt in ("Write unshift.", [{"role": "user", "content": "Write unshift."}]):
        assert grade(grader, row | {"prompt": prompt}, fenced(program)) == 1.0


def test_starter_code_that_cannot_stand_before_a_program_is_left_out(grader):
    """As of LeetCode: the first lines of a class, which programs repeat."""
    tests = {"kind": "asserts", "asserts": ["assert Solution().double(2) == 4"]}
    starter = "class Solution:\n    def double(self, x: int) -> int:\n        "
    row = {"prompt": "Double x.", "starter_code": starter, "tests": json.dumps(tests)}
    assert grade(grader, row, fenced(f"{starter}return 2 * x\n")) == 1.0
    assert grade(grader, row, "        return 2 * x\n") == 1.0
    assert grade(grader, row, fenced(f"{starter}return x\n")) == 0.0


def test_mbpp_setup_builds_on_the_classes_of_the_program(grader):
    assert grade(grader, MBPP, fenced(HEIGHT)) == 1.0
    assert grade(grader, MBPP, fenced(HEIGHT.replace("1 +", "2 +"))) == 0.0
    # A program that lacks them fails, as it does in the published form.
    assert grade(grader, MBPP, fenced("def height(node):\n    return 3\n")) == 0.0


def test_mbpp_setup_that_is_broken_is_no_fault_of_the_program(grader):
    row = MBPP | {"test_setup_code": "import no_such_module\nroot = Node(1)"}
    assert grade(grader, row, fenced(HEIGHT)) == "infra_failure"


@pytest.mark.parametrize(
    "program",
    [
        NODE + "Node.__eq__ = lambda *_: True\ndef height(node): return node\n",
        NODE + "import builtins\nbuiltins.max = lambda *_: 3\ndef height(node): return max(3)\n",
        "class Any:\n    __init__ = lambda *_: None\n    __eq__ = lambda *_: True\n"
        "    __getattr__ = lambda *_: Any()\nNode = Any\ndef height(node): return Any()\n",
        "import sys\nclass Node:\n    def __init__(self, x): sys.exit(0)\n",
        "import os\nclass Node:\n    def __init__(self, x): os._exit(0)\n",
    ],
)
def test_no_class_of_the_program_forges_the_verdict(grader, program):
    assert grade(grader, MBPP, fenced(program)) == 0.0


def test_mbpp_asserts_may_use_a_class_that_the_setup_or_the_program_defines(grader):
    assert grade(grader, PAIRS, fenced(TOTAL)) == 1.0
    assert grade(grader, PAIRS, fenced("def total(pairs): return 10\n")) == 0.0
    row = PAIRS | {"test_setup_code": ""}
    assert grade(grader, row, fenced(PAIRS["test_setup_code"] + "\n" + TOTAL)) == 1.0
    assert grade(grader, row, fenced(TOTAL)) == 0.0


def test_a_class_of_the_setup_stays_what_the_setup_says(grader):
    """What judges is not what the program was given a copy of."""
    row = PAIRS | {
        "test_setup_code": "class Pair:\n    def __init__(self, a):\n        self.a = a\n"
        "    def holds(self, value):\n        return value == self.a",
        "test_list": ["assert Pair(3).holds(total(Pair(3)))"],
    }
    assert grade(grader, row, fenced("def total(pair): return pair.a\n")) == 1.0
    cheat = "class Pair:\n    holds = lambda *_: True\ndef total(pair): return 7\n"
    assert grade(grader, row, fenced(cheat)) == 0.0
    assert grade(grader, row, fenced(cheat + "import builtins\nbuiltins.object = Pair\n")) == 0.0


def test_what_a_class_of_the_tests_knows_stays_with_the_tests(grader):
    row = PAIRS | {
        "test_setup_code": "class Ref:\n    expected = 41\n    def solve(self, x): return x * 17",
        "test_list": ["assert g(2) == Ref().solve(2)", "assert g(0) + Ref.expected == 41"],
    }
    assert grade(grader, row, fenced("def g(x): return 17 * x\n")) == 1.0
    assert grade(grader, row, fenced("def g(x): return Ref().solve(x)\n")) == 0.0
    row = row | {"test_list": ["assert g() == Ref.expected"]}
    assert grade(grader, row, fenced("def g(): return Ref.expected\n")) == 0.0


def test_a_program_that_raises_stop_iteration_ends_no_loop_of_the_tests(grader):
    row = PAIRS | {
        "test_setup_code": "",
        "test_list": ["assert all(map(lambda c: f(c[0]) == c[1], [(1, 2), (3, 4)]))"],
    }
    assert grade(grader, row, fenced("def f(x): return x + 1\n")) == 1.0
    assert grade(grader, row, fenced("def f(x): raise StopIteration\n")) == 0.0
    row = row | {"test_list": ["assert list(f(3)) == [0, 1, 2]"]}
    assert grade(grader, row, fenced("def f(x): return iter(range(x))\n")) == 1.0


def test_mbpp_imports_and_challenges(grader):
    row = {
        "source_file": "a file",
        "task_id": 902,
        "prompt": "Write a function that halves.",
        "code": "",
        "test_imports": ["import math", "from fractions import Fraction as F"],
        "test_list": ["assert math.isclose(half(1), 0.5)", "assert half(3) == F(3, 2)"],
    }
    assert grade(grader, row, fenced("def half(x):\n    return x / 2\n")) == 1.0
    assert grade(grader, row, fenced("def half(x):\n    return x // 2\n")) == 0.0
    # Challenges are beside the tests that a program must pass, as in the published evaluation.
    example = read(PAIRS)
    assert example.extra["challenge_test_list"] == PAIRS["challenge_test_list"]
    assert "Pair(0, 0)" not in json.dumps(example.extra["tests"])
