"""A calculator as a tool: exact arithmetic over whole numbers, decimals and fractions.

Expressions are read by a parser of their own, nothing is evaluated by Python, and every number on
the way is bounded, so that a call takes no time to speak of.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

MAX_CHARACTERS = 1000  # of an expression
MAX_BITS = 4096  # of a numerator or denominator, about 1,200 digits
MAX_DECIMALS = 60  # digits behind the point; longer numbers are written as fractions

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?(?:[eE][+-]?\d{1,4})?"
    r"|\.\d+(?:[eE][+-]?\d{1,4})?)"
    r"|(?P<sign>\*\*|//|[-+*/%^()])|(?P<end>$))"
)
_SPELLINGS = str.maketrans({"\u2212": "-", "×": "*", "·": "*", "÷": "/", "[": "(", "]": ")"})
# How tightly each operator binds; a sign binds more than a product and less than a power.
_BINDING = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2, "^": 4, "**": 4}
_SIGN_BINDING = 3


class Calculator:
    """The tool `calculator`: `{"expression": "12*(3+4)"}` gives `84`."""

    name = "calculator"
    description = "Computes an arithmetic expression exactly: + - * / // % ^ and parentheses."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "such as 12*(3+4)^2"}},
        "required": ["expression"],
    }

    def start(self) -> "Calculator":
        """A session; it keeps no state, so all share one."""
        return self

    def call(self, arguments: Mapping[str, Any]) -> str:
        """The value of the expression, or what is wrong with it."""
        try:
            return write_number(calculate(str(arguments.get("expression", ""))))
        except ValueError as error:
            return f"error: {error}"

    def close(self) -> None:
        """Nothing is held."""


def calculate(expression: str) -> Fraction:
    """The exact value of an expression.

    Raises:
      ValueError: when it is no arithmetic expression, is longer than `MAX_CHARACTERS`, divides by
        zero, has a power that is not whole, or exceeds `MAX_BITS` on the way.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(
            f"the expression has {len(expression)} characters, more than {MAX_CHARACTERS}"
        )
    values: list[Fraction] = []
    waiting: list[str] = []  # operators and open parentheses; a sign is written as "sign"
    before = "("  # what the last token was: a value, an operator, or an open parenthesis
    for token in _tokens(expression.translate(_SPELLINGS)):
        after_value = before == "value"
        if token == "(" or not _is_sign(token):
            if after_value:
                raise ValueError(f"an operator is missing before {token}")
            if token == "(":
                waiting.append(token)
            else:
                values.append(_read(token))
            before = "(" if token == "(" else "value"
        elif token == ")":
            if not after_value:
                raise ValueError("a value is missing before )")
            while waiting and waiting[-1] != "(":
                _apply(waiting.pop(), values)
            if not waiting:
                raise ValueError("a parenthesis is closed that was not opened")
            waiting.pop()
        elif not after_value:
            if token not in "+-":
                raise ValueError(f"a value is missing before {token}")
            waiting.append("sign" if token == "-" else "plus")
        else:
            while waiting and waiting[-1] != "(" and _goes_first(waiting[-1], token):
                _apply(waiting.pop(), values)
            waiting.append(token)
            before = "operator"
    if before != "value":
        raise ValueError("a value is missing at the end")
    while waiting:
        if waiting[-1] == "(":
            raise ValueError("a parenthesis is not closed")
        _apply(waiting.pop(), values)
    return values[0]


def write_number(value: Fraction) -> str:
    """A number as text: whole, as a finite decimal, or as a fraction with its size."""
    if value.denominator == 1:
        return str(value.numerator)
    decimals = _count_decimals(value.denominator)
    if decimals is not None:
        whole, part = divmod(abs(value.numerator) * 10**decimals // value.denominator, 10**decimals)
        return f"{'-' if value < 0 else ''}{whole}.{part:0{decimals}d}"
    try:
        return f"{value.numerator}/{value.denominator}, about {float(value):.6g}"
    except OverflowError:
        return f"{value.numerator}/{value.denominator}"


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    while True:
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"{text[at:].strip()[:20]!r} is no number, operator or parenthesis")
        if match["end"] is not None:
            return tokens
        tokens.append(match["number"] or match["sign"])
        at = match.end()


def _is_sign(token: str) -> bool:
    return token[0] not in "0123456789."


def _read(number: str) -> Fraction:
    return _bounded(Fraction(number.replace(",", "")))


def _goes_first(waiting: str, token: str) -> bool:
    """Whether an operator that waits is applied before the one that comes: powers go from right."""
    binding = _BINDING.get(waiting, _SIGN_BINDING)
    return binding > _BINDING[token] or (binding == _BINDING[token] and token not in ("^", "**"))


def _apply(operator: str, values: list[Fraction]) -> None:
    right = values.pop()
    if operator in ("sign", "plus"):
        values.append(-right if operator == "sign" else right)
        return
    left = values.pop()
    if operator in ("/", "//", "%") and right == 0:
        raise ValueError("division by zero")
    if operator == "+":
        value = left + right
    elif operator == "-":
        value = left - right
    elif operator == "*":
        value = left * right
    elif operator == "/":
        value = left / right
    elif operator == "//":
        value = Fraction(left // right)
    elif operator == "%":
        value = left % right
    else:
        value = _power(left, right)
    values.append(_bounded(value))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("a power that is no whole number is not exact")
    if base == 0 and exponent < 0:
        raise ValueError("division by zero")
    if abs(base) == 1 or base == 0:  # of any size
        return base ** int(exponent % 2) if base else Fraction(int(exponent == 0))
    bits = max(abs(base.numerator).bit_length(), base.denominator.bit_length()) - 1
    if abs(exponent) * max(bits, 1) > MAX_BITS:
        raise ValueError(f"the power is larger than {MAX_BITS} bits")
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator).bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError(f"a number is larger than {MAX_BITS} bits")
    return value


def _count_decimals(denominator: int) -> int | None:
    """Digits behind the point of a fraction in lowest terms; None without end, or too many."""
    twos = (denominator & -denominator).bit_length() - 1
    rest, fives = denominator >> twos, 0
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    return max(twos, fives) if rest == 1 and max(twos, fives) <= MAX_DECIMALS else None
