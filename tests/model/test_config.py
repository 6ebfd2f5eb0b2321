"""What `config.json` may say, and the sentence for what it may not."""

import json
from pathlib import Path

import pytest

from orbit_jax.model.config import ModelConfig

QWEN3_MOE = json.loads(
    (Path(__file__).parents[1] / "goldens" / "qwen3_moe" / "config.json").read_text()
)


def test_fields_left_out_take_the_family_s_defaults():
    hf = QWEN3_MOE | {"num_key_value_heads": None, "head_dim": None, "decoder_sparse_step": None}
    config = ModelConfig.from_hf(hf)
    assert config.num_kv_heads == config.num_heads == hf["num_attention_heads"]
    assert config.head_dim == hf["hidden_size"] // hf["num_attention_heads"]
    assert config.sparse == (True,) * hf["num_hidden_layers"]


def test_every_other_layer_may_be_sparse():
    hf = QWEN3_MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert ModelConfig.from_hf(hf).sparse == (False, True, False, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be a whole number"),
        ({"hidden_size": [32, 64]}, r"hidden_size=\[32, 64\] must be a whole number"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5 must be a whole number"),
        ({"vocab_size": None}, "the field vocab_size is missing"),
        ({"num_experts": 5, "num_local_experts": 6}, "contradict each other"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"num_experts_per_tok": 99}, "num_experts_per_tok=99 exceeds"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling=.* is not supported"),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "rope_theta is .*contradict"),
    ],
)
def test_fields_that_make_no_sense_are_refused_by_name(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(QWEN3_MOE | change)
