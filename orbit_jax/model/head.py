"""The head: from hidden states to log-probs of given tokens, never with an array of all logits."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from orbit_jax import exchange, mesh
from orbit_jax.model.config import MeshShape, ModelConfig
from orbit_jax.model.stream import inverse, regroup
from orbit_jax.quant.matmul import contract, dot, matmul, over_rows
from orbit_jax.quant.qtensor import QTensor, dequantize


def score(
    config: ModelConfig,
    base: dict,
    hidden: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
    *,
    places: jax.Array | None = None,
    entropy_gradient: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs of `targets[N]` under softmax(logits / temperature[N]), and entropies, f32.

    Args:
      config: static.
      base: of which only the head is read, a chunk of rows at a time.
      hidden: `[N, D]`.
      targets: `[N]` int32; temperature: `[N]` f32.
      places: `[P]` distinct rows to compute, the others are 0; N or more for none. On a mesh each
        shard's own, counted within it. None: all.
      entropy_gradient: whether the gradient flows through the entropies as well, which costs
        computing the logits once more.
    """

    def every_row(
        base: dict,
        hidden: jax.Array,
        targets: jax.Array,
        temperature: jax.Array,
        places: jax.Array | None,
    ):
        n = hidden.shape[0]
        if places is not None:
            hidden = regroup(hidden, places, inverse(places, n)[:, None])
            targets, temperature = (
                jnp.take(x, places, mode="clip") for x in (targets, temperature)
            )
        head = _head(base)
        if entropy_gradient or not isinstance(head, QTensor):
            own = jax.checkpoint(functools.partial(_score, config.mesh, head))
        else:
            own = functools.partial(_frozen_score, config.mesh, head)

        def chunk(hidden: jax.Array, *rows: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = own(hidden, *own_tokens(config, *rows))
            return tuple(exchange.gather_tokens(config.mesh, x) for x in found)

        size = config.head_chunk if hidden.shape[0] > config.head_chunk else 0
        out = over_rows(chunk, config.tile or size, hidden, targets, temperature)
        if places is not None:
            out = tuple(jnp.zeros(n, x.dtype).at[places].set(x, mode="drop") for x in out)
        return out

    return with_head(config, every_row, base, hidden, targets, temperature, places)


def with_head(config: ModelConfig, fn: Callable, base: dict, *rows: jax.Array | None):
    """`fn(base, *rows)`, which reads of the base only what `logits` does: each data shard its rows.

    Within one, each device has the head of its own words; what becomes of all logits of a token is
    computed by one of them.
    """
    if config.mesh.size == 1:
        return fn(base, *rows)
    head = {name: base[name] for name in ("embed_tokens", "lm_head") if name in base}
    specs = (mesh.base_specs(head), *(None if x is None else P("data") for x in rows))
    return mesh.per_device(fn, config, specs, P("data"))(head, *rows)


def logits(config: ModelConfig, base: dict, hidden: jax.Array) -> jax.Array:
    """`[N, V]` in f32 of `hidden[N, D]`, on a mesh of own tokens; a tied head is the embedding."""
    return exchange.words_to_tokens(config.mesh, matmul(hidden, _head(base)))


def own_tokens(config: ModelConfig, *rows: jax.Array) -> tuple[jax.Array, ...]:
    """Of arrays `[N, ...]` the tokens that `logits` returns."""
    return tuple(exchange.own_tokens(config.mesh, x) for x in rows)


def temper(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Logits `[N, V]` over `temperature[N]`, by a product with a reciprocal that is made once.

    A quotient would be left as it is in one program and turned into this product in another, which
    rounds differently unless the temperature is a power of two.
    """
    return logits * lax.optimization_barrier(1.0 / temperature)[:, None]


def log_softmax_at(
    logits: jax.Array, targets: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each target and entropy, of logits `[N, V]` tempered by `temperature[N]`."""
    shifted, exps, total = _softmax(logits, temperature)
    log_total = jnp.log(total)
    logprobs = jnp.take_along_axis(shifted, targets[:, None], axis=-1)[:, 0] - log_total
    return logprobs, log_total - (exps * shifted).sum(axis=-1) / total


def _softmax(logits: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tempered logits below their maximum, their exponentials, and the sum of those."""
    tempered = temper(logits, temperature)
    shifted = tempered - lax.stop_gradient(tempered.max(axis=-1, keepdims=True))
    exps = jnp.exp(shifted)
    return shifted, exps, exps.sum(axis=-1)


def _head(base: dict) -> QTensor | jax.Array:
    return base.get("lm_head", base["embed_tokens"])


def _score(
    shape: MeshShape,
    head: QTensor | jax.Array,
    hidden: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Of all tokens' `hidden[N, D]`, what own tokens' `targets` and `temperature[N/t]` make."""
    raw = exchange.words_to_tokens(shape, matmul(hidden, head))
    return log_softmax_at(raw, targets, temperature)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _frozen_score(
    shape: MeshShape, head: QTensor, hidden: jax.Array, targets: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`_score` with no gradient through entropies, and with its backward pass done beforehand.

    A row's log-prob moves with its hidden state by (1 at the target - probabilities) . head / T,
    whatever the loss. Made while the logits are there, it spares the backward pass from making
    them again. On a mesh each device makes its own words' part of it.
    """
    return _score(shape, head, hidden, targets, temperature)


def _forward(
    shape: MeshShape, head: QTensor, hidden: jax.Array, targets: jax.Array, temperature: jax.Array
) -> tuple[tuple, jax.Array]:
    weight = dequantize(head, hidden.dtype)
    raw = exchange.words_to_tokens(shape, dot(hidden, weight))
    _, exps, total = _softmax(raw, temperature)
    scale = 1.0 / temperature
    at_target = jnp.arange(raw.shape[1]) == targets[:, None]
    slope = jnp.where(at_target, 1.0, 0.0) - exps * (1.0 / total)[:, None]
    slope = (slope * scale[:, None]).astype(hidden.dtype)
    moves = contract(exchange.tokens_to_words(shape, slope), weight, (1, 0)).astype(hidden.dtype)
    return log_softmax_at(raw, targets, temperature), moves


def _backward(shape: MeshShape, moves: jax.Array, cotangents: tuple) -> tuple:
    of_logprobs = exchange.gather_tokens(shape, cotangents[0])
    change = of_logprobs[:, None] * moves.astype(jnp.float32)
    return None, change.astype(moves.dtype), None, None


_frozen_score.defvjp(_forward, _backward)
