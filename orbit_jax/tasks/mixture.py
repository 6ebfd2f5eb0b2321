"""Several sources of examples mixed by weights, as a function of the step: nothing to store.

Places are dealt to the sources so that each has its share at any time: after any number of places
a source is less than one example away from its exact share. Within a source each epoch goes
through all examples in an order of its own.
"""

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from orbit_jax.tasks.task import Example

LONGEST_PERIOD = 10_000  # places until the pattern of sources repeats


@dataclass(frozen=True)
class Source:
    """Examples that a mixture draws from.

    Attributes:
      name: unique in the mixture; the order of its examples depends on it, not on its neighbours.
      examples: at least one.
      weight: its share of the examples, relative to the other sources' weights.
    """

    name: str
    examples: tuple[Example, ...]
    weight: float = 1.0


class Mixture:
    """Sources mixed by their weights.

    Args:
        sources: at least one.

    Raises:
        ValueError: when a source has no examples, a weight is not positive, a name occurs twice,
            or the weights have no common period of `LONGEST_PERIOD` places or fewer.
    """

    def __init__(self, sources: Sequence[Source]):
        self.sources = tuple(sources)
        names = [source.name for source in sources]
        if not sources:
            raise ValueError("Mixture: no sources; give at least one.")
        for source in sources:
            if names.count(source.name) > 1:
                raise ValueError(f"Mixture: source {source.name!r} occurs twice; rename one.")
            if not source.examples:
                raise ValueError(f"Mixture: source {source.name!r} has no examples; leave it out.")
            if not (source.weight > 0 and math.isfinite(source.weight)):
                raise ValueError(
                    f"Mixture: weight {source.weight} of source {source.name!r} is not positive; "
                    "leave out a source that is not meant."
                )
        self._period = _pattern(_whole_weights(sources))

    def examples_of_step(self, step: int, count: int, seed: int) -> list[Example]:
        """Return the `count` examples of a step; a function of its arguments and the sources."""
        return [self._at(place, seed) for place in range(step * count, (step + 1) * count)]

    def _at(self, place: int, seed: int) -> Example:
        rounds, within = divmod(place, len(self._period))
        index, earlier, share = self._period[within]
        source = self.sources[index]
        epoch, position = divmod(rounds * share + earlier, len(source.examples))
        order = _order(len(source.examples), seed, _number(source.name), epoch)
        return source.examples[order[position]]


def _whole_weights(sources: Sequence[Source]) -> list[int]:
    """The weights as the smallest whole numbers in their proportion."""
    exact = [Fraction(str(source.weight)) for source in sources]
    whole = [int(w * math.lcm(*(w.denominator for w in exact))) for w in exact]
    whole = [w // math.gcd(*whole) for w in whole]
    if sum(whole) > LONGEST_PERIOD:
        raise ValueError(
            f"Mixture: weights {[source.weight for source in sources]} are in the proportion "
            f"{':'.join(map(str, whole))}, which repeats only after {sum(whole)} examples; give "
            f"weights that do after {LONGEST_PERIOD} or fewer, such as 3 and 1."
        )
    return whole


def _pattern(weights: Sequence[int]) -> list[tuple[int, int, int]]:
    """For each place of a period: the source, how many it had before there, and its share.

    A source's k-th example is due by the place where its share reaches k, and may not come before
    its share exceeds k - 1; of those that may, the one due first is next. That keeps all of them
    less than one away from their shares (it is earliest-deadline-first on a full machine).
    """
    total, had = sum(weights), [0] * len(weights)
    pattern = []
    for place in range(total):
        ready = [i for i, w in enumerate(weights) if had[i] * total < (place + 1) * w]
        i = min(ready, key=lambda i: (-(-(had[i] + 1) * total // weights[i]), i))
        pattern.append((i, had[i], weights[i]))
        had[i] += 1
    return pattern


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


@functools.lru_cache(maxsize=64)
def _order(size: int, seed: int, source: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, source, epoch)).permutation(size)
