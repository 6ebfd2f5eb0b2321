"""Writes one page about finished, broken or unfinished runs: curves, samples, config, machine.

    python experiments/report.py runs/ppo_math-…
    python experiments/report.py runs/ppo_math-… runs/ppo_math-… --out report.html

Runs that differ only in their seed are one arm, drawn as a mean with a band from the lowest to the
highest. The page is a single HTML file that loads nothing.
"""

import argparse
from pathlib import Path

from orbit_jax.runs.report.page import write_report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page")
    args = parser.parse_args()
    try:
        what = write_report(args.runs, args.out)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{args.out}: {what}, {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
