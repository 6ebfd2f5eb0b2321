import io
import re

import pytest
from rich.console import Console

from orbit_jax.runs.progress import Progress

METRICS = {
    "reward/mean": 0.7104,
    "parity/max_abs_diff": 0.0,
    "adapter/update_size": 1.23e-3,
    "heldout/pass_greedy": 0.842,
    "heldout/pass_sampled": 0.71,
    "tokens_per_second": 5234.4,
    "other": 9.0,
}


def plain(total=10, **settings):
    """A progress that writes to a file, with its output and its log."""
    output, log = io.StringIO(), []
    console = Console(file=output, width=40)
    return Progress(total, log.append, console=console, **settings), output, log


def test_without_a_terminal_a_line_says_all_and_the_log_has_the_same():
    progress, output, log = plain()
    with progress:
        progress.update(4, METRICS)
    (line,) = output.getvalue().splitlines()
    assert log == [line]
    assert line.startswith("step 4/10  40%")
    for part in (
        "reward 0.710",
        "held-out greedy 84.2%",
        "held-out sampled 71.0%",
        "log-prob gap 0 ",
        "adapter update 1.2e-03",
        "tokens/s 5,234",
        "steps/s",
        "ETA 0:00",
    ):
        assert part in line
    assert "other" not in line


def test_lines_come_at_the_interval_and_at_the_end():
    progress, _, log = plain(interval_seconds=3600)
    with progress:
        for step in range(1, 11):
            progress.update(step, {"reward/mean": 0.5})
    assert [line.split()[1] for line in log] == ["1/10", "10/10"]


def test_new_heldout_figures_are_shown_at_once_and_only_where_they_are_new():
    progress, _, log = plain(interval_seconds=3600)
    with progress:
        progress.update(1, {})
        progress.update(2, {"heldout/pass_greedy": 0.5})
        progress.update(3, {"reward/mean": 0.5})
        progress.update(10, {})
    assert [line.split()[1] for line in log] == ["1/10", "2/10", "10/10"]
    assert "held-out greedy 50.0%" in log[1]
    assert "held-out" not in log[-1]


def test_a_gap_that_is_not_zero_does_not_read_as_zero():
    progress, _, log = plain()
    progress.update(1, {"parity/max_abs_diff": 1.2e-7})
    assert "log-prob gap 1.2e-07" in log[0]


def test_a_metric_that_is_not_finite_is_shown_as_such():
    progress, _, log = plain()
    progress.update(1, {"reward/mean": float("nan"), "entropy": None})
    assert "reward nan" in log[0]
    assert "entropy" not in log[0]


def test_the_rate_of_a_resumed_run_counts_only_its_own_steps(monkeypatch):
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr("orbit_jax.runs.progress.time.monotonic", lambda: float(next(clock)))
    progress, _, log = plain(total=104, start=100)  # the clock stands at 0
    progress.update(101, {})  # and here at 2
    assert "0.50 steps/s  ETA 0:06" in log[0]


def test_a_note_is_shown_and_logged():
    progress, output, log = plain()
    with progress:
        progress.note("checkpoint [step_000004]")
    assert output.getvalue() == "checkpoint [step_000004]\n"
    assert log == ["checkpoint [step_000004]"]


@pytest.mark.parametrize("width", [60, 120])
def test_on_a_terminal_the_view_is_live_and_the_log_stays_plain(width):
    output, log = io.StringIO(), []
    console = Console(file=output, force_terminal=True, width=width, _environ={"TERM": "xterm"})
    with Progress(10, log.append, console=console) as progress:
        progress.update(4, METRICS)
        progress.note("a note")
    assert "log-prob gap" in output.getvalue()
    assert "a note" in output.getvalue()
    assert "\x1b[" in output.getvalue()
    assert "\x1b[" not in "".join(log)


def on_a_terminal(width=80, height=40, encoding="utf-8", **environment):
    """A progress on a terminal of that size, with what the terminal gets and its log."""
    output, log = io.TextIOWrapper(io.BytesIO(), encoding=encoding), []
    environment = {"TERM": "xterm-256color"} | environment
    console = Console(
        file=output, force_terminal=True, width=width, height=height, _environ=environment
    )
    return Progress(10, log.append, console=console), console, log


