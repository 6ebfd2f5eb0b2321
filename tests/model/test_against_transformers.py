"""The model against transformers, in float32 compute: what another implementation says."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from orbit_jax.checkpoint.base import load_base
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.head import logits
from orbit_jax.model.stream import Stream
from orbit_jax.model.transformer import apply

GOLDENS = Path(__file__).parents[1] / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/reference.npz"))
GGUF = sorted(f"gguf/{path.name}" for path in GOLDENS.glob("gguf/*.gguf"))


def reference_logprobs(config: ModelConfig, base: dict, tokens: np.ndarray) -> jax.Array:
    """Log-probs `[B, T, V]` after each token of `tokens[B, T]`, through the project's own apply."""
    rows, positions = np.indices(tokens.shape, np.int32)
    num_rows, num_slots = tokens.shape
    flat = (jnp.asarray(x.reshape(-1)) for x in (tokens, rows, positions))
    stream = Stream(*flat, num_rows=num_rows, num_slots=num_slots)

    @functools.partial(jax.jit, compiler_options=toy.QUICK)
    def run(base: dict, stream: Stream) -> jax.Array:
        hidden, _, _ = apply(config, base, None, stream)
        return jax.nn.log_softmax(logits(config, base, hidden))

    return run(base, stream).reshape(*tokens.shape, -1)


@functools.cache
def load(name: str) -> tuple[ModelConfig, dict, np.ndarray, np.ndarray]:
    path = GOLDENS / name
    config, base = load_base(path)
    reference = np.load(path.with_suffix(".npz") if path.is_file() else path / "reference.npz")
    config = dataclasses.replace(config, compute_dtype="float32")
    return config, base, reference["tokens"], reference["logprobs"]


def test_goldens_cover_the_families_and_are_not_uniform():
    configs = [load(name)[0] for name in NAMES]
    assert {config.family for config in configs} == {"qwen3_moe", "qwen3", "llama"}
    assert {config.norm_topk_prob for config in configs if any(config.sparse)} == {True, False}
    assert {config.tie_word_embeddings for config in configs} == {True, False}
    assert any(config.sparse == (False, True) for config in configs)
    for name in NAMES + GGUF:
        logprobs = load(name)[3]
        assert np.ptp(logprobs, axis=-1).mean() > 5


@pytest.mark.parametrize("name", NAMES + GGUF)
def test_logprobs_agree_with_transformers(name: str):
    config, base, tokens, logprobs = load(name)
    ours = reference_logprobs(config, base, tokens)
    np.testing.assert_allclose(ours, logprobs, rtol=0, atol=1e-4)


def test_fixed_row_tiles_agree_with_transformers_too():
    config, base, tokens, logprobs = load("qwen3_moe_first_dense")
    config = dataclasses.replace(config, recipe="tiles")
    ours = reference_logprobs(config, base, tokens)
    np.testing.assert_allclose(ours, logprobs, rtol=0, atol=1e-4)
