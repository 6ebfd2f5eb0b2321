"""A training batch: rollouts with rewards, laid out as the step wants them."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import struct

from orbit_jax import mesh, processes
from orbit_jax.config import Config
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.stream import Stream
from orbit_jax.rl.packing import largest_part, pack, sizes, smallest_fit
from orbit_jax.rl.rollouts import Rollouts
from orbit_jax.rl.sampler import LENGTH


@struct.dataclass
class Batch:
    """B = M*R rollouts as M micro-batches of R rows, each a stream of N tokens.

    Attributes:
      stream: tokens, rows and positions `[M, N]`; rows count from 0 in each micro-batch. Of rows
        with one prompt, the first holds it and the others begin with its last token.
      sampled: [M, N] bool, tokens drawn by the policy; nothing else is trained on.
      scored: [M, P] int32, the tokens before those, counted within their data shard: only there is
        the head computed. N or more for none.
      logprobs: [M, N] f32, the sampler's.
      rewards: [M, R] f32; not finite where the grader failed: the row is masked and counted.
      groups: [M, R] int32, which prompt a row answers.
      truncated: [M, R] bool, rows that ended at their length limit.
      temperature: f32 scalar, the one that was sampled with.
      fingerprint: uint32 of the adapter that sampled.
      num_groups: static, an upper bound on `groups`.
    """

    stream: Stream
    sampled: jax.Array
    scored: jax.Array
    logprobs: jax.Array
    rewards: jax.Array
    groups: jax.Array
    truncated: jax.Array
    temperature: jax.Array
    fingerprint: jax.Array
    num_groups: int = struct.field(pytree_node=False)


class Bucket(NamedTuple):
    """A shape of the step: the tokens N of a micro-batch's stream, and how many are scored."""

    tokens: int
    scored: int


