"""The syntaxes in which models call tools: which one a model has, how its calls are read and end.

A syntax is picked by the model's own chat template where that shows one, else it is `plain`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from orbit_jax.tasks import call_readers
from orbit_jax.tasks.call_readers import Reader, ToolCall
from orbit_jax.tasks.task import Tool


class Encoder(Protocol):
    """What of a tokenizer finds the ids of stops."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text as it is; special tokens written out become their ids."""
        ...


@dataclass(frozen=True)
class Syntax:
    """How a model calls tools.

    Attributes:
      name: as a config names it.
      reader: reads the calls of a turn.
      opens: what a turn's calls begin with.
      stops: what the calls of a turn end with; sampling pauses there, or at the end of the turn.
      several: calls may follow behind a stop, so only the end of the turn ends them all.
      marks: a chat template that has one of these uses the syntax.
      channels: thinking is told from answers by messages, not by `<think>`.
    """

    name: str
    reader: Reader
    opens: str
    stops: tuple[str, ...]
    several: bool
    marks: tuple[str, ...]
    channels: bool = False

    def read(self, text: str, tools: Sequence[Tool] = ()) -> tuple[ToolCall, ...]:
        """The calls in the text of an assistant's turn, malformed ones with their error.

        What is thought counts for nothing: all up to the first `</think>`, and all of a turn that
        begins with `<think>` and does not close it.
        """
        if not self.channels:
            thought, closed, rest = text.partition("</think>")
            if not closed and thought.lstrip().startswith("<think>"):
                return ()
            text = rest if closed else text
        return self.reader(text, tools)


@dataclass(frozen=True)
class Stops:
    """Where sampling pauses for a tool, besides the ids that end a completion.

    Attributes:
      ids: of stops that are one token.
      texts: stops of several tokens, which no id tells: calls are then found where the turn ends.
    """

    ids: tuple[int, ...]
    texts: tuple[str, ...]


SYNTAXES = {
    syntax.name: syntax
    for syntax in (
        Syntax(
            "kimi",
            call_readers.read_kimi,
            "<|tool_calls_section_begin|>",
            ("<|tool_calls_section_end|>",),
            several=False,
            marks=("<|tool_calls_section_begin|>", "tool_declare<|im_middle|>"),
        ),
        Syntax(
            "deepseek",
            call_readers.read_deepseek,
            "<｜tool▁calls▁begin｜>",
            ("<｜tool▁calls▁end｜>",),
            several=False,
            marks=("<｜tool▁calls▁begin｜>",),
        ),
        Syntax(
            "harmony",
            call_readers.read_harmony,
            "<|start|>assistant to=",
            ("<|call|>",),
            several=False,
            marks=("<|channel|>",),
            channels=True,
        ),
        Syntax(
            "qwen_xml",
            call_readers.read_qwen_xml,
            "<tool_call>",
            ("</tool_call>",),
            several=True,
            marks=("<function=",),
        ),
        Syntax(
            "hermes",
            call_readers.read_hermes,
            "<tool_call>",
            ("</tool_call>",),
            several=True,
            marks=("<tool_call>",),
        ),
        Syntax("plain", call_readers.read_plain, "<tool>", ("</tool>",), several=True, marks=()),
    )
}

# What templates have whose syntax is none of these: GLM, DeepSeek from V3.2 on, Mistral, Llama.
_UNKNOWN_MARKS = ("<arg_key>", "｜DSML｜", "[TOOL_CALLS]", "<|python_tag|>")


def syntax_of(chat_template: str, name: str = "") -> Syntax:
    """The syntax of a model.

    Args:
      chat_template: source of the model's template, or what it renders of a conversation with
        tools (`chats.show_template`); empty for none.
      name: of a syntax, which is then taken whatever the template is; empty to ask the template.

    Raises:
      ValueError: for a name that no syntax has, or a template with a syntax that is not read here.
    """
    if name:
        if name not in SYNTAXES:
            raise ValueError(f"syntax={name!r} is not known: use one of {', '.join(SYNTAXES)}")
        return SYNTAXES[name]
    for mark in _UNKNOWN_MARKS:
        if mark in chat_template:
            raise ValueError(
                f"the chat template calls tools with {mark!r}, which is not read: name one of the "
                f"syntaxes {', '.join(SYNTAXES)}, such as 'plain', and tell the model of it"
            )
    for syntax in SYNTAXES.values():
        if any(mark in chat_template for mark in syntax.marks):
            return syntax
    return SYNTAXES["plain"]


def find_stops(syntax: Syntax, tokenizer: Encoder, one_call: bool = True) -> Stops:
    """Where sampling pauses for a syntax's calls, in a tokenizer's ids.

    Args:
      syntax: of the calls.
      tokenizer: of the model.
      one_call: pause at the end of the first call; else, where a syntax lets calls follow one
        another without an end of their own, only at the end of the turn.
    """
    if syntax.several and not one_call:
        return Stops((), ())
    encoded = {text: tokenizer.encode(text) for text in syntax.stops}
    return Stops(
        ids=tuple(ids[0] for ids in encoded.values() if len(ids) == 1),
        texts=tuple(text for text, ids in encoded.items() if len(ids) != 1),
    )
