"""Both ways side by side, for a run and for models without one."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
from figures import DEVICE, MODEL, WORKLOAD
from rich.console import Console

from orbit_jax import recipes
from orbit_jax.config import from_config_dict
from orbit_jax.model.config import MeshShape, ModelConfig
from orbit_jax.plan.adapter_only import adapter_only, lora_parameters
from orbit_jax.plan.comparison import Comparison, compare, show, show_sizes, workload_of
from orbit_jax.plan.counts import count, preset
from orbit_jax.plan.devices import find
from orbit_jax.plan.full_parameters import PRECISIONS, full_parameters

ROOT = Path(__file__).parents[2]
MESH = MeshShape(2, 4)
ROOMY = dataclasses.replace(DEVICE, memory_bytes=8000)


def found(device=ROOMY) -> Comparison:
    return compare(MODEL, device, WORKLOAD, 420, 100, MESH)


def printed(fn, *given) -> str:
    out = io.StringIO()
    fn(*given, Console(file=out, width=100))
    return out.getvalue()


def test_the_workload_is_that_of_the_run():
    config = recipes.node("kimi_k2")
    config.mesh.data, config.mesh.tensor = 2, 4
    workload = workload_of(from_config_dict(config))
    assert (workload.rows, workload.rows_at_once, workload.tokens_per_row) == (64, 64, 5120)
    # A prompt and a completion, rounded up.
    assert 5120 <= workload.micro_batch_tokens < 5200


def test_rows_are_those_of_both_ways():
    one = found()
    assert one.adapter == adapter_only(MODEL, ROOMY, WORKLOAD, 420, 100, MESH)
    assert one.full == tuple(full_parameters(MODEL, ROOMY, WORKLOAD, p) for p in PRECISIONS)
    assert json.loads(json.dumps(one.to_json()))["adapters"]["trained_parameters"] == 420


def test_the_largest_is_told_only_where_all_parameters_fit_one_node():
    # 8 x (4000 - 200) bytes, less 18 a parameter, for rows of 32.
    assert found().largest == {
        "rows_with_adapters": 606,
        "rows_with_all_parameters": (8 * 3800 - 18_000) // 32,
        "ppo_rows_with_adapters": 606 - 420 * 24 // 32,
        "ppo_rows_with_all_parameters": 0,  # 34 bytes a parameter
        "rank": 5,
    }
    assert found(DEVICE).largest is None
    text = printed(show, found(), 4.0)
    assert [line.split()[-2:] for line in text.splitlines() if "rows at once" in line] == [
        ["606", "387"]
    ]
    assert "rows at once" not in printed(show, found(DEVICE), 4.0).replace("fewer rows at once", "")


def test_the_table_sets_shares_of_a_step_apart():
    text = printed(show, found(), 4.0)
    (row,) = [line.split() for line in text.splitlines() if line.startswith("adapters  ")]
    # 288 s of products; 81.6 of routing, 67.2 of dense, 336 of adapters (see test_adapter_only).
    expected = "1 12.86 kB 1.61 kB 48.48 kB 772.8 62.7% 43.5% 10.6%"
    assert row == ["adapters", *expected.split()]


@pytest.mark.parametrize(("device", "times", "times_in_ppo"), [("h100", 7, None), ("b200", 1.5, 4)])
def test_thirty_billion_parameters_leave_more_room_for_rows_with_adapters(
    device, times, times_in_ppo
):
    """On the smaller one a critic and a reference of all parameters do not fit at all."""
    source = json.loads((ROOT / "configs/models/qwen3_30b_a3b/config.json").read_text())
    model = count(ModelConfig.from_hf(source), base_bytes=31_170_000_000)  # FP8
    workload = workload_of(from_config_dict(recipes.node("qwen3_30b_a3b")))
    largest = compare(model, find(device), workload, *lora_parameters(model, 16), MESH).largest
    assert largest["rows_with_adapters"] > times * largest["rows_with_all_parameters"]
    both = largest["ppo_rows_with_adapters"], largest["ppo_rows_with_all_parameters"]
    assert both[0] > (times_in_ppo or 1) * both[1]
    assert (both[1] == 0) == (times_in_ppo is None)


@pytest.mark.parametrize("name", ["7b", "50t"])
def test_sizes_are_two_rows_each(name):
    model = preset(name)
    one = compare(model, find("b200"), WORKLOAD, *lora_parameters(model, 16), MESH)
    rows = [line for line in printed(show_sizes, [one]).splitlines() if line.startswith(name)]
    assert [row.split()[1] for row in rows] == ["adapters", "all"]
    assert ("no fit" in rows[0]) == (name == "50t")
    assert max(map(len, rows)) <= 100
