"""The conversations of a batch: who is answered, by what, and what is told of it."""

import threading
import time

import pytest

from orbit_jax.checkpoint.byte_tokenizer import build_byte_tokenizer
from orbit_jax.checkpoint.tokenizer import Tokenizer
from orbit_jax.tasks.chats import chat_of
from orbit_jax.tasks.dialogue import HigherLower
from orbit_jax.tasks.dialogues import Asked, Dialogues
from orbit_jax.tasks.products import Multiply, Products
from orbit_jax.tasks.task import Example, Turn
from orbit_jax.tasks.tools import ToolPool


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_byte_tokenizer(folder)
    return Tokenizer.load(folder)


class Sleepy(Multiply):
    """Does not answer in time."""

    def call(self, arguments):
        time.sleep(60)
        return ""


def asked(tokenizer: Tokenizer, prompt: str = "27*43*16", tool=None, user=None) -> Asked:
    example = Example("one", prompt, "18576", "products")
    chat = chat_of(tokenizer, (tool or Multiply(),), "plain")
    return Asked(example, [{"role": "user", "content": prompt}], chat, user)


def said(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode(text), tokenizer.eos_ids[0]]


def dialogues(
    rows: list[Asked], max_turns: int = 4, max_seconds: float = 5.0, workers: int = 5
) -> Dialogues:
    return Dialogues(rows, ToolPool(max_seconds, workers), max_turns)


def test_a_product_of_three_takes_three_turns_and_earns_its_reward(tokenizer):
    row = asked(tokenizer)
    with dialogues([row]) as talk:
        ids = row.prompt
        for text, output in (("27*43", "1161"), ("1161*16", "18576")):
            ids += said(tokenizer, f"<tool>{text}</tool>")
            assert talk.ended(0, ids)
            reply = talk.replies(wait=True)[0]
            expected = f"<|user|><result>{output}</result><|assistant|>"
            assert tokenizer.decode(reply, keep_special=True) == expected
            ids += reply
        ids += said(tokenizer, r"\boxed{18576}")
        assert not talk.ended(0, ids)
        transcript = talk.transcript(0, ids)
        counts = talk.counts()
    assert [turn.role for turn in transcript] == ["assistant", "tool"] * 2 + ["assistant"]
    score = Products().grade(row.example, transcript)
    assert (score.value, score.outcome, score.details["calls"]) == (1.0, "scored", 2)
    assert counts == {"tools/ok": 2, "turns/mean": 3, "turns/most": 3, "turns/cut": 0}


def test_the_last_turn_that_is_allowed_goes_unanswered(tokenizer):
    row = asked(tokenizer)
    with dialogues([row], max_turns=1) as talk:
        ids = row.prompt + said(tokenizer, "<tool>2*3</tool>")
        assert not talk.ended(0, ids)
        assert talk.replies(wait=False) == {}
        assert talk.transcript(0, ids) == (Turn("assistant", "<tool>2*3</tool>"),)


def test_an_output_that_found_no_room_is_no_part_of_the_transcript_and_earns_nothing(tokenizer):
    """It would be graded as if the model had said it, and here it is the right answer."""
    row = asked(tokenizer)
    with dialogues([row]) as talk:
        ids = row.prompt + said(tokenizer, "<tool>1161*16</tool>")
        assert talk.ended(0, ids)
        assert talk.replies(wait=True)[0]  # which the sampler has no room for: the row ends here
        transcript = talk.transcript(0, ids)
    assert transcript == (Turn("assistant", "<tool>1161*16</tool>"),)
    assert Products().grade(row.example, transcript).value == 0


def test_a_turn_that_was_cut_off_is_part_of_the_transcript(tokenizer):
    row = asked(tokenizer)
    with dialogues([row]) as talk:
        ids = row.prompt + said(tokenizer, "<tool>2*3</tool>")
        assert talk.ended(0, ids)
        ids += talk.replies(wait=True)[0]
        transcript = talk.transcript(0, ids + tokenizer.encode(r"\boxed{"))
    assert transcript[-1] == Turn("assistant", r"\boxed{")