def token_buckets(config: Config) -> tuple[Bucket, ...]:
    """The shapes of a run's micro-batches: one trace of the step for each.

    The largest holds any batch: of each group that a shard of a micro-batch touches one row with
    prompt and completion, of the others the completion and the token that it begins from.
    """
    shards, group_size = config.mesh.data, config.sampler.group_size
    rows = config.rows // (config.ppo.micro_batches * shards)
    first = np.arange(0, config.rows, rows)
    groups = int(((first + rows - 1) // group_size - first // group_size).max()) + 1
    completion, prompt = config.sampler.max_completion_tokens, config.sampler.max_prompt_tokens
    largest = shards * (groups * prompt + (rows - groups) + rows * completion)
    (most_scored,) = sizes(shards * rows * completion, (1.0,), shards)
    tokens = sizes(largest, config.ppo.token_buckets, shards)
    return tuple(Bucket(n, min(n, most_scored)) for n in tokens)


def make_batch(
    config: ModelConfig,
    rollouts: Rollouts,
    rewards: np.ndarray,
    micro_batches: int,
    buckets: Sequence[Bucket],
) -> Batch:
    """Packs rollouts, in their order, into `micro_batches` equal parts.

    The shape is the smallest of `buckets` that holds the fullest part, so a run sees few. The
    rewards of the first process count: a grader may run out of time in one and not in another.

    Raises:
      ValueError: for rollouts that cannot be trained on: greedy or filtered ones, whose
        distribution is not the one that the log-probs are of.
    """
    if rollouts.temperature <= 0 or rollouts.filtered:
        raise ValueError(
            f"temperature={rollouts.temperature}, top-k/top-p={rollouts.filtered}: such samples "
            "are for evaluation; train on samples of the whole distribution at a temperature "
            "above 0 (the set that a filter keeps moves with every update)"
        )
    total, width = rollouts.tokens.shape
    num_rows, shards = total // micro_batches, config.mesh.data
    most = int(np.bincount(rollouts.groups).max()) - 1  # the same in each step of a run
    leaders = _leaders(rollouts, num_rows // shards, most)
    starts = np.where(leaders == np.arange(total), 0, rollouts.prompt_lengths - 1)
    lengths = rollouts.lengths - starts
    fullest = max(
        largest_part(lengths[i : i + num_rows], num_rows, shards) for i in range(0, total, num_rows)
    )
    size = smallest_fit(fullest, [bucket.tokens for bucket in buckets], shards)
    most_scored = dict(buckets)[size]
    packed, sampled, scored, logprobs = [], [], [], []
    for first in range(0, total, num_rows):
        pieces = [
            (r - first, starts[r], rollouts.tokens[r, starts[r] : rollouts.lengths[r]])
            for r in range(first, first + num_rows)
        ]
        part = pack(pieces, num_rows, shards, size)
        valid = part.rows < num_rows
        place = (first + np.where(valid, part.rows, 0), part.positions)
        packed.append(part)
        sampled.append(valid & rollouts.sampled[place])
        scored.append(_before(sampled[-1], most_scored, shards))
        logprobs.append(np.where(sampled[-1], rollouts.logprobs[place], 0).astype(np.float32))

    def per_row(x: np.ndarray, dtype: type) -> np.ndarray:
        return np.asarray(x, dtype).reshape(micro_batches, num_rows)

    return mesh.place_micro_batches(
        config,
        Batch(
            stream=Stream(
                *(
                    np.stack([getattr(p, f) for p in packed])
                    for f in ("tokens", "rows", "positions")
                ),
                num_rows=num_rows,
                num_slots=width,
                prefix=per_row(leaders % num_rows, np.int32),
                max_sharers=most,
            ),
            sampled=np.stack(sampled),
            scored=np.stack(scored),
            logprobs=np.stack(logprobs),
            rewards=processes.from_first(per_row(rewards, np.float32)),
            groups=per_row(rollouts.groups, np.int32),
            truncated=per_row(rollouts.status == LENGTH, bool),
            temperature=np.float32(rollouts.temperature),
            fingerprint=np.uint32(rollouts.fingerprint),
            num_groups=total,
        ),
    )


def save_batch(path: Path, batch: Batch) -> None:
    """Writes a batch as one `.npz`, by the first of several processes; all must call it."""
    host = processes.read(batch)
    fields = _fields(host) | {f"stream.{name}": x for name, x in _fields(host.stream).items()}
    arrays = {name: x for name, x in fields.items() if isinstance(x, np.ndarray | np.generic)}
    others = {name: x for name, x in fields.items() if isinstance(x, int)}
    if processes.is_first():
        np.savez(path, static=json.dumps(others), **arrays)


def load_batch(path: Path, config: ModelConfig) -> Batch:
    """Reads what `save_batch` wrote, and places it on the mesh."""
    with np.load(path) as file:
        fields = {name: file[name] for name in file.files if name != "static"}
        fields |= json.loads(file["static"].item())
    of_stream = {n.partition(".")[2]: x for n, x in fields.items() if n.startswith("stream.")}
    of_batch = {name: x for name, x in fields.items() if not name.startswith("stream.")}
    return mesh.place_micro_batches(config, Batch(stream=Stream(**of_stream), **of_batch))


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _before(sampled: np.ndarray, size: int, shards: int) -> np.ndarray:
    """[size] places, each shard's in its own part, of the tokens before those that were sampled."""
    parts = sampled.reshape(shards, -1)
    places = np.full((shards, size // shards), parts.shape[1], np.int32)
    for shard, part in enumerate(parts):
        found = np.flatnonzero(part) - 1  # in its row: a row's first token is never sampled
        if len(found) > places.shape[1]:
            raise ValueError(
                f"{len(found)} sampled tokens in a shard of a micro-batch, where completions of "
                f"sampler.max_completion_tokens make at most {places.shape[1]}"
            )
        places[shard, : len(found)] = found
    return places.reshape(-1)


def _leaders(rollouts: Rollouts, part: int, most: int) -> np.ndarray:
    """For each row the one that holds its prompt: the first with the same of `part` rows.

    At most `most` others share one. Prompts are compared, not groups: what is shared must be equal.
    """
    leaders = np.arange(len(rollouts.lengths))
    found: dict[tuple[int, bytes], list[int]] = {}
    for row, length in enumerate(rollouts.prompt_lengths):
        key = (row // part, rollouts.tokens[row, :length].tobytes())
        together = found.setdefault(key, [])
        if len(together) > most:
            together.clear()
        together.append(row)
        leaders[row] = together[0]
    return leaders
