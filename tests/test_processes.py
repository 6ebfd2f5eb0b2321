"""Two processes of four simulated devices as one of eight; one is killed, and they go on."""

import functools
import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from orbit_jax import processes
from orbit_jax.checkpoint import run_state
from orbit_jax.config import Config, MeshConfig
from orbit_jax.runs.metrics import read_metrics

ROOT = Path(__file__).parents[1]
SECONDS = 500  # that one run may take on a busy machine
STEPS = 3
SMALL = {
    "adapter.targets": ("q_proj", "down_proj"),  # the second of experts: one of each kind
    "base.working_copy": "never",
    "mesh.data": 4,
    "mesh.tensor": 2,
    "mesh.simulate": True,
    "sampler.prompts_per_step": 4,
    "sampler.max_completion_tokens": 12,
    "ppo.micro_batches": 1,
    "task.heldout_problems": 1,
    "task.unseen_problems": 0,
    "evaluation.every_steps": 1000,
    "run.checkpoint_every_steps": 1,
    "run.keep_checkpoints": STEPS,
}
# Which says on stdout whom it has found, its threads in the midst of each other's lines.
_BY_GLOO = re.compile(r"Gloo|peer ranks|connected|^[\d\s:.]*$")
TIMES = ("seconds/step", "tokens_per_second")
# Summed over devices only to be shown, and in another order where they are of two processes.
SUMS = ("entropy", "gradient_norm/", "adapter/", "loss/", "kl/", "ratio/")


class Ended(NamedTuple):
    """How a process ended and what it printed."""

    code: int
    text: str


def launch(
    command: list[str], paths: tuple[Path, ...], stderr: int | None = None
) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-u", *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def start(fields: dict, resume: str = "") -> subprocess.Popen:
    command = ["experiments/ppo_math.py", "--config=configs/tiny_moe.py:test"]
    command += [f"--config.{name}={value}" for name, value in (SMALL | fields).items()]
    command += ["--resume", resume] if resume else []
    return launch(command, (ROOT,), stderr=subprocess.STDOUT)


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def start_two(*each: dict, resume: str = "") -> list[subprocess.Popen]:
    both = {"mesh.processes": 2, "mesh.coordinator": f"localhost:{free_port()}"}
    return [start(fields | both | {"mesh.process": n}, resume) for n, fields in enumerate(each)]


def end(*running: subprocess.Popen) -> list[Ended]:
    """Waits for them and for what outlives them; reads all at once, so that no pipe is full."""
    try:
        with ThreadPoolExecutor(len(running)) as threads:
            wait = functools.partial(subprocess.Popen.communicate, timeout=SECONDS)
            texts = [text for text, _ in threads.map(wait, running)]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [Ended(process.returncode, text) for process, text in zip(running, texts, strict=True)]


def folder(root: Path) -> Path:
    (found,) = root.glob("ppo_math-*")
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """The run folder of one process with eight devices."""
    root = tmp_path_factory.mktemp("one")
    (ended,) = end(start({"run.root": root, "steps": STEPS}))
    assert ended.code == 0, ended.text
    return folder(root)


class Lost(NamedTuple):
    """Two processes, the second of which was killed after a step that the first had saved."""

    root: Path
    survivor: Ended
    seconds: float


@pytest.fixture(scope="module")
def lost(tmp_path_factory) -> Lost:
    root = tmp_path_factory.mktemp("two")
    first, second = start_two(*[{"run.root": root, "steps": 1000}] * 2)
    deadline = time.monotonic() + SECONDS
    while not any('"step": 2' in file.read_text() for file in root.glob("*/metrics.jsonl")):
        if first.poll() is not None or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    second.kill()
    began = time.monotonic()
    survivor, _ = end(first, second)
    return Lost(root, survivor, time.monotonic() - began)


@pytest.fixture(scope="module")
def two(lost: Lost) -> list[Ended]:
    """The same two, started again."""
    fields = {"run.root": lost.root, "steps": STEPS}
    return end(*start_two(fields, fields, resume=str(folder(lost.root))))