def test_what_the_tool_cannot_do_is_told(tokenizer):
    row = asked(tokenizer)
    with dialogues([row]) as talk:
        assert talk.ended(0, row.prompt + said(tokenizer, "<tool>27*43*16</tool>"))
        reply = tokenizer.decode(talk.replies(wait=True)[0])
        assert "error: give two numbers" in reply
        assert talk.counts()["tools/error"] == 1


def test_a_late_tool_is_answered_for_and_nobody_waits_for_it(tokenizer):
    rows = [asked(tokenizer, tool=Sleepy()), asked(tokenizer)]
    with dialogues(rows, max_seconds=1.0) as talk:
        for i, row in enumerate(rows):
            assert talk.ended(i, row.prompt + said(tokenizer, "<tool>2*3</tool>"))
        began = time.monotonic()
        assert talk.replies(wait=True).keys() == {1}
        late = talk.replies(wait=True)
        assert time.monotonic() - began < 20
        assert "no answer within 1 seconds" in tokenizer.decode(late[0])
        assert talk.counts()["tools/timeout"] == 1


class Doing:
    """A user who answers by a function of the transcript."""

    def __init__(self, reply):
        self._reply = reply

    def reply(self, example, transcript):
        return self._reply(transcript)


def forever(*_):
    threading.Event().wait()


def fail(*_):
    raise SystemExit("no more")


def test_a_user_answers_turns_without_calls_until_content(tokenizer):
    row = asked(tokenizer, user=HigherLower())
    row = Asked(Example("n", "guess", "7"), row.messages, row.chat, row.user)
    with dialogues([row]) as talk:
        ids = row.prompt + said(tokenizer, "5")
        assert talk.ended(0, ids)
        reply = talk.replies(wait=True)[0]
        assert tokenizer.decode(reply, keep_special=True) == "<|user|>higher<|assistant|>"
        ids += reply + said(tokenizer, "7")
        assert talk.ended(0, ids)
        assert talk.replies(wait=True) == {0: []}
        assert [turn.text for turn in talk.transcript(0, ids)] == ["5", "higher", "7"]
        counts = talk.counts()
    assert (counts["users/ok"], counts["users/over"]) == (1, 1)
    assert "tools/ok" not in counts


def test_users_that_fail_or_are_late_end_their_dialogues_and_are_counted(tokenizer, caplog):
    """A late word is not said later either: the row has ended."""
    late = threading.Event()
    users = [forever, fail, lambda _: late.wait() and "late", lambda _: 7, lambda _: "error: go on"]
    rows = [asked(tokenizer, user=Doing(one)) for one in users]
    with dialogues(rows, max_seconds=2.0) as talk:
        began = time.monotonic()
        for i, row in enumerate(rows):
            assert talk.ended(i, row.prompt + said(tokenizer, "a"))
        assert time.monotonic() - began < 2.0  # nobody is waited for where rows decode
        found = {}
        while len(found) < len(rows):
            found |= talk.replies(wait=True)
        assert time.monotonic() - began < 20
        late.set()
        assert tokenizer.decode(found.pop(4)) == "error: go on"
        assert found == {row: [] for row in range(4)}
        assert talk.replies(wait=False) == {}
        counts = talk.counts()
    told = {name: count for name, count in counts.items() if not name.startswith("turns")}
    assert told == {"users/timeout": 2, "users/error": 2, "users/ok": 1}
    assert talk.failed.keys() == {0, 1, 2, 3}
    assert len(caplog.records) == 1
    assert "its user failed: " in caplog.text


def test_no_row_waits_for_the_user_of_another(tokenizer):
    """Beside users who never answer are one who takes his time, a tool, and one who is quick."""
    go = threading.Event()
    users = [*[forever] * 3, lambda _: go.wait() and "b", lambda _: "c", forever]
    rows = [asked(tokenizer, user=Doing(one)) for one in users]
    with dialogues(rows, max_seconds=60.0, workers=6) as talk:
        for i, row in enumerate(rows):
            text = "<tool>2*3</tool>" if i == 5 else "a"
            assert talk.ended(i, row.prompt + said(tokenizer, text))
        first = {}
        while len(first) < 2:
            first |= talk.replies(wait=True)
        assert {i: tokenizer.decode(ids) for i, ids in first.items()} == {
            4: "c",
            5: "<result>6</result>",
        }
        go.set()
        assert talk.replies(wait=True).keys() == {3}
