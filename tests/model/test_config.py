"""What `config.json` may say, and the sentence for what it may not."""

import dataclasses
import json
from pathlib import Path

import pytest

from orbit_jax.model.config import ModelConfig

GOLDENS = Path(__file__).parents[1] / "goldens"
QWEN3_MOE = json.loads((GOLDENS / "qwen3_moe" / "config.json").read_text())
QWEN3_MOE["rope_theta"] = QWEN3_MOE.pop("rope_parameters")["rope_theta"]


def hf(name: str) -> dict:
    return json.loads((GOLDENS / "families" / name / "config.json").read_text())


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
        ({"rope_scaling": {"type": "dynamic"}}, "rope_type='dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor=None must be a number above 0"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' must be an object"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "original_max_position_embeddings is missing",
        ),
        ({"rope_theta": 1.0}, "rope_theta=1.0 must be a finite number above 1"),
        ({"rope_theta": float("inf")}, "rope_theta=inf must be a finite number above 1"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            "type='linear' and rope_type='yarn' contradict",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types=.* must be a list of"),
        ({"layer_types": ["sliding_attention"] * 2}, "the field sliding_window is missing"),
        ({"mlp_only_layers": 3}, "mlp_only_layers=3 must be a list"),
        ({"model_type": "gpt5"}, "model_type='gpt5' is not supported: use one of"),
        ({"model_type": ["llama"]}, "model_type=.* is not supported"),
        ({"model_type": "kimi_k25"}, "text_config is missing"),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "rope_theta is .*contradict"),
    ],
)
def test_fields_that_make_no_sense_are_refused_by_name(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(QWEN3_MOE | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported for deepseek_v3"),
        ({"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"n_group": 3}, "n_group=3, topk_group=2 .* do not fit 8 experts"),
        ({"num_experts_per_tok": 5}, "do not fit 8 experts"),
        ({"n_shared_experts": -1}, "n_shared_experts=-1 must be a whole number of at least 0"),
        ({"qk_rope_head_dim": 7}, "7 rotated dimensions of a head must be even"),
        ({"kv_lora_rank": None}, "the field kv_lora_rank is missing"),
    ],
)
def test_deepseek_fields_that_make_no_sense_are_refused_by_name(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(hf("deepseek_v3") | change)


def test_age_of_spelling_makes_no_difference():
    """`rope_scaling` with `type` and a `rope_theta` at the top say what `rope_parameters` does."""
    new = hf("deepseek_v3")
    rope = dict(new["rope_parameters"])
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    old |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    rope["type"] = rope.pop("rope_type")
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)
    kimi = ModelConfig.from_hf(hf("kimi_k25"))
    assert dataclasses.replace(kimi, family="deepseek_v3") == ModelConfig.from_hf(new)


def test_yarn_stretches_scores_by_mscale_and_angles_by_the_ratio():
    """DeepSeek-V3's own figures: factor 40, mscale and mscale_all_dim 1."""
    rope = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    rope |= {"original_max_position_embeddings": 4096, "rope_theta": 10000}
    wide = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    config = ModelConfig.from_hf(hf("deepseek_v3") | wide | {"rope_parameters": rope})
    assert config.rope.magnitude == 1.0
    assert config.score_scale == pytest.approx(192**-0.5 * 1.3688879454**2)
    alone = ModelConfig.from_hf(QWEN3_MOE | {"rope_parameters": rope | {"mscale_all_dim": None}})
    assert alone.rope.magnitude == pytest.approx(1.3688879454)


def test_gpt_oss_alternates_windows_unless_it_says_which():
    plain = {k: v for k, v in hf("gpt_oss").items() if k != "layer_types"}
    assert ModelConfig.from_hf(plain).windows == (5, 0)
    assert ModelConfig.from_hf(plain | {"sliding_window": None}).windows == ()
    swapped = {"layer_types": ["full_attention", "sliding_attention"]}
    assert ModelConfig.from_hf(plain | swapped).windows == (0, 5)
