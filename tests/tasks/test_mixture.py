from collections import Counter
from fractions import Fraction

import pytest

from orbit_jax.tasks.mixture import Mixture, Source
from orbit_jax.tasks.task import Example


def source(name, size=7, weight=1.0):
    examples = (Example(f"{name}:{i}", f"{name} {i}?", str(i), task=name) for i in range(size))
    return Source(name, tuple(examples), weight)


def ids(examples):
    return [example.id for example in examples]


def tasks(mixture, count):
    return [example.task for example in mixture.examples_of_step(0, count, 0)]


@pytest.mark.parametrize(
    "weights", [(1, 1), (0.5, 0.3, 0.2), (1, 1, 1), (5, 1, 1, 1), (0.7, 0.1, 0.1, 0.05, 0.05)]
)
def test_every_source_has_its_share_at_any_time(weights):
    mixture = Mixture([source(f"s{i}", 3 + i, w) for i, w in enumerate(weights)])
    total, counts = sum(map(Fraction, map(str, weights))), Counter()
    for place, name in enumerate(tasks(mixture, 500), start=1):
        counts[name] += 1
        for i, weight in enumerate(weights):
            assert abs(counts[f"s{i}"] - place * Fraction(str(weight)) / total) < 1


def test_weights_mean_their_proportions():
    shares = [(30_000, 10_000), (0.75, 0.25), (3, 1.0)]
    mixtures = [Mixture([source("a", 7, x), source("b", 7, y)]) for x, y in shares]
    first, *others = [ids(m.examples_of_step(0, 100, 0)) for m in mixtures]
    assert others == [first, first]
    assert Counter(i[0] for i in first) == {"a": 75, "b": 25}


def test_each_epoch_of_a_source_has_all_its_examples_in_an_order_of_its_own():
    mixture = Mixture([source("a", 20, 2), source("b", 9, 1)])
    of_a = [i for i in ids(mixture.examples_of_step(0, 120, 0)) if i[0] == "a"]
    epochs = [of_a[start : start + 20] for start in range(0, 80, 20)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert len(set(epochs[0])) == 20


def test_a_step_is_a_function_of_its_number_so_nothing_is_stored():
    sources = [source("a", 11, 2), source("b", 5, 1), source("c", 3, 1)]
    together = ids(Mixture(sources).examples_of_step(0, 60, 4))
    resumed = Mixture(sources)
    assert ids(resumed.examples_of_step(3, 12, 4)) == together[36:48]
    assert ids(resumed.examples_of_step(2, 12, 4)) == together[24:36]
    assert ids(resumed.examples_of_step(0, 60, 5)) != together


def test_another_source_does_not_change_the_order_of_a_source():
    alone = ids(Mixture([source("a", 11)]).examples_of_step(0, 30, 0))
    mixed = ids(Mixture([source("b", 5, 3), source("a", 11)]).examples_of_step(0, 120, 0))
    assert [i for i in mixed if i[0] == "a"] == alone


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "no sources"),
        ([source("a"), source("a")], "'a' occurs twice"),
        ([source("a", 0)], "'a' has no examples"),
        ([source("a"), source("b", 7, 0.0)], "weight 0.0 of source 'b' is not positive"),
        ([source("a"), source("b", 7, float("inf"))], "weight inf of source 'b' is not positive"),
        ([source("a", 7, 1 / 3), source("b", 7, 1 / 7)], "repeats only after .* such as 3 and 1"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(sources, message):
    with pytest.raises(ValueError, match=message):
        Mixture(sources)
