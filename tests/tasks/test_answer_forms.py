r"""The forms in which people and models write answers, graded in a thread that is not the main one.

A row is the content of a box, the reference, and whether they are equal; "cannot be read" earns
nothing either.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from orbit_jax.tasks.answers import vote
from orbit_jax.tasks.decoration import MAX_CHARACTERS, split_unit
from orbit_jax.tasks.grading import Grader

FORMS = {
    "braces": [("{5}", "5"), ("{{{5}}}", "5"), (" {5} ", "5"), (r"\boxed{5}", "5"), ("5", "{5}")],
    "fractions": [
        (r"\dfrac{3}{4}", "0.75"),
        (r"\tfrac34", "3/4"),
        (r"\frac{6}{8}", "3/4"),
        (r"\frac{3}{-4}", "-0.75"),
        ("3 / 4", r"\frac{3}{4}"),
    ],
    "decimals": [(".5", "1/2"), ("5.", "5"), ("5.00", "5"), (r"0.\overline{3}", r"\frac13")],
    "typed signs": [
        ("½", "0.5"),
        ("2½", "5/2"),
        ("5²", "25"),
        ("√2", r"\sqrt{2}"),
        ("∞", r"\infty"),
        (r"\(5\)", "5"),
        ("**5**", "5"),
        ("`5`", "5"),
        (r"50\text{%}", "50%"),
        (r"0.\dot{3}", "1/3"),
    ],
    "differences": [("x-z-y", "x-y-z"), (r"a \cdot b", "ba")],
    "words": [
        ("Listen", "listen"),
        (r"\text{Yes}", "yes"),
        ("left, right", r"\text{left, right}"),
        ("A, B, C", "A,B,C"),
    ],
    "repeating": [(r"0.1\overline{6}", "1/6"), (r"-1.\bar{45}", "-16/11")],
    "percent": [
        (r"12.5\%", r"\frac18"),
        ("0.5", "50%"),
        (r"50\text{ percent}", r"50\%"),
        ("50 per cent", "50%"),
    ],
    "minus signs": [
        ("\u22125", "-5"),
        ("\u2212\u00a05", "-5"),
        ("\u20135", "-5"),
        ("\uff0d5", "-5"),
        ("- 5", "\u22125"),
        ("\u2212\\frac{1}{2}", "-0.5"),
    ],
    "plus": [("+5", "5"), ("+ 5", "5"), (r"+\frac12", "0.5")],
    "thousands": [
        ("1,000", "1000"),
        ("1{,}000", "1000"),
        ("1000", "1{,}000"),
        (r"1\,000", "1000"),
        (r"1\!,000", "1000"),
        ("12 345 678", "12345678"),
        ("1,000.50", "1000.5"),
    ],
    "mixed numbers": [
        ("2 2/3", "8/3"),
        (r"2\frac{2}{3}", "8/3"),
        (r"-2\dfrac23", "-8/3"),
        ("8/3", r"2 \frac{2}{3}"),
    ],
    "scientific": [
        ("1.5e3", "1500"),
        (r"1.5 \times 10^{-3}", "0.0015"),
        (r"1.5\cdot10^3", "1500"),
        ("1.5*10^3", "1500"),
        ("1.5 × 10^3", "1500"),
    ],
    "units": [
        (r"5\text{ cm}", "5"),
        (r"5\,\mathrm{m/s}", "5"),
        (r"5\mathrm{~cm}^2", "5"),
        (r"\text{5 apples}", "5"),
        ("5 cm", r"5\text{ centimeters}"),
        (r"5\text{ sq. ft.}", r"5\text{ square feet}"),
        (r"\$1,000", r"1000\text{ dollars}"),
        ("€5", "5"),
    ],
    "degrees": [(r"90^\circ", "90"), ("90°", r"90^{\circ}"), (r"90\degree", "90 degrees")],
    "styles": [(r"\mathbf{5}", "5"), (r"\textbf{A}", "A"), (r"\text{(A)}", "A"), (r"$5$", "5")],
    "spacing": [("~5~", "5"), (r"5\quad", "5"), (r"\,5\;", "5"), (r"\left( 1,2 \right)", "(1,2)")],
    "names": [
        ("x = 5", "5"),
        ("5", "x=5"),
        ("f(2)=5", "5"),
        (r"\theta = 30^\circ", "30"),
        (r"\text{Area} = 5", "5"),
    ],
    "sets and pairs": [(r"\{2, 1\}", r"\{1,2\}"), ("(0.5, 2)", r"\left(\frac12,2\right)")],
    "intervals": [
        (r"\left[0, \frac12\right)", "[0, 0.5)"),
        (r"(3,\infty)\cup(-\infty,2)", r"(-\infty,2)\cup(3,\infty)"),
        (r"x\in[0,1)", "[0,1)"),
    ],
    "matrices": [(r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}")],
    "symbols": [
        (r"\varnothing", r"\emptyset"),
        ("4i+3", "3+4i"),
        ("101_{2}", "101_2"),
        ("x/2", r"\frac{1}{2}x"),
        ("n(n+1)/2", r"\frac{n^2+n}{2}"),
    ],
}
NOT_EQUAL = {
    "letters in another order": [
        ("silent", "listen"),
        ("no", "on"),
        ("ACB", "ABC"),
        ("B, A, C", "A, B, C"),
        ("B then A", "A then B"),
        ("right, left", "left, right"),
    ],
    "powers": [(r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"), ("1/2^99 x", "1/2^98 x")],
    "percent": [(r"50\%", "50"), ("50", "50%"), (r"50\text{ percent}", "50"), ("5 per cent", "5")],
    "mixed numbers": [("2", "2 2/3"), ("2 2/3", "2"), ("22/3", "2 2/3"), ("4/3", r"2\frac23")],
    "rounded": [("0.333", "1/3"), ("0.3333333333", r"0.\overline{3}"), ("1.41421356", r"\sqrt2")],
    "a sign": [("\u22125", "5"), ("5", "-5")],
    "thousands": [("10,00", "1000"), ("1 00", "100"), ("1,0000", "10000")],
    "an expression": [
        ("27 + 35", "62"),
        ("2+3", "x=5"),
        ("2+3", r"5\text{ cm}"),
        ("45+45", r"90^\circ"),
        ("x=2+3", "5"),
        ("5!", "120"),
        (r"\sqrt{4}", "2"),
        (r"9^{9^{9}}", "5"),
    ],
    "words that count": [
        (r"5\text{ million}", "5"),
        (r"5\text{ dozen}", "5"),
        (r"5\text{ and a half}", "5"),
        (r"5\text{ tenths}", "5"),
        (r"5\text{ or more}", "5"),
        (r"\text{minus }5", "5"),
        (r"\text{at least }5", "5"),
        (r"5\text{ pi}", "5"),
        (r"5\text{ }^2", "5"),
        ("5x", "5"),
        ("5m", "5"),
        ("5 ab", "5"),
        ("5 ft 6 in", "5"),
    ],
    "another unit": [(r"5\text{ m}", r"5\text{ cm}"), ("5 ms", "5 m"), ("5 cm^2", "5 cm")],
    "sets and pairs": [
        ("(1,2)", r"\{1,2\}"),
        (r"\{1,2\}", "(1,2)"),
        ("(2,1)", "(1,2)"),
        ("(1,2)", "(1,2,3)"),
        ("1,2", "1"),
        ("48, 49", "48"),
    ],
    "intervals": [("[0,1]", "[0,1)"), ("(0,1)", "[0,1)"), (r"[0,1]\cup[2,3]", r"[0,1]\cup[2,4]")],
    "matrices": [(r"\begin{pmatrix}1\\3\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}")],
    "bases": [("101", "101_2"), ("101_3", "101_2"), ("101_2", "101")],
    "relations": [("x<5", "x>5"), (r"x\le5", "x<5"), ("2:3", "3:2"), ("5", "x<5")],
}


def rows(forms):
    return [pytest.param(*pair, id=f"{k}: {pair}") for k, pairs in forms.items() for pair in pairs]


@pytest.fixture(scope="module")
def value_of():
    """What a completion earns, graded from a thread."""
    with Grader() as grader, ThreadPoolExecutor(1) as thread:
        yield lambda text, answer: thread.submit(grader.grade, text, answer).result().value


@pytest.mark.parametrize(("box", "answer"), rows(FORMS))
def test_every_form_of_the_right_answer_counts(value_of, box, answer):
    assert value_of(rf"The answer is \boxed{{{box}}}.", answer) == 1


@pytest.mark.parametrize(("box", "answer"), rows(NOT_EQUAL))
def test_what_is_not_the_answer_does_not_count(value_of, box, answer):
    assert value_of(rf"The answer is \boxed{{{box}}}.", answer) == 0


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        (r"\boxed{4} or \boxed{5}", "5", 1),
        (r"\boxed{4} or \boxed{5}", "4", 0),
        (r"\boxed{4}, \boxed{5}", r"\{4,5\}", 0),
        (r"\boxed{5", "5", 0),
        (r"\boxed{5} no, \boxed{5", "5", 0),
        (r"\boxed{\frac{1}{2}", "0.5", 0),
        ("The answer is 5.", "5", 1),
        ("so it is \u22125.", "-5", 1),
        ("#### 1,000", "1000", 1),
        ("**5**", "5", 1),
        ("$$x = \\frac{3}{4}.$$", "0.75", 1),
        ("pages 3\u20137", "7", 1),
        ("4 of 5", "4", 0),
        ("", "5", 0),
    ],
)
def test_the_last_box_counts_and_without_one_the_last_number(value_of, completion, answer, value):
    assert value_of(completion, answer) == value


def test_equal_numbers_vote_together():
    forms = (r"\boxed{1/2}", r"\boxed{x = 0.5}", r"\boxed{50\%}", r"\boxed{\dfrac12\text{ cm}}")
    assert {vote(form) for form in (*forms, "so 0.50.")} == {"1/2"}
    assert vote(r"\boxed{(1, 2)}") == vote(r"\boxed{(1,2)}") == "(1,2)"
    assert vote(r"\boxed{5") is None
    assert vote("") is None


def test_long_text_is_left_alone():
    for text in ("5 " + "." * MAX_CHARACTERS, "5" + " a" * 20_000, "{" * 20_000 + "}" * 20_000):
        assert split_unit(text) == (text, "")
