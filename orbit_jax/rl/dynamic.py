"""Dynamic sampling (DAPO, Yu et al., 2025): prompts that teach nothing make room for others.

A group whose rewards are all equal has no advantage. Further prompts are sampled, in rounds of as
many as a step has, until enough groups differ. What is drawn depends on the step alone, so that a
resumed run draws the same, and the first round is that of a run without dynamic sampling.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbit_jax.rl.rollouts import Rollouts

_APART = 2**20  # steps: further rounds take the examples of steps that no run comes to


class Round(NamedTuple):
    """Rollouts of as many prompts as a step has, what they are worth, and metrics of them."""

    rollouts: Rollouts
    rewards: np.ndarray
    verdicts: Sequence
    counts: Mapping[str, float]


def step_of_round(step: int, number: int) -> int:
    """The step whose examples the round `number`, from 0, of a step takes."""
    return step + _APART * number


def fill(draw: Callable[[int], Round], most_rounds: int, before_stop: Callable[[], None]) -> Round:
    """A step's rollouts, of groups whose rewards differ as far as `most_rounds` rounds have them.

    Groups stand in the order in which they were drawn. Where too few differ, the first of the
    others stand behind them; where more do than a step has prompts, the last are left out. Counts
    are the mean of the rounds', 0 where one has none. With 0 rounds the first is taken as it is.

    Args:
      draw: samples and scores the round of a number from 0.
      before_stop: is called before this raises; as to save what there is.

    Raises:
      ValueError: if no group differs in any round.
    """
    if not most_rounds:
        return draw(0)
    rounds, differing, flat = [], [], []
    for number in range(most_rounds):
        rounds.append(draw(number))
        differs = groups_that_differ(rounds[-1])
        differing += [(number, group) for group in np.flatnonzero(differs)]
        flat += [(number, group) for group in np.flatnonzero(~differs)]
        if len(differing) >= len(differs):
            break
    if not differing:
        before_stop()
        raise ValueError(
            f"config.ppo.dynamic_sampling={most_rounds}: in {len(flat)} groups of "
            f"{most_rounds} rounds all rewards of a prompt were equal or not known, so there is "
            "nothing to learn from; what was trained is saved: resume with more rounds, or start "
            "with easier or harder problems or a higher sampler.group_size"
        )
    missing = max(len(differs) - len(differing), 0)
    chosen = pick(rounds, (differing + flat)[: len(differs)])
    counts = {
        "dynamic_sampling/rounds": len(rounds),
        "dynamic_sampling/groups": len(differing) + len(flat),
        "dynamic_sampling/flat_groups": missing,
    }
    return chosen._replace(counts=chosen.counts | counts)


def groups_that_differ(found: Round) -> np.ndarray:
    """[groups] bool: whether two known rewards of the group are not equal."""
    groups = found.rollouts.groups
    known = np.where(np.isfinite(found.rewards), found.rewards, np.nan)
    by_group = [known[groups == group] for group in range(groups.max() + 1)]
    return np.array([np.fmax.reduce(g) > np.fmin.reduce(g) for g in by_group])


def pick(rounds: Sequence[Round], chosen: Sequence[tuple[int, int]]) -> Round:
    """One round of as many groups as each has, chosen by numbers of round and group."""
    places = [
        (number, row)
        for number, group in chosen
        for row in np.flatnonzero(rounds[number].rollouts.groups == group)
    ]
    parts = [found.rollouts for found in rounds]

    def of_rows(name: str) -> np.ndarray:
        return np.stack([getattr(parts[number], name)[row] for number, row in places])

    names = {name: None for found in rounds for name in found.counts}
    per_row = ("tokens", "lengths", "prompt_lengths", "sampled", "logprobs", "status")
    rollouts = dataclasses.replace(
        parts[0],  # whose numbers of groups are those of any round
        **{name: of_rows(name) for name in per_row},
        calls=sum(part.calls for part in parts),
        decode_steps=sum(part.decode_steps for part in parts),
    )
    return Round(
        rollouts,
        np.array([rounds[number].rewards[row] for number, row in places]),
        [rounds[number].verdicts[row] for number, row in places],
        {name: sum(found.counts.get(name, 0) for found in rounds) / len(rounds) for name in names},
    )
