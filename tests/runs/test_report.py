"""A report of run folders that stand in for real ones; what it shows is read off the page."""

import json
import re
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from orbit_jax.runs.report.curves import MOST_POINTS, curve_of
from orbit_jax.runs.report.page import page, write_report
from orbit_jax.runs.report.pictures import apart, round_ticks
from orbit_jax.runs.report.reading import GAP, arms_of, read_runs
from orbit_jax.runs.report.samples import chosen

ROOT = Path(__file__).parents[2]
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--disable-sync")
HOSTILE = (
    '</code></div><script>document.title="taken"</script><img src="{url}"><b>&amp;\u202e\ud800\x1b'
)


def write_run(folder, seed=0, steps=12, done=None, rate=1e-4, hostile="", change=lambda row: row):
    """A run of `steps` steps of which `done` are done; `change` alters each metric row."""
    done = steps if done is None else done
    (folder / "samples").mkdir(parents=True)
    config = {"experiment": f"stand_in{hostile}", "seed": seed, "steps": steps, "parity": "auto"}
    config |= {"optimizer": {"learning_rate": rate}, "evaluation": {"problems": 8}}
    (folder / "config.json").write_text(json.dumps(config))
    environment = {
        "python": "3.11.7",
        "git_commit": "abc",
        "command": f"python x.py {seed}{hostile}",
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    log = "2026-01-02 03:04:05 {}\n"
    told = ("stand_in starts", "base_bytes: 874624", "memory, by estimate: base 1 MB", hostile)
    (folder / "log.txt").write_text("".join(map(log.format, told)), errors="replace")
    rows = [{"step": 0, "heldout/pass_greedy": 0.25, "heldout/pass_sampled": 0.2}]
    rows += [metric_row(step, seed, steps) for step in range(1, done + 1)]
    if done == steps:
        rows.append({"step": steps, "heldout/pass_greedy": 0.75 + seed / 100})
        summary = {"finished": True, "steps": steps, "seconds": 2.0 * steps, "seed": seed}
        summary |= {"parity_max_abs_diff": 0.0, "parity_tokens": 10 * steps}
        summary |= {"peak_memory_bytes": 2_000_000_000, "tokens_per_second": 10.0}
        (folder / "summary.json").write_text(json.dumps(summary))
    lines = "".join(f"{json.dumps(change(row))}\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines)
    for step in (1, done) if done else ():
        samples = [sample(p, step, seed, hostile) for p in range(3) for _ in range(2)]
        path = folder / f"samples/step_{step:06d}.jsonl"
        path.write_text("".join(f"{json.dumps(one)}\n" for one in samples))
    return folder


def metric_row(step, seed, steps):
    return {
        "step": step,
        "reward/mean": step / steps + seed / 10,
        GAP: 0.0,
        "parity/tokens": 10.0,
        "entropy": 1 / step,
        "kl/rollout_k3": 0.0,
        "router/load_max_over_mean": 2.0 + seed,
        "router/unused_experts": 0.0,
        "adapter/update_size/policy/q_proj": 1e-3 * step,
        "completion/length_mean": 20.0 + step,
        "tokens": 20.0,
        "seconds/step": 1.5,
        "tokens_per_second": 13.0,
    }


def sample(problem, step, seed, hostile):
    turns = [["assistant", f"try {step}{hostile}"], ["tool", f"6{hostile}"], ["assistant", "done"]]
    return {
        "task": "sums",
        "problem": f"p{problem}" if step == 1 else f"p{problem}-late",
        "difficulty": "3x1",
        "prompt": f"1+{problem}{hostile}",
        "answer": str(1 + problem),
        "turns": turns,
        "reward": 1.0 if step > 1 else 0.0,
        "outcome": "scored",
        "parts": {"correctness": 1.0 if step > 1 else 0.0},
        "stop": "eos",
        "ids": [1, 2, 3, 4, 5],
        "sampled": [True, True, False, False, True],
    }


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text; titles of pictures apart."""

    def __init__(self, markup):
        super().__init__()
        self.tags, self.texts = [("", {})], []
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags[-1][0] != "style":
            self.texts.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.texts))


def shown(*folders):
    return Page(page(arms_of(read_runs(folders))))


def test_runs_that_differ_in_their_seed_are_one_arm(tmp_path):
    folders = [
        write_run(tmp_path / f"{rate}/seed={seed}", seed, rate=rate)
        for rate in (1e-4, 1e-3)
        for seed in (0, 1, 2)
    ]
    arms = arms_of(read_runs(folders))
    assert [(arm.letter, arm.label, len(arm.runs)) for arm in arms] == [
        ("A", "learning_rate=0.0001", 3),
        ("B", "learning_rate=0.001", 3),
    ]
    assert [run.name for run in arms[1].runs] == [f"0.001/seed={seed}" for seed in (0, 1, 2)]


def test_other_data_under_the_same_config_is_another_arm(tmp_path):
    folders = [write_run(tmp_path / name, seed) for seed, name in enumerate("ab")]
    with (folders[1] / "log.txt").open("a") as file:
        file.write("2026-01-02 03:04:05 data_hash: 123\n")
    assert [arm.label for arm in arms_of(read_runs(folders))] == ["1 more", "data_hash=123"]


def test_a_band_reaches_from_the_lowest_seed_to_the_highest(tmp_path):
    folders = [write_run(tmp_path / f"{seed}", seed) for seed in (0, 1, 2)]
    (arm,) = arms_of(read_runs(folders))
    curve = curve_of(arm, "router/load_max_over_mean")
    assert (curve.low == 2).all()
    assert (curve.middle == 3).all()
    assert (curve.high == 4).all()
    text = shown(*folders).text
    assert "band reaches from the lowest to the highest" in text
    assert "25.0% → 76.0% 75.0% to 77.0%" in text


def test_an_arm_is_named_by_what_is_unusual_in_it(tmp_path):
    rates = {"a": 1e-4, "b": 1e-4, "c": 1e-3}
    folders = [write_run(tmp_path / name, rate=rate) for name, rate in rates.items()]
    config = json.loads((folders[1] / "config.json").read_text())
    (folders[1] / "config.json").write_text(json.dumps(config | {"steps": 24}))
    labels = [arm.label for arm in arms_of(read_runs(folders))]
    assert labels == ["the usual values", "steps=24", "learning_rate=0.001"]


def test_lines_that_lie_on_each_other_take_turns(tmp_path):
    folders = [write_run(tmp_path / f"{i}", rate=i) for i in range(3)]
    found = page(arms_of(read_runs(folders)))
    (picture,) = re.findall(r'aria-label="entropy.*?</svg>', found, re.DOTALL)
    assert re.findall(r"stroke-dasharray:8 16;stroke-dashoffset:-(\d+)", picture) == [
        "0",
        "8",
        "16",
    ]


def test_what_a_step_does_not_count_is_0(tmp_path):
    def cut(row):
        return row | {"stop/length": 0.5} if row["step"] == 4 else row

    folders = [write_run(tmp_path / "a", change=cut), write_run(tmp_path / "b", rate=1.0)]
    cut_arm, whole_arm = arms_of(read_runs(folders))
    assert curve_of(cut_arm, "stop/length").middle.tolist() == [0, 0, 0, 0.5, *[0] * 8]
    assert curve_of(whole_arm, "stop/length").middle.tolist() == [0] * 12


def test_a_gap_of_0_reads_as_0(tmp_path):
    text = shown(write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1)).text
    assert "log-prob gap of exactly 0 over 240 tokens" in text
    assert "exactly 0 at every step" in text
    assert "0 over 120 tokens" in text


@pytest.mark.parametrize(
    ("gap", "said"), [(1e-6, "is not 0 but up to 1e-06"), (None, "not finite")]
)
def test_a_gap_that_is_not_0_cannot_be_overlooked(tmp_path, gap, said):
    def spoil(row):
        return row | {GAP: gap} if row["step"] == 7 and GAP in row else row

    text = shown(write_run(tmp_path / "a", change=spoil), write_run(tmp_path / "b", seed=1)).text
    assert f"To look at a log-prob gap {said}" in text.replace("was not finite", "not finite")
    assert "in 1 of 12 steps" in text
    assert "exactly 0 at 23 of 24 steps" in text
    assert "every step" not in text.partition("Entropy")[0]


def test_thinned_points_hide_no_gap_and_no_extreme(tmp_path):
    def spoil(row):
        return row | {GAP: 1e-3, "entropy": 50.0} if row["step"] == 777 else row

    (arm,) = arms_of(read_runs([write_run(tmp_path / "a", steps=2000, change=spoil)]))
    gap, entropy = curve_of(arm, GAP), curve_of(arm, "entropy")
    assert len(gap.steps) <= MOST_POINTS
    assert gap.steps[-1] == 2000
    assert gap.middle.max() == 1e-3
    assert entropy.high.max() == 50
    assert entropy.middle.max() < 10


def test_pages_stay_small(tmp_path):
    folders = [
        write_run(tmp_path / f"{i}", seed=i % 3, steps=2000, rate=1e-4 * (i // 3))
        for i in range(12)
    ]
    write_report(folders, tmp_path / "all.html")
    write_report(folders[:1], tmp_path / "one.html")
    assert (tmp_path / "all.html").stat().st_size < 800_000
    assert (tmp_path / "one.html").stat().st_size < 200_000


def test_a_run_that_was_killed_early_says_so(tmp_path):
    folder = write_run(tmp_path / "killed", done=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "entr')
    with (folder / "log.txt").open("a") as file:
        file.write("2026-01-02 03:04:06 Traceback\n  File\nRuntimeError: the disk is full\n")
    text = shown(folder, write_run(tmp_path / "whole", seed=1)).text
    assert "killed is not finished: step 3 of 12" in text
    assert "its log ends with “RuntimeError: the disk is full”" in text
    assert "a line is cut short in metrics.jsonl" in text
    card = text.partition("run seed began")[0]
    assert "1 of 2 finished , whose figures these are held-out, greedy 25.0% → 76.0%" in card
    assert "25.0% at step 0" in text


def test_more_steps_that_were_asked_for_make_a_finished_run_unfinished(tmp_path):
    folder = write_run(tmp_path / "a")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"steps": 20}))
    assert "is not finished: step 12 of 20" in shown(folder).text


def test_config_alone_is_enough(tmp_path):
    folder = write_run(tmp_path / "a", done=0)
    for path in ("environment.json", "metrics.jsonl", "log.txt"):
        (folder / path).unlink()
    shutil.rmtree(folder / "samples")
    text = shown(folder).text
    assert "a is not finished: step 0 of 12" in text
    assert "No step has been written yet" in text
    assert "No samples have been written" in text
    assert "Not recorded of a" in text


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "environment.json").write_text('{"python": "3')
    with (folder / "alerts.jsonl").open("w") as file:
        file.write("\0\0\0\n[1]\n")
    text = shown(folder).text
    assert "environment.json is no whole JSON" in text
    assert "2 lines are cut short in alerts.jsonl" in text
    assert "25.0% → 75.0%" in text


def test_values_that_are_not_finite_are_counted_and_leave_a_hole(tmp_path):
    def spoil(row):
        return row | {"entropy": None} if 5 <= row["step"] < 8 and "entropy" in row else row

    folder = write_run(tmp_path / "a", change=spoil)
    (arm,) = arms_of(read_runs([folder]))
    assert np.isnan(curve_of(arm, "entropy").middle).sum() == 3
    found = shown(folder)
    assert "metrics that were not finite, with steps: entropy (3)" in found.text
    assert "3 values not finite" in found.text
    (line,) = re.findall(r'aria-label="entropy.*?class="line" d="(.*?)"', page([arm]))
    assert line.count("M") == 2


def test_alerts_are_shown_and_whether_they_are_over(tmp_path):
    folder = write_run(tmp_path / "a")
    rows = [
        {"step": 4, "rule": "entropy_collapse", "state": "begins", "message": "entropy is 0.01"},
        {"step": 9, "rule": "entropy_collapse", "state": "over", "message": "it is over"},
        {"step": 5, "rule": "dead_group", "message": "q_proj stands still"},
    ]
    (folder / "alerts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = shown(folder).text
    assert "alert entropy_collapse, at step 4 (over at step 9): entropy is 0.01" in text
    assert "alert dead_group, at step 5: q_proj stands still" in text
    assert "✓" not in text.partition("Curves")[0]


def test_only_the_fields_that_differ_are_in_the_table(tmp_path):
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1, rate=0.5)]
    text = shown(*folders).text
    table = text.partition("Whole config")[0].rpartition("field that differs")[2]
    assert "optimizer.learning_rate" in table
    assert "seed" in table
    assert "parity" not in table
    assert "The config is the same" not in text


def test_samples_of_one_prompt_stand_side_by_side_and_else_of_one_kind(tmp_path):
    folders = [write_run(tmp_path / name, rate=rate) for name, rate in (("a", 1e-4), ("b", 1e-3))]
    places = chosen(read_runs(folders))
    assert len(places) == 3
    first = [folder / "samples/step_000001.jsonl" for folder in folders]
    rows = [path.read_text() for path in first]
    first[0].write_text(rows[0] + json.dumps(sample(8, 1, 0, "")))
    first[1].write_text(f"{json.dumps(sample(9, 1, 0, ''))}\n{rows[1]}")
    *same, alike = chosen(read_runs(folders))
    for place in same:
        problems = {where: shown.row["problem"] for where, shown in place.items()}
        assert problems["a", "first"] == problems["b", "first"]
        assert problems["a", "last"] == problems["b", "last"]
    assert [shown.row["problem"] for shown in alike.values()] == ["p8", "p9"]
    for path, text in zip(first, rows, strict=True):
        path.write_text(text)
    found = shown(*folders)
    kinds = [attrs.get("class") for tag, attrs in found.tags if tag == "div"]
    assert kinds.count("said") == 2 * kinds.count("given") == 3 * 4 * 2
    strips = [i for i, (_, attrs) in enumerate(found.tags) if attrs.get("class") == "strip"]
    rects = [found.tags[i + 2 : i + 4] for i in strips]
    assert rects[0] == [
        ("rect", {"x": "0", "width": "2", "height": "1"}),
        ("rect", {"x": "4", "width": "1", "height": "1"}),
    ]


def test_hostile_text_stays_text(tmp_path):
    hostile = HOSTILE.format(url="http://127.0.0.1:9/x.png")
    folder = write_run(tmp_path / "a<img src=x>", hostile=hostile)
    rows = [{"step": 1, "rule": hostile, "message": hostile}]
    (folder / "alerts.jsonl").write_text(f"{json.dumps(rows[0])}\n")
    write_report([folder], tmp_path / "report.html")
    found = Page((tmp_path / "report.html").read_text())
    tags = {tag for tag, _ in found.tags}
    assert tags.isdisjoint({"script", "img", "iframe", "link", "object", "form", "base"})
    for _, attrs in found.tags:
        assert not any(name.startswith("on") or name == "src" for name in attrs)
        assert attrs.get("href", "#").startswith("#")
    assert found.text.count('document.title="taken"') > 10
    assert "\\u202e" in found.text


def test_a_long_completion_is_cut_in_its_middle(tmp_path):
    folder = write_run(tmp_path / "a", hostile="x" * 5000)
    found = page(arms_of(read_runs([folder])))
    assert "x" * 2000 not in found.partition('id="Samples"')[2].partition('id="Config"')[0]
    assert "characters …" in found


def test_bad_input_is_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/config.json").write_text("{")
    good = write_run(tmp_path / "good")
    for folders, said in (
        ([tmp_path / "none"], "there is no such folder"),
        ([tmp_path / "empty"], "is no run folder: it has no config.json"),
        ([tmp_path / "torn"], "config.json is no whole JSON"),
        ([good, good], "is given twice"),
    ):
        with pytest.raises(ValueError, match=said):
            write_report(folders, tmp_path / "report.html")
    with pytest.raises(ValueError, match="is a folder: name a file"):
        write_report([good], tmp_path)


def test_the_command_prints_what_it_wrote(tmp_path, monkeypatch, capsys):
    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
        runpy.run_path(str(ROOT / "experiments/report.py"), run_name="__main__")

    out = tmp_path / "deep/report.html"
    command(write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1), "--out", out)
    printed = f"{out}: 2 runs in 1 arm, {out.stat().st_size:,} bytes\n"
    assert capsys.readouterr().out == printed
    with pytest.raises(SystemExit, match=r"^error: .*/none: there is no such folder; name one"):
        command(tmp_path / "none", "--out", out)


def test_labels_are_moved_apart_and_stay_inside():
    moved = apart([50.0, 50.0, 51.0, 99.0, 100.0], 10, 0, 100)
    assert sorted(moved) == pytest.approx([50, 60, 70, 90, 100])
    crowded = apart([5.0] * 30, 10, 0, 100)
    assert min(crowded) == pytest.approx(0)
    assert max(crowded) == pytest.approx(100)
    assert np.diff(sorted(crowded)).min() == pytest.approx(100 / 29)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.0113), (-3e-7, 2e-6), (9, 1e9), (-5, -4)])
def test_ticks_enclose_what_they_measure(low, high):
    ticks = round_ticks(low, high, 6)
    assert ticks[0] <= low < high <= ticks[-1]
    assert 3 <= len(ticks) <= 9
    assert ticks[-1] - ticks[0] < 1.7 * (high - low)


class Listener:
    """Counts who connects to it."""

    def __init__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/x.png"
        self.connections = 0
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            connection.close()

    def close(self):
        self._socket.close()


@pytest.fixture
def listener():
    listener = Listener()
    yield listener
    listener.close()


def open_page(path, *flags):
    """What a browser has made of the page; it keeps nothing."""
    with tempfile.TemporaryDirectory() as profile:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, path.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


@browser
def test_a_browser_opens_the_page_and_asks_the_network_for_nothing(tmp_path, listener):
    hostile = HOSTILE.format(url=listener.url)
    folders = [write_run(tmp_path / name, hostile=hostile, rate=i) for i, name in enumerate("ab")]
    out = tmp_path / "report.html"
    write_report(folders, out)
    dom = open_page(out, "--dump-dom")
    found = Page(dom)
    for word in (
        "Curves",
        "Training reward",
        "Samples",
        "field that differs",
        "874.62 kB",
        "try 12",
    ):
        assert word in found.text
    assert sum(tag == "svg" for tag, _ in found.tags) > 8
    assert "<title>taken" not in dom
    assert listener.connections == 0
    # Markup that got through would be held back by the page's policy, and without it would ask.
    for policy, asks in ((re.search("<meta http-equiv.*?>", out.read_text())[0], 0), ("", 1)):
        through = tmp_path / f"through{asks}.html"
        through.write_text(f'<!doctype html>{policy}<img src="{listener.url}">')
        open_page(through, "--dump-dom")
        assert (listener.connections > 0) == asks


@browser
def test_the_page_follows_the_scheme_of_the_reader(tmp_path):
    out = tmp_path / "report.html"
    write_report([write_run(tmp_path / "a")], out)
    for scheme, paper in (("1", (255, 255, 255)), ("0", (0x16, 0x18, 0x1C))):
        picture = tmp_path / f"{scheme}.png"
        flags = (f"--blink-settings=preferredColorScheme={scheme}", "--window-size=900,700")
        open_page(out, *flags, f"--screenshot={picture}")
        pixels = (imread(picture)[..., :3] * 255).round().astype(int)
        assert tuple(pixels[2, 2]) == paper
        assert len(np.unique(pixels @ [1 << 16, 1 << 8, 1])) > 50
