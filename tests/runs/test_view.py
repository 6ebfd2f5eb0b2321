"""The live view as a terminal gets it, at several sizes."""

import dataclasses
import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from orbit_jax.runs.sample_text import coloured
from orbit_jax.runs.view import GAP, METRICS, RECENT_VALUES, View, sparkline

SAMPLE = {
    "prompt": "75*84*74",
    "turns": [
        ["assistant", "<tool>75*84</tool>"],
        ["tool", "6300"],
        ["assistant", "\\boxed{466200}"],
    ],
    "reward": 1.0,
    "outcome": "scored",
    "sampled": [True] * 9 + [False] * 4 + [True] * 5,
}
HISTORY = {name: tuple(i / 10 for i in range(RECENT_VALUES)) for name in METRICS}
VIEW = View(
    done=27,
    total=40,
    per_second=0.5,
    seconds=61.0,
    history=HISTORY | {GAP: (0.0,) * 9},
    alerts=("step 24  ALERT length_runaway: completions are 3 times as long",) * 3,
    sample=coloured(SAMPLE, "best of 256, step 27"),
)


def shown(view: View, width: int = 80, height: int = 40, **settings) -> str:
    """What a terminal of that size gets, with its colours."""
    environment = {"TERM": "xterm-256color", **settings}
    console = Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, _environ=environment
    )
    console.print(view)
    return console.file.getvalue()


def plain(view: View, width: int = 80, height: int = 40) -> list[str]:
    """Its lines without colours."""
    return shown(view, width, height, TERM="dumb").splitlines()


@pytest.mark.parametrize("width", [20, 60, 80, 99, 100, 132, 300])
@pytest.mark.parametrize("height", [1, 3, 12, 24, 50])
def test_it_fits_every_terminal(width, height):
    lines = plain(VIEW, width, height)
    assert len(lines) < height or height == 1 == len(lines)
    assert max(map(cell_len, lines)) < width


@pytest.mark.parametrize("width", [60, 80, 132])
def test_it_says_all_at_every_usual_width(width):
    text = "\n".join(plain(VIEW, width, 24))
    labels = [shown.label for shown in METRICS.values()]
    for part in ("step 27/40", " 68%", "0.50 steps/s", "ETA 0:26", *labels):
        assert part in text
    assert ("1:01 so far" in text) == (width > 60)
    assert "▲ step 24  ALERT length_runaway" in text
    assert "┃ best of 256, step 27  reward 1  scored" in text
    assert "┃ 75*84*74" in text
    assert "┃ \\boxed{466200}" in text


def test_metrics_stand_side_by_side_where_there_is_room():
    narrow, wide = (plain(dataclasses.replace(VIEW, sample=None), width) for width in (80, 132))
    assert len(narrow) - len(wide) == len(METRICS) // 2
    assert any("reward" in line and "entropy" in line for line in wide)


@pytest.mark.parametrize("turns", [1, 3, 60])
def test_its_height_does_not_depend_on_the_sample(turns):
    many = SAMPLE | {"turns": SAMPLE["turns"][:1] * turns, "prompt": "word " * turns}
    view = dataclasses.replace(VIEW, sample=coloured(many, "best"))
    assert len(plain(view)) == len(plain(VIEW))


def test_when_all_is_over_nothing_is_kept_free():
    assert plain(VIEW)[-1] == ""
    last = plain(dataclasses.replace(VIEW, over=True))
    assert last[-1] == "┃ \\boxed{466200}"


def test_of_a_long_completion_the_beginning_and_the_end_are_shown():
    turns = [["assistant", f"turn {i}"] for i in range(20)]
    view = dataclasses.replace(VIEW, sample=coloured(SAMPLE | {"turns": turns}, "best"))
    text = "\n".join(plain(view))
    assert "┃ turn 3\n┃ ⋯ 15 more lines\n┃ turn 19" in text


def test_a_long_line_goes_on_in_the_next():
    words = " ".join(f"word{i}" for i in range(30)) + "x" * 90
    view = dataclasses.replace(
        VIEW, sample=coloured(SAMPLE | {"turns": [["assistant", words]]}, "")
    )
    said = "".join(line.removeprefix("┃ ") for line in plain(view) if line.startswith("┃"))
    assert words.replace(" ", "") in said.replace(" ", "")


def test_without_room_for_it_the_sample_is_left_out():
    assert not any("best of" in line for line in plain(VIEW, 80, 18))


def test_a_gap_of_0_is_calm_and_any_other_is_an_alarm():
    calm = shown(VIEW)
    assert "\x1b[1;32m0\x1b[0m" in calm
    assert "\x1b[1;37;41m" not in calm
    loud = dataclasses.replace(VIEW, history=HISTORY | {GAP: (0.0, 1.2e-7)})
    assert "\x1b[1;37;41m≠ 1.2e-07\x1b[0m" in shown(loud)
    assert "\x1b[1;37;41m≠ nan\x1b[0m" in shown(
        dataclasses.replace(VIEW, history=HISTORY | {GAP: (0.0, float("nan"))})
    )
    assert "≠ 1.2e-07" in shown(loud, NO_COLOR="1")


def test_who_wants_no_colours_gets_none():
    assert "\x1b[36m" in shown(VIEW)
    coloured_codes = [f"\x1b[{code}m" for code in (31, 32, 33, 34, 36, 90)]
    assert not any(code in shown(VIEW, NO_COLOR="1") for code in coloured_codes)


def test_before_the_first_step_it_is_a_bar():
    assert plain(View(done=0, total=40), 60) == ["step 0/40  " + "─" * 29 + "    0%  0:00 so far"]
    assert plain(View(done=0, total=0, unit="MB"))[0].startswith("MB 0/0")


def test_it_is_green_when_all_is_done():
    assert "\x1b[32m━" in shown(dataclasses.replace(VIEW, done=40))
    assert "\x1b[36m━" in shown(VIEW)


@pytest.mark.parametrize(
    ("values", "blocks"),
    [
        ((), ""),
        ((0.0, 1.0), "▁▇"),
        ((1.0, 0.5, 0.0), "▇▄▁"),
        (tuple(range(7)), "▁▂▃▄▅▆▇"),
        ((-3.0, -1.0), "▁▇"),
        ((0.0, 0.0), "▁▁"),
        ((0.7, 0.7), "▄▄"),
        ((-2.0, -2.0), "▄▄"),
        ((0.0, float("nan"), 1.0), "▁ ▇"),
        ((float("nan"), float("inf")), "  "),
        ((-1.7e308, 1.7e308, 0.0), "  ▁"),
        ((5e-324, 0.0), "▇▁"),
        ((1.0, 1.0 + 2**-52), "▁▇"),
    ],
)
def test_sparklines(values, blocks):
    assert sparkline(values) == blocks


def test_a_sparkline_shows_the_newest_values_where_it_is_cut():
    falling = (*range(30), 99.0)
    (line,) = plain(View(done=1, total=2, history={"entropy": falling}), 40)[2:]
    assert line.startswith("entropy             99.000  ")
    assert line.endswith("▇")
