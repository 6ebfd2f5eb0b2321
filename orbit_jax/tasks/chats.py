"""How a model's conversations are written: its tokenizer, its template, its syntax for calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from orbit_jax.tasks.task import Tool
from orbit_jax.tasks.tool_calls import Syntax, syntax_of

Message = Mapping[str, Any]


class ChatTokenizer(Protocol):
    """What is asked of a tokenizer; `checkpoint.tokenizer.Tokenizer` is one.

    Attributes:
      eos_ids: all ids that end a turn.
      templates: the chat templates by name; empty for none.
    """

    eos_ids: Sequence[int]
    templates: Mapping[str, Any]

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without BOS."""
        ...

    def encode_chat(self, messages: Sequence[Message], **arguments: Any) -> list[int]:
        """The ids of messages in the chat template, ready for a completion."""
        ...

    def render_chat(self, messages: Sequence[Message], **arguments: Any) -> str:
        """The text of messages in the chat template."""
        ...

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        """The text of ids."""
        ...


@dataclass(frozen=True)
class Chat:
    """How the conversations of a run are written; make one with `chat_of`.

    Attributes:
      tokenizer, syntax, tools: of the model, its calls, and what it may call.
      arguments: of the chat template, such as `enable_thinking`, and the tools it shows.
    """

    tokenizer: ChatTokenizer
    syntax: Syntax
    tools: tuple[Tool, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


def chat_of(
    tokenizer: ChatTokenizer, tools: Sequence[Tool] = (), syntax: str = "", **arguments: Any
) -> Chat:
    """How a model's conversations are written: its syntax by name, or as its template shows it.

    The template is given the tools; in the plain syntax they are told of by the prompt alone.
    """
    chosen = syntax_of(show_template(tokenizer) if not syntax else "", syntax)
    if tools and chosen.name != "plain" and tokenizer.templates:
        arguments["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": dict(tool.parameters),
                },
            }
            for tool in tools
        ]
    return Chat(tokenizer, chosen, tuple(tools), arguments)


def show_template(tokenizer: ChatTokenizer) -> str:
    """What the chat template writes of a conversation with a tool; empty without a template."""
    function = {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}}
    user = {"role": "user", "content": "a"}
    shown = []
    for arguments in ("{}", {}):
        call = {"id": "f:0", "type": "function", "function": {"name": "f", "arguments": arguments}}
        assistant = {"role": "assistant", "content": "", "tool_calls": [call]}
        for messages in ([user, assistant], [user]):
            try:
                tools = [{"type": "function", "function": function}]
                shown.append(tokenizer.render_chat(messages, tools=tools))
            except ValueError:  # of these messages the template knows nothing
                continue
    return "".join(shown)


def encode_behind(tokenizer: ChatTokenizer, last: int, text: str) -> list[int]:
    """The ids of a text that follows the token `last`.

    Some tokenizers write a space before a text that begins; so, where that leaves the ids of what
    goes before as they are, something goes before it.
    """
    for first in (tokenizer.decode([last], keep_special=True), "\n"):
        alone, both = tokenizer.encode(first), tokenizer.encode(first + text)
        if alone and both[: len(alone)] == alone:
            return both[len(alone) :]
    return tokenizer.encode(text)


def without_special(tokenizer: ChatTokenizer, text: str) -> str:
    """A text in which special tokens that are written out are broken by a space."""
    for i in set(tokenizer.encode(text)):
        mark = tokenizer.decode([i], keep_special=True)
        if len(mark) > 1 and not tokenizer.decode([i]):
            text = text.replace(mark, f"{mark[0]} {mark[1:]}")
    return text
