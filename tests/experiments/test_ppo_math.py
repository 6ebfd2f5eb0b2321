"""The main experiment, in the `test` variant of its recipe: what it leaves, resumes and refuses."""

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT)]

import export_adapter  # noqa: E402
import generate  # noqa: E402
import ppo_math  # noqa: E402

from configs import tiny_moe  # noqa: E402
from orbit_jax import compile as compiler  # noqa: E402
from orbit_jax import parity, startup  # noqa: E402
from orbit_jax.checkpoint import run_state  # noqa: E402
from orbit_jax.config import from_config_dict  # noqa: E402
from orbit_jax.rl.rollouts import Rollouts  # noqa: E402
from orbit_jax.rl.rollouts import generate as rollout  # noqa: E402
from orbit_jax.rl.sampler import STOP_REASONS  # noqa: E402
from orbit_jax.runs.folder import SUMMARY_KEYS  # noqa: E402
from orbit_jax.runs.metrics import read_metrics  # noqa: E402

# Times; and evaluations, which the last step of a run leaves to the end.
NOT_COMPARED = ("seconds/step", "tokens_per_second", "hardware/", "heldout/")


pytestmark = pytest.mark.usefixtures("compiled_once")


def recipe(root: Path, **fields):
    config = tiny_moe.get_config("test")
    config.base.path = str(ROOT / config.base.path)
    config.run.root = str(root)
    # No power of two: a quotient and a product with a reciprocal would round differently.
    config.sampler.temperature = 0.7
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
    return from_config_dict(config)


def only_run(root: Path) -> Path:
    (path,) = root.iterdir()
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict, list]:
    """Four uninterrupted steps, with the programs that ran them."""
    root = tmp_path_factory.mktemp("finished")
    made = []
    build = parity.build
    parity.build = lambda *a: made.append(build(*a)) or made[-1]
    try:
        summary = ppo_math.run(recipe(root, steps=4))
    finally:
        parity.build = build
    return only_run(root), summary, made


def test_a_run_leaves_a_whole_folder(finished):
    folder, summary, _ = finished
    assert set(SUMMARY_KEYS) == set(json.loads((folder / "summary.json").read_text()))
    assert summary["finished"]
    for name in ("config.json", "environment.json", "log.txt", "metrics.jsonl"):
        assert (folder / name).stat().st_size > 0
    assert (folder / "plots" / "learning_curve.png").stat().st_size > 10_000
    assert list((folder / "tensorboard").iterdir())
    samples = (folder / "samples/step_000001.jsonl").read_text().splitlines()
    first = json.loads(samples[0])
    assert len(samples) == 16
    assert {"prompt", "turns", "ids", "logprobs", "reward", "stop"} <= set(first)
    assert len(first["ids"]) == len(first["logprobs"])


def test_what_grows_with_the_steps_of_a_run_stays_small(finished):
    """10 kB a step, and 4 kB a rollout that is kept: of a day of 10-second steps 86 MB, and these.

    Once there are the picture and what the start tells; `log.txt` grows by a line in 10 seconds.
    """
    folder, _, _ = finished
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    assert max(map(len, rows)) < 4_000
    (kept,) = (folder / "samples").iterdir()  # of the first of ten steps
    samples = kept.stat().st_size
    assert samples < 2_000 * 16
    events = sum(file.stat().st_size for file in (folder / "tensorboard").iterdir())
    picture = (folder / "plots" / "learning_curve.png").stat().st_size
    assert events < 6_000 * len(rows) + samples + picture
    assert (folder / "log.txt").stat().st_size < 4_000
    assert (folder / "alerts.jsonl").read_text() == ""
    assert any("hardware/disk_free_gb" in row for row in rows)


def test_the_log_prob_gap_is_exactly_zero_at_every_step(finished):
    folder, summary, _ = finished
    assert "recipe 'fast'" in (folder / "log.txt").read_text()
    gaps = [r["parity/max_abs_diff"] for r in read_metrics(folder) if "tokens" in r]
    assert gaps == [0.0] * 4
    assert summary["parity_max_abs_diff"] == 0.0
    assert summary["parity_tokens"] > 100


def test_the_loop_has_two_jitted_functions_and_traces_none_of_them_again(finished):
    _, _, made = finished
    (programs,) = made
    # One length of training streams; prompts of groups and prompts of an evaluation.
    assert programs.ppo_step.traces == 1
    assert programs.sample.traces <= 2
    # Nor is one compiled again for arguments that lie elsewhere: the gate's executables are the
    # run's.
    assert programs.ppo_step.executables == 1
    assert programs.sample.executables == programs.sample.traces
    assert "jit(" not in (ROOT / "experiments/ppo_math.py").read_text()


