"""From prompts to rollouts, on the host: fills the sampler's slots and reads the results back.

Rows at different turns decode together: one that waits for a tool only holds its slot.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from jax.sharding import PartitionSpec as P

from orbit_jax import mesh, processes
from orbit_jax.adapters.adapter import Adapter
from orbit_jax.model.config import ModelConfig
from orbit_jax.rl.admission import Entry, admit, how_many
from orbit_jax.rl.sampler import IDLE, LENGTH, RUNNING, STOP_REASONS, SamplerState

_REFILL_EVERY = 32  # decoded tokens: a call, and a slot that idles for half of them, cost less
_RECORDED = ("tokens", "lengths", "sampled", "logprobs", "status")


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

    @property
    def stops(self) -> list[str]:
        """[B] why each row ended, of `sampler.STOP_REASONS`."""
        return [STOP_REASONS[status] for status in self.status]

    def completion(self, row: int) -> list[int]:
        """The sampled ids of a row, stop id included."""
        return self.tokens[row, self.prompt_lengths[row] : self.lengths[row]].tolist()

    def take(self, rows: np.ndarray) -> "Rollouts":
        """Those rows alone, in that order."""
        per_row = (*_RECORDED, "prompt_lengths", "groups")
        return dataclasses.replace(self, **{name: getattr(self, name)[rows] for name in per_row})


class Environment(Protocol):
    """What answers a row whose turn is over: tools, or somebody who talks.

    Of several processes the first alone has one that is asked.
    """

    def ended(self, row: int, ids: list[int]) -> bool:
        """Takes the ids of a row, prompt included, that stopped by an id; whether it may go on."""
        ...

    def replies(self, wait: bool) -> Mapping[int, Sequence[int]]:
        """By row the ids that go behind it, or none for it to end; each row that it took, once.

        With `wait` at least one, otherwise what there is.
        """
        ...


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
    tool_ids: Sequence[int] = (),
    environment: Environment | None = None,
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
      tool_ids: stop a row too, as TOOL.
      environment: is asked what follows a row that stopped by an id. What it says is appended
        behind the very ids that were sampled, up to the row's limit, and is not `sampled` itself.

    Raises:
      ValueError: if a prompt leaves no room for a completion, or there are more stop ids than the
        slots were made for.
    """
    width = state.tokens.shape[1]
    stops, room = len(stop_ids) + len(tool_ids), state.controls.stop_ids.shape[1]
    if stops > room:
        raise ValueError(
            f"stop_ids and tool_ids have {stops} ids: these slots have room for {room}; make them "
            "by sampler.empty_state with num_stops as large"
        )
    prompt_ids = range(len(prompts)) if prompt_ids is None else prompt_ids
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) < width:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens: a row holds 1 to {width - 1} prompt tokens "
                "and a completion; raise sampler.max_prompt_tokens or shorten the prompt"
            )
    rows = [
        Entry(prompts[g], len(prompts[g]) + limit, (seed, step, prompt_ids[g], i), g)
        for (g, i), limit in zip(
            itertools.product(range(len(prompts)), range(group_size)),
            np.broadcast_to(max_completion_tokens, len(prompts) * group_size).tolist(),
            strict=True,
        )
    ]
    table = _Table(config, state, rows, environment)
    state = clear(config, state)
    while table.unfinished:
        entries = table.next_entries()
        incoming = admit(
            config,
            state,
            entries,
            stop_ids,
            temperature,
            top_k,
            top_p,
            tool_ids=tool_ids,
            held=table.held(entries),
        )
        state = sample(
            config,
            base,
            adapter,
            state,
            mesh.place_rows(config, incoming),
            np.int32(table.steps),
            filters=top_k > 0 or top_p < 1.0,
        )
        table.read(state)
    rollouts = Rollouts(
        **table.found,
        prompt_lengths=np.array([len(row.tokens) for row in rows], np.int32),
        groups=np.array([row.group for row in rows], np.int32),
        temperature=temperature,
        filtered=top_k > 0 or top_p < 1.0,
        fingerprint=int(state.fingerprint),
        calls=table.calls,
        decode_steps=int(state.decode_steps),
    )
    return rollouts, state


