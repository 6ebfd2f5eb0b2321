"""Small models, rows of tokens and jitted programs that the tests of several parts share."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from orbit_jax import compile as programs
from orbit_jax.adapters.adapter import LINEAR_LAYERS, Adapter, attach
from orbit_jax.adapters.lora import LoRA
from orbit_jax.model.attention import empty_cache
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.families import Latent
from orbit_jax.model.head import score
from orbit_jax.model.init import freeze, init_weights
from orbit_jax.model.rope import Rope
from orbit_jax.model.stream import Stream
from orbit_jax.model.transformer import apply
from orbit_jax.quant.qtensor import QTensor, working_copy

MOE = ModelConfig(
    family="qwen3_moe",
    vocab_size=96,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=96,
    rms_norm_eps=1e-6,
    rope=Rope(1e4),
    max_positions=256,
    tie_word_embeddings=True,
    qk_norm="head",
    sparse=(True, True),
    num_experts=8,
    top_k=2,
    expert_size=64,
    norm_topk_prob=True,
)
DENSE = dataclasses.replace(MOE, family="qwen3", sparse=(False, False), num_experts=0, top_k=0)


# DeepSeek's parts: latent attention, a dense layer first, grouped experts by sigmoid, a shared one.
LATENT = dataclasses.replace(
    MOE,
    family="deepseek_v3",
    num_layers=3,
    num_kv_heads=1,
    head_dim=40,
    latent=Latent(q_rank=32, kv_rank=32, nope=16, rope=8, value=24),
    attention_scale=0.2,
    qk_norm="",
    rope=Rope(1e4, "yarn", factor=4.0, original=32, high=32.0, interleaved=True),
    tie_word_embeddings=False,
    sparse=(False, True, True),
    router="sigmoid",
    num_groups=4,
    top_groups=2,
    top_k=3,
    routed_scale=2.5,
    shared_size=96,
)
# gpt-oss': sinks, windows in every other layer, biases, clamped activations.
SINKS = dataclasses.replace(
    MOE,
    family="gpt_oss",
    qk_norm="",
    windows=(9, 0),
    sinks=True,
    attention_bias=True,
    router="chosen",
    norm_topk_prob=False,
    expert_bias=True,
    swiglu_limit=2.0,
    swiglu_alpha=1.702,
)


def make_base(config: ModelConfig, dense_bits: int = 16, group_size: int = 32) -> dict:
    """A random frozen base, with weights so large that its log-probs are far from uniform."""
    shapes = jax.eval_shape(functools.partial(init_weights, config), jax.random.key(0))
    rng = np.random.default_rng(0)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        values = rng.standard_normal(leaf.shape, np.float32)
        if jax.tree_util.keystr(path).rstrip("']").endswith("norm"):
            return 1 + 0.1 * values
        return values * 1.5 / np.sqrt(leaf.shape[-1], dtype=np.float32)

    weights = jax.tree_util.tree_map_with_path(draw, shapes)
    return jax.jit(functools.partial(freeze, config, dense_bits=dense_bits, group_size=group_size))(
        weights
    )


def with_working_copy(base: dict) -> dict:
    def widen(node):
        return working_copy(node) if isinstance(node, QTensor) else node

    return jax.tree.map(widen, base, is_leaf=lambda node: isinstance(node, QTensor))


def make_adapter(
    base: dict, method=None, targets: tuple[str, ...] = LINEAR_LAYERS, size: float = 0.1
) -> Adapter:
    """An adapter on `base` whose every parameter is non-zero, as after some training."""
    method = method or LoRA(rank=8, alpha=16.0)
    adapter = jax.eval_shape(lambda: attach(method, jax.random.key(1), base, targets))
    rng = np.random.default_rng(1)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(rng.standard_normal(leaf.shape, np.float32) * size)

    return jax.tree.map(draw, adapter)


@dataclasses.dataclass(frozen=True)
class Rows:
    """B rows of random tokens `[B, S]`, of which the first `lengths` count."""

    tokens: np.ndarray
    lengths: np.ndarray

    @classmethod
    def draw(cls, config: ModelConfig, num_rows: int, num_slots: int, shortest: int = 3) -> "Rows":
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, config.vocab_size, (num_rows, num_slots)).astype(np.int32)
        lengths = rng.integers(shortest, num_slots + 1, num_rows).astype(np.int32)
        lengths[0] = num_slots
        return cls(tokens, lengths)

    def stream(
        self,
        order: Sequence[int] | None = None,
        padding: Sequence[int] = (),
        num_slots: int | None = None,
        size: int | None = None,
        shards: int = 1,
    ) -> tuple[Stream, np.ndarray]:
        """The rows of `order` (default: all), one after another; `padding[i]` pads before row i.

        Returns the stream and, for each of its tokens, the index `b * S + t` that it stands for
        (-1 for padding and for the last token of a row, whose right neighbour is not its own).
        `size` pads the end up to that many tokens, in `shards` equal parts of whole rows.
        """
        order = range(len(self.lengths)) if order is None else order
        tokens, rows, positions, origin = [], [], [], []

        def pad(count: int) -> None:
            tokens.extend([1] * count)
            rows.extend([len(order) + 3] * count)
            positions.extend([0] * count)
            origin.extend([-1] * count)

        for i, b in enumerate(order):
            if shards > 1 and i % (len(order) // shards) == 0:
                pad(size * i // len(order) - len(tokens))
            pad(padding[i] if i < len(padding) else 0)
            length = int(self.lengths[b])
            tokens.extend(self.tokens[b, :length])
            rows.extend([i] * length)
            positions.extend(range(length))
            first = b * self.tokens.shape[1]
            origin.extend([*range(first, first + length - 1), -1][:length])
        if size is not None:
            pad(size - len(tokens))
        flat = (jnp.asarray(x, jnp.int32) for x in (tokens, rows, positions))
        slots = num_slots or self.tokens.shape[1]
        return Stream(*flat, num_rows=len(order), num_slots=slots), np.array(origin)

    def temperature(self, origin: np.ndarray) -> jax.Array:
        """A temperature of its own for every token, the same wherever the token stands."""
        return jnp.asarray(0.6 + 0.1 * (np.maximum(origin, 0) % 8), jnp.float32)


def table(rows: Rows, origin: np.ndarray, logprobs: jax.Array) -> np.ndarray:
    """Log-probs of a stream as `[B * S]`, NaN where the stream said nothing."""
    out = np.full(rows.tokens.size, np.nan, np.float32)
    known = origin >= 0
    out[origin[known]] = np.asarray(logprobs)[known]
    return out


def largest_gap(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference where both tables say something; NaN in one alone does not count."""
    both = ~np.isnan(a) & ~np.isnan(b)
    assert both.sum() > 10
    return float(np.abs(a[both] - b[both]).max())