def test_training_begins_from_an_exported_adapter(finished, tmp_path, monkeypatch, capsys):
    """The policy is the adapter, to the bit, and so is the reference of the KL: 0 at first."""
    folder, _, _ = finished
    peft = tmp_path / "peft"
    monkeypatch.setattr(sys, "argv", ["export_adapter.py", str(folder), str(peft)])
    export_adapter.main()
    asked = ["--prompt", "7+8-3", "--max_tokens", "20"]
    answers = []
    for source in (["--run", str(folder)], ["--adapter", str(peft)]):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["generate.py", *source, *asked])
        generate.main()
        answers.append(capsys.readouterr().out.splitlines()[1].partition("> ")[2])
    assert answers[0] == answers[1]
    ppo_math.run(recipe(tmp_path / "again", steps=1, adapter__initial=str(peft), ppo__kl="metric"))
    (row,) = [r for r in read_metrics(only_run(tmp_path / "again")) if "tokens" in r]
    assert row["kl/reference_k1"] == row["kl/reference_k3"] == 0.0
    assert row["parity/max_abs_diff"] == 0.0
    # Another scale in that folder would make another policy of the same parameters.
    file = peft / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha": 32', '"lora_alpha": 64'))
    with pytest.raises(ValueError, match=r"alpha=32.0.*adapter.initial says .*alpha=64.0"):
        export_adapter.read_trained(only_run(tmp_path / "again"))
    with pytest.raises(ValueError, match=r"alpha=32.0.*adapter.initial says .*alpha=64.0"):
        ppo_math.run(
            recipe(tmp_path / "again", steps=2, adapter__initial=str(peft), ppo__kl="metric"),
            resume=str(only_run(tmp_path / "again")),
        )
    # Not what the run of a fresh adapter measured.
    fresh = next(r for r in read_metrics(folder) if "tokens" in r)
    assert row["reward/mean"] != fresh["reward/mean"] or row["entropy"] != fresh["entropy"]


def test_what_was_trained_answers_beside_its_base(finished, capsys, monkeypatch):
    folder, _, _ = finished
    asked = ["generate.py", "--run", str(folder), "--prompt", "7+8-3", "--max_tokens", "20"]
    monkeypatch.setattr(sys, "argv", asked)
    generate.main()
    out, errors = capsys.readouterr()
    base, trained = out.splitlines()
    assert re.fullmatch(r"base> .*\\boxed\{-?\d+\}", base)
    assert trained.startswith("step 4> ")
    assert len(errors.splitlines()) == 2
    assert "<|" not in out
    # The same greedy answers as those of a batch, here all in one piece.
    config = recipe(folder.parent, sampler__prompts_per_step=1)  # slots for the two alone
    frozen = startup.load(config)
    programs = parity.build("fast", frozen.model, config)
    tokenizer = frozen.tokenizer
    rollouts, _ = rollout(
        programs.sample,
        programs.model,
        frozen.base,
        None,
        startup.slots(config, frozen),
        [tokenizer.encode_chat([{"role": "user", "content": p}]) for p in ("1+1+1", "7+8-3")],
        group_size=1,
        max_completion_tokens=20,
        stop_ids=tokenizer.eos_ids,
        temperature=0.0,
        seed=0,
        step=0,
    )
    assert base == "base> " + tokenizer.decode(rollouts.completion(1))


