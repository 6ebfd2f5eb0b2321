"""Rows that go on after a tool or a user has answered, on the mixture of experts."""

import itertools
import threading
from collections import Counter

import jax
import numpy as np
import pytest
from lab import Lab, prompts
from talkers import ANSWERS, CALLS, LIMIT, STOP, USERS, Timed, dialogue_rows, name_of

from orbit_jax.rl.rollouts import Rollouts
from orbit_jax.rl.sampler import EOS, LENGTH, TOOL
from orbit_jax.tasks.tools import ToolPool

ROWS, TURNS, ROOM = 24, 3, 40


class Scripted:
    """Answers the first calls of a row by ids that only the row and the turn decide.

    Attributes:
      asked: (row, ids) in the order of asking.
      waits: how often it was asked to wait.
    """

    def __init__(self, late_rows: tuple[int, ...] = (), length: int = 3):
        self.late_rows, self.length = late_rows, length
        self.asked: list[tuple[int, list[int]]] = []
        self.turn: dict[int, int] = {}
        self.open: dict[int, list[int]] = {}
        self.waits = 0

    def ended(self, row: int, ids: list[int]) -> bool:
        self.asked.append((row, ids))
        turn = self.turn[row] = self.turn.get(row, 0) + 1
        if ids[-1] not in CALLS or turn >= TURNS:
            return False
        self.open[row] = [1 + (7 * row + turn + i) % 60 for i in range(self.length)]
        return True

    def replies(self, wait: bool) -> dict[int, list[int]]:
        """Late rows are answered only when nothing else is left to do."""
        self.waits += wait
        now = {r: ids for r, ids in self.open.items() if wait or r not in self.late_rows}
        self.open = {r: ids for r, ids in self.open.items() if r not in now}
        return now


def talk(lab: Lab, adapter, environment, num_rows: int = ROWS, **given) -> Rollouts:
    settings = {"stop_ids": (STOP,), "tool_ids": CALLS, "max_completion_tokens": ROOM} | given
    return lab.generate(adapter, num_rows, environment=environment, **settings)


@pytest.fixture(scope="module")
def adapter(moe: Lab):
    return moe.adapter()


@pytest.fixture(scope="module")
def environment() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def talked(moe: Lab, adapter, environment) -> Rollouts:
    return talk(moe, adapter, environment)


def given_ids(sampled: Rollouts, row: int) -> list[list[int]]:
    """The runs of ids behind the prompt that were not sampled."""
    runs, previous = [], True
    for position in range(sampled.prompt_lengths[row], sampled.lengths[row]):
        drawn = bool(sampled.sampled[row, position])
        if not drawn:
            runs += [[]] if previous else []
            runs[-1].append(int(sampled.tokens[row, position]))
        previous = drawn
    return runs


def test_rows_go_on_behind_the_very_ids_that_were_sampled(talked, environment):
    """T3: what was asked about is a prefix of the row, id for id."""
    assert len(environment.asked) > ROWS
    for row, ids in environment.asked:
        assert talked.tokens[row, : len(ids)].tolist() == ids


def test_what_was_given_is_not_sampled_and_stands_where_it_was_given(talked, environment):
    """T4: [prompt, gen gen, tool tool tool, gen] has mask 0 1 1 0 0 0 1."""
    several = 0
    for row in range(ROWS):
        turns = environment.turn.get(row, 0)
        calls = [len(ids) for r, ids in environment.asked if r == row and ids[-1] in CALLS]
        answered = calls[: TURNS - 1]
        expected = [
            [1 + (7 * row + turn + i) % 60 for i in range(3)]
            for turn, at in enumerate(answered, start=1)
            if at + 3 < talked.prompt_lengths[row] + ROOM
        ]
        assert given_ids(talked, row) == expected
        assert (talked.logprobs[row][~talked.sampled[row]] == 0).all()
        several += turns > 1
    assert several > 3


def test_each_turn_equals_recomputing_the_whole_transcript(moe, adapter, talked, environment):
    """From the cache or from scratch: same ids and log-probs, for every turn of every row."""
    for turn in range(1, TURNS):
        calls = [(r, ids) for r, ids in environment.asked if ids[-1] in CALLS]
        ends: dict[int, list[int]] = {}
        for row, ids in calls:
            ends.setdefault(row, []).append(len(ids))
        chosen = {r: e[turn - 1] + 3 for r, e in ends.items() if len(e) >= turn}
        chosen = {r: n for r, n in chosen.items() if talked.sampled[r, n:].any()}
        assert chosen
        for row, start in list(chosen.items())[:4]:
            text = talked.tokens[row, :start].tolist()
            group, sample = divmod(row, 4)
            scratch = moe.generate(
                adapter,
                prompts=[text],
                group_size=sample + 1,
                prompt_ids=[group],
                stop_ids=(STOP, *CALLS),
                max_completion_tokens=int(talked.prompt_lengths[row]) + ROOM - start,
            )
            end = next((n for n in ends[row] if n > start), int(talked.lengths[row]))
            assert scratch.tokens[sample, :end].tolist() == talked.tokens[row, :end].tolist()
            np.testing.assert_array_equal(
                scratch.logprobs[sample, start:end], talked.logprobs[row, start:end]
            )


def test_sampler_and_trainer_agree_on_all_turns_exactly(moe, adapter, talked):
    batch = moe.batch(talked)
    stream = jax.tree.map(lambda x: x[0], batch.stream)
    ours = moe.logprobs(adapter, stream, talked.temperature)[batch.sampled[0]]
    np.testing.assert_array_equal(
        ours, np.concatenate([talked.logprobs[i, on] for i, on in enumerate(talked.sampled)])
    )
    assert batch.sampled.sum() == talked.sampled.sum() > 100


