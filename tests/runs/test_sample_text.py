"""Samples for people: who said what, and nothing that a terminal or a page would obey."""

import io
import math
import unicodedata

import pytest
from rich.cells import cell_len
from rich.console import Console

from orbit_jax.runs.sample_text import (
    MOST_CHARACTERS,
    as_texts,
    best_and_worst,
    coloured,
    printable,
)
from orbit_jax.runs.view import View

HOSTILE = {
    "colours": "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J",
    "markup": "[bold red]x[/] [/nothing] [link=http://a]a[/link]",
    "controls": "a\rb\bc\x00d\x7fe\vf\fg\x85h\u2028i\u2029j",
    "newlines": "one\n\ntwo\r\nthree\n",
    "tabs": "\tx\ty",
    "turned round": "a\u202eb\u2066c\u200bd\ufeff",
    "wide": "漢字かな交じり文 🙂🙂 한국어 " * 9,
    "stacked": "e" + "\u0301" * 50,
    "half characters": "\ud800 and \udfff",
    "no spaces": "x" * 3000,
    "spaces": " " * 3000,
    "page": "<script>alert(1)</script> ```\n# head\n\n| a | b |\n\n- [x](javascript:1)",
    "empty": "",
}


def sample(text: str = "8", reward: float | None = 1.0, **more) -> dict:
    row = {"prompt": text, "turns": [["assistant", text], ["tool", text]], "reward": reward}
    return row | {"outcome": "scored", "sampled": [True, True, False]} | more


@pytest.mark.parametrize("width", [30, 60, 132])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_nothing_that_was_said_can_do_anything_to_a_terminal(text, width):
    output = io.StringIO()
    console = Console(file=output, width=width, height=24, no_color=True, force_terminal=False)
    console.print(View(1, 2, sample=coloured(sample(text), "best")))
    lines = output.getvalue().split("\n")
    assert all(cell_len(line) < width for line in lines)
    assert not {unicodedata.category(c) for c in "".join(lines)} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    output.getvalue().encode()


def test_signs_stand_for_what_is_not_printable():
    assert printable("a\x1b[0m\tb\x00\n\u202e\x7f\u2028ü漢") == "a␛[0m b␀\n��\x20ü漢"
    assert "[bold red]x[/]" in coloured(sample(HOSTILE["markup"]), "t").completion.plain
    assert coloured(sample("a\nb"), "t").completion.plain == "a↵b\na↵b"


def test_colours_tell_who_said_what():
    found = coloured(sample("8"), "best of 2")
    assert found.prompt.style == "bright_black"
    assert [(span.start, str(span.style)) for span in found.completion.spans] == [
        (0, "cyan"),
        (2, "italic yellow"),
    ]
    assert found.facts.plain == "best of 2  reward 1  scored  2 tokens sampled  1 given"


@pytest.mark.parametrize(
    ("reward", "outcome", "style"),
    [
        (1.0, "scored", "green"),
        (0.2, "truncated", "yellow"),
        (0.0, "scored", "red"),
        (0.0, "parse_failure", "yellow"),
        (None, "infra_failure", "yellow"),
    ],
)
def test_its_own_colour_tells_how_it_went(reward, outcome, style):
    assert coloured(sample(reward=reward, outcome=outcome), "t").style == style


def test_the_best_and_the_worst_are_the_first_of_their_kind_and_no_reward_is_the_worst():
    rows = [sample(str(i), r) for i, r in enumerate((0.5, 1.0, 1.0, 0.0, 0.0))]
    assert [one["prompt"] for one in best_and_worst(rows)] == ["1", "3"]
    for nothing in (math.nan, None):
        assert best_and_worst([*rows, sample("x", nothing)])[1]["prompt"] == "x"
    assert best_and_worst([sample("only", None)])[0]["prompt"] == "only"


def test_the_prompt_may_be_messages():
    prompt = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"})
    assert coloured(sample(prompt=prompt), "t").prompt.plain == "Be brief.↵1+1"


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_in_markdown_all_that_was_said_is_code(text):
    (markdown,) = {*as_texts([sample(text)]).values()}
    ours = ("reward 1, scored", "**prompt**", "**sampled**", "**given by a tool**", "")
    lines = markdown.split("\n")
    assert {line for line in lines if not line.startswith("    ")} <= {*ours}
    for line, before in zip(lines[1:], lines, strict=False):
        assert line.startswith("    ") <= (before == "" or before.startswith("    "))
    markdown.encode()


def test_long_ones_are_cut_in_the_middle():
    long = "a" * 50_000 + "b" * 50_000
    for text in as_texts([sample(long, turns=[["assistant", long]] * 9)]).values():
        assert len(text) < 1.2 * MOST_CHARACTERS
        assert text.count("a … b") == 10


def test_without_samples_there_are_no_texts():
    assert as_texts([]) == {}
