"""The sampler: one jitted function that advances a state of slots.

`sample` appends incoming tokens to slots (prompts, or tool output later), then decodes until every
row has stopped or `max_steps` tokens were drawn. A slot's cache always holds the keys and values of
all its tokens but the last, so a new prompt, a shared prompt and a later turn are the same thing:
tokens to process, then the last one to decode from.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec as P

from orbit_jax import mesh
from orbit_jax.adapters.adapter import Adapter, fingerprint
from orbit_jax.model.attention import Cache, cache_windows, empty_cache
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.head import with_head
from orbit_jax.model.stream import Stream
from orbit_jax.model.transformer import apply
from orbit_jax.rl.draw import draw, row_keys

STOP_REASONS = ("running", "eos", "length", "tool", "idle")
RUNNING, EOS, LENGTH, TOOL, IDLE = range(len(STOP_REASONS))
NO_STOP = -1  # fills unused places of stop_ids
_FEWEST_ROWS = 8  # decoded at a time: matmuls pad fewer to 16 as well, and each number is compiled


@struct.dataclass
class Controls:
    """How each of B slots samples.

    Attributes:
      limits: [B] int32, the total length at which a row stops.
      temperature: [B] f32; 0 is greedy, with log-probs reported at temperature 1.
      top_k: [B] int32, 0 for all; top_p: [B] f32, 1 for all (read only when `filters` is on).
      stop_ids: [B, M] int32 and stop_reasons [B, M] int32: a sampled id and what it stands for.
      noise_ids: [B, 4] uint32: (run seed, step, prompt, sample), which key the noise.
    """

    limits: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    stop_ids: jax.Array
    stop_reasons: jax.Array
    noise_ids: jax.Array


@struct.dataclass
class SamplerState:
    """B slots of S positions.

    Attributes:
      cache: keys and values; filled for all tokens of a row but its last.
      tokens: [B, S] int32.
      lengths: [B] int32, the tokens known.
      sampled: [B, S] bool, true at tokens that were drawn here.
      logprobs: [B, S] f32, of each sampled token; 0 elsewhere.
      status: [B] int32, an index into `STOP_REASONS`.
      controls: how each slot samples.
      fingerprint: uint32 checksum of the adapter that sampled last.
      decode_steps: int32, how often decoding went over the model since the slots were cleared.
    """

    cache: Cache
    tokens: jax.Array
    lengths: jax.Array
    sampled: jax.Array
    logprobs: jax.Array
    status: jax.Array
    controls: Controls
    fingerprint: jax.Array
    decode_steps: jax.Array


@struct.dataclass
class Incoming:
    """What the host appends before decoding.

    Attributes:
      stream: the tokens to process: of each new row all but the last, unless another slot has them.
      update: [B] bool, rows that take the tokens, lengths and controls given here.
      fresh: [B] bool, rows whose record of sampled tokens starts anew (not so for a later turn).
      source: [B] int32, the slot whose cache a row copies after processing; itself for none.
      tokens: [B, S] int32, lengths: [B] int32, controls.
    """

    stream: Stream
    update: jax.Array
    fresh: jax.Array
    source: jax.Array
    tokens: jax.Array
    lengths: jax.Array
    controls: Controls


def empty_state(config: ModelConfig, num_rows: int, num_slots: int, num_stops: int) -> SamplerState:
    """B idle slots of S positions with room for `num_stops` stop ids each."""
    b, s = num_rows, num_slots
    return SamplerState(
        cache=empty_cache(config, b, s),
        tokens=jnp.zeros((b, s), jnp.int32),
        lengths=jnp.ones(b, jnp.int32),
        sampled=jnp.zeros((b, s), bool),
        logprobs=jnp.zeros((b, s), jnp.float32),
        status=jnp.full(b, IDLE, jnp.int32),
        controls=Controls(
            limits=jnp.ones(b, jnp.int32),
            temperature=jnp.ones(b, jnp.float32),
            top_k=jnp.zeros(b, jnp.int32),
            top_p=jnp.ones(b, jnp.float32),
            stop_ids=jnp.full((b, num_stops), NO_STOP, jnp.int32),
            stop_reasons=jnp.full((b, num_stops), EOS, jnp.int32),
            noise_ids=jnp.zeros((b, 4), jnp.uint32),
        ),
        fingerprint=jnp.uint32(0),
        decode_steps=jnp.int32(0),
    )


def state_specs(config: ModelConfig, state: SamplerState) -> SamplerState:
    """Where the slots lie on a mesh: rows over `data`, those of the cache over all devices."""
    specs = mesh.row_specs(state)
    return specs.replace(cache=mesh.cache_specs(state.cache), fingerprint=P(), decode_steps=P())


def sample(
    config: ModelConfig,
    base: dict,
    adapter: Adapter | None,
    state: SamplerState,
    incoming: Incoming,
    max_steps: jax.Array,
    filters: bool = False,
) -> SamplerState:
    """Appends `incoming`, then decodes at most `max_steps` tokens a row.

    Args:
      config: static.
      base: the frozen weights.
      adapter: f32 master; its compute-dtype copy is made once, here.
      state: donated.
      incoming: see `Incoming`.
      max_steps: int32 scalar, not static.
      filters: static; whether top-k and top-p are read (a sort of the vocabulary per token).

    Returns:
      The new state. Rows that stopped say why in `status`; the others are RUNNING.
    """
    mark = fingerprint(adapter.params) if adapter else jnp.uint32(0)
    if adapter:
        adapter = mesh.gathered(config, adapter, jnp.dtype(config.compute_dtype))
    state = _admit(config, base, adapter, state.replace(fingerprint=mark), incoming)
    keys = row_keys(state.controls.noise_ids)
    (b, s), shards = state.tokens.shape, config.mesh.size
    slots = jnp.arange(b)

    def unfinished(fewer: int, window: int, carry: tuple) -> jax.Array:
        steps, state = carry
        running = state.status == RUNNING
        most = running.reshape(shards, -1).sum(axis=1).max()
        fits = jnp.where(running, state.lengths, 0).max() <= window
        return (steps < max_steps) & (most > fewer) & fits

    def decode(rows: int, window: int, carry: tuple) -> tuple:
        steps, state = carry
        controls, active = state.controls, state.status == RUNNING
        last = state.lengths - 1
        take, back = _running_first(active, shards, rows)
        stream = Stream(
            tokens=take(jnp.take_along_axis(state.tokens, last[:, None], axis=1)[:, 0]),
            rows=take(jnp.where(active, slots, b)),
            positions=take(last),
            num_rows=b,
            num_slots=s,
            decode=True,
            window=window,
        )
        hidden, cache, _ = apply(config, base, adapter, stream, state.cache)
        drawn = with_head(
            config,
            functools.partial(draw, config, filters),
            base,
            hidden,
            take(keys),
            take(state.lengths),
            take(controls.temperature),
            take(controls.top_k),
            take(controls.top_p),
        )
        token, logprob = (back(x) for x in drawn)
        place = (slots, jnp.where(active, state.lengths, s))
        lengths = state.lengths + active
        hit = token[:, None] == controls.stop_ids
        reason = jnp.where(hit, controls.stop_reasons, RUNNING).max(axis=1)
        reason = jnp.where((reason == RUNNING) & (lengths >= controls.limits), LENGTH, reason)
        state = state.replace(
            cache=cache,
            tokens=state.tokens.at[place].set(token, mode="drop"),
            logprobs=state.logprobs.at[place].set(logprob, mode="drop"),
            sampled=state.sampled.at[place].set(True, mode="drop"),
            lengths=lengths,
            status=jnp.where(active, reason, state.status),
        )
        return steps + 1, state

    carry = (jnp.int32(0), state)
    # A loop for each: the cost of a step follows the rows that run and the longest of them.
    for rows, fewer in itertools.pairwise((*_row_counts(b // shards), 0)):
        for window in cache_windows(s):
            carry = lax.while_loop(
                functools.partial(unfinished, fewer, window),
                functools.partial(decode, rows, window),
                carry,
            )
    steps, state = carry
    state = state.replace(decode_steps=state.decode_steps + steps)
    return mesh.constrain(config, state, state_specs(config, state))


def _row_counts(num_rows: int) -> list[int]:
    """Numbers of rows (of each device) for which decoding is compiled: all, half, a quarter."""
    counts = {max(num_rows // share, min(_FEWEST_ROWS, num_rows)) for share in (1, 2, 4)}
    return sorted(counts, reverse=True)


def _running_first(active: jax.Array, shards: int, rows: int) -> tuple[Callable, Callable]:
    """Two functions: one takes `rows` slots of each shard, those that run before others, out of an
    array `[B, ...]`; one puts what was computed for them back, with anything for the others.
    """
    order = jnp.argsort(~active.reshape(shards, -1), axis=1)
    place = jnp.argsort(order, axis=1)

    def by_shard(x: jax.Array, index: jax.Array) -> jax.Array:
        take = functools.partial(jnp.take, axis=0, mode="clip")
        out = jax.vmap(take)(x.reshape(shards, -1, *x.shape[1:]), index)
        return out.reshape(-1, *x.shape[1:])

    return lambda x: by_shard(x, order[:, :rows]), lambda x: by_shard(x, place)


def _admit(
    config: ModelConfig, base: dict, adapter: Adapter | None, state: SamplerState, new: Incoming
) -> SamplerState:
    """Takes over the rows of `new`, fills their cache, and sets them running."""

    def updated(old: jax.Array, given: jax.Array, where: jax.Array = new.update) -> jax.Array:
        return jnp.where(where.reshape(-1, *(1,) * (old.ndim - 1)), given, old)

    _, cache, _ = apply(config, base, adapter, new.stream, state.cache)

    copy = _copy_rows
    if config.mesh.size > 1:
        specs, rows = mesh.cache_specs(cache), P(mesh.DEVICES)
        copy = mesh.per_device(copy, config, (specs, rows, rows), specs)
    cache = copy(cache, jnp.arange(new.source.shape[0]), new.source)
    lengths = updated(state.lengths, new.lengths)
    controls = jax.tree.map(updated, state.controls, new.controls)
    # A row without room for a token stops before it starts.
    status = jnp.where(lengths < controls.limits, RUNNING, LENGTH)
    return state.replace(
        cache=cache,
        tokens=updated(state.tokens, new.tokens),
        lengths=lengths,
        sampled=updated(state.sampled, False, new.fresh),
        logprobs=updated(state.logprobs, 0.0, new.fresh),
        status=updated(state.status, status),
        controls=controls,
    )


def _copy_rows(cache: Cache, slots: jax.Array, source: jax.Array) -> Cache:
    """Row i of the cache becomes row `source[i]`, both counted as in `slots`.

    In place, a row at a time: gathering all rows at once would hold a second cache.
    """
    source = source - slots[0]

    def copy_row(b: jax.Array, cache: Cache) -> Cache:
        def one(c: jax.Array) -> jax.Array:
            row = lax.dynamic_slice_in_dim(c, source[b], 1, axis=1)
            return lax.dynamic_update_slice_in_dim(c, row, b, axis=1)

        return jax.tree.map(one, cache)

    return lax.fori_loop(0, source.shape[0], copy_row, cache)
