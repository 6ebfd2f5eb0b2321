"""What the sampler is given at each call: new prompts, and tokens behind turns that are over."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from orbit_jax.model.config import ModelConfig
from orbit_jax.model.stream import Stream
from orbit_jax.rl.packing import largest_part, pack, sizes, smallest_fit
from orbit_jax.rl.sampler import EOS, NO_STOP, TOOL, Controls, Incoming, SamplerState

# Shares of a full house (all slots of all rows) for which tokens are processed: a refill of a few
# rows, a prompt for every eighth and every fourth row or short ones for all, and the worst case.
_SHARES = (1 / 32, 1 / 8, 1 / 4, 1.0)
PREFILL_TOKENS = 1 << 14  # at a time, of several rows: more would only take memory


@dataclasses.dataclass(frozen=True)
class Entry:
    """What one slot takes.

    Attributes:
      tokens: all ids of the row.
      limit: the total length at which it stops.
      noise_id: (run seed, step, prompt, sample), which key its noise.
      group: rows of a group have one prompt, which a device processes once.
      known: how many of the ids the slot holds already; 0 for a new row.
    """

    tokens: Sequence[int]
    limit: int
    noise_id: tuple[int, int, int, int]
    group: int
    known: int = 0

    @property
    def unprocessed(self) -> tuple[int, Sequence[int]]:
        """The first position that is not in the cache, and the ids from there to the last but one.

        A cache holds all ids of a row but the last, from which it is decoded.
        """
        first = max(self.known - 1, 0)
        return first, self.tokens[first:-1]


def admit(
    config: ModelConfig,
    state: SamplerState,
    entries: Mapping[int, Entry],
    stop_ids: Sequence[int],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    *,
    tool_ids: Sequence[int] = (),
    held: Mapping[int, int] | None = None,
) -> Incoming:
    """The `Incoming` that gives slots what they take.

    A prompt is processed in the first slot of its group on a device, unless a slot there holds it.

    Args:
      stop_ids: end a row as EOS, `tool_ids` as TOOL.
      held: the group whose prompt lies in a slot that takes no new row.
    """
    (num_slots, width), shards = state.tokens.shape, config.mesh.size
    tokens = np.zeros((num_slots, width), np.int32)
    lengths, limits = np.ones(num_slots, np.int32), np.ones(num_slots, np.int32)
    source, counts = np.arange(num_slots, dtype=np.int32), np.zeros(num_slots, int)
    ids = np.zeros((num_slots, 4), np.uint32)
    update, fresh = np.zeros(num_slots, bool), np.zeros(num_slots, bool)
    leaders = {(group, _shard(config, state, slot)): slot for slot, group in (held or {}).items()}
    pieces = []
    for slot, entry in entries.items():
        tokens[slot, : len(entry.tokens)] = entry.tokens
        lengths[slot], limits[slot] = len(entry.tokens), min(entry.limit, width)
        ids[slot], update[slot], fresh[slot] = entry.noise_id, True, not entry.known
        if fresh[slot]:
            place = entry.group, _shard(config, state, slot)
            source[slot] = leaders.setdefault(place, slot)
        if source[slot] == slot:
            first, piece = entry.unprocessed
            pieces.append((slot, first, piece))
            counts[slot] = len(piece)
    size = smallest_fit(largest_part(counts, num_slots, shards), _streams(config, state), shards)
    packed = pack(pieces, num_slots, shards, size)
    stops = [(i, EOS) for i in stop_ids] + [(i, TOOL) for i in tool_ids]
    stops += [(NO_STOP, EOS)] * (state.controls.stop_ids.shape[1] - len(stops))
    names, reasons = np.array(stops, np.int32).T
    return Incoming(
        stream=Stream(packed.tokens, packed.rows, packed.positions, num_slots, width),
        update=update,
        fresh=fresh,
        source=source,
        tokens=tokens,
        lengths=lengths,
        controls=Controls(
            limits=limits,
            temperature=np.full(num_slots, temperature, np.float32),
            top_k=np.full(num_slots, top_k, np.int32),
            top_p=np.full(num_slots, top_p, np.float32),
            stop_ids=np.tile(names, (num_slots, 1)),
            stop_reasons=np.tile(reasons, (num_slots, 1)),
            noise_ids=ids,
        ),
    )


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
) -> Incoming:
    """`admit` of new prompts into the first slots; a limit for all of them, or one for each."""
    most = np.broadcast_to(max_completion_tokens, len(prompts)).tolist()
    given = zip(prompts, most, noise_ids, groups, strict=True)
    entries = {
        slot: Entry(prompt, len(prompt) + limit, noise, group)
        for slot, (prompt, limit, noise, group) in enumerate(given)
    }
    return admit(config, state, entries, stop_ids, temperature, top_k, top_p)


def how_many(config: ModelConfig, state: SamplerState, asked: Iterable[tuple[int, Entry]]) -> int:
    """How many of the slots and what they ask for, in turn, are admitted by one call.

    As many as fit a stream of `PREFILL_TOKENS`, or the smallest that there is; at least one.
    """
    shards, count = config.mesh.size, 0
    streams = _streams(config, state)
    most = max((s for s in streams if s <= PREFILL_TOKENS), default=min(streams)) // shards
    used, seen = [0] * shards, set()
    for slot, entry in asked:
        shard = _shard(config, state, slot)
        if entry.known or (entry.group, shard) not in seen:
            used[shard] += len(entry.unprocessed[1])
            if count and used[shard] > most:
                break
        if not entry.known:  # of equal prompts on a device one is processed
            seen.add((entry.group, shard))
        count += 1
    return count


def _shard(config: ModelConfig, state: SamplerState, slot: int) -> int:
    return slot * config.mesh.size // state.tokens.shape[0]


def _streams(config: ModelConfig, state: SamplerState) -> tuple[int, ...]:
    num_slots, width = state.tokens.shape
    return sizes(num_slots * width, _SHARES, config.mesh.size)
