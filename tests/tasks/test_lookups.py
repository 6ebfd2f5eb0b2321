"""The task that takes a search."""

from pathlib import Path

import pytest

from orbit_jax.checkpoint.tokenizer import Tokenizer
from orbit_jax.tasks.chats import chat_of
from orbit_jax.tasks.dialogues import Asked, Dialogues
from orbit_jax.tasks.lookups import Lookups
from orbit_jax.tasks.task import Turn
from orbit_jax.tasks.tools import ToolPool

BASE = Path(__file__).parents[2] / "orbit_jax/assets/tiny_agent_int4"


@pytest.fixture(scope="module")
def task() -> Lookups:
    return Lookups()


def test_a_search_finds_the_number_and_earns_the_reward(task):
    tokenizer = Tokenizer.load(BASE)
    example = task.examples("train")[0]
    row = Asked(example, task.messages(example), chat_of(tokenizer, task.tools, "plain"))
    assert tokenizer.decode(row.prompt) == example.prompt
    with Dialogues([row], ToolPool(30.0), max_turns=2) as talk:
        ids = [*row.prompt, *tokenizer.encode(f"<tool>{example.prompt}</tool>")]
        ids.append(tokenizer.eos_ids[0])
        assert talk.ended(0, ids)
        ids += talk.replies(wait=True)[0]
        found = talk.transcript(0, ids)
        assert found[-1] == Turn("tool", f"{example.prompt}: {example.answer}")
        said = Turn("assistant", rf"\boxed{{{example.answer}}}")
    score = task.grade(example, (*found, said))
    assert (score.value, score.outcome, score.details["calls"]) == (1.0, "scored", 1)
    assert task.grade(example, (Turn("assistant", r"\boxed{0}"),)).value == 0.0


def test_splits_share_no_key_and_all_are_in_the_corpus(task):
    train, heldout = (task.examples(split) for split in ("train", "heldout"))
    keys = [example.prompt for example in (*train, *heldout)]
    assert len(set(keys)) == len(keys) == 3600
    assert 300 < len(heldout) < 420
    (search,) = task.tools
    for example in heldout[:50]:
        assert search.find(example.prompt) == [(example.prompt, example.answer)]
    assert task.examples("unseen") == ()


def test_numbers_depend_on_the_seed_alone(task):
    numbers = {seed: {e.id: e.answer for e in Lookups(seed).examples("train")} for seed in (0, 1)}
    assert numbers[0] == {e.id: e.answer for e in task.examples("train")}
    same = sum(number == numbers[1][key] for key, number in numbers[0].items())
    assert same < len(numbers[0]) / 30  # by chance one in 90
