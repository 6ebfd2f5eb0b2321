"""What a turn costs: continued from the cache, and with the whole transcript computed again.

    python experiments/turn_cost.py
    python experiments/turn_cost.py --turns 6 --given 64 --drawn 64

A scripted environment gives every row the same number of tokens each turn, and the model draws as
many behind them each time. Each turn is run several times from the cache, as a run does it, and as
often from empty slots with the whole transcript, one after the other; medians are told, on the
clock and of the processors, which a busy machine disturbs less. A second table has turns of several
sizes behind one transcript. Both ways must draw the same ids with the same log-probs, bit for bit,
or the script ends with an error.

Measured are the host's `admit`, the processing of what was given and the decoding. What is computed
again gets a stream of just its tokens; from the cache the stream is padded as in a run. Not saved
by a cache is attention: every new token reads the keys of the transcript, by windows of 128, 256,
512 and 1,024 slots, and in a model as narrow as this one that is most of the work at the end.
Writes `turn_cost.json` and `turn_cost.png` to --out.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from orbit_jax import parity, startup
from orbit_jax.config import BaseConfig, Config, SamplerConfig
from orbit_jax.model.attention import cache_windows
from orbit_jax.rl.admission import Entry, admit
from orbit_jax.rl.packing import pack
from orbit_jax.rl.rollouts import clear
from orbit_jax.rl.sampler import SamplerState
from orbit_jax.runs.plots import COLOURS, FAINT, INK

BASE = Path(__file__).parents[1] / "orbit_jax/assets/tiny_agent_int4"
WAYS = ("cache", "recomputed")


class Lab:
    """The shipped base with a random adapter, and its sampler.

    Args:
      rows, width: slots of the sampler, and positions of each.
      drawn: tokens of each row in a turn.
      repeats: runs of each way that are timed.
    """

    def __init__(self, rows: int, width: int, drawn: int, repeats: int):
        self.drawn, self.repeats = drawn, repeats
        config = Config(
            base=BaseConfig(str(BASE)),
            sampler=SamplerConfig(
                prompts_per_step=rows,
                group_size=1,
                max_prompt_tokens=width // 2,
                max_completion_tokens=width - width // 2,
            ),
        )
        frozen = startup.load(config)
        self.base, self.empty = frozen.base, startup.slots(config, frozen)
        self.programs = parity.build("fast", frozen.model, config)
        self.model = self.programs.model
        self.policy = parity.perturbed(startup.train_state(config, frozen), seed=0).policy

    def run(self, state: SamplerState, ids: np.ndarray, known: int) -> tuple[SamplerState, dict]:
        """One turn behind `ids` [B, n], of which the slots hold `known`, and its seconds."""
        state = jax.block_until_ready(jax.tree.map(jnp.copy, state))  # the sampler's to use up
        began = time.perf_counter(), time.process_time()
        entries = {
            row: Entry(tokens, len(tokens) + self.drawn, (0, 0, row, 0), row, known)
            for row, tokens in enumerate(ids.tolist())
        }
        incoming = admit(self.model, state, entries, (), 1.0)
        if not known:
            pieces = [(row, *entry.unprocessed) for row, entry in entries.items()]
            size = -(-sum(len(piece) for _, _, piece in pieces) // 16) * 16
            exact = dataclasses.asdict(pack(pieces, len(ids), 1, size))
            incoming = incoming.replace(stream=incoming.stream.replace(**exact))
        given = (self.model, self.base, self.policy, state, incoming, np.int32(self.drawn))
        state = jax.block_until_ready(self.programs.sample(*given))
        ended = time.perf_counter(), time.process_time()
        return state, {"seconds": ended[0] - began[0], "cpu_seconds": ended[1] - began[1]}

    def turn(self, state: SamplerState, given: np.ndarray) -> tuple[SamplerState, dict]:
        """The slots after a turn behind what was `given` [B, n], and what it cost both ways."""
        known = int(state.lengths[0]) if np.asarray(state.sampled).any() else 0
        ids = np.concatenate([np.asarray(state.tokens)[:, :known], given], axis=1)
        asked = {"cache": (state, ids, known), "recomputed": (self.empty, ids, 0)}
        after = {way: self.run(*asked[way])[0] for way in WAYS}  # compiles
        taken = [{way: self.run(*asked[way])[1] for way in WAYS} for _ in range(self.repeats)]
        cost = {
            f"{way}_{unit}": statistics.median(one[way][unit] for one in taken)
            for way in WAYS
            for unit in ("seconds", "cpu_seconds")
        }
        place = np.s_[:, ids.shape[1] : ids.shape[1] + self.drawn]
        assert all(np.asarray(one.sampled)[place].all() for one in after.values())
        tokens, logprobs = (
            [np.asarray(getattr(after[way], name))[place] for way in WAYS]
            for name in ("tokens", "logprobs")
        )
        return after["cache"], {
            "before": known,
            "given": given.shape[1],
            "drawn": self.drawn,
            **cost,
            "compared": tokens[0].size,
            "other_ids": int((tokens[0] != tokens[1]).sum()),
            "max_abs_diff": float(np.abs(logprobs[0] - logprobs[1]).max()),
        }


def measure(lab: Lab, turns: int, given: int, sizes: Sequence[int]) -> tuple[list, list]:
    """A row for each turn, and one for each size of a turn behind the transcript's first half."""
    rng, state, of_turns, of_sizes = np.random.default_rng(0), clear(lab.model, lab.empty), [], []
    rows = state.tokens.shape[0]
    for turn in range(turns):
        if turn == turns // 2:
            draws = [rng.integers(1, 256, (rows, size)) for size in sizes]
            of_sizes = [lab.turn(state, tokens)[1] for tokens in draws]
        state, row = lab.turn(state, rng.integers(1, 256, (rows, given)))
        of_turns.append({"turn": turn + 1} | row)
        print(f"turn {turn + 1} of {turns} is measured", flush=True)
    return of_turns, of_sizes