def test_a_lost_process_ends_the_others_soon_and_they_say_how_to_go_on(lost: Lost):
    assert lost.survivor.code != 0, lost.survivor.text
    assert lost.seconds < 90  # JAX gives up after 100 s without a heartbeat
    words = lost.survivor.text.splitlines()[-1]
    assert words.startswith("error: process 0 of 2 ended before its run did")
    assert re.search(rf"step [12] is saved: .* --resume {folder(lost.root)};", words), words


def test_a_run_goes_on_with_what_was_saved(lost: Lost, two: list[Ended]):
    assert [ended.code for ended in two] == [0, 0], two
    assert re.search("goes on after step [12]", two[0].text)
    assert json.loads((folder(lost.root) / "summary.json").read_text())["finished"]
    assert "ended before" not in two[0].text + two[1].text


def test_the_first_process_alone_writes(lost: Lost, two: list[Ended]):
    assert sorted(p.name[:8] for p in lost.root.iterdir()) == ["ppo_math"]
    assert [row["step"] for row in read_metrics(folder(lost.root))] == [0, 1, 2, 3, 3]
    assert [line for line in two[1].text.splitlines() if not _BY_GLOO.search(line)] == []


def test_two_processes_train_as_one_does_bit_for_bit(one: Path, lost: Lost, two: list[Ended]):
    found, expected = (
        run_state._load(
            path / f"checkpoints/step_{STEPS:06d}", state=run_state.ocp.args.StandardRestore()
        )["state"]
        for path in (folder(lost.root), one)
    )
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_two_processes_report_what_one_does(one: Path, lost: Lost, two: list[Ended]):
    def rows(run: Path) -> list[dict]:
        """Without the machine, which is read when a process begins, and now and then."""
        kept = read_metrics(run)
        return [{k: v for k, v in r.items() if not k.startswith("hardware/")} for r in kept]

    for row, expected in zip(rows(folder(lost.root)), rows(one), strict=True):
        assert row.keys() == expected.keys()
        assert row.get("parity/max_abs_diff", 0) == 0
        for name in expected.keys() - TIMES:
            tolerance = 1e-5 if name.startswith(SUMS) else 0
            assert row[name] == pytest.approx(expected[name], rel=tolerance, abs=0), name


@pytest.fixture(scope="module")
def agreed() -> list[dict]:
    """What two processes with different values agree on."""
    command, port = ["tests/two_processes.py"], str(free_port())
    paths = (ROOT, ROOT / "tests/model")
    ended = end(*(launch([*command, n, port], paths) for n in "01"))
    assert [each.code for each in ended] == [0, 0]
    return [json.loads(each.text.splitlines()[-1]) for each in ended]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("devices", [4, 2]),
        ("bits", np.array([-0.0, 2.0**-1074]).tobytes().hex()),
        ("all", [10**12, 10**12 + 1]),
        ("read", {"whole": [i - 0.5 for i in range(8)], "host": 3}),
        ("free", 10**12),
        ("rewards", [1, 0, 1, 1]),
        ("stopped", [False, True]),
    ],
)
def test_two_processes_have_the_same_of_what_steers_a_run(name: str, expected, agreed):
    assert [each[name] for each in agreed] == [expected, expected]


def test_what_the_first_process_refuses_all_do(agreed: list[dict]):
    assert [each["refusal"] for each in agreed] == ["refused by 0", "process 0: refused by 0"]


def test_processes_that_were_started_differently_are_refused(tmp_path: Path):
    root = tmp_path / "runs"
    for ended in end(*start_two(*({"run.root": root, "seed": seed} for seed in (0, 1)))):
        assert ended.code == 2
        assert "error: the config of processes [1] differs from that of process 0" in ended.text
    assert not list(root.glob("ppo_math-*"))


def test_processes_that_nobody_brings_together_are_refused():
    with pytest.raises(ValueError, match=r"processes=2: JAX cannot join them .* mesh\.coordinator"):
        processes.start(Config(mesh=MeshConfig(data=2, processes=2)))


def test_one_process_has_the_first_ones_values_already():
    values = np.array([-0.0, 1e-45])
    assert processes.from_first(values) is values
    assert processes.from_all(3).tolist() == [3]
    assert processes.by_first(divmod, 7, 2) == (3, 1)
