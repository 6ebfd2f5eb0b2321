"""Recipes of large models in their tiny form, from random weights to a trained step."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT)]

import export_adapter  # noqa: E402
import ppo_math  # noqa: E402

from orbit_jax.config import from_config_dict  # noqa: E402
from orbit_jax.runs.metrics import read_metrics  # noqa: E402

pytestmark = pytest.mark.long

# Latent attention, INT4, a critic and a reference.
RECIPES = {"kimi_k2": {"loss/value", "kl/reference_k1"}}


@pytest.fixture(scope="module", params=RECIPES)
def rehearsed(request, tmp_path_factory) -> tuple[str, Path]:
    config = importlib.import_module(f"configs.{request.param}").get_config("tiny")
    config.base.path = str(ROOT / config.base.path)
    config.run.root = str(tmp_path_factory.mktemp(request.param))
    config.run.compilation_cache = False
    config.sampler.max_completion_tokens = 12
    config.steps = 1
    ppo_math.run(from_config_dict(config))
    (folder,) = Path(config.run.root).iterdir()
    return request.param, folder


def test_a_rehearsal_trains_with_gap_zero(rehearsed: tuple[str, Path]):
    name, folder = rehearsed
    summary = json.loads((folder / "summary.json").read_text())
    (row,) = [row for row in read_metrics(folder) if "tokens" in row]
    assert summary["finished"]
    assert summary["parity_max_abs_diff"] == 0.0
    assert summary["parity_tokens"] > 200
    assert 4 < row["entropy"] < 5.7  # of random weights, nearly that of 288 equal words
    assert RECIPES[name] <= row.keys()


def test_the_adapter_of_a_rehearsal_is_not_exported(rehearsed: tuple[str, Path], tmp_path: Path):
    with pytest.raises(ValueError, match="is a rehearsal: its base was random, so that no model"):
        export_adapter.export(rehearsed[1], tmp_path / "out")
