"""Every family, plain and in its deployed formats, against transformers in f32."""

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
# Of the formats that recipes of large models load.
DEPLOYED_LARGE = (
    "deployed/kimi_k25_int4",
    "deployed/deepseek_v3_fp8",
    "deployed/gpt_oss_mxfp4",
    "deployed/qwen3_moe_fp8",
)
NAMES = sorted(
    f"{kind}/{path.parent.name}"
    for kind in ("families", "deployed")
    for path in (GOLDENS / kind).glob("*/reference.npz")
)
# Held in memory as another of the folders is: their decoding is compared there.
REPEATED = {
    f"deployed/{name}"
    for name in ("deepseek_v3_awq", "mixtral_gptq", "qwen3_awq", "qwen3_moe_nvfp4")
}
GREEDY = 8  # tokens at the end that transformers appended by greedy decoding


@functools.cache
def load(name: str) -> tuple[ModelConfig, dict, dict[str, np.ndarray]]:
    config, base = load_base(GOLDENS / name)
    config = dataclasses.replace(config, compute_dtype="float32")
    return config, base, dict(np.load(GOLDENS / name / "reference.npz"))


def forward(config: ModelConfig, base: dict, tokens: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Log-probs `[B, T, V]` after each token, and each layer's loads."""
    rows, positions = np.indices(tokens.shape, np.int32)
    num_rows, num_slots = tokens.shape
    flat = (jnp.asarray(x.reshape(-1)) for x in (tokens, rows, positions))
    stream = Stream(*flat, num_rows=num_rows, num_slots=num_slots)

    @functools.partial(jax.jit, compiler_options=toy.QUICK)
    def run(base: dict, stream: Stream) -> tuple[jax.Array, jax.Array]:
        hidden, _, load = apply(config, base, None, stream)
        return jax.nn.log_softmax(logits(config, base, hidden)), load

    logprobs, load = run(base, stream)
    return logprobs.reshape(*tokens.shape, -1), load


def test_the_goldens_cover_what_differs():
    configs = [load(name)[0] for name in NAMES]
    assert {c.family for c in configs} == {
        *("llama", "qwen3", "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3", "kimi_k2")
    }
    assert {c.rope.kind for c in configs} == {"default", "linear", "llama3", "yarn"}
    assert {c.tie_word_embeddings for c in configs} == {True, False}
    for fact in (
        *("windows", "sinks", "attention_bias", "expert_bias", "clip_qkv", "shared_size"),
        "swiglu_limit",
    ):
        assert len({getattr(c, fact) for c in configs}) > 1, fact
    assert {c.num_groups for c in configs if c.latent} == {1, 4}
    assert {bool(c.latent.q_rank) for c in configs if c.latent} == {True, False}


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_routing_and_greedy_decoding_agree_with_transformers(name: str):
    config, base, reference = load(name)
    tokens, chosen = reference["tokens"], reference["experts"]
    logprobs, loads = forward(config, base, tokens)
    np.testing.assert_allclose(logprobs, reference["logprobs"], rtol=0, atol=1e-4)
    wanted = [np.bincount(layer.reshape(-1), minlength=config.num_experts) for layer in chosen]
    np.testing.assert_array_equal(loads, np.reshape(wanted, loads.shape))
    appended = logprobs[:, -GREEDY - 1 : -1].argmax(-1)
    np.testing.assert_array_equal(appended, tokens[:, -GREEDY:])


@pytest.mark.parametrize(
    "name",
    [
        n if n in DEPLOYED_LARGE else pytest.param(n, marks=pytest.mark.long)
        for n in NAMES
        if n.startswith("deployed") and n not in REPEATED
    ],
)
def test_decoding_equals_the_full_forward_exactly_in_every_format(name: str):
    config, base, _ = load(name)
    config = dataclasses.replace(config, compute_dtype="bfloat16")
    adapter = toy.make_adapter(base)
    rows = toy.Rows.draw(config, num_rows=3, num_slots=64, shortest=20)
    stream, origin = rows.stream(size=192)
    full = toy.training_forward(config)(base, adapter, stream, rows.temperature(origin))
    decoded = toy.cached_table(config, base, adapter, rows, [0, 9, 1])
    assert toy.largest_gap(toy.table(rows, origin, full), decoded) == 0.0


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("families")])
@pytest.mark.filterwarnings("ignore")
def test_transformers_itself_agrees_where_it_is_installed(name: str):
    """Not only what was recorded of it; runs in the environment of `make goldens`."""
    torch, transformers = (pytest.importorskip(package) for package in ("torch", "transformers"))
    config, base, reference = load(name)
    if config.family == "kimi_k2":
        pytest.skip("transformers has the text part alone, which is deepseek_v3's")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        GOLDENS / name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = (reference["tokens"] + 1) % config.vocab_size  # others than the recorded ones
    with torch.no_grad():
        wanted = torch.log_softmax(model(torch.tensor(tokens).long()).logits, -1).numpy()
    np.testing.assert_allclose(forward(config, base, tokens)[0], wanted, rtol=0, atol=1e-4)
