"""The task of guessing a number, as dialogues with its user."""

from pathlib import Path

import pytest

from orbit_jax.checkpoint.tokenizer import Tokenizer
from orbit_jax.tasks.chats import chat_of
from orbit_jax.tasks.dialogues import Asked, Dialogues
from orbit_jax.tasks.guesses import Guesses
from orbit_jax.tasks.task import Turn
from orbit_jax.tasks.tools import ToolPool

BASE = Path(__file__).parents[2] / "orbit_jax/assets/tiny_agent_int4"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BASE)


def play(tokenizer, number, player, task=None):
    """The transcript and its score of a player, who is shown what the user said last."""
    task = task or Guesses()
    example = next(e for e in task.examples("train") if e.answer == number and "15" in e.difficulty)
    row = Asked(example, task.messages(example), chat_of(tokenizer), task.user)
    ids, word = row.prompt, str(example.prompt)
    with Dialogues([row], ToolPool(30.0), max_turns=9) as talk:
        while True:
            ids = [*ids, *tokenizer.encode(player(word)), tokenizer.eos_ids[0]]
            reply = talk.replies(wait=True)[0] if talk.ended(0, ids) else []
            if not reply:
                transcript = talk.transcript(0, ids)
                return transcript, task.grade(example, transcript)
            ids = ids + reply
            word = talk.transcript(0, ids)[-1].text


def halving():
    """A player who asks for the middle of what is left."""
    bounds = []

    def player(word):
        if word.startswith("guess "):
            low, high = word.removeprefix("guess ").split(" to ")
            bounds[:] = int(low), int(high)
        elif word == "higher":
            bounds[0] = sum(bounds) // 2 + 1
        else:
            bounds[1] = sum(bounds) // 2 - 1
        return f"is it {sum(bounds) // 2}"

    return player


@pytest.mark.parametrize("number", ["31", "42", "57", "68"])
def test_who_halves_the_range_finds_every_number(tokenizer, number):
    transcript, score = play(tokenizer, number, halving())
    assert (score.value, score.outcome) == (1.0, "scored")
    assert transcript[-1] == Turn("assistant", f"is it {number}")
    assert score.details["guesses"] == len(transcript) // 2 + 1 <= 4
    assert {turn.text for turn in transcript if turn.role == "user"} <= {"higher", "lower"}


def test_who_does_not_find_it_in_the_turns_earns_nothing(tokenizer):
    transcript, score = play(tokenizer, "50", lambda word: "99 or 50, no, 98")
    assert [turn.role for turn in transcript] == ["assistant", "user"] * 3 + ["assistant"]
    assert (score.value, score.outcome) == (0.0, "scored")
    _, score = play(tokenizer, "50", lambda word: "who knows")
    assert (score.value, score.outcome) == (0.0, "parse_failure")


def test_guesses_behind_the_last_that_is_allowed_do_not_count():
    task, (example, *_) = Guesses(), Guesses().examples("train")
    late = [Turn("assistant", "-1")] * 4 + [Turn("assistant", example.answer)]
    assert task.grade(example, late).value == 0
    assert task.grade(example, late[1:]).value == 1


def test_splits_share_no_prompt_and_no_prompt_tells_its_number(tokenizer):
    task = Guesses()
    train, heldout = (task.examples(split) for split in ("train", "heldout"))
    assert len(train) > 1000
    assert len(heldout) > 100
    assert not {e.prompt for e in train} & {e.prompt for e in heldout}
    ids = [e.id for e in (*train, *heldout)]
    assert len(set(ids)) == len(ids)
    numbers = {}
    for e in (*train, *heldout):
        numbers.setdefault(e.prompt, set()).add(int(e.answer))
    for prompt, found in numbers.items():
        low, high = map(int, prompt.removeprefix("guess ").split(" to "))
        assert found == set(range(low, high + 1))
        assert high <= 99
    assert task.examples("unseen") == ()
    prompt = str(train[0].prompt)
    assert tokenizer.decode(tokenizer.encode(prompt)) == prompt
