"""A plan says what a run holds, what its programs need beside that, and how far it could go."""

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import toy

from orbit_jax import compile as programs
from orbit_jax import startup
from orbit_jax.config import Config, from_config_dict
from orbit_jax.plan import memory, picture, search
from orbit_jax.plan.adapter_only import lora_parameters
from orbit_jax.plan.devices import find
from orbit_jax.plan.plan import Plan, make_plan
from orbit_jax.plan.programs import arguments
from orbit_jax.rl.train_state import trained_parameters

ROOT = Path(__file__).parents[2]


@functools.cache
def config() -> Config:
    return from_config_dict(
        {
            "base": {"working_copy": "never"},
            "sampler": {"prompts_per_step": 8, "group_size": 4},
            "ppo": {"advantage": "gae", "token_buckets": (1.0,), "remat": "always"},
        }
    )


@functools.cache
def given():
    return arguments(config(), jax.devices()[:1])


@pytest.fixture(scope="module")
def plan() -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "options", lambda *_: toy.QUICK)
        patch.setattr("orbit_jax.plan.compiler.available", lambda: False)
        return make_plan(config(), find("b200"), given())


def nbytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_parts_are_those_that_a_run_holds():
    frozen = startup.load(config())
    state, slots = startup.train_state(config(), frozen), startup.slots(config(), frozen)
    held = memory.parts(given())
    assert held["base"] == nbytes(frozen.base)
    assert held["policy"] == nbytes(state.policy)
    assert held["critic"] == nbytes(state.critic)
    assert held["moments"] == nbytes(state.optimizer)
    assert held["cache"] == nbytes(slots.cache)
    assert held["reference"] == 0
    assert jax.tree.structure(given().base) == jax.tree.structure(frozen.base)


def test_a_program_takes_its_parts_and_the_others_lie_beside_it(plan):
    for name, program in plan.programs.items():
        taken = sum(plan.parts[part] for part in memory.TAKEN[name])
        assert taken == pytest.approx(program.arguments, rel=0.01), name
        rest = sum(plan.parts.values()) - taken
        assert program.resident == rest
        assert program.temporaries > 0
        assert program.total == program.arguments + program.temporaries + rest
    assert plan.needed == max(program.total for program in plan.programs.values())
    assert plan.fits


def test_the_closed_form_is_near_the_compiler(plan):
    guess = plan.guess
    assert guess.base == plan.parts["base"]
    assert guess.cache == plan.parts["cache"]
    parts = ("policy", "critic", "moments")
    assert guess.adapters == pytest.approx(sum(plan.parts[p] for p in parts), rel=0.01)
    assert 0.3 < guess.ppo_step / plan.programs["ppo_step"].temporaries < 3


@pytest.mark.parametrize(("experts", "shared"), [("each", 0), ("outer", 3)])
def test_what_an_expert_has_for_itself_is_not_reduced(experts, shared):
    asked = config()
    asked = dataclasses.replace(asked, adapter=dataclasses.replace(asked.adapter, experts=experts))
    planned = make_plan(
        asked, find("b200"), arguments(asked, jax.devices()[:1]), compile_them=False
    )
    model = planned.model
    _, dense = lora_parameters(model, 16)
    # Of policy and critic; what experts share once a layer; and the critic's head.
    of_a_layer = 16 * shared * model.hidden
    assert planned.reduced == 2 * (dense + model.layers * of_a_layer) + model.hidden
    assert planned.trained_in_all == 2 * planned.trained + model.hidden


def test_one_device_sends_nothing(plan):
    assert {size for sent in plan.sent.values() for size in sent.values()} == {0}
    times = plan.times(disk_bytes_per_second=1e9)
    assert times.step == times.prefill + times.decode + times.training
    assert times.load == pytest.approx(plan.parts["base"] / 1e9)


