import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from orbit_jax.runs.plots import learning_curve

GAP = "parity/max_abs_diff"


@pytest.fixture
def drawn(monkeypatch):
    """What the picture's titles say, collected while it is drawn."""
    titles = []
    original = Axes.set_title

    def record(axes, label, **settings):
        titles.append(label)
        return original(axes, label, **settings)

    monkeypatch.setattr(Axes, "set_title", record)
    return titles


def rows(gap=0.0, steps=12):
    return [
        {"step": i, "reward/mean": i / 20, GAP: gap}
        | ({"heldout/pass_greedy": i / 15, "heldout/pass_sampled": i / 18} if i % 4 == 0 else {})
        for i in range(steps)
    ]


def test_a_curve_is_a_picture_that_opens(tmp_path, drawn):
    learning_curve({"seed 0": rows()}, tmp_path / "curve.png")
    height, width, _ = imread(tmp_path / "curve.png").shape
    assert width > height > 600
    assert drawn == ["exactly 0 at every step"]


def test_several_seeds_are_overlaid_in_colours_of_their_own(tmp_path, drawn):
    learning_curve({f"seed {i}": rows() for i in range(3)}, tmp_path / "curve.png")
    pixels = (imread(tmp_path / "curve.png")[..., :3] * 255).round().astype(int)
    colours = set(np.unique(pixels @ [1 << 16, 1 << 8, 1]))
    assert {0x0072B2, 0xD55E00, 0x009E73} <= colours
    assert drawn == ["exactly 0 at every step"]


def test_a_gap_that_is_not_zero_is_never_labelled_zero(tmp_path, drawn):
    learning_curve({"a": rows(), "b": rows(gap=1e-6)}, tmp_path / "curve.png")
    assert drawn == ["exactly 0 at 12 of 24 steps"]


def test_a_gap_that_was_not_finite_is_never_labelled_zero(tmp_path, drawn):
    learning_curve({"a": [*rows(), {"step": 12, GAP: None}]}, tmp_path / "curve.png")
    assert drawn == ["exactly 0 at 12 of 13 steps"]


def test_rewards_of_another_range_are_not_cut_off(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda f, path: seen.append(f.axes[0].get_ylim()))
    for scale in (1, 5, -1):
        scaled = [row | {"reward/mean": scale * row["reward/mean"]} for row in rows()]
        learning_curve({"a": scaled}, tmp_path / "curve.png")
    assert seen[0] == (-0.02, 1.02)
    assert seen[1][1] > 1.02
    assert seen[2][0] < -0.02


@pytest.mark.parametrize("short", [[], rows(steps=1), [{"step": 0}]])
def test_a_run_that_has_hardly_begun_is_drawn_too(tmp_path, short):
    learning_curve({"a": short}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000
