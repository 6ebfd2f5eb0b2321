r"""Finding the answer in a completion, and reading plain numbers exactly.

The answer of a completion is its last *balanced* `\boxed{...}`, else the last number in the text.
Numbers are read by one regular expression into `fractions.Fraction`: nothing is evaluated, there
is no floating point and hence no tolerance. Understood are signs (also U+2212), thousands
separators, decimals, repeating ones (`0.\overline{3}`), `a/b`, `\frac{a}{b}`, mixed numbers
(`2 2/3`), small integer powers, scientific notation and percent (`50%` is 1/2).
"""

import re
from fractions import Fraction

from orbit_jax.tasks.decoration import split_unit

MAX_NUMBER_CHARACTERS = 200  # longer digit strings are no answers, and cost quadratic time to read

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_EXPONENT = r"(?:\{[+-]?\d{1,3}\}|[+-]?\d{1,3})"
_ATOM = (
    rf"{_DECIMAL}(?:\^{_EXPONENT}|[eE][+-]?\d{{1,3}}|\s*(?:\\times|\\cdot|×|\*)\s*10\^{_EXPONENT})?"
)
_ATOM_PARTS = re.compile(
    rf"(?P<mantissa>{_DECIMAL})(?:\^(?P<power>{_EXPONENT})"
    rf"|(?:[eE]|\s*(?:\\times|\\cdot|×|\*)\s*10\^)(?P<ten>{_EXPONENT}))?"
)
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)(?P<whole>\d+\s*(?=\\frac)|\d+\s+(?=\d+\s?/\s?\d))?"
    rf"(?:\\frac\{{(?P<top_sign>-?)(?P<top>{_ATOM})\}}\{{(?P<bottom_sign>-?)(?P<bottom>{_ATOM})\}}"
    rf"|(?P<left>{_ATOM})(?:\s?/\s?(?P<right>{_ATOM}))?)"
    r"(?P<percent>\s*%)?"
)
# In running text a number does not start inside a word or another number, a minus after a digit
# or bracket subtracts, and what goes on as a power or a decimal is not yet the whole number.
_NUMBER_IN_TEXT = re.compile(
    rf"(?<![\w.^])(?:(?<![\w)}}\]%])(?=[+-])|(?![+-]))(?:{_NUMBER.pattern})(?![\d^]|\.\d)"
)
_BRACE_OR_BOX = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
_REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\(?:overline|bar|dot)\{(\d+)\}")
_SPELT_OUT = str.maketrans(
    dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-")
    | {"½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}"}
    | {"¾": r"\frac{3}{4}", "∞": r"\infty ", "π": r"\pi ", "≤": r"\le ", "≥": r"\ge "}
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")


def extract_answer(completion: str) -> str | None:
    r"""Return the text of the answer, or None when there is none to read.

    The last outermost balanced `\boxed{...}` counts; when a later box is never closed (the
    completion was cut off inside its answer) there is no answer. Without any box, the last number.
    """
    boxed, cut_off = _last_box(completion)
    if cut_off:
        return None
    if boxed is not None:
        return boxed.strip() or None
    numbers = [m.group() for m in _NUMBER_IN_TEXT.finditer(normalise_answer(completion))]
    return numbers[-1] if numbers else None


def vote(completion: str) -> str | None:
    """Return the answer in one spelling for all forms of a number, None when there is none."""
    answer = extract_answer(completion)
    if answer is None:
        return None
    text = normalise_answer(answer)
    value = read_number(split_unit(text)[0])
    return text.replace(" ", "") if value is None else str(value)


def normalise_answer(text: str) -> str:
    r"""Unify spellings that do not change the value: minus signs, `$`, spacing, `\dfrac`, `\%`."""
    text = text.translate(_SPELT_OUT)
    text = re.sub(r"[⁰¹²³⁴-⁹]+", lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
    text = re.sub(r"√\s*(\d+|[a-z]|\([^()]*\))", r"\\sqrt{\1}", text)
    text = re.sub(r"\\text\{([.%])\}", r"\1", text)
    text = re.sub(r"^\s*(\*\*|`)(.*)\1\s*$", r"\2", text, flags=re.DOTALL)
    text = re.sub(r"(?<!\\)\\[()]", "", text)
    text = re.sub(r"(?<=\d)(?:\{,\}|,\\!|\\,)(?=\d{3})", "", text)
    text = re.sub(r"\\\$|\$|\\left(?![a-z])|\\right(?![a-z])|(?<!\\)\\[,!]", "", text)
    # Two backslashes end a row of a matrix.
    text = re.sub(r"(?<!\\)\\[;: ]|\\q?quad(?![a-z])|~|\s", " ", text).replace("\\%", "%")
    text = re.sub(r"\\degree(?![a-z])", r"^\\circ", text)
    text = re.sub(r"\\varnothing(?![a-z])", r"\\emptyset", text)
    text = re.sub(r"\\[dtc]frac(?![a-z])", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}", text)
    return re.sub(r"^([+-])\s+", r"\1", text.strip())


def read_number(text: str) -> Fraction | None:
    """Return the exact value of a normalised plain number or fraction, None for anything else."""
    if len(text) > MAX_NUMBER_CHARACTERS:
        return None
    if repeating := _REPEATING.fullmatch(text):
        return _read_repeating(*repeating.groups())
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    try:
        top, bottom = match["top"] or match["left"], match["bottom"] or match["right"]
        value = _read_atom(top) / (_read_atom(bottom) if bottom else 1)
    except ZeroDivisionError:
        return None
    value = -value if bool(match["top_sign"]) != bool(match["bottom_sign"]) else value
    value += int(match["whole"]) if match["whole"] else 0
    value = -value if match["sign"] == "-" else value
    return value / 100 if match["percent"] else value


def _read_atom(text: str) -> Fraction:
    parts = _ATOM_PARTS.fullmatch(text)
    value = Fraction(parts["mantissa"].replace(",", "").rstrip("."))
    if parts["power"]:
        value **= int(parts["power"].strip("{}"))
    if parts["ten"]:
        value *= Fraction(10) ** int(parts["ten"].strip("{}"))
    return value


def _read_repeating(sign: str, whole: str, fixed: str, again: str) -> Fraction:
    once, before = int(whole + fixed + again), int(whole + fixed or "0")
    value = Fraction(once - before, 10 ** len(fixed) * (10 ** len(again) - 1))
    return -value if sign == "-" else value


def _last_box(text: str) -> tuple[str | None, bool]:
    """Return the content of the last balanced box, and whether a later box stays open."""
    open_braces: list[tuple[bool, int]] = []  # (is a box, where its content starts)
    closed: list[tuple[int, int]] = []  # contents of outermost balanced boxes
    for token in _BRACE_OR_BOX.finditer(text):
        if token.group() in (r"\{", r"\}"):
            continue
        if token.group() != "}":
            open_braces.append((token.group() != "{", token.end()))
        elif open_braces:
            is_box, start = open_braces.pop()
            if is_box:
                while closed and closed[-1][0] > start:
                    closed.pop()
                closed.append((start, token.start()))
    last_start = closed[-1][0] if closed else -1
    cut_off = any(is_box and start > last_start for is_box, start in open_braces)
    return (text[slice(*closed[-1])] if closed else None), cut_off
