"""From prompts to rollouts, on the host: fills the sampler's slots and reads the results back."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from orbit_jax import mesh
from orbit_jax.adapters.adapter import Adapter
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.stream import Stream
from orbit_jax.rl.packing import largest_part, pack, sizes, smallest_fit
from orbit_jax.rl.sampler import EOS, IDLE, NO_STOP, Controls, Incoming, SamplerState

# Shares of a full house for which prompts are processed: groups of a few long rows, one prompt a
# row, and the worst case.
_SHARES = (1 / 32, 1 / 4, 1.0)


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """B prompts with their completions; arrays on the host.

    Attributes:
      tokens: [B, S] int32, prompt then completion; what lies behind `lengths` means nothing.
      lengths, prompt_lengths: [B] int32.
      sampled: [B, S] bool, true at tokens drawn by the model.
      logprobs: [B, S] f32, of the sampled tokens.
      status: [B] int32, an index into `sampler.STOP_REASONS`.
      groups: [B] int32, which prompt a row answers.
      temperature: the temperature that all rows were sampled with.
      filtered: whether top-k or top-p took tokens away from the distribution.
      fingerprint: of the adapter that sampled them.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    status: np.ndarray
    groups: np.ndarray
    temperature: float
    filtered: bool
    fingerprint: int

    def completion(self, row: int) -> list[int]:
        """The sampled ids of a row, stop id included."""
        return self.tokens[row, self.prompt_lengths[row] : self.lengths[row]].tolist()


def generate(
    sample: Callable,
    config: ModelConfig,
    base: dict,
    adapter: Adapter | None,
    state: SamplerState,
    prompts: Sequence[Sequence[int]],
    *,
    group_size: int,
    max_completion_tokens: int,
    stop_ids: Sequence[int],
    temperature: float,
    seed: int,
    step: int,
    prompt_ids: Sequence[int] | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Rollouts, SamplerState]:
    """Samples `group_size` completions of every prompt.

    Rows go through the state's slots a wave at a time; the first row of a group in a wave processes
    the prompt, the others copy its cache.

    Args:
      sample: the jitted `sampler.sample`.
      state: the slots; donated, so go on with the one that is returned.
      prompts: token ids. `prompt_ids` number them for the noise; by default in order.
      temperature: 0 for greedy.
      top_k, top_p: for evaluation; log-probs stay those of the whole tempered distribution.

    Raises:
      ValueError: if a prompt leaves no room for a completion, or there are more stop ids than the
        slots were made for.
    """
    slots, width = state.tokens.shape
    if len(stop_ids) > (room := state.controls.stop_ids.shape[1]):
        raise ValueError(
            f"stop_ids has {len(stop_ids)} ids: these slots have room for {room}; make them by "
            "sampler.empty_state with num_stops as large"
        )
    prompt_ids = range(len(prompts)) if prompt_ids is None else prompt_ids
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) < width:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens: a row holds 1 to {width - 1} prompt tokens "
                "and a completion; raise sampler.max_prompt_tokens or shorten the prompt"
            )
    filtered = top_k > 0 or top_p < 1.0
    rows = [(g, i) for g in range(len(prompts)) for i in range(group_size)]
    parts = []
    for start in range(0, len(rows), slots):
        wave = rows[start : start + slots]
        state = clear(state)
        incoming = admit_prompts(
            config,
            state,
            [prompts[g] for g, _ in wave],
            [(seed, step, prompt_ids[g], i) for g, i in wave],
            [g for g, _ in wave],
            max_completion_tokens,
            stop_ids,
            temperature,
            top_k,
            top_p,
        )
        steps = np.int32(max_completion_tokens)
        state = sample(config, base, adapter, state, incoming, steps, filters=filtered)
        fields = (state.tokens, state.lengths, state.sampled, state.logprobs, state.status)
        parts.append([np.asarray(x)[: len(wave)] for x in jax.device_get(fields)])
    tokens, lengths, sampled, logprobs, status = (
        np.concatenate(p) for p in zip(*parts, strict=True)
    )
    rollouts = Rollouts(
        tokens=tokens,
        lengths=lengths,
        prompt_lengths=np.array([len(prompts[g]) for g, _ in rows], np.int32),
        sampled=sampled,
        logprobs=logprobs,
        status=status,
        groups=np.array([g for g, _ in rows], np.int32),
        temperature=temperature,
        filtered=filtered,
        fingerprint=int(state.fingerprint),
    )
    return rollouts, state


def clear(state: SamplerState) -> SamplerState:
    """Every slot idle. Stale keys and values stay: nothing looks past a row's own tokens."""
    return state.replace(status=np.full(state.status.shape, IDLE, np.int32))


def admit_prompts(
    config: ModelConfig,
    state: SamplerState,
    prompts: Sequence[Sequence[int]],
    noise_ids: Sequence[tuple[int, int, int, int]],
    groups: Sequence[int],
    max_completion_tokens: int,
    stop_ids: Sequence[int],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Incoming:
    """The `Incoming` that puts prompt i into slot i; equal groups share one processing.

    A shared prompt is processed in the first slot of its group within the same data shard.
    """
    slots, width = state.tokens.shape
    stops = state.controls.stop_ids.shape[1]
    shards = config.mesh.data
    tokens = np.zeros((slots, width), np.int32)
    lengths = np.ones(slots, np.int32)
    source = np.arange(slots, dtype=np.int32)
    ids = np.zeros((slots, 4), np.uint32)
    leaders: dict[tuple[int, int], int] = {}
    pieces = []
    for slot, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        tokens[slot, : len(prompt)] = prompt
        lengths[slot] = len(prompt)
        ids[slot] = noise_ids[slot]
        leader = leaders.setdefault((group, slot * shards // slots), slot)
        source[slot] = leader
        if leader == slot:
            pieces.append((slot, 0, prompt[:-1]))
    counts = np.zeros(slots, int)
    for slot, _, piece in pieces:
        counts[slot] = len(piece)
    buckets = sizes(slots * width, _SHARES, shards)
    packed = pack(
        pieces, slots, shards, smallest_fit(largest_part(counts, slots, shards), buckets, shards)
    )
    used = np.arange(slots) < len(prompts)
    stop_row = np.full(stops, NO_STOP, np.int32)
    stop_row[: len(stop_ids)] = stop_ids
    incoming = Incoming(
        stream=Stream(packed.tokens, packed.rows, packed.positions, slots, width),
        update=used,
        fresh=used,
        source=source,
        tokens=tokens,
        lengths=lengths,
        controls=Controls(
            limits=np.minimum(lengths + max_completion_tokens, width).astype(np.int32),
            temperature=np.full(slots, temperature, np.float32),
            top_k=np.full(slots, top_k, np.int32),
            top_p=np.full(slots, top_p, np.float32),
            stop_ids=np.tile(stop_row, (slots, 1)),
            stop_reasons=np.full((slots, stops), EOS, np.int32),
            noise_ids=ids,
        ),
    )
    return mesh.place_rows(config, incoming)
