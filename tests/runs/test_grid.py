"""Grids: what is read from the command line, what the cells are called, what is refused."""

import pytest

from orbit_jax.config import Config, to_dict
from orbit_jax.runs.grid import cells_of, merged, numeric, order, read_grid, read_seeds, short

BASE = to_dict(Config())


def names(*texts, seeds=(0,)):
    return [cell.name for cell in cells_of(BASE, read_grid(texts, Config()), seeds)]


@pytest.mark.parametrize(
    ("text", "field", "values"),
    [
        ("optimizer.learning_rate=1e-4, 1", "optimizer.learning_rate", (1e-4, 1.0)),
        ("config.adapter.rank=4,16", "adapter.rank", (4, 16)),
        ("ppo.whiten=true,False", "ppo.whiten", (True, False)),
        ("adapter.experts=each,all", "adapter.experts", ("each", "all")),
        ("adapter.targets=('q_proj',),('q_proj','v_proj')", "adapter.targets",
         (("q_proj",), ("q_proj", "v_proj"))),
        ("adapter.overrides=(),['experts.up_proj:2']", "adapter.overrides",
         ((), ["experts.up_proj:2"])),
    ],
)  # fmt: skip
def test_values_are_read_as_their_field_has_them(text, field, values):
    grid = read_grid([text], Config())
    assert grid == {field: values}
    assert list(map(type, grid[field])) == list(map(type, values))


def test_a_cell_has_a_name_that_does_not_depend_on_how_a_value_was_written():
    assert names("optimizer.learning_rate=5e-4,.002", "adapter.rank=4") == [
        "learning_rate=0.0005,rank=4/seed=0",
        "learning_rate=0.002,rank=4/seed=0",
    ]
    assert names(seeds=(0, 7)) == ["seed=0", "seed=7"]


def test_names_are_plain_folders_and_tell_fields_of_one_last_name_apart():
    (name,) = names("base.path=a/b=c", "adapter.targets=('q_proj','v_proj')")
    assert name == "path=a%2Fb=c,targets=q_proj+v_proj/seed=0"
    two = {"sampler": {"workers": 1}, "tools": {"workers": 2, "turns": 3}}
    assert [short(f, two) for f in ("tools.workers", "tools.turns")] == ["tools.workers", "turns"]
    many = ["q_proj:2"] * 40
    first, second = names(f"adapter.overrides={[*many, 'o_proj:2']},{[*many, 'o_proj:3']}")
    assert first != second
    assert max(map(len, first.split("/"))) < 200


def test_every_setting_has_its_first_seed_before_any_its_second():
    assert names("adapter.rank=4,16", seeds=(0, 1)) == [
        "rank=4/seed=0",
        "rank=16/seed=0",
        "rank=4/seed=1",
        "rank=16/seed=1",
    ]


def test_cells_have_the_config_of_the_recipe_but_for_what_they_set():
    (cell,) = cells_of(BASE, {"adapter.rank": (4,)}, (3,))
    assert cell.config == merged(BASE, {"adapter.rank": 4, "seed": 3})
    assert (cell.seed, cell.settings) == (3, {"adapter.rank": 4})
    assert BASE["adapter"]["rank"] == 16


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["adapter.rank"], "give a field and its values"),
        (["=4"], "give a field and its values"),
        (["seed=1,2"], "use --seeds=1,2"),
        (["adapter.rank=4", "adapter.rank=8"], "adapter.rank is there twice"),
        (["adapter.rnk=4"], "config.adapter.rnk: there is no such field; did you mean"),
        (["adaptor.rank=4"], "config.adaptor: there is no such field; did you mean"),
        (["steps.more=4"], "config.steps.more: there is no such field"),
        (["adapter.rank=many"], "config.adapter.rank='many': expected int"),
        (["adapter.targets=q_proj,"], "expected a list"),
        (["adapter.rank=4,0"], "^rank=0/seed=0: config.adapter.rank=0: must be above 0"),
        (["ppo.micro_batches=3"], "must divide the 256 rollouts"),
        (["optimizer.learning_rate=1e-3,0.001"], "are the same run"),
        (["run.keep_checkpoints=1,2"], "are the same run"),
        (["adapter.targets=('q_proj+v_proj',),('q_proj','v_proj')"], "one name"),
    ],
)
def test_what_no_run_would_accept_is_refused(texts, sentence):
    with pytest.raises(ValueError, match=sentence):
        names(*texts)


def test_seeds_are_whole_numbers_given_once():
    assert read_seeds(["0", " 2"]) == (0, 2)
    with pytest.raises(ValueError, match="seeds=0,x: give whole numbers"):
        read_seeds(["0", "x"])
    with pytest.raises(ValueError, match="are the same run"):
        names(seeds=(1, 1))
    with pytest.raises(ValueError, match=r"config\.seed=-1: must be at least 0"):
        names(seeds=(-1,))


def test_numbers_are_in_their_order_and_words_as_they_came():
    assert order([16, 4, 16, 8.0]) == [4, 8.0, 16]
    assert order(["outer", "all", "outer"]) == ["outer", "all"]
    assert not numeric([True, 1])