def logprobs_of(
    config: ModelConfig,
    base: dict,
    adapter: Adapter | None,
    stream: Stream,
    temperature: jax.Array,
) -> jax.Array:
    """Log-prob of each token's right neighbour, `[N]`."""
    hidden, _, _ = apply(config, base, adapter, stream)
    return score(config, base, hidden, jnp.roll(stream.tokens, -1), temperature)[0]


@functools.cache
def training_forward(config: ModelConfig):
    """Jitted `(base, adapter, stream, temperature) -> logprobs[N]`: the whole rows at once."""

    def run(base: dict, adapter: Adapter | None, stream: Stream, temperature: jax.Array):
        return logprobs_of(config, base, adapter, stream, temperature)

    return programs.jit(run, programs.options(config.recipe))


# For what is compared within a tolerance: less work for the compiler, slower code.
QUICK = {"xla_backend_optimization_level": 0}


@functools.cache
def training_gradient(config: ModelConfig, quick: bool = False):
    """Jitted `(base, adapter, stream, temperature) -> logprobs[N], gradient`."""

    def run(base: dict, adapter: Adapter, stream: Stream, temperature: jax.Array):
        def loss(params: dict):
            moved = adapter.replace(params=params)
            logprobs = logprobs_of(config, base, moved, stream, temperature)
            return jnp.where(stream.valid, logprobs, 0.0).sum(), logprobs

        (_, logprobs), gradient = jax.value_and_grad(loss, has_aux=True)(adapter.params)
        return logprobs, gradient

    return programs.jit(run, programs.options(config.recipe) | (QUICK if quick else {}))


@functools.cache
def cached_forward(config: ModelConfig):
    """Jitted `(base, adapter, tokens[B,S], lengths[B], temperature[B,S], prompt) -> logprobs[B,S]`.

    The stream `prompt` fills the cache and gives its log-probs; then every row is decoded token by
    token from where its prompt ended, in a loop as the sampler's. Two results: decode's `[B, S]`
    (zero where the prompt stood) and the prompt's `[N]`.
    """

    def run(base, adapter, tokens, starts, lengths, temperature, prompt, prompt_temperature):
        b, s = tokens.shape
        slots = jnp.arange(b)
        cache = empty_cache(config, b, s)
        hidden, cache, _ = apply(config, base, adapter, prompt, cache)
        after_prompt = score(config, base, hidden, jnp.roll(prompt.tokens, -1), prompt_temperature)[
            0
        ]

        def unfinished(carry: tuple) -> jax.Array:
            return (carry[1] < lengths).any()

        def step(carry: tuple) -> tuple:
            cache, at, out = carry
            active = at < lengths
            place = jnp.minimum(at, s - 1)
            stream = Stream(
                tokens=tokens[slots, place],
                rows=jnp.where(active, slots, b),
                positions=place,
                num_rows=b,
                num_slots=s,
                decode=True,
            )
            hidden, cache, _ = apply(config, base, adapter, stream, cache)
            following = tokens[slots, jnp.minimum(place + 1, s - 1)]
            logprobs, _ = score(config, base, hidden, following, temperature[slots, place])
            out = out.at[slots, jnp.where(active, place, s)].set(logprobs, mode="drop")
            return cache, at + 1, out

        carry = (cache, starts, jnp.zeros((b, s), jnp.float32))
        return lax.while_loop(unfinished, step, carry)[2], after_prompt

    return programs.jit(run, programs.options(config.recipe))


def cached_table(
    config: ModelConfig, base: dict, adapter: Adapter | None, rows: Rows, prompts: Sequence[int]
) -> np.ndarray:
    """Log-probs `[B * S]`: `prompts[b]` tokens of row b are prefilled, the others decoded."""
    b, s = rows.tokens.shape
    prompts = np.minimum(np.asarray(prompts, np.int32), rows.lengths - 1)
    prompt_rows = Rows(rows.tokens, prompts)
    stream, origin = prompt_rows.stream(size=b * s, shards=config.mesh.size)
    every = rows.temperature(np.arange(b * s)).reshape(b, s)
    decoded, after_prompt = cached_forward(config)(
        base,
        adapter,
        rows.tokens,
        prompts,
        rows.lengths,
        every,
        stream,
        rows.temperature(origin),
    )
    out = table(rows, origin, after_prompt).reshape(b, s)
    position = np.arange(s)
    done = (position >= prompts[:, None]) & (position < rows.lengths[:, None] - 1)
    return np.where(done, np.asarray(decoded), out).reshape(-1)
