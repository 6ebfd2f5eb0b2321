"""The benchmark: contestants take turns, the report is complete, mistakes are sentences."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT)]

import bench  # noqa: E402
from rivals import contest, worker  # noqa: E402

from orbit_jax.checkpoint.tokenizer import Tokenizer  # noqa: E402

# Says when it runs, prints what it should not, and takes as long as it is told.
FAKE = f"""
import sys, time
sys.path.insert(0, {str(contest.RIVALS)!r})
from worker import counted, lengths_of, serve

def load(settings):
    print("a library greets")
    def run(case):
        print("and chatters")
        with open(settings["diary"], "a") as diary:
            diary.write(settings["name"] + " ")
        time.sleep(settings["seconds"])
        return {{"tokens": counted(settings, case, lengths_of(settings, case))}}
    cases = {{case: lambda case=case: run(case) for case in settings["knows"]}}
    return cases, {{"rival": "fake"}}

serve(load)
"""
SETTINGS = {
    "prompts": ["a", "b"],
    "prompt_ids": [[1, 2, 3], [1, 2, 3]],
    "group_size": 2,
    "new_tokens": 5,
    "varied_tokens": [1, 2, 3, 4],
}


def fake(folder: Path, name: str, **settings) -> contest.Worker:
    script = folder / "fake_worker.py"
    script.write_text(FAKE)
    told = SETTINGS | {"name": name, "diary": str(folder / "diary"), "seconds": 0.0} | settings
    return contest.Worker(name, [sys.executable, str(script)], told, folder / f"{name}.log")


def test_they_alternate_and_are_compared(tmp_path):
    workers = {
        "ours": fake(tmp_path, "ours", knows=["sample", "step", "step_varied"]),
        "rival": fake(tmp_path, "rival", knows=["step", "sample"], seconds=0.05),
    }
    results = contest.compete(workers, worker.CASES, repeats=2)
    for one in workers.values():
        one.close()
    assert list(results) == ["sample", "step"], "only what both can"
    assert (tmp_path / "diary").read_text() == "ours rival " * 2 * (1 + 2)
    ours, rival, ratio = (results["step"][side] for side in ("ours", "rival", "ratio"))
    assert ours["tokens"] == 4 * (3 + 5)
    assert results["sample"]["ours"]["tokens"] == 4 * 5
    assert len(rival["runs"]) == 2
    assert ratio["tokens_per_second"] > 1 > ratio["seconds"]
    assert ratio["seconds"] == pytest.approx(ours["seconds"] / rival["seconds"])
    assert 0 < rival["peak_memory_bytes"] <= rival["process_peak_memory_bytes"]


def test_a_worker_that_ends_is_told_of_with_its_last_words(tmp_path):
    with pytest.raises(ChildProcessError, match=r"rival.*'knows'"):
        fake(tmp_path, "rival")


def test_rollouts_of_other_lengths_are_not_counted():
    assert worker.counted(SETTINGS, "step_varied", [4, 3, 2, 1]) == 4 * 3 + 10
    with pytest.raises(RuntimeError, match="not those asked for"):
        worker.counted(SETTINGS, "sample", [5, 5, 5, 4])


def test_prompts_have_exactly_the_tokens_asked_for():
    tokenizer = Tokenizer.load(bench.TINY)
    prompts = bench.exact_prompts(tokenizer, 3, 17, seed=0)
    assert len(set(prompts)) == 3
    assert {len(tokenizer.encode(prompt)) for prompt in prompts} == {17}


@pytest.mark.long
def test_the_quick_setting_writes_the_report(tmp_path):
    bench.main(["--quick", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "bench.json").read_text())
    assert list(report["cases"]) == ["sample", "step", "sample_varied"]
    for sides in report["cases"].values():
        assert set(contest.FIGURES) <= set(sides["ours"])
        assert "ratio" not in sides
    (run,) = report["cases"]["step"]["ours"]["runs"]
    assert run["logprob_gap"] == 0.0
    assert report["facts"]["ours"]["base_bytes"] == report["figures"]["base_bytes"] > 0
    assert {row["axis"] for row in report["growth"]} == {"rows", "tokens", "experts", "layers"}
    assert all(row["logprob_gap"] == 0.0 for row in report["growth"])
    assert "| step | orbit_jax |" in (tmp_path / "bench.md").read_text()
    assert (tmp_path / "bench.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (["--base", "nowhere.gguf"], "nowhere.gguf is missing: check the path"),
        (["--quick", "--ours-set", "slots"], "--ours-set slots: expected name=value"),
        (["--quick", "--repeats", "0"], "0 must be a whole number above 0"),
    ],
)
def test_a_mistake_is_one_sentence(mistake, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--out", str(tmp_path), *mistake])
    assert sentence in capsys.readouterr().err.splitlines()[-1]