def test_rows_do_not_wait_for_others_tools(moe, adapter, talked):
    """All rows of even number are answered late: nobody else's ids or bits depend on it."""
    late = Scripted(late_rows=tuple(range(0, ROWS, 2)))
    found = talk(moe, adapter, late)
    assert late.waits > 0
    for name in ("lengths", "status"):
        np.testing.assert_array_equal(getattr(found, name), getattr(talked, name))
    for row, length in enumerate(talked.lengths):
        for name in ("tokens", "sampled", "logprobs"):
            np.testing.assert_array_equal(
                getattr(found, name)[row, :length], getattr(talked, name)[row, :length]
            )


def test_rows_that_wait_for_a_slot_take_those_of_rows_that_ended(moe, adapter, talked):
    found = talk(moe, adapter, Scripted(), num_rows=8)
    assert found.calls > talked.calls
    np.testing.assert_array_equal(found.lengths, talked.lengths)
    for row, length in enumerate(talked.lengths):
        np.testing.assert_array_equal(found.tokens[row, :length], talked.tokens[row, :length])
        np.testing.assert_array_equal(found.logprobs[row, :length], talked.logprobs[row, :length])


def test_a_row_says_how_it_ended(talked, environment):
    """T7: by the reason that the sampler recorded; the last turn's call may go unanswered."""
    for row in range(ROWS):
        last = talked.tokens[row, talked.lengths[row] - 1]
        room = talked.prompt_lengths[row] + ROOM - talked.lengths[row]
        if talked.status[row] == EOS:
            assert last == STOP
        elif talked.status[row] == TOOL:
            assert last in CALLS
            assert environment.turn[row] == TURNS
        else:
            assert talked.status[row] == LENGTH
            assert room == 0 or (last in CALLS and room <= 3)
    assert {EOS, LENGTH} <= set(talked.status.tolist())


def test_a_reply_that_leaves_no_room_ends_the_row_as_too_long(moe, adapter):
    environment = Scripted(length=ROOM)
    found = talk(moe, adapter, environment)
    called = {row for row, ids in environment.asked if ids[-1] in CALLS}
    assert called
    assert all(found.status[row] == LENGTH for row in called)
    assert not any(given_ids(found, row) for row in range(ROWS))


def test_slow_tools_are_waited_for_without_asking_again_and_again(moe, adapter, talked):
    """Replies that come from threads, while nothing else is left to decode."""

    class Slow(Scripted):
        def __init__(self):
            super().__init__()
            self.ready = threading.Condition()
            self.done: dict[int, list[int]] = {}

        def ended(self, row, ids):
            taken = super().ended(row, ids)
            if taken:
                threading.Timer(0.05, self.finish, (row, self.open.pop(row))).start()
            return taken

        def finish(self, row, ids):
            with self.ready:
                self.done[row] = ids
                self.ready.notify()

        def replies(self, wait):
            with self.ready:
                if wait:
                    self.waits += 1
                    self.ready.wait_for(lambda: self.done, timeout=30)
                now, self.done = self.done, {}
                return now

    slow = Slow()
    found = talk(moe, adapter, slow)
    np.testing.assert_array_equal(found.lengths, talked.lengths)
    assert slow.waits <= len(slow.asked)


def test_64_dialogues_with_slow_and_failing_tools_and_users_lose_nothing_and_stall_nowhere(
    moe, adapter
):
    """More dialogues than slots: those that wait hold theirs, those that end make room."""
    rows = dialogue_rows(64)
    asked = {"prompts": [row.prompt for row in rows], "group_size": 1, "max_completion_tokens": 50}
    with Timed(rows, ToolPool(LIMIT, workers=64), TURNS) as environment:
        found = talk(moe, adapter, environment, **asked)
        texts = [
            environment.transcript(row, found.tokens[row, :length].tolist())
            for row, length in enumerate(found.lengths)
        ]
        counts = environment.counts()
    assert environment.longest_seconds < 10 * LIMIT
    expected = Counter()
    for row, turns in enumerate(texts):
        for before, turn in itertools.pairwise(turns):
            if turn.role == "tool":
                outcome, text = ANSWERS[name_of(before.text)]
                assert turn.text.startswith(text)
                expected[f"tools/{outcome}"] += 1
            elif turn.role == "user":
                assert turn.text == "go"
                expected["users/ok"] += 1
        spoken = sum(turn.role == "assistant" for turn in turns)
        if found.status[row] == LENGTH and found.tokens[row, found.lengths[row] - 1] in CALLS:
            expected[f"tools/{ANSWERS[name_of(turns[-1].text)][0]}"] += 1  # and did not fit
        if row % 4 == 0 and found.status[row] == EOS and spoken < TURNS:
            expected[f"users/{USERS[row // 4 % 3]}"] += 1  # and so it ended
    assert {name: n for name, n in counts.items() if not name.startswith("turns/")} == expected
    assert counts["turns/cut"] == 0
    assert min(expected[f"tools/{outcome}"] for outcome in ("ok", "error", "timeout")) > 4
    assert expected.keys() >= {f"users/{outcome}" for outcome in USERS}


def test_without_an_environment_a_call_ends_the_row(moe, adapter, talked):
    found = moe.generate(adapter, stop_ids=(STOP,), tool_ids=CALLS)
    assert TOOL in found.status
    for row in np.flatnonzero(found.status == TOOL):
        end = found.lengths[row]
        np.testing.assert_array_equal(found.tokens[row, :end], talked.tokens[row, :end])
    assert prompts()[0] == found.tokens[0, : found.prompt_lengths[0]].tolist()
