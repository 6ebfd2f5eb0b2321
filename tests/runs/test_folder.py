import json

import jax.numpy as jnp
import numpy as np
import pytest

from orbit_jax.runs.folder import SUMMARY_KEYS, RunFolder

CONFIG = {"seed": 0, "steps": 10, "adapter": {"rank": 8, "targets": ("q_proj", "v_proj")}}


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "runs", "ppo_math", CONFIG)


def test_a_new_folder_has_everything_that_the_design_names(folder):
    assert folder.path.parent.name == "runs"
    assert folder.path.name.startswith("ppo_math-")
    names = {path.name for path in folder.path.iterdir()}
    assert names == {
        "config.json", "environment.json", "log.txt", "samples", "checkpoints", "replays", "plots"
    }  # fmt: skip
    assert folder.config()["adapter"]["targets"] == ["q_proj", "v_proj"]


def test_a_prepared_folder_begins_when_it_is_opened(tmp_path):
    prepared = RunFolder(tmp_path / "rank=8" / "seed=0")
    prepared.prepare(CONFIG)
    prepared.prepare(CONFIG)  # a half that a kill left is completed
    assert not prepared.environment.exists()
    opened = RunFolder.open(prepared.path, CONFIG)
    assert json.loads(opened.environment.read_text())["devices"]
    assert opened.checkpoints.is_dir()
    assert "starts" in (opened.path / "log.txt").read_text()
    RunFolder.open(prepared.path, CONFIG)
    assert "resumes" in (opened.path / "log.txt").read_text()
    with pytest.raises(ValueError, match=r"seed: 0 -> 1"):
        RunFolder.open(prepared.path, CONFIG | {"seed": 1})


def test_two_runs_started_at_once_get_two_folders(tmp_path):
    paths = {RunFolder.create(tmp_path, "ppo_math", CONFIG).path for _ in range(3)}
    assert len(paths) == 3


def test_the_environment_says_what_the_bits_depend_on(folder):
    environment = json.loads((folder.path / "environment.json").read_text())
    assert environment["packages"]["jaxlib"]
    assert environment["devices"]
    assert environment["python"].startswith("3.")
    assert environment["cpu_model"]
    assert len(environment["cpu_features_hash"]) == 16
    assert "python" in environment["command"]


def test_samples_are_one_json_line_each_and_arrays_become_lists(folder):
    row = {"prompt": "1+1", "ids": np.array([1, 2]), "logprobs": jnp.bfloat16([-0.5, np.nan])}
    path = folder.write_samples(12, [row, {"reward": np.float32(0.5)}])
    assert path.relative_to(folder.path).as_posix() == "samples/step_000012.jsonl"
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {"prompt": "1+1", "ids": [1, 2], "logprobs": [-0.5, None]}
    assert second == {"reward": 0.5}


def test_a_summary_has_exactly_the_keys_that_scripts_read(folder):
    summary = dict.fromkeys(SUMMARY_KEYS, 0) | {"reward_last": float("nan"), "finished": True}
    written = json.loads(folder.write_summary(summary).read_text())
    assert tuple(written) == SUMMARY_KEYS
    assert written["reward_last"] is None
    assert written["finished"] is True


def test_a_summary_with_missing_or_unknown_keys_is_refused(folder):
    summary = dict.fromkeys(SUMMARY_KEYS[1:], 0) | {"loss": 1}
    with pytest.raises(ValueError, match=r"missing keys \['experiment'\], unknown keys \['loss'\]"):
        folder.write_summary(summary)
    assert not (folder.path / "summary.json").exists()


def test_files_are_replaced_whole(folder):
    folder.write_samples(1, [{"a": 1}])
    with pytest.raises(TypeError):
        folder.write_samples(1, [{"a": 2}, {"a": object()}])
    assert (folder.samples / "step_000001.jsonl").read_text() == '{"a": 1}\n'


def test_resume_with_the_same_config_opens_the_folder(folder):
    again = RunFolder.open(folder.path, CONFIG)
    assert again.path == folder.path
    assert "resumes" in (folder.path / "log.txt").read_text()


def test_resume_with_another_config_is_refused_and_lists_every_difference(folder):
    other = {"seed": 1, "adapter": {"rank": 16, "targets": ["q_proj", "v_proj"]}, "steps": 10}
    before = (folder.path / "config.json").read_text()
    with pytest.raises(ValueError, match=r"adapter\.rank: 8 -> 16; seed: 0 -> 1"):
        RunFolder.open(folder.path, other)
    assert (folder.path / "config.json").read_text() == before


def test_resume_refuses_fields_that_one_side_lacks(folder):
    with pytest.raises(ValueError, match=r"kl: absent -> 0\.1; seed: 0 -> absent"):
        RunFolder.open(folder.path, {k: CONFIG[k] for k in ("steps", "adapter")} | {"kl": 0.1})


def test_resume_takes_a_difference_that_the_experiment_allows_and_logs_it(folder):
    RunFolder.open(folder.path, CONFIG | {"steps": 20}, may_differ=("steps",))
    assert folder.config()["steps"] == 20
    assert "steps: 10 -> 20" in (folder.path / "log.txt").read_text()


def test_resume_takes_a_difference_that_is_asked_for_by_name(folder):
    other = CONFIG | {"seed": 1, "adapter": CONFIG["adapter"] | {"rank": 16}}
    with pytest.raises(ValueError, match=r"seed: 0 -> 1; .* want it: --change=seed"):
        RunFolder.open(folder.path, other, change=("adapter.rank",))
    with pytest.raises(ValueError, match=r"change='adapter.rang': config has no such field"):
        RunFolder.open(folder.path, other, change=("adapter.rang", "seed"))
    RunFolder.open(folder.path, other, change=("adapter.rank", "seed"))
    assert folder.config()["seed"] == 1
    assert "adapter.rank: 8 -> 16; seed: 0 -> 1" in (folder.path / "log.txt").read_text()


def test_resume_on_another_machine_is_logged(folder):
    path = folder.path / "environment.json"
    environment = json.loads(path.read_text())
    environment["packages"]["jaxlib"] = "0.0.1"
    path.write_text(json.dumps(environment))
    RunFolder.open(folder.path, CONFIG)
    assert "bits may differ: packages.jaxlib: 0.0.1 ->" in (folder.path / "log.txt").read_text()


def test_resume_from_a_folder_that_is_no_run_is_one_clear_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"resume: .*nothing has no config\.json"):
        RunFolder.open(tmp_path / "nothing", CONFIG)