def test_the_json_has_the_keys_that_scripts_read(plan):
    found = json.loads(json.dumps(plan.to_json()))
    keys = {"device", "count", "node_bytes", "base_bytes", "programs", "node_fraction", "fits"}
    assert keys < found.keys()
    step = found["programs"]["ppo_step"]
    assert {"argument_bytes", "temp_bytes", "peak_bytes"} < step.keys()
    assert found["source"] == "cpu compiler"


def test_the_picture_is_drawn(plan, tmp_path):
    picture.draw(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 5000


def test_settings_go_as_far_as_memory_and_no_further(plan):
    def trained(changed: Config) -> int:
        make = functools.partial(startup.initial_state, changed, given().model, given().base)
        return trained_parameters(jax.eval_shape(make))

    def best(room: int) -> dict[str, int]:
        device = dataclasses.replace(plan.device, memory_bytes=room)
        found = search.largest(dataclasses.replace(plan, device=device), given().model, trained)
        return {setting.name: setting.best for setting in found}

    plenty, tight = best(plan.device.memory_bytes), best(int(plan.needed / 0.94) + 2)
    assert 8 <= tight["sampler.prompts_per_step"] < 12
    assert tight["adapter.rank"] == 16
    assert plenty["adapter.rank"] == 1024
    assert plenty["sampler.prompts_per_step"] > 8
    assert set(best(1).values()) == {0}


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "experiments/plan.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_trillion_parameters_are_estimated_in_seconds(tmp_path):
    told = run(
        *("--config", "configs/kimi_k2.py", "--device", "B200", "--count", "8"),
        *("--estimate", "--compare", "--price", "5", "--out", str(tmp_path)),
    )
    assert told.returncode == 0, told.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["source"] == "estimate"
    assert found["parameters"] == pytest.approx(1.026e12, rel=1e-3)
    assert found["base_bytes"] == pytest.approx(594.2e9, rel=1e-3)
    assert found["trained_share"] > 0.001
    assert found["fits"]
    assert found["node_fraction"] < 0.48
    adapters, others = found["compared"]["adapters"], found["compared"]["all_parameters"]
    assert adapters["bytes_per_device"] == pytest.approx(found["needed_bytes_per_device"], rel=0.03)
    assert adapters["trained_parameters"] > found["trained_parameters"]
    assert others[0]["nodes"] > 8
    assert "1.0 G parameters" not in told.stdout
    assert "1,026.4 G parameters" in told.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "b20"], "device=b20 is not known: did you mean b200?"),
        (["--count", "4"], "count=4: the config's mesh=1x8 has 8 devices"),
        (
            ["--config.mesh.tensor=32"],
            "mesh.tensor=32 does not divide 16, the tokens that are taken together",
        ),
    ],
)
def test_bad_input_is_one_clear_sentence(arguments, message):
    told = run("--config", "configs/kimi_k2.py", "--estimate", *arguments)
    assert told.returncode == 2
    assert message in told.stderr
    own = [line for line in told.stderr.splitlines() if "absl" not in line and "cuda" not in line]
    assert len(own) == 1


def test_sizes_are_compared_without_a_run(tmp_path):
    told = run("--sizes", "7b,1t", "--device", "b200", "--out", str(tmp_path))
    assert told.returncode == 0, told.stderr
    found = json.loads((tmp_path / "plan_sizes.json").read_text())
    assert list(found) == ["7b", "1t"]
    assert found["1t"]["adapters"]["fits"]
    assert found["1t"]["all_parameters"][0]["nodes"] == 14
    assert "1t, adapters" in told.stdout


def test_what_does_not_fit_ends_with_status_1(tmp_path):
    told = run(
        *("--config", "configs/moe_1600b.py", "--device", "h100", "--estimate"),
        *("--out", str(tmp_path)),
    )
    assert told.returncode == 1, told.stderr
    assert "does NOT fit" in told.stdout
    assert json.loads((tmp_path / "plan.json").read_text())["largest_batch"] == 0
