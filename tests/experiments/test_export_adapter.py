"""From a run folder to files that others load."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT)]

import export_adapter  # noqa: E402

from configs import tiny_moe  # noqa: E402
from orbit_jax import startup  # noqa: E402
from orbit_jax.checkpoint import run_state  # noqa: E402
from orbit_jax.checkpoint.base import base_hash, read_config  # noqa: E402
from orbit_jax.checkpoint.peft import load_adapter  # noqa: E402
from orbit_jax.checkpoint.safetensors_io import open_checkpoint  # noqa: E402
from orbit_jax.config import from_config_dict, to_dict  # noqa: E402
from orbit_jax.rl.train_state import TrainState  # noqa: E402
from orbit_jax.runs.folder import RunFolder  # noqa: E402

BASE = ROOT / "orbit_jax" / "assets" / "tiny_moe_int4"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, dict[int, TrainState]]:
    """A run folder with two checkpoints and a half-written one, and the states in them."""
    recipe = tiny_moe.get_config("test")
    recipe.base.path = str(BASE)
    config = from_config_dict(recipe)
    model = read_config(BASE)
    frozen = startup.Frozen(model, export_adapter.shapes(model), None, 0, 0, base_hash(BASE))
    folder = RunFolder.create(tmp_path_factory.mktemp("runs"), "ppo_math", to_dict(config))
    states = {}
    for step in (2, 5):
        rng = np.random.default_rng(step)
        state = startup.train_state(config, frozen)
        params = jax.tree.map(
            lambda p, rng=rng: rng.standard_normal(p.shape, np.float32), state.policy.params
        )
        states[step] = dataclasses.replace(state, policy=state.policy.replace(params=params))
        run_state.save(folder.checkpoints, step, states[step], {"base_hash": frozen.hash}, 9)
    (folder.checkpoints / "step_000009.orbax-checkpoint-tmp").mkdir()
    return folder.path, states


def assert_policy(folder: Path, state: TrainState) -> None:
    adapter = load_adapter(folder, read_config(BASE), base_hash(BASE))
    assert adapter.method == state.policy.method
    jax.tree.map(np.testing.assert_array_equal, adapter.params, state.policy.params)


def test_a_run_gives_its_newest_whole_adapter_and_says_what_it_is(run, tmp_path, capsys):
    folder, states = run
    export_adapter.export(folder, tmp_path / "out")
    assert_policy(tmp_path / "out", states[5])
    facts = json.loads((tmp_path / "out" / "orbit.json").read_text())
    assert (facts["base"], facts["base_hash"], facts["step"]) == (str(BASE), base_hash(BASE), 5)
    assert any("mlp.experts" in name for name in facts["quantised_weights"])
    assert not any(name.endswith(("gate", "norm")) for name in facts["adapted_weights"])
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(BASE)
    assert f"it belongs to {BASE} (hash {base_hash(BASE)})" in capsys.readouterr().out


def test_a_checkpoint_of_a_run_gives_its_own(run, tmp_path):
    folder, states = run
    export_adapter.export(folder / "checkpoints" / "step_000002", tmp_path / "out")
    assert_policy(tmp_path / "out", states[2])


def test_layout_and_dtype_are_those_that_were_asked_for(run, tmp_path):
    export_adapter.export(run[0], tmp_path / "out", layout="fused", dtype="bfloat16")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    header = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    assert b'"dtype":"BF16"' in header
    assert b'"dtype":"F32"' not in header


def test_a_merged_checkpoint_is_a_plain_one_with_its_tokenizer(run, tmp_path, capsys):
    export_adapter.export(run[0], tmp_path / "out", merged=True)
    assert {ref.dtype.name for ref in open_checkpoint(tmp_path / "out").values()} == {"bfloat16"}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    for path in BASE.glob("tokenizer*"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    out = capsys.readouterr().out
    assert "100%" in out
    assert "agree with those of training within bf16, not bit for bit" in out


def test_a_base_that_has_moved_is_named_and_another_is_refused(run, tmp_path):
    moved = Path(shutil.copytree(BASE, tmp_path / "moved"))
    export_adapter.export(run[0], tmp_path / "out", base=str(moved))
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"rope_theta": 2.0}))
    with pytest.raises(ValueError, match=r"was trained on the base with hash .* --base"):
        export_adapter.export(run[0], tmp_path / "other", base=str(moved))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("source", "out", "message"),
    [
        ("nowhere", "out", "nowhere is no run folder"),
        ("empty", "out", "empty has no whole checkpoint"),
        ("empty", "full", "full already exists: name a new folder"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, monkeypatch, source, out, message):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "empty" / "config.json").write_text("{}")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    arguments = ["export_adapter.py", str(tmp_path / source), str(tmp_path / out)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stopped:
        export_adapter.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_what_peft_leaves_out_is_told_where_it_happens():
    names = ["model.layers.[0-1].mlp.experts.[0-7].up_proj", "model.layers.[0-1].self_attn.o_proj"]
    assert not any(map(export_adapter._beside_experts, names))
    assert export_adapter._beside_experts("model.layers.[1-2].mlp.shared_experts.up_proj")
    assert export_adapter._beside_experts("model.layers.[0-0].mlp.up_proj")


def test_names_are_those_of_the_model_that_the_language_model_is_in():
    goldens = ROOT / "tests" / "goldens"
    assert export_adapter.wrapper_of(goldens / "families" / "kimi_k25") == "language_model."
    assert export_adapter.wrapper_of(goldens / "families" / "deepseek_v3") == ""
    assert export_adapter.wrapper_of(goldens / "gguf" / "simple.gguf") == ""


def test_help_answers(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["export_adapter.py", "--help"])
    with pytest.raises(SystemExit) as stopped:
        export_adapter.main()
    assert stopped.value.code == 0
    assert "--merged" in capsys.readouterr().out


def test_what_peft_reads_of_experts_in_part_is_known_beforehand():
    def partial(*names: str) -> bool:
        return export_adapter.some_of_experts(f"layers.1.mlp.experts.{n}_proj" for n in names)

    assert partial("gate", "up")
    assert partial("up")
    assert partial("up", "down")
    assert not partial("down")
    assert not partial("gate", "up", "down")
    assert not export_adapter.some_of_experts(["layers.0.mlp.shared_experts.up_proj", "q_proj"])
