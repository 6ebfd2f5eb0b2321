"""Counts of models: of configs, and of assumed shapes."""

import jax
import pytest
import toy

from orbit_jax.adapters.adapter import LINEAR_LAYERS
from orbit_jax.adapters.footprint import footprint
from orbit_jax.adapters.lora import LoRA
from orbit_jax.model.attention import empty_cache
from orbit_jax.model.init import init_weights
from orbit_jax.plan.counts import count, preset


@pytest.mark.parametrize(
    "config", [toy.MOE, toy.DENSE, toy.LATENT, toy.SINKS], ids=["moe", "dense", "latent", "sinks"]
)
def test_counts_are_those_of_the_real_trees(config):
    found = count(config)
    real = jax.eval_shape(lambda key: init_weights(config, key), jax.random.key(0))
    assert found.parameters == sum(leaf.size for leaf in jax.tree.leaves(real))
    attached = footprint(LoRA(4, 8.0), real, LINEAR_LAYERS)
    assert 4 * (found.dense_widths + found.expert_widths) == attached.parameters
    cache = jax.eval_shape(lambda: empty_cache(config, 1, 1))
    assert found.cache_bytes_per_token == sum(2 * leaf.size for leaf in jax.tree.leaves(cache))


def test_idle_experts_and_a_table_that_is_looked_up_are_not_active():
    found = count(toy.MOE)
    idle = found.expert_parameters * (1 - toy.MOE.top_k / toy.MOE.num_experts)
    table = 0 if toy.MOE.tie_word_embeddings else toy.MOE.vocab_size * toy.MOE.hidden_size
    assert found.active_parameters == found.parameters - idle - table


@pytest.mark.parametrize(
    ("name", "parameters", "active", "base_bytes"),
    [
        ("7b", 6_738_415_616, 6.6e9, 4.2e9),  # as Llama 2 7B
        ("70b", 70_553_706_496, 69.5e9, 42.7e9),  # as Llama 3 70B
        ("1t", 1_026_408_232_448, 32e9, 594e9),  # Kimi-K2: "32B activated", 594 GB in INT4
        ("1.6t", 1.6e12, 41e9, 0.9e12),
        ("50t", 50e12, 330e9, 28e12),
    ],
)
def test_assumed_shapes_have_the_size_of_their_name(name, parameters, active, base_bytes):
    model = preset(name)
    exact = isinstance(parameters, int)
    assert model.parameters == pytest.approx(parameters, rel=0 if exact else 0.04)
    assert model.active_parameters == pytest.approx(active, rel=0.02)
    assert model.base_bytes == pytest.approx(base_bytes, rel=0.02)


def test_what_is_gathered_is_what_projections_read_and_keys_and_values():
    # x twice, what was attended, 8 heads of keys and of values, and the inner numbers.
    assert preset("70b").gathered_widths == 80 * (2 * 8192 + 8192 + 2 * 1024 + 28_672)
    # x twice, the narrow queries, values, and of a shared expert or once of a dense layer.
    of_a_layer = 2 * 7168 + 1536 + 64 * 128
    assert preset("1t").gathered_widths == 61 * of_a_layer + 60 * 2048 + 18_432


def test_a_known_checkpoint_says_its_own_bytes():
    assert count(toy.MOE, "mine", base_bytes=123).base_bytes == 123


def test_an_unknown_size_is_refused():
    with pytest.raises(ValueError, match=r"model=2t is no known size: use one of 7b, 70b, 1t"):
        preset("2t")
