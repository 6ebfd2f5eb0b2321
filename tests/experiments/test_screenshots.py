"""Pictures of the terminal view and of pages, from a run folder as runs leave it behind."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from experiments import screenshots
from orbit_jax.runs.metrics import MetricsWriter
from orbit_jax.runs.view import GAP


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 8 steps, whose last samples are of step 6."""
    folder = tmp_path / "x-1"
    (folder / "samples").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"steps": 8, "experiment": "ppo_math"}))
    (folder / "log.txt").write_text(
        "2026-12-01 04:00:00 run folder: /somewhere\n"
        "2026-12-01 04:00:01 before training: heldout/pass_greedy 29.2%\n"
    )
    with MetricsWriter(folder) as metrics:
        for step in range(1, 9):
            metrics.write(step, {"reward/mean": step / 8, GAP: 0.0, "seconds/step": 2.0})
    row = {"prompt": "1+1", "outcome": "scored", "sampled": [True] * 3}
    rows = [row | {"reward": r, "turns": [["assistant", f"<it is {r}>"]]} for r in (0.0, 1.0)]
    for step in (1, 6):
        text = "".join(f"{json.dumps(r)}\n" for r in rows)
        (folder / "samples" / f"step_{step:06d}.jsonl").write_text(text)
    return folder


def words(svg: str) -> str:
    return re.sub(r"<[^>]*>|&#160;", " ", svg)


def test_the_terminal_shows_the_run_as_it_was_at_the_last_samples(run: Path):
    (run / "alerts.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "rule": "stuck", "state": "begins", "message": f"at {step}"})
            + "\n"
            for step in (5, 7)
        )
    )
    svg = screenshots.terminal(run, 120)
    text = re.sub(r"\s+", " ", words(svg))
    for part in (
        "$ python experiments/ppo_math.py",
        "before training: heldout/pass_greedy 29.2%",
        "step 6/8",
        "0.50 steps/s ETA 0:04 0:12 so far",
        "reward 0.750 ▁▂▃▅▆▇",
        "▲ step 5 stuck: at 5",
        "best of 2, step 6 reward 1 scored 3 tokens sampled",
        "&lt;it is 1.0&gt;",
    ):
        assert part in text
    assert "at 7" not in text
    assert "/somewhere" not in text


def test_the_picture_asks_nothing_of_a_network(run: Path):
    addresses = set(re.findall(r"https?://[^\"' )]*", screenshots.terminal(run, 120)))
    assert addresses == {"http://www.w3.org/2000/svg", "https://www.textualize.io"}  # a comment


def main(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["screenshots.py", *map(str, arguments)])
    screenshots.main()


def test_without_a_browser_there_is_one_sentence(run: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="error: there is no browser: install one of chromium,"):
        main(monkeypatch, "--run", run, "--out", tmp_path)


def test_a_folder_without_samples_is_refused(tmp_path: Path, monkeypatch):
    with pytest.raises(SystemExit, match="has no samples: name the folder of a run"):
        main(monkeypatch, "--run", tmp_path, "--out", tmp_path / "out")


@pytest.mark.skipif(
    not any(map(shutil.which, screenshots.BROWSERS)), reason="there is no browser here"
)
def test_a_page_becomes_a_picture(tmp_path: Path, monkeypatch):
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><body style='background:#ff0000'>")
    main(monkeypatch, "--html", page, "--out", tmp_path / "out")
    picture = imread(tmp_path / "out/page.png")
    assert picture.shape[:2] == (2 * screenshots.PAGE[1], 2 * screenshots.PAGE[0])
    assert picture[500, 500].tolist()[:3] == [1, 0, 0]
