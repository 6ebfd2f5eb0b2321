"""Stands in for an experiment: does in no time what a run leaves behind, or ends as it is told.

What it is told stands in `told.json` beside the sweep's `sweep.json`: by the cell's name `fail`,
`stop` (as by Ctrl-C, after a step), `wait` (for Ctrl-C), or `die`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

folder = Path(sys.argv[-1].removeprefix("--resume="))
out = next(path for path in folder.parents if (path / "sweep.json").exists())
config = json.loads((folder / "config.json").read_text())
name = folder.relative_to(out).as_posix()
told = out / "told.json"
how = json.loads(told.read_text()).get(name) if told.exists() else None
checkpoint = folder / "checkpoints" / "step"
start = int(checkpoint.read_text()) if checkpoint.exists() else 0
with (out / "started.txt").open("a") as file:
    file.write(f"{name} from {start}\n")
(folder / "environment.json").write_text(json.dumps({"git_commit": "abc"}))


def end(finished: bool) -> None:
    rate, seed, rank = (
        config["optimizer"]["learning_rate"],
        config["seed"],
        config["adapter"]["rank"],
    )
    after = 0.3 + 0.1 * seed + 20 * rate
    rewards = [0.1 * (seed + 1) + rank * step / 400 for step in range(1, config["steps"] + 1)]
    with (folder / "metrics.jsonl").open("w") as file:
        for step, reward in enumerate(rewards, 1):
            row = {"step": step, "reward/mean": reward, "entropy": 1 / step}
            file.write(json.dumps(row) + "\n")
    summary = {"seed": seed, "steps": config["steps"], "seconds": 100.0, "finished": finished}
    summary |= {"heldout_pass_before": 0.3, "heldout_pass_after": after if finished else None}
    summary |= {"reward_mean": sum(rewards) / len(rewards), "reward_last": rewards[-1]}
    summary |= {"parity_max_abs_diff": 0.0, "experiment": "stand_in"}
    (folder / "summary.json").write_text(json.dumps(summary))
    sys.exit()


def save(*_: object) -> None:
    checkpoint.write_text("1")
    end(finished=False)


if how == "fail":
    print("error: config.base.path: it is not there", file=sys.stderr)
    print("and some more words", file=sys.stderr)
    sys.exit(2)
if how == "stop":
    save()
if how == "die":
    checkpoint.write_text("1")
    os.kill(os.getpid(), signal.SIGKILL)
if how == "wait":
    signal.signal(signal.SIGINT, save)
    signal.signal(signal.SIGTERM, save)
    (out / "ready.txt").write_text(str(os.getpid()))
    time.sleep(120)
end(finished=True)
