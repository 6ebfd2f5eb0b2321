"""Pictures of what people see: the terminal view of a run, its HTML report, any HTML page.

    python experiments/screenshots.py --run runs/ppo_math-... --out experiments/reports
    python experiments/screenshots.py --html page.html --out .

Of a run folder the view is shown as it was when samples were last written. A browser draws the
pictures: Chromium or Chrome, without a window and without a network.
"""

import argparse
import functools
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from orbit_jax.runs.metrics import read_metrics
from orbit_jax.runs.progress import STANDING_ALERTS
from orbit_jax.runs.sample_text import best_and_worst, coloured
from orbit_jax.runs.view import View, added

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--force-device-scale-factor=2"),
)
NOTES = ("task ", "log-prob gate", "before training")  # of log.txt, above the view
PAGE = (1280, 1600)  # CSS pixels of an HTML page
MARGIN = 16
REPORT = Path(__file__).with_name("report.py")


def view_of(run: Path) -> View:
    """The view of a run after the step whose samples are the last, made from what it wrote."""
    path = max((run / "samples").glob("step_*.jsonl"), default=None)
    if path is None:
        raise SystemExit(f"error: --run={run} has no samples: name the folder of a run")
    samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    done = int(path.stem.removeprefix("step_"))
    rows = [row for row in read_metrics(run) if row["step"] <= done]
    seconds = [row["seconds/step"] for row in rows if "seconds/step" in row]
    path = run / "alerts.jsonl"
    told = map(json.loads, path.read_text("utf-8").splitlines() if path.exists() else [])
    alerts = [
        f"step {one['step']}  {one['rule']}: {one['message']}"
        for one in told
        if one["step"] <= done
    ]
    return View(
        done=done,
        total=json.loads((run / "config.json").read_text())["steps"],
        per_second=len(seconds) / sum(seconds) if seconds else None,
        seconds=sum(seconds),
        history=functools.reduce(added, rows, {}),
        alerts=tuple(alerts[-STANDING_ALERTS:]),
        sample=coloured(best_and_worst(samples)[0], f"best of {len(samples)}, step {done}"),
        over=True,
    )


def terminal(run: Path, width: int) -> str:
    """The terminal of a run as an SVG."""
    console = Console(
        record=True, file=io.StringIO(), width=width, height=30, force_terminal=True,
        color_system="truecolor", _environ={},
    )  # fmt: skip
    view = view_of(run)
    experiment = json.loads((run / "config.json").read_text())["experiment"]
    console.print(Text.assemble(("$ ", "green"), f"python experiments/{experiment}.py"))
    for line in (run / "log.txt").read_text(encoding="utf-8").splitlines():
        note = line[len("2026-01-01 00:00:00 ") :]
        if note.startswith(NOTES):
            console.print(Text(note), no_wrap=True, overflow="ellipsis")
    console.print()
    console.print(view)
    svg = console.export_svg(title=f"{experiment} — orbit_jax")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # they lie in the network


def photograph(page: Path, png: Path, size: tuple[int, int]) -> None:
    """Has a browser draw an HTML page as a PNG of that many CSS pixels, twice as fine."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"error: there is no browser: install one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as profile:
        place = [f"--user-data-dir={profile}", f"--screenshot={png.absolute()}"]
        place += ["--window-size={},{}".format(*size), page.absolute().as_uri()]
        done = subprocess.run([browser, *FLAGS, *place], capture_output=True, text=True)
    if done.returncode or not png.exists():
        raise SystemExit(f"error: {browser} made no picture of {page}: {done.stderr[-500:]}")
    print(png)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="a run folder: terminal_view.png, report.png")
    parser.add_argument("--html", type=Path, help="a page: its name with .png")
    parser.add_argument("--width", type=int, default=120, help="of the terminal, in columns")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        if args.run:
            svg = terminal(args.run, args.width)
            width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
            page.write_text(
                f"<!doctype html><body style='margin:{MARGIN}px;background:#fff'>"
                f"<div style='width:{width}px'>{svg}</div>"
            )
            size = (round(width) + 2 * MARGIN, round(height) + 2 * MARGIN)
            photograph(page, args.out / "terminal_view.png", size)
        if args.run and REPORT.exists():
            subprocess.run([sys.executable, REPORT, args.run, "--out", page], check=True)
            photograph(page, args.out / "report.png", PAGE)
        if args.html:
            photograph(args.html, args.out / f"{args.html.stem}.png", PAGE)


if __name__ == "__main__":
    main()
