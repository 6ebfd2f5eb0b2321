"""A sweep's folder: what is kept, gone on with and refused, and what its runs come to."""

import json
import math
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT)]

import sweep as script  # noqa: E402

from orbit_jax.config import Config, from_config_dict  # noqa: E402
from orbit_jax.runs import sweep_report  # noqa: E402
from orbit_jax.runs.children import Children  # noqa: E402
from orbit_jax.runs.folder import RunFolder  # noqa: E402
from orbit_jax.runs.sweep_plot import draw  # noqa: E402
from orbit_jax.runs.sweeps import MEASURES, Sweep, over_seeds, require_measures, script_of  # noqa: E402

STAND_IN = str(Path(__file__).with_name("stand_in.py"))
RATES = {"optimizer.learning_rate": (1e-3, 1e-2)}


def plan(out, grid=RATES, seeds=(0, 1), config=None, run=STAND_IN):
    return Sweep.plan(out, run, config or Config(steps=3), grid, seeds)


def run(out, *given, tell=None, **more) -> Sweep:
    """Plans and runs a sweep of the stand-in, whose cells do what they are told."""
    out.mkdir(exist_ok=True)
    (out / "told.json").write_text(json.dumps(tell or {}))
    found = plan(out, *given, **more)
    with RunFolder(out).lock() as lock, Children(lock) as children:
        command = lambda sweep, cell: [sys.executable, STAND_IN, str(sweep.path(cell))]  # noqa: E731
        script.run_all(found, children, command, MEASURES)
    return found


def states(found: Sweep) -> dict[str, str]:
    return {cell.name: found.state(cell) for cell in found.cells}


def started(out: Path) -> list[str]:
    """What has been started since the last call."""
    path = out / "started.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


FOUR = [f"learning_rate={rate}/seed={seed}" for seed in (0, 1) for rate in (0.001, 0.01)]


def test_a_finished_sweep_is_kept_whole(tmp_path, capsys):
    found = run(tmp_path)
    assert states(found) == dict.fromkeys(FOUR, "finished")
    assert started(tmp_path) == [f"{name} from 0" for name in FOUR]
    out = capsys.readouterr().out
    assert "4 runs to do; 0 of 4 have finished" in out
    assert f"[2/4] {FOUR[1]}  ETA 0:00:0" in out
    again = run(tmp_path)
    assert started(tmp_path) == []
    assert states(again) == states(found)
    assert "0 runs to do; 4 of 4 have finished" in capsys.readouterr().out


def test_what_stopped_or_died_goes_on_from_its_checkpoint(tmp_path, capsys):
    first = run(tmp_path, tell={FOUR[0]: "die", FOUR[2]: "stop"})
    started(tmp_path)
    assert [states(first)[name] for name in FOUR] == ["failed", "finished"] * 2
    assert first.cells[0].error == "killed by SIGKILL"
    capsys.readouterr()
    second = run(tmp_path)
    assert set(states(second).values()) == {"finished"}
    assert started(tmp_path) == [f"{FOUR[0]} from 1", f"{FOUR[2]} from 1"]
    out = capsys.readouterr().out
    assert f"[1/2] {FOUR[0]}  ETA 0:03:20  once more, after killed by SIGKILL" in out


def test_one_that_fails_does_not_stop_the_others_and_says_why(tmp_path, capfd):
    found = run(tmp_path, tell={FOUR[0]: "fail"})
    assert [states(found)[name] for name in FOUR] == ["failed", *["finished"] * 3]
    assert "and some more words" in capfd.readouterr().err
    assert "and some more words" in (tmp_path / FOUR[0] / "errors.txt").read_text()
    sweep_report.show(Sweep.read(tmp_path), MEASURES)
    sentence = "status 2: error: config.base.path: it is not there"
    assert f"failed: {FOUR[0]}: {sentence}" in capfd.readouterr().out
    assert set(states(run(tmp_path)).values()) == {"finished"}


