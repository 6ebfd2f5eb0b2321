"""Dialogues for the sampler of tests, with tools and users that are slow, fail or never answer."""

import re
import threading
import time
import zlib

from orbit_jax.tasks.call_readers import ToolCall
from orbit_jax.tasks.chats import Chat
from orbit_jax.tasks.dialogues import Asked, Dialogues
from orbit_jax.tasks.task import Example
from orbit_jax.tasks.tool_calls import Syntax

STOP, CALLS = 9, (17, 30, 44)  # ends a turn for good; call a tool
LIMIT = 1.5  # seconds that a loaded machine, too, needs less than for an answer
USERS = ("ok", "timeout", "error")
LATE = f"error: no answer within {LIMIT:g} seconds; the tool starts anew"
ANSWERS = {  # what each tool comes to
    "quick": ("ok", "fine"),
    "sleeps": ("ok", "fine"),
    "raises": ("error", "error: ValueError: no"),
    "never": ("timeout", LATE),
    "absent": ("error", "error: there is no tool 'absent'; the tools are: "),
}


class Tokens:
    """A letter for each id of the model; given texts are an id a word."""

    eos_ids, templates = (STOP,), {}

    def encode(self, text):
        pieces = re.findall(r"\w+|\W", text)
        return [STOP if p == "\n" else 10 + zlib.crc32(p.encode()) % 54 for p in pieces]

    def decode(self, ids, keep_special=False):
        return "".join("\n" if i == STOP else chr(64 + i) for i in ids)

    def render_chat(self, messages, **arguments):
        return "".join(message["content"] + "\n" for message in messages)

    def encode_chat(self, messages, **arguments):
        return self.encode(self.render_chat(messages))


def name_of(text: str) -> str:
    """Which tool a turn calls: its length decides."""
    return list(ANSWERS)[len(text) % len(ANSWERS)]


def read(text, tools):
    ends = Tokens().decode(CALLS)
    return (ToolCall(name_of(text), {}),) if text and text[-1] in ends else ()


class ATool:
    description, parameters = "", {}

    def __init__(self, name: str):
        self.name = name

    def start(self):
        return self

    def call(self, arguments):
        if self.name == "raises":
            raise ValueError("no")
        threading.Event().wait({"never": None, "sleeps": 0.05, "quick": 0}[self.name])
        return "fine"

    def close(self):
        pass


class AUser:
    """One says a word, one never anything, one fails: `USERS` by the row."""

    def reply(self, example, transcript):
        outcome = USERS[int(example.id) // 4 % 3]
        if outcome == "timeout":
            threading.Event().wait()
        return "go" if outcome == "ok" else 1 / 0


def dialogue_rows(count: int) -> list[Asked]:
    tools = tuple(ATool(name) for name in ANSWERS if name != "absent")
    chat = Chat(Tokens(), Syntax("plain", read, "<tool>", ("</tool>",), True, ()), tools)
    prompts = [f"{i} a b" for i in range(count)]
    return [
        Asked(
            Example(str(i), prompt, ""),
            [{"role": "user", "content": prompt}],
            chat,
            AUser() if i % 4 == 0 else None,
        )
        for i, prompt in enumerate(prompts)
    ]


class Timed(Dialogues):
    """Dialogues that know the longest wait for an answer."""

    longest_seconds = 0.0

    def replies(self, wait):
        began = time.monotonic()
        found = super().replies(wait)
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
        return found
