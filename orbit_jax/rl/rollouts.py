"""From prompts to rollouts, on the host: fills the sampler's slots and reads the results back."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jax.sharding import PartitionSpec as P

from orbit_jax import mesh, processes
from orbit_jax.adapters.adapter import Adapter
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.stream import Stream
from orbit_jax.rl.packing import largest_part, pack, sizes, smallest_fit
from orbit_jax.rl.sampler import EOS, IDLE, NO_STOP, RUNNING, Controls, Incoming, SamplerState

# Shares of a full house (all slots of all rows) for which prompts are processed: a refill of a few
# rows, a prompt for every eighth and every fourth row or short ones for all, and the worst case.
_SHARES = (1 / 32, 1 / 8, 1 / 4, 1.0)
_PREFILL_TOKENS = 1 << 14  # at a time, of several prompts: more would only take memory
_REFILL_EVERY = 32  # decoded tokens: a call, and a slot that idles for half of them, cost less


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """B prompts with their completions; arrays on the host.

    Attributes:
      tokens: [B, S] int32, prompt then completion; what lies behind `lengths` means nothing.
      lengths: [B] int32, prompt and completion together; prompt_lengths: [B] int32.
      sampled: [B, S] bool, true at tokens drawn by the model.
      logprobs: [B, S] f32, of the sampled tokens.
      status: [B] int32, an index into `sampler.STOP_REASONS`.
      groups: [B] int32, which prompt a row answers.
      temperature: the temperature that all rows were sampled with.
      filtered: whether top-k or top-p took tokens away from the distribution.
      fingerprint: of the adapter that sampled them.
      calls: of the sampler; decode_steps: how often decoding went over the model in them.
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
    calls: int
    decode_steps: int

    @property
    def completion_lengths(self) -> np.ndarray:
        """[B] tokens behind the prompt, stop id included."""
        return self.lengths - self.prompt_lengths

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
    max_completion_tokens: int | Sequence[int],
    stop_ids: Sequence[int],
    temperature: float,
    seed: int,
    step: int,
    prompt_ids: Sequence[int] | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Rollouts, SamplerState]:
    """Samples `group_size` completions of every prompt.

    Rows wait for a free slot while others go on. The first row of a group processes the prompt; the
    others copy it from that row's cache.

    Args:
      sample: the jitted `sampler.sample`.
      state: the slots; donated, so go on with the one that is returned.
      prompts: token ids. `prompt_ids` number them for the noise; by default in order.
      max_completion_tokens: for all rows, or one for each, a prompt's samples after another.
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
    limits = np.broadcast_to(max_completion_tokens, len(rows))
    queue, running = collections.deque(range(len(rows))), {}
    held: dict[int, int] = {}  # the group whose prompt lies in a slot's cache
    fields = ("tokens", "lengths", "sampled", "logprobs", "status")
    found = {
        name: np.zeros((len(rows), *getattr(state, name).shape[1:]), getattr(state, name).dtype)
        for name in fields
    }
    state, calls = clear(config, state), 0
    while queue or running:
        calls += 1
        free = [slot for slot in range(slots) if slot not in running]
        count = _at_once(config, state, free, [rows[row][0] for row in queue], prompts)
        new = {slot: queue.popleft() for slot in free[:count]}
        incoming = admit_prompts(
            config,
            state,
            [prompts[rows[row][0]] for row in new.values()],
            [(seed, step, prompt_ids[rows[row][0]], rows[row][1]) for row in new.values()],
            [rows[row][0] for row in new.values()],
            limits[list(new.values())],
            stop_ids,
            temperature,
            top_k,
            top_p,
            slots=list(new),
            held={slot: group for slot, group in held.items() if slot not in new},
        )
        running |= new
        held |= {slot: rows[row][0] for slot, row in new.items()}
        if queue and count < len(free):
            steps = 0  # the next prompts first
        else:
            # With rows waiting, slots that have finished are looked for now and then.
            steps = _REFILL_EVERY if queue else limits.max(initial=0)
        incoming = mesh.place_rows(config, incoming)
        state = sample(config, base, adapter, state, incoming, np.int32(steps), filters=filtered)
        status = processes.read(state.status)
        done = [slot for slot in running if status[slot] != RUNNING]
        if done:
            places = [running.pop(slot) for slot in done]
            for name in fields:
                found[name][places] = processes.read(getattr(state, name))[done]
    rollouts = Rollouts(
        **found,
        prompt_lengths=np.array([len(prompts[g]) for g, _ in rows], np.int32),
        groups=np.array([g for g, _ in rows], np.int32),
        temperature=temperature,
        filtered=filtered,
        fingerprint=int(state.fingerprint),
        calls=calls,
        decode_steps=int(state.decode_steps),
    )
    return rollouts, state


def _at_once(
    config: ModelConfig,
    state: SamplerState,
    free: Sequence[int],
    waiting: Sequence[int],
    prompts: Sequence[Sequence[int]],
) -> int:
    """How many of the rows that wait, named by their groups, go into the free slots by one call.

    As many as fit a stream of `_PREFILL_TOKENS`, or the smallest that there is.
    """
    (num_slots, width), shards = state.tokens.shape, config.mesh.size
    streams = sizes(num_slots * width, _SHARES, shards)
    most = max((s for s in streams if s <= _PREFILL_TOKENS), default=min(streams)) // shards
    used, seen = [0] * shards, set()
    for count, (slot, group) in enumerate(zip(free, waiting, strict=False)):
        shard = slot * shards // num_slots
        if (shard, group) not in seen:  # of equal prompts on a device one is processed
            seen.add((shard, group))
            used[shard] += len(prompts[group]) - 1
            if count and used[shard] > most:
                return count
    return min(len(free), len(waiting))


def clear(config: ModelConfig, state: SamplerState) -> SamplerState:
    """Every slot idle. Stale keys and values stay: nothing looks past a row's own tokens."""
    idle = np.full(state.status.shape, IDLE, np.int32)
    status, steps = mesh.place(config, (idle, np.int32(0)), (P("data"), P()))
    return state.replace(status=status, decode_steps=steps)


