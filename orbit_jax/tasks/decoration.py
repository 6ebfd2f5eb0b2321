r"""What is written around a number: braces, type styles, names, units, currencies.

Only what cannot change the value is taken away. Words behind a number are its unit, unless one of
them counts, computes or hedges (`\text{ million}`, `\text{ and a half}`, `\text{ or more}`): then
all stays, and what stays is no number. Before it may stand the name that it is given to, or a
currency.
"""

import re

MAX_CHARACTERS = 400  # of a number with what is around it; anything longer is left alone

_STYLE = re.compile(
    r"(?:\\(?:boxed|text|textbf|textit|textrm|mathrm|mathbf|mathit|bm|boldsymbol|mbox)\s*)?\{(.*)\}"
)
_NAME = re.compile(
    r"^(?:\\?[A-Za-z]\w*(?:_\{\w+\})?(?:\([^=()]*\))?|\\(?:text|mathrm)\{[A-Za-z ]+\})\s*=\s*"
)
_TEXT_OF_BOTH = re.compile(r"\\(?:text|mathrm)\{([^{}A-Za-z]*\d\.?) *([A-Za-z][^{}]*)\}")
_GROUPED_BY_SPACES = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_PERCENT = re.compile(
    r"(?<=[\d.}])\s*(?:\\(?:text|mathrm)\{\s*(?:per ?cent|pct)\s*\}|per ?cent)$", re.IGNORECASE
)
_CURRENCY = re.compile(r"^[€£¥]\s*|\s*[€£¥]$")
_POWER = r"(?:\s*\^\{?-?\d\}?|[²³])?"
_WORDS = rf"[A-Za-z][A-Za-z ./-]*{_POWER}[ .]*"
_DEGREES = r"\s*(?:\^\s*\{?\\circ\}?|°)\s*(?:[CFK]|\\(?:text|mathrm)\{\s*[CFK]\s*\})?"
_UNIT = re.compile(
    rf"(?<=[\d.}}])(?:\s*\\(?:text|mathrm|textrm|mbox)\{{\s*(?P<text>{_WORDS})\}}{_POWER}"
    rf"|(?P<degrees>{_DEGREES})|\s*(?P<plain>{_WORDS}))$"
)
_LETTERS = re.compile(r"[A-Za-z]+")

# With one of these the words behind a number say another number, or none.
_COUNTING = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
    hundred thousand million billion trillion dozen score half halve third fourth fifth sixth
    seventh eighth ninth tenth hundredth thousandth millionth quarter percent pct
    and or plus minus times over by divided squared cubed root factorial pi base mod
    not no least most more less fewer than greater about approximately around nearly almost if when
"""
_ONE_LETTER = frozenset("msghlLNJWVA")  # units, not names of variables
# Of words without `\text{}`, which might be a product of variables, these alone are units.
_COMMON = """
    m s g h l cm mm km meter metre centimeter centimetre millimeter millimetre kilometer kilometre
    in inch inche feet foot ft yard mile kg gram kilogram pound ounce liter litre ml gallon cup
    sec second min minute hr hour day week month year deg degree radian dollar cent euro unit
    square cubic sq cu mph per
"""
_SPELT = {
    "cm": ("centimeter", "centimetre"),
    "mm": ("millimeter", "millimetre"),
    "km": ("kilometer", "kilometre"),
    "m": ("meter", "metre"),
    "kg": ("kilogram",),
    "g": ("gram",),
    "l": ("liter", "litre"),
    "ft": ("feet", "foot"),
    "in": ("inch", "inche"),
    "h": ("hour", "hr", "hrs"),
    "min": ("minute", "mins"),
    "s": ("second", "sec", "secs"),
    "°": ("degree", "deg"),
    "sq": ("square",),
    "cu": ("cubic",),
}
_NOT_UNITS, _PLAIN = frozenset(_COUNTING.split()), frozenset(_COMMON.split())
_SHORT = {word: short for short, words in _SPELT.items() for word in words}


def split_unit(text: str) -> tuple[str, str]:
    r"""Return a normalised text without what decorates it, and its unit, "" for none.

    `x = 5\text{ cm}` gives `5` and `cm`. Equal units have equal spellings: `5 centimeters` gives
    the same.
    """
    if len(text) > MAX_CHARACTERS:
        return text, ""
    unit, before = "", None
    while text != before:
        before = text
        if both := _TEXT_OF_BOTH.fullmatch(text):  # \text{5 apples}
            text = rf"{both[1]}\text{{{both[2]}}}"
        text = _CURRENCY.sub("", _NAME.sub("", _unwrapped(text))).strip()
        text = _PERCENT.sub("%", text)
        found = _UNIT.search(text)
        name = _unit_name(found) if found else ""
        if name:
            unit = unit or name
            text = text[: found.start()].strip()
    if _GROUPED_BY_SPACES.fullmatch(text):
        text = text.replace(" ", "")
    return text, unit


def _unwrapped(text: str) -> str:
    r"""The content of `{...}`, `\text{...}` and the like, where that is all of the text."""
    match = _STYLE.fullmatch(text)
    if match is None:
        return text
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", match[1]):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return text
    return match[1].strip()


def _unit_name(found: re.Match) -> str:
    """The unit in one spelling, or "" for words that are none."""
    if found["degrees"]:
        return "°" + "".join(re.findall(r"[CFK]", found["degrees"]))
    words = _LETTERS.findall(found["text"] or found["plain"])
    singular = [word.lower().removesuffix("s" * (len(word) > 3)) for word in words]
    if not _NOT_UNITS.isdisjoint([*singular, *map(str.lower, words)]):
        return ""
    letters = [word for word in words if len(word) == 1]
    if not _ONE_LETTER.issuperset(letters):
        return ""
    # 5 m is a length; 5m may be a product.
    close = bool(letters) and not found.group()[0].isspace()
    if found["plain"] and (close or not _PLAIN.issuperset(singular)):
        return ""
    powers = [{"²": "2", "³": "3"}.get(p, p) for p in re.findall(r"-?\d|[²³]", found.group())]
    return " ".join([*(_SHORT.get(word, word) for word in singular), *powers])
