"""KL of a low-bit model from its original, as a whole and group by group."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from orbit_jax.checkpoint.huggingface import load_base, open_base
from orbit_jax.checkpoint.quantized_plan import make_plan
from orbit_jax.checkpoint.write_quantized import save_quantized
from orbit_jax.divergence import Divergence, Passage, one_group_at_a_time
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.head import logits
from orbit_jax.model.stream import Stream
from orbit_jax.model.transformer import apply

MIXTRAL = Path(__file__).parent / "goldens" / "families" / "mixtral"
GPT_OSS = MIXTRAL.parent / "gpt_oss"
PASSAGES = [
    Passage(np.random.default_rng(i).integers(0, 64, size).tolist(), begin)
    for i, (size, begin) in enumerate([(20, 0), (9, 4), (31, 30)])
]


@pytest.fixture(scope="module")
def low(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("low") / "out"
    save_quantized(folder, make_plan(MIXTRAL, "int4"))
    return folder


@pytest.fixture(scope="module")
def divergence() -> Divergence:
    return Divergence(*load_base(MIXTRAL), PASSAGES)


def test_a_model_does_not_diverge_from_itself(divergence):
    assert divergence.of(*load_base(MIXTRAL)) == pytest.approx((0, 0), abs=1e-6)
    assert divergence.tokens == 20 + 5 + 1


def test_it_is_the_mean_over_the_tokens_that_count(low):
    @functools.partial(jax.jit, static_argnums=0)
    def table(config: ModelConfig, base: dict, stream: Stream) -> jax.Array:
        return jax.nn.log_softmax(logits(config, base, apply(config, base, None, stream)[0]))

    passages = [Passage(np.arange(i, i + 16).tolist(), begin) for i, begin in ((0, 0), (30, 11))]
    every = []
    for passage in passages:
        flat = (np.asarray(x, np.int32) for x in (passage.ids, np.zeros(16), range(16)))
        stream = Stream(*flat, num_rows=1, num_slots=16)
        p, q = (np.asarray(table(*load_base(folder), stream)) for folder in (MIXTRAL, low))
        every += (np.exp(p) * (p - q)).sum(axis=-1)[passage.begin :].tolist()
    mean, largest = Divergence(*load_base(MIXTRAL), passages).of(*load_base(low))
    assert mean == pytest.approx(np.mean(every), rel=0.05)
    assert largest == pytest.approx(max(every), rel=0.05)
    assert len(every) == 21
    assert mean > 0.01


def test_passages_longer_together_than_a_stream_give_the_same(divergence, low, monkeypatch):
    whole = divergence.of(*load_base(low))
    monkeypatch.setattr("orbit_jax.divergence._STREAM_TOKENS", 32)
    assert Divergence(*load_base(MIXTRAL), PASSAGES).of(*load_base(low)) == pytest.approx(whole)


def test_one_group_alone_is_the_model_with_all_others_ignored(divergence, low, tmp_path):
    plan = make_plan(MIXTRAL, "int4")
    groups = list(dict.fromkeys(weight.group for weight in plan.weights.values()))
    found = dict(one_group_at_a_time(load_base(MIXTRAL)[1], plan, open_base(low)))
    assert set(found) == set(groups)
    chosen = r"re:.*layers\.1\.block_sparse_moe\.experts\b"
    ignored = [group for group in groups if group != chosen]
    save_quantized(tmp_path / "out", make_plan(MIXTRAL, "int4", ignore=ignored))
    alone = divergence.of(load_base(MIXTRAL)[0], found[chosen])
    assert alone == pytest.approx(divergence.of(*load_base(tmp_path / "out")), rel=1e-5)
    assert 0 < alone[0] < divergence.of(*load_base(low))[0]


def test_experts_that_stand_in_one_tensor_are_a_group(tmp_path):
    plan = make_plan(GPT_OSS, "mxfp4")
    save_quantized(tmp_path / "out", plan)
    config, base = load_base(GPT_OSS)
    divergence = Divergence(config, base, PASSAGES)
    groups = one_group_at_a_time(base, plan, open_base(tmp_path / "out"))
    alone = {name: divergence.of(config, changed)[0] for name, changed in groups}
    assert set(alone) == {rf"re:.*layers\.{i}\.mlp\.experts\b" for i in range(2)}
    assert all(kl > 0 for kl in alone.values())