def received(console: Console) -> str:
    console.file.flush()
    return console.file.buffer.getvalue().decode(console.file.encoding)


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


SAMPLES = [
    {
        "prompt": "1+1",
        "turns": [["assistant", text]],
        "reward": reward,
        "outcome": "scored",
        "sampled": [True],
    }
    for text, reward in (("it is 2", 1.0), ("it is \x1b[2J3", 0.0))
]


def test_an_alert_is_shown_logged_and_stands_in_the_view():
    progress, console, log = on_a_terminal()
    with progress:
        progress.update(3, METRICS)
        for name in ("zero", "one", "two", "three"):
            progress.alert(f"ALERT {name}: [red]\x1b[31m")
    assert log[1:] == [f"ALERT {name}: [red]␛[31m" for name in ("zero", "one", "two", "three")]
    text = received(console)
    assert "\x1b[1;33mALERT zero: [red]␛[31m\x1b[0m" in text
    standing = [line for line in text.split("\r")[-1].splitlines() if "▲" in line]
    assert [line.split("ALERT ")[1].split(":")[0] for line in standing] == ["one", "two", "three"]
    assert "\x1b[31m" not in text


def test_without_a_terminal_an_alert_is_a_line():
    progress, output, log = plain()
    with progress:
        progress.alert("ALERT x: [y]")
        progress.show_sample(SAMPLES)
    assert output.getvalue() == "ALERT x: [y]\n"
    assert log == ["ALERT x: [y]"]


def test_a_resumed_run_shows_the_course_of_earlier_steps():
    progress, console, _ = on_a_terminal()
    rows = [{"step": i, "reward/mean": i / 7, "entropy": None} for i in range(6)]
    rows[3]["heldout/pass_greedy"] = 0.5
    progress.remember(rows)
    with progress:
        progress.update(7, {"reward/mean": 6 / 7})
    last = without_codes(received(console))
    assert "0.857  ▁▂▃▄▅▆▇\n" in last
    assert "50.0%  ▄▄▄▄\n" in last
    assert "entropy" not in last


def test_the_best_and_the_worst_sample_take_turns_and_each_stays_to_be_read(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("orbit_jax.runs.progress.time.monotonic", lambda: now[0])
    progress, console, _ = on_a_terminal()
    titles = []
    for _ in range(9):
        progress.show_sample(SAMPLES)
        titles.append(progress._view().sample.facts.plain.split(",")[0])
        now[0] += 2.5
    assert titles == ["best of 2"] * 2 + ["worst of 2"] * 2 + ["best of 2"] * 2 + [
        "worst of 2"
    ] * 2 + ["best of 2"]
    progress.show_sample([])
    with progress:
        pass
    assert "it is 2" in received(console)


def test_nothing_that_was_said_reaches_the_terminal_as_a_command():
    progress, console, _ = on_a_terminal()
    with progress:
        progress.show_sample(SAMPLES[1:])
        progress.note("said: \x1b[2J\u202e")
    assert "it is ␛[2J3" in received(console)
    assert "said: ␛[2J�" in received(console)
    assert "\x1b[2J" not in received(console)


@pytest.mark.parametrize("kind", [{"TERM": "dumb"}, {"encoding": "latin-1"}])
def test_terminals_that_cannot_show_the_view_get_lines(kind):
    progress, console, log = on_a_terminal(**kind)
    with progress:
        progress.update(4, METRICS)
    (line,) = received(console).splitlines()
    assert log == [line]


def test_a_terminal_that_becomes_narrower_is_drawn_anew_and_one_that_becomes_wider_is_not():
    progress, console, _ = on_a_terminal(width=132)
    with progress:
        progress.update(4, METRICS)
        progress.show_sample(SAMPLES)
        console.width = 150
        progress._live.refresh()
        assert "\x1b[2J" not in received(console)
        console.width = 60
        progress._live.refresh()
    assert received(console).count("\x1b[2J") == 1
    last = received(console).split("\x1b[2J")[-1]
    assert max(map(len, without_codes(last).replace("\r", "\n").split("\n"))) < 60