def test_a_grown_grid_adds_cells_and_keeps_the_others(tmp_path):
    run(tmp_path)
    started(tmp_path)
    found = run(tmp_path, {"optimizer.learning_rate": (1e-2, 0.1)}, (1, 2))
    new = ["learning_rate=0.1/seed=1", "learning_rate=0.01/seed=2", "learning_rate=0.1/seed=2"]
    assert started(tmp_path) == [f"{name} from 0" for name in new]
    assert states(found) == dict.fromkeys([*FOUR, *new], "finished")
    assert [row["seeds"] for row in found.table(MEASURES)] == [[0, 1], [0, 1, 2], [1, 2]]


def test_a_run_is_kept_where_its_field_is_swept_only_later(tmp_path):
    run(tmp_path, {}, (0,))
    started(tmp_path)
    found = run(tmp_path, {"adapter.rank": (16, 4)}, (0,))  # 16 is what the first run had
    assert started(tmp_path) == ["rank=4/seed=0 from 0"]
    assert states(found) == {"seed=0": "finished", "rank=4/seed=0": "finished"}
    assert [row["setting"] for row in found.table(MEASURES)] == ["rank=4", "rank=16"]


def test_cells_of_an_earlier_grid_that_were_never_begun_are_let_go(tmp_path):
    found = plan(tmp_path)
    found.write(MEASURES)
    assert list(states(plan(tmp_path, seeds=(1,)))) == FOUR[2:]


def test_another_config_or_experiment_is_refused_and_what_does_no_harm_is_not(tmp_path):
    run(tmp_path, {}, (0,))
    other = from_config_dict({"steps": 3, "adapter": {"rank": 8}})
    with pytest.raises(ValueError, match=r"another config than now: adapter.rank: 16 -> 8; rest"):
        plan(tmp_path, config=other)
    with pytest.raises(ValueError, match="steps: 3 -> 4"):
        plan(tmp_path, config=Config(steps=4))
    with pytest.raises(ValueError, match=r"those of .*stand_in.py, not of other.py"):
        plan(tmp_path, run="other.py")
    harmless = from_config_dict({"steps": 3, "seed": 5, "run": {"root": "x"}})
    assert states(plan(tmp_path, {}, (0,), harmless)) == {"seed=0": "finished"}
    (tmp_path / "sweep.json").unlink()  # the run folder tells as well
    with pytest.raises(ValueError, match=r"adapter\.rank: 16 -> 8"):
        plan(tmp_path, {}, (0,), other)


def test_a_sweep_over_several_nodes_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"mesh\.processes=2: a sweep starts one process"):
        plan(tmp_path, config=from_config_dict({"mesh": {"data": 2, "processes": 2}}))


def test_median_mean_and_interval_are_those_by_hand():
    found = over_seeds([0.5, 0.8, 0.6])
    # Deviations -2/15, 1/6, -1/30 of the mean 19/30: s^2 = 7/300; t of 2 degrees is 4.302653.
    half = 4.302653 * math.sqrt(7 / 300) / math.sqrt(3)
    assert found["median"] == 0.6
    assert found["mean"] == pytest.approx(19 / 30)
    assert (found["low"], found["high"]) == pytest.approx((19 / 30 - half, 19 / 30 + half))


def test_one_seed_has_no_interval_and_none_has_nothing():
    assert over_seeds([0.5]) == {
        "values": [0.5], "median": 0.5, "mean": 0.5, "low": None, "high": None
    }  # fmt: skip
    assert over_seeds([])["mean"] is None


def test_each_setting_has_its_gain_over_its_seeds(tmp_path):
    run(tmp_path)
    rows = json.loads((tmp_path / "sweep.json").read_text())["settings"]
    assert [row["values"] for row in rows] == [{"optimizer.learning_rate": x} for x in (1e-3, 1e-2)]
    gain = rows[1]["measures"]["gain"]
    # From 0.3 to 0.5 and 0.6; s = 0.1 / sqrt(2), t of 1 degree is 12.706205.
    assert gain["values"] == pytest.approx([0.2, 0.3])
    assert gain["mean"] == pytest.approx(0.25)
    assert gain["high"] == pytest.approx(0.25 + 12.706205 * 0.05, abs=1e-6)