class _Table:
    """The host's record of rows: those that wait for a slot, that run, that wait for a reply."""

    def __init__(
        self,
        config: ModelConfig,
        state: SamplerState,
        rows: Sequence[Entry],
        environment: Environment | None,
    ):
        self.config, self.rows, self.environment = config, rows, environment
        self.state, self.calls, self.steps = state, 0, 0  # of the slots only shapes are read
        self.queue = collections.deque(range(len(rows)))
        self.row_of: dict[int, int] = {}  # by slot
        self.asked: dict[int, list[int]] = {}  # ids of rows that wait for a reply
        self.prompt_in: dict[int, int] = {}  # the group whose prompt lies in a slot's cache
        self.replied: dict[int, Entry] = {}  # what slots are to go on with
        self.found = {
            name: np.zeros((len(rows), *getattr(state, name).shape[1:]), getattr(state, name).dtype)
            for name in _RECORDED
        }

    @property
    def unfinished(self) -> bool:
        return bool(self.queue or self.row_of)

    def next_entries(self) -> dict[int, Entry]:
        """What slots take in the next call, as far as one call goes; sets `steps` for it."""
        self._take_replies()
        slots = self.state.tokens.shape[0]
        free = [slot for slot in range(slots) if slot not in self.row_of]
        new = [(s, self.rows[row]) for s, row in zip(free, self.queue, strict=False)]
        asked = [*self.replied.items(), *new]
        entries = dict(asked[: how_many(self.config, self.state, asked)])
        for slot, entry in entries.items():
            if not entry.known:
                self.row_of[slot] = self.queue.popleft()
                self.prompt_in[slot] = entry.group
            self.replied.pop(slot, None)
        if len(entries) < len(asked):
            self.steps = 0  # the others first
        else:
            # With rows waiting, slots that have finished are looked for now and then.
            more = self.queue or self.asked
            self.steps = _REFILL_EVERY if more else max(row.limit for row in self.rows)
        self.calls += 1
        return entries

    def held(self, entries: Mapping[int, Entry]) -> dict[int, int]:
        """Prompts that lie in the cache of slots beside those of new rows."""
        new = {slot for slot, entry in entries.items() if not entry.known}
        return {slot: group for slot, group in self.prompt_in.items() if slot not in new}

    def read(self, state: SamplerState) -> None:
        """Takes over the rows that have stopped, and asks what follows them."""
        status = processes.read(state.status)
        waiting = {slot for slot, row in self.row_of.items() if row in self.asked}
        busy = waiting | self.replied.keys()
        stopped = [s for s in self.row_of if status[s] != RUNNING and s not in busy]
        if not stopped:
            return
        now = {name: processes.read(getattr(state, name)) for name in _RECORDED}
        for slot in stopped:
            row = self.row_of[slot]
            for name, values in now.items():
                self.found[name][row] = values[slot]
            if self.environment and status[slot] != LENGTH:
                ids = now["tokens"][slot, : now["lengths"][slot]].tolist()
                if processes.by_first(self.environment.ended, row, ids):
                    self.asked[row] = ids
                    continue
            del self.row_of[slot]

    def _take_replies(self) -> None:
        """What the environment answered; waits for it where there is nothing else to do."""
        if not self.asked:
            return
        idle = len(self.asked) == len(self.row_of) and not self.queue and not self.replied
        slot_of = {row: slot for slot, row in self.row_of.items()}
        for row, reply in processes.by_first(self._replies, idle):
            ids, entry = self.asked.pop(row), self.rows[row]
            if reply and len(ids) + len(reply) < min(entry.limit, self.state.tokens.shape[1]):
                self.replied[slot_of[row]] = dataclasses.replace(
                    entry, tokens=[*ids, *reply], known=len(ids)
                )
            else:  # nothing follows, or what follows leaves no room
                self.found["status"][row] = LENGTH if reply else self.found["status"][row]
                del self.row_of[slot_of[row]]

    def _replies(self, wait: bool) -> list[tuple[int, list[int]]]:
        return [(row, list(ids)) for row, ids in self.environment.replies(wait).items()]


def clear(config: ModelConfig, state: SamplerState) -> SamplerState:
    """Every slot idle. Stale keys and values stay: nothing looks past a row's own tokens."""
    idle = np.full(state.status.shape, IDLE, np.int32)
    status, steps = mesh.place(config, (idle, np.int32(0)), (P("data"), P()))
    return state.replace(status=status, decode_steps=steps)