def test_a_resumed_run_equals_one_in_a_single_go(finished, tmp_path):
    whole, _, _ = finished
    # The last checkpoint by interval is the final one as well.
    ppo_math.run(recipe(tmp_path, steps=2, run__checkpoint_every_steps=2))
    part = only_run(tmp_path)
    ppo_math.run(recipe(tmp_path, steps=4), resume=str(part))

    def rows(folder: Path) -> list[dict]:
        kept = [r for r in read_metrics(folder) if "tokens" in r]
        return [{k: v for k, v in r.items() if not k.startswith(NOT_COMPARED)} for r in kept]

    assert rows(part) == rows(whole)
    for one, other in zip(
        *(_arrays(f / "checkpoints/step_000004") for f in (whole, part)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.long
def test_a_resumed_run_draws_the_same_further_groups_and_has_the_same_coefficient(tmp_path):
    settings = {"dynamic_sampling": 3, "kl": "loss", "kl_coefficient": 0.1, "kl_target": 0.01}
    fields = {f"ppo__{name}": value for name, value in settings.items()}
    ppo_math.run(recipe(tmp_path / "whole", steps=2, **fields))
    ppo_math.run(recipe(tmp_path / "part", steps=1, **fields))
    whole, part = only_run(tmp_path / "whole"), only_run(tmp_path / "part")
    # The limit may be another: what is drawn until then does not depend on it.
    ppo_math.run(recipe(tmp_path / "part", steps=2, **fields | {"ppo__dynamic_sampling": 4}), part)
    first, second = (r for r in read_metrics(whole) if "tokens" in r)
    for row in (first, second):
        assert row["parity/max_abs_diff"] == 0
        assert 1 < row["dynamic_sampling/rounds"] <= 3
        flat = row["dynamic_sampling/flat_groups"]
        assert row["reward/flat_groups"] == flat / 8
        assert flat == 0 or row["dynamic_sampling/rounds"] == 3
    assert first["kl/coefficient"] == np.float32(0.1) != second["kl/coefficient"]
    for one, other in zip(
        *(_arrays(f / "checkpoints/step_000002") for f in (whole, part)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_a_run_whose_groups_never_differ_stops_with_a_sentence_and_loses_nothing(tmp_path):
    with pytest.raises(ValueError, match="dynamic_sampling=2: in 16 groups of 2 rounds all"):
        ppo_math.run(recipe(tmp_path, ppo__dynamic_sampling=2, reward__correctness=0.0))
    assert run_state.latest(only_run(tmp_path) / "checkpoints").path.name == "step_000000"


def _arrays(checkpoint: Path) -> list[np.ndarray]:
    state = run_state.stored_arrays(checkpoint)
    return [state[name] for name in sorted(state)]


def test_a_group_is_flat_where_its_counted_rewards_are_all_equal():
    nan, groups = np.nan, np.repeat(np.arange(4), 3)
    rewards = np.array([1, 1, 1, 1, nan, 1, 0, nan, 1, nan, nan, nan])
    sampled = Rollouts(
        tokens=np.zeros((12, 2), np.int32),
        lengths=np.full(12, 2),
        prompt_lengths=np.ones(12),
        sampled=np.tile([False, True], (12, 1)),
        logprobs=np.zeros((12, 2)),
        status=np.full(12, STOP_REASONS.index("eos")),
        groups=groups,
        temperature=1.0,
        filtered=False,
        fingerprint=0,
        calls=1,
        decode_steps=2,
    )
    found = ppo_math.describe(sampled, rewards)
    assert found["reward/flat_groups"] == 0.75
    assert found["completion/length_mean"] == 1
    assert found["stop/eos"] == 1


def test_resuming_under_another_meaning_is_refused(finished, tmp_path):
    folder, _, _ = finished
    with pytest.raises(ValueError, match=r"adapter\.alpha: 32\.0 -> 16\.0"):
        ppo_math.run(recipe(folder.parent, steps=6, adapter__alpha=16.0), resume=str(folder))


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, capsys):
    def interrupt_after_a_step():
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            metrics = list(tmp_path.glob("*/metrics.jsonl"))
            if metrics and '"step": 1' in metrics[0].read_text():
                break
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_after_a_step, daemon=True).start()
    summary = ppo_math.run(recipe(tmp_path, steps=1000, evaluation__every_steps=1000))
    folder = only_run(tmp_path)
    assert not summary["finished"]
    assert run_state.latest(folder / "checkpoints").path is not None
    assert f"--resume {folder}" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.long
def test_tiles_are_chosen_unasked_where_the_library_depends_on_shapes(tmp_path, monkeypatch):
    # Without the option, reductions and exp go into library kernels together with the dots.
    naive = dict(compiler._OPTIONS["cpu", "fast"])
    del naive["xla_cpu_experimental_ynn_fusion_type"]
    monkeypatch.setitem(compiler._OPTIONS, ("cpu", "fast"), naive)
    # A small adapter: two recipes are compiled.
    small = {"adapter__targets": ("o_proj", "down_proj"), "base__working_copy": "never"}
    summary = ppo_math.run(recipe(tmp_path, steps=1, sampler__temperature=1.0, **small))
    log = (only_run(tmp_path) / "log.txt").read_text()
    assert "recipe 'tiles'" in log
    assert summary["parity_max_abs_diff"] == 0.0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"base__path": "/nowhere"}, "does not exist"),
        ({"task__mixture": ("data:/nowhere.jsonl",)}, "does not exist"),
        ({"sampler__max_prompt_tokens": 4}, r"max_prompt_tokens=4: .* has \d+ tokens"),
        ({"sampler__prompts_per_step": 8_000_000}, "GB are free"),
        ({"sampler__temperature": 0.0}, "greedy samples is refused"),
        ({"sampler__group_size": 1}, "needs at least 2"),
        ({"ppo__micro_batches": 3}, "must divide the 16 rollouts"),
        ({"adapter__targets": ("gate",)}, "never adapted"),
        ({"mesh__tensor": 64}, "64 devices"),
    ],
)
def test_bad_input_is_refused_in_one_sentence_before_any_long_work(tmp_path, fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        ppo_math.run(recipe(tmp_path, **fields))
    assert not list(tmp_path.iterdir())