def admit_prompts(
    config: ModelConfig,
    state: SamplerState,
    prompts: Sequence[Sequence[int]],
    noise_ids: Sequence[tuple[int, int, int, int]],
    groups: Sequence[int],
    max_completion_tokens: int | Sequence[int],
    stop_ids: Sequence[int],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    *,
    slots: Sequence[int] | None = None,
    held: Mapping[int, int] | None = None,
) -> Incoming:
    """The `Incoming` that puts prompt i into `slots[i]`; equal groups share one processing.

    A shared prompt is processed in the first slot of its group on the same device, unless a slot of
    that device holds it already.

    Args:
      slots: by default the first ones.
      max_completion_tokens: for all prompts, or one for each.
      held: the group whose prompt lies in a slot that is not among `slots`.
    """
    num_slots, width = state.tokens.shape
    stops = state.controls.stop_ids.shape[1]
    shards = config.mesh.size
    slots = range(len(prompts)) if slots is None else slots
    shard = [slot * shards // num_slots for slot in range(num_slots)]
    tokens = np.zeros((num_slots, width), np.int32)
    lengths = np.ones(num_slots, np.int32)
    source = np.arange(num_slots, dtype=np.int32)
    ids = np.zeros((num_slots, 4), np.uint32)
    used = np.zeros(num_slots, bool)
    limits = np.ones(num_slots, np.int32)
    limits[list(slots)] = max_completion_tokens
    leaders = {(group, shard[slot]): slot for slot, group in (held or {}).items()}
    pieces = []
    for slot, prompt, group, noise in zip(slots, prompts, groups, noise_ids, strict=True):
        tokens[slot, : len(prompt)] = prompt
        lengths[slot] = len(prompt)
        ids[slot] = noise
        used[slot] = True
        leader = leaders.setdefault((group, shard[slot]), slot)
        source[slot] = leader
        if leader == slot:
            pieces.append((slot, 0, prompt[:-1]))
    counts = np.zeros(num_slots, int)
    for slot, _, piece in pieces:
        counts[slot] = len(piece)
    buckets = sizes(num_slots * width, _SHARES, shards)
    size = smallest_fit(largest_part(counts, num_slots, shards), buckets, shards)
    packed = pack(pieces, num_slots, shards, size)
    stop_row = np.full(stops, NO_STOP, np.int32)
    stop_row[: len(stop_ids)] = stop_ids
    return Incoming(
        stream=Stream(packed.tokens, packed.rows, packed.positions, num_slots, width),
        update=used,
        fresh=used,
        source=source,
        tokens=tokens,
        lengths=lengths,
        controls=Controls(
            limits=np.minimum(lengths + limits, width).astype(np.int32),
            temperature=np.full(num_slots, temperature, np.float32),
            top_k=np.full(num_slots, top_k, np.int32),
            top_p=np.full(num_slots, top_p, np.float32),
            stop_ids=np.tile(stop_row, (num_slots, 1)),
            stop_reasons=np.full((num_slots, stops), EOS, np.int32),
            noise_ids=ids,
        ),
    )