def test_a_folder_is_read_again_and_the_file_alone_as_well(tmp_path, capsys):
    run(tmp_path / "a", seeds=(0,))
    for cell in ("a", "b"):
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b" / "sweep.json").write_text((tmp_path / "a" / "sweep.json").read_text())
        capsys.readouterr()
        sweep_report.show(Sweep.read(tmp_path / cell), ["gain", "entropy"])
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["learning_rate=0.01", "1", "seed", "+20.0%", "0.333"] in lines
    with pytest.raises(ValueError, match=r"has no sweep\.json"):
        Sweep.read(tmp_path)


def test_the_table_has_medians_means_intervals_and_the_largest_gap(tmp_path, capsys):
    found = run(tmp_path, {}, (0, 1, 2))
    found.cells[1].figures["parity_max_abs_diff"] = 0.25
    capsys.readouterr()
    sweep_report.show(found, ["gain", "reward_last", "parity_max_abs_diff", "unseen/pass_greedy"])
    shown = [line.split() for line in capsys.readouterr().out.splitlines() if "95%:" not in line]
    assert ["median", "+11.0%", "0.32", "0.25", "-"] in shown
    assert ["3", "seeds", "mean", "+11.0%", "0.32", "-"] in shown
    assert ["95%", "[-13.8,", "+35.8]", "[0.0716,", "0.568]"] in shown


def test_runs_of_several_commits_are_told(tmp_path):
    found = run(tmp_path)
    found.cells[0].commit = "def"
    assert any("2 commits" in text for text in sweep_report.remarks(found))
    assert len(sweep_report.remarks(run(tmp_path))) == 1


def test_a_measure_that_no_run_has_is_refused():
    require_measures(["gain", "entropy", "unseen/pass_greedy"])
    with pytest.raises(ValueError, match="did you mean heldout_pass_after"):
        require_measures(["heldout_pas_after"])


def test_an_experiment_is_found_by_path_or_by_name(tmp_path):
    fork = tmp_path / "my_ppo.py"
    fork.write_text("")
    assert Path(script_of(str(fork), tmp_path)).resolve() == fork.resolve()
    assert Path(script_of("my_ppo", tmp_path)).resolve() == fork.resolve()
    with pytest.raises(ValueError, match=r"run='my_run': there is neither .*my_run\.py"):
        script_of("my_run", tmp_path)


@pytest.mark.parametrize(
    "grid",
    [
        {},
        {"optimizer.learning_rate": (1e-4, 1e-3, 1e-2)},
        {"adapter.experts": ("each", "all"), "adapter.rank": (4, 8)},
        {"adapter.rank": tuple(range(1, 11))},
    ],
)
def test_sweeps_of_any_number_of_fields_are_drawn(tmp_path, grid):
    found = run(tmp_path, grid, (0,))
    draw(found, MEASURES, tmp_path / "sweep.png")
    draw(found, ["entropy"], tmp_path / "entropy.png")
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    assert (tmp_path / "entropy.png").stat().st_size > 10_000


def test_each_run_is_a_point_and_decades_have_a_logarithmic_axis(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    found = run(tmp_path, RATES | {"adapter.rank": (4, 8)})
    draw(found, MEASURES, tmp_path / "sweep.png")
    left, right = figures[-1].axes
    points = sorted(tuple(xy) for dots in left.collections for xy in dots.get_offsets().tolist())
    after = [[c.config["optimizer"]["learning_rate"], c.figures["heldout_pass_after"]]
             for c in found.cells]  # fmt: skip
    assert points == sorted(map(tuple, after))
    assert left.get_xscale() == "log"
    assert left.get_xlabel() == "optimizer.learning_rate"
    named = [text.get_text() for axes in (left, right) for text in axes.get_legend().get_texts()]
    assert named == ["rank=4", "rank=8", "before training", "0.001", "0.01"]
    # A median and a band over the seeds of each setting: rewards of seeds 0 and 1 from 0.1 and 0.2.
    assert len(right.lines) == len(right.collections) == 4
    assert right.lines[0].get_ydata() == pytest.approx([0.17] * 3)
    draw(run(tmp_path / "ranks", {"adapter.rank": (4, 8)}, (0,)), ["gain"], tmp_path / "x.png")
    assert figures[-1].axes[0].get_xscale() == "linear"