def draw(of_turns: Sequence[dict], of_sizes: Sequence[dict], slots: int, path: Path) -> None:
    """Seconds over the turns, and over the new tokens of a turn behind one transcript."""
    figure = Figure(figsize=(9.2, 4.0), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2, width_ratios=(3, 2))
    labels = {"cache": "from the cache", "recomputed": "all computed again"}
    windows = cache_windows(slots)
    xs = ([r["turn"] for r in of_turns], [r["given"] + r["drawn"] for r in of_sizes])
    for axes, x, rows in zip(panels, xs, (of_turns, of_sizes), strict=True):
        for way, colour in zip(WAYS, COLOURS, strict=False):
            y = [row[f"{way}_cpu_seconds"] for row in rows]
            axes.plot(x, y, "o-", color=colour, linewidth=1.8, label=labels[way])
        axes.set(ylim=(0, None), ylabel="processor seconds of the turn", xticks=x)
        axes.grid(color=FAINT, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    new, before = of_turns[0]["given"] + of_turns[0]["drawn"], of_sizes[0]["before"]
    panels[0].set(xlabel=f"turn ({new} new tokens a row in each)", xlim=(0.5, len(of_turns) + 0.5))
    panels[1].set(xlabel=f"new tokens a row, behind {before}")
    panels[0].legend(frameon=False, loc="center left")
    top = {"transform": panels[0].get_xaxis_transform(), "ha": "center", "va": "top"}
    for i, window in enumerate(windows):
        read = [r["turn"] for r in of_turns if _window(r, windows) == window]
        if read:
            shade = {"facecolor": FAINT, "alpha": 0.5 * (i % 2), "linewidth": 0, "zorder": 0}
            panels[0].axvspan(read[0] - 0.5, read[-1] + 0.5, **shade)
            panels[0].text(np.mean(read), 0.98, f"{window:,}", color=INK, **top)
    panels[0].set_title("slots of the cache that attention reads", fontsize=9, color=INK)
    compared = sum(row["compared"] for row in (*of_turns, *of_sizes))
    gap = max(row["max_abs_diff"] for row in (*of_turns, *of_sizes))
    figure.suptitle(
        f"log-probs of {compared:,} sampled tokens, both ways: largest difference {gap}",
        fontsize=10,
        color=INK,
    )
    figure.savefig(path)


def _window(row: dict, windows: Sequence[int]) -> int:
    """The slots that the last token of a turn reads."""
    return next(w for w in windows if w >= row["before"] + row["given"] + row["drawn"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--given", type=int, default=96, help="tokens a row in each turn")
    parser.add_argument("--drawn", type=int, default=24, help="tokens a row drawn in each turn")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5, help="runs that are timed")
    parser.add_argument("--quick", action="store_true", help="two small turns")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    width, sizes = 1024, (32, 128, 256)  # sizes that fill streams of the sampler
    if args.quick:
        args.turns, args.given, args.drawn, args.repeats, args.rows = 2, 12, 4, 1, 4
        width, sizes = 64, (12,)
    needed = args.turns * (args.given + args.drawn)
    half = args.turns // 2 * (args.given + args.drawn) + max(sizes) + args.drawn
    if args.turns < 2 or max(needed, half) > width:
        sys.exit(
            f"--turns, --given, --drawn: {needed} tokens in {args.turns} turns; a row has room"
            f" for {width}, and there are at least 2 turns"
        )
    lab = Lab(args.rows, width, args.drawn, args.repeats)
    of_turns, of_sizes = measure(lab, args.turns, args.given, sizes)
    args.out.mkdir(parents=True, exist_ok=True)
    found = {"rows": args.rows, "slots": width, "turns": of_turns, "sizes": of_sizes}
    (args.out / "turn_cost.json").write_text(json.dumps(found, indent=2) + "\n")
    draw(of_turns, of_sizes, width, args.out / "turn_cost.png")
    table = Table(box=None, header_style="bold")
    counted, timed = ("turn", "before", "given", "drawn"), ("cache, s", "again, s")
    for head in (*counted, *timed, "cache, cpu s", "again, cpu s", "ratio", "max diff"):
        table.add_column(head, justify="right")
    for row in (*of_turns, *({"turn": "-"} | row for row in of_sizes)):
        counts = [str(row[name]) for name in counted]
        costs = [row[f"{way}_{unit}"] for unit in ("seconds", "cpu_seconds") for way in WAYS]
        ratio = f"{costs[3] / costs[2]:.1f}"
        table.add_row(*counts, *(f"{c:.3f}" for c in costs), ratio, str(row["max_abs_diff"]))
    Console(width=120).print(table)
    if any(row["other_ids"] or row["max_abs_diff"] != 0.0 for row in (*of_turns, *of_sizes)):
        sys.exit("turns from the cache and computed again differ")


if __name__ == "__main__":
    main()
