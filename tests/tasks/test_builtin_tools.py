"""The calculator, the search, and tools by name."""

import json
import time

import pytest

from orbit_jax.tasks.builtin_tools import open_tools
from orbit_jax.tasks.calculator import MAX_BITS, Calculator, calculate, write_number
from orbit_jax.tasks.search import Search, load_corpus


def compute(expression: object) -> str:
    return Calculator().start().call({"expression": expression})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("2-3-4", "-5"),
        ("12345678901234567890*98765432109876543210", "1219326311370217952237463801111263526900"),
        ("-2^2", "-4"),
        ("2^3^2", "512"),
        ("2**-1", "0.5"),
        ("2^-3^2", "0.001953125"),
        ("2*-3", "-6"),
        ("--3", "3"),
        ("0.1+0.2", "0.3"),
        ("1,234.50*2", "2469"),
        ("1/3+1/6", "0.5"),
        ("1/3", "1/3, about 0.333333"),
        ("-7//2", "-4"),
        ("-7%3", "2"),
        ("3 × (4 ÷ 2) \u2212 1", "5"),
        ("1.5e3", "1500"),
        ("-0.05", "-0.05"),
        ("0^0", "1"),
        ("(-1)^99999999999", "-1"),
        (5, "5"),
    ],
)
def test_arithmetic_is_exact(expression, value):
    assert compute(expression) == value


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("1/0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0^-1", "division by zero"),
        ("2^0.5", "no whole number is not exact"),
        ("", "a value is missing at the end"),
        ("1+", "a value is missing at the end"),
        ("*2", "a value is missing before *"),
        ("()", "a value is missing before )"),
        ("2 3", "an operator is missing before 3"),
        ("(1", "not closed"),
        ("1)", "closed that was not opened"),
        ("__import__('os')", "is no number, operator or parenthesis"),
        ("9^9^9^9^9", "the power is larger than"),
        ("(1/3)^-99999999999999999999", "the power is larger than"),
        ("1e9999", "larger than"),
        ("1e1000*1e1000", "larger than"),
        ("1" * 1001, "1001 characters, more than 1000"),
    ],
)
def test_what_cannot_be_computed_is_told(expression, told):
    answer = compute(expression)
    assert answer.startswith("error: ")
    assert told in answer


def test_no_expression_takes_long():
    start = time.perf_counter()
    hostile = ["2^" * 400 + "2", "(" * 900, "-" * 999 + "1", "*".join(["9" * 180] * 5)]
    hostile += ["(10^1000)^999999", "(1/10^1000)^-999999"]
    hostile += ["+".join(f"1/{n}" for n in range(100, 250)), "(9^400)*" * 100 + "1", "1/3^2000"]
    for expression in hostile:
        compute(expression)
    assert time.perf_counter() - start < 1.0
    assert calculate(f"2^{MAX_BITS - 1}") == 2 ** (MAX_BITS - 1)
    assert len(write_number(calculate("3^2000/7^1000"))) < 2000


def test_a_key_that_is_met_is_alone_and_words_find_the_best_overlap():
    corpus = {
        "Paris": "the capital of France",
        "Rome": "the capital of Italy, on the Tiber",
        "Tiber": "a river of Italy",
        "Zürich": "a city on a river",
    }
    call = Search(corpus, max_results=2).start().call
    assert call({"query": "  ROME "}) == "Rome: the capital of Italy, on the Tiber"
    assert call({"query": "zürich"}) == "Zürich: a city on a river"
    assert call({"query": "river, Italy?"}).splitlines() == [
        "Tiber: a river of Italy",
        "Rome: the capital of Italy, on the Tiber",
    ]
    assert call({"query": "Tiber"}) == "Tiber: a river of Italy"
    # Of as many words in common, those in the key count more, and earlier entries come first.
    assert call({"query": "where is the Tiber"}).splitlines()[0].startswith("Rome")
    assert call({"query": "tiber banks"}).splitlines()[0] == "Tiber: a river of Italy"
    assert len(call({"query": "the a of"}).splitlines()) == 2
    assert call({"query": "volcano"}) == "nothing found"
    assert call({"query": " "}) == "error: the query is empty"
    assert call({}) == "error: the query is empty"


def test_an_answer_of_search_is_bounded():
    call = Search({"a": "x" * 100}, max_characters=20).call
    assert call({"query": "a"}) == "a: " + "x" * 17 + "... (83 more)"
    with pytest.raises(ValueError, match="got 0 entries"):
        Search({})


def test_a_corpus_is_read_from_jsonl_and_bad_rows_are_named(tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"key": "a", "text": "é"}\n\n{"key": "b", "text": "2", "more": 1}\n')
    assert load_corpus(file) == {"a": "é", "b": "2"}
    rows = [{"key": "a"}, {"key": "a", "text": "1"}, [], {"key": "a", "text": "2"}, {"key": 1}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{")
    with pytest.raises(ValueError, match="has 5 bad rows") as fault:
        load_corpus(file)
    for told in ("line 1: not an object with `key`", "line 4: its `key` occurs", "line 6: not val"):
        assert told in str(fault.value)
    file.write_text("{}\n" * 30)
    with pytest.raises(ValueError, match=r"line 20: .*; and 10 more\."):
        load_corpus(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match="holds no entries"):
        load_corpus(file)
    with pytest.raises(ValueError, match="does not exist"):
        load_corpus(tmp_path / "absent")


def test_tools_are_opened_by_name_and_python_alone_has_a_sandbox(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"key": "a", "text": "1"}\n')
    opened = []

    def sandbox():
        opened.append(1)
        return "a sandbox"

    tools = open_tools(("calculator", f"search:{corpus}"), sandbox)
    assert [tool.name for tool in tools] == ["calculator", "search"]
    assert tools[1].start().call({"query": "a"}) == "a: 1"
    assert not opened
    (python,) = open_tools(("python",), sandbox)
    assert (python.name, python.sandbox, opened) == ("python", "a sandbox", [1])
    assert open_tools((), sandbox) == ()


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("browser",), "use='browser': there is no such tool; use calculator, python or search:"),
        (("search",), "use='search': there is no such tool"),
        (("search:nowhere.jsonl",), "use='search:nowhere.jsonl': corpus nowhere.jsonl does not"),
        (("calculator", "calculator"), "calculator is there twice"),
    ],
)
def test_what_names_no_tool_is_refused(names, told):
    with pytest.raises(ValueError, match=told):
        open_tools(names, None)
