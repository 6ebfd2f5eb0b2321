from fractions import Fraction

import pytest

from orbit_jax.tasks.answers import extract_answer, normalise_answer, read_number


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so \boxed{48}.", "48"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\boxed{5}+1}", r"\boxed{5}+1"),
        (r"put it in \boxed{ like this: \boxed{7}", "7"),
        (r"\boxed{5} and {", "5"),
        (r"\boxed{4", None),
        (r"\boxed{5} or rather \boxed{6", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{}", None),
        ("no answer here", None),
        ("", None),
    ],
)
def test_last_balanced_box_is_the_answer(completion, answer):
    assert extract_answer(completion) == answer


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("27+35=62;62-14=48", "48"),
        ("The answer is 1,000.", "1000"),
        ("It is \u22125", "-5"),
        ("between 3-7", "7"),
        ("so 2 2/3", "8/3"),
        ("about 50%", "1/2"),
        ("= 1/2", "1/2"),
        ("gives -3.25.", "-13/4"),
        ("it is $12$", "12"),
    ],
)
def test_without_a_box_the_last_number_is_the_answer(completion, number):
    assert read_number(normalise_answer(extract_answer(completion))) == Fraction(number)


def test_a_power_is_not_cut_into_its_last_digits():
    found = read_number(normalise_answer(extract_answer("so it is 1/2^99")))
    assert found == Fraction(1, 2**99)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,000", 1000),
        ("1{,}000", 1000),
        (r"1\,000", 1000),
        (r"1,\!234,\!567", 1234567),
        ("1000", 1000),
        ("\u22127", -7),
        ("- 7", -7),
        ("+7", 7),
        ("0.5", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("1/2", Fraction(1, 2)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"\dfrac12", Fraction(1, 2)),
        (r"\frac{-1}{2}", Fraction(-1, 2)),
        (r"-\frac{1}{2}", Fraction(-1, 2)),
        (r"2\frac{2}{3}", Fraction(8, 3)),
        ("2 2/3", Fraction(8, 3)),
        ("-2 2/3", Fraction(-8, 3)),
        (r"50\%", Fraction(1, 2)),
        ("50%", Fraction(1, 2)),
        ("2^{10}", 1024),
        (r"\frac{1}{2^{99}}", Fraction(1, 2**99)),
        (r"3 \times 10^{-2}", Fraction(3, 100)),
        ("1e3", 1000),
        (r"$\left 5 \right$", 5),
    ],
)
def test_numbers_are_read_exactly(text, value):
    assert read_number(normalise_answer(text)) == value


@pytest.mark.parametrize(
    "text",
    [
        "27 + 35",
        "27+35",
        "1,2",
        "1,00",
        "1/0",
        r"\frac{1}{0}",
        "0^{-1}",
        "2 2",
        "x",
        "",
        "9^{9^{9}}",
        "2^1000",
        "9" * 5000,
        "1e9999",
        r"\{1\}",
        "1 2/",
        "--1",
        "1_000",
    ],
)
def test_anything_else_is_no_number(text):
    assert read_number(normalise_answer(text)) is None


def test_long_repetitive_text_is_read_in_linear_time():
    for piece in (r"\boxed{", "{", "1,000,", "9", "1 ", r"\frac{1}", "2^"):
        extract_answer(piece * 20_000)
