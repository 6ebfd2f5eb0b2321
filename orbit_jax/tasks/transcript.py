"""Conversations as tokens: what was sampled stays id for id, what is given comes behind it.

After an assistant's turn the chat template renders the conversation with that turn and with what
was given (the outputs of tools, or a user's words). If its text begins with the text so far, only
the rest is encoded and appended; else (a template that drops earlier thinking, say) the
conversation cannot go on exactly and is cut. Sampled ids are never encoded again: decoding serves
only to compare texts.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orbit_jax.tasks.call_readers import ToolCall, harmony_messages
from orbit_jax.tasks.chats import Chat, Message, encode_behind, without_special
from orbit_jax.tasks.task import Turn


@dataclass(frozen=True)
class Conversation:
    """One rollout so far.

    Attributes:
      messages: what the template renders of it.
      prompt: ids of the prompt.
      ids: what follows the prompt.
      mask: one for each of `ids`: 1 where it was sampled, 0 where it was given.
      turns: what follows the prompt as texts, for grading.
      sampled: ids of the last turn while it is the assistant's.
    """

    messages: tuple[Message, ...]
    prompt: tuple[int, ...]
    ids: tuple[int, ...] = ()
    mask: tuple[int, ...] = ()
    turns: tuple[Turn, ...] = ()
    sampled: tuple[int, ...] = ()


def begin(chat: Chat, messages: Sequence[Message]) -> Conversation:
    """The conversation before anything is sampled.

    Raises:
      ValueError: when the template refuses the messages.
    """
    ids = chat.tokenizer.encode_chat(messages, **chat.arguments)
    return Conversation(tuple(messages), tuple(ids))


def add_sampled(chat: Chat, conversation: Conversation, ids: Sequence[int]) -> Conversation:
    """The conversation with ids that were sampled, the one that stopped them included.

    Called again before anything is given, it goes on with the same turn.
    """
    sampled = (*conversation.sampled, *ids)
    before = conversation.turns[:-1] if conversation.sampled else conversation.turns
    return replace(
        conversation,
        ids=(*conversation.ids, *ids),
        mask=(*conversation.mask, *[1] * len(ids)),
        turns=(*before, Turn("assistant", _body(chat, sampled))),
        sampled=sampled,
    )


def calls_of(chat: Chat, conversation: Conversation) -> tuple[ToolCall, ...]:
    """The tool calls of the assistant's turn that was sampled last."""
    return chat.syntax.read(conversation.turns[-1].text, chat.tools) if conversation.sampled else ()


def add_outputs(
    chat: Chat, conversation: Conversation, calls: Sequence[ToolCall], outputs: Sequence[str]
) -> Conversation | None:
    """The conversation with the outputs of its calls, ready for the next turn; None: cut it here.

    Outputs stand as the chat template writes them; as `<result>...</result>` where there is no
    template, in the plain syntax, and to templates that know no tools. Special tokens written out
    in an output are broken by a space, so that no tool writes the marks of the chat.

    Raises:
      ValueError: when there is not one output for each call, or nothing was sampled before.
    """
    if not calls or len(calls) != len(outputs):
        raise ValueError(
            f"outputs has {len(outputs)} entries for {len(calls)} calls: give one for each, of at "
            "least one call"
        )
    outputs = [without_special(chat.tokenizer, output) for output in outputs]
    marked = [f"<result>{output}</result>" for output in outputs]
    plain = chat.syntax.name == "plain" or not chat.tokenizer.templates
    by_tool = [
        {"role": "tool", "name": call.name or "tool", "tool_call_id": _id(call, i), "content": text}
        for i, (call, text) in enumerate(zip(calls, marked if plain else outputs, strict=True))
    ]
    by_user = [{"role": "user", "content": "\n".join(marked)}]
    return _give(chat, conversation, (by_tool, by_user), [Turn("tool", text) for text in outputs])


def add_user(chat: Chat, conversation: Conversation, text: str) -> Conversation | None:
    """The conversation with a user's turn, ready for the assistant's next; None: cut it here.

    Raises:
      ValueError: when nothing was sampled before.
    """
    text = without_special(chat.tokenizer, text)
    form = [{"role": "user", "content": text}]
    return _give(chat, conversation, (form,), [Turn("user", text)])


def _give(
    chat: Chat,
    conversation: Conversation,
    forms: Sequence[Sequence[Message]],
    turns: Sequence[Turn],
) -> Conversation | None:
    """The conversation with the first of the forms that extends its text exactly."""
    if not conversation.sampled:
        raise ValueError(
            "nothing was sampled before what is given: add the assistant's turn with add_sampled"
        )
    before = _render(chat, conversation.messages)
    texts = [turn.text for turn in turns]
    for given in forms:
        for assistant in _assistants(chat, conversation, before):
            messages = (*conversation.messages, assistant, *given)
            behind = _behind(chat, conversation, before, messages, len(given))
            if behind is None or not _holds(behind, texts):
                continue
            ids = encode_behind(chat.tokenizer, conversation.sampled[-1], behind)
            return Conversation(
                messages=messages,
                prompt=conversation.prompt,
                ids=(*conversation.ids, *ids),
                mask=(*conversation.mask, *[0] * len(ids)),
                turns=(*conversation.turns, *turns),
            )
    return None


def _behind(
    chat: Chat, conversation: Conversation, before: str, messages: Sequence[Message], given: int
) -> str | None:
    """What the template writes behind the sampled turn; None if it writes the turn otherwise.

    gpt-oss's template never spells a call as the model does (the recipient stands elsewhere, the
    JSON is written anew). There it is enough that the template keeps all that was said, ends the
    turn as it was ended, and does not change its own spelling of it.
    """
    after = _render(chat, messages)
    if after is None or before is None:
        return None
    sampled = before + chat.tokenizer.decode(conversation.sampled, keep_special=True)
    if after.startswith(sampled):
        return after[len(sampled) :]
    if not chat.syntax.channels:
        return None
    closed = _render(chat, messages[: len(messages) - given], add_generation_prompt=False)
    said = [b for head, b, _ in harmony_messages(conversation.turns[-1].text) if "to=" not in head]
    if (
        closed is None
        or not after.startswith(closed)
        or not closed.startswith(before)
        or not sampled.endswith("<|call|>")
        or not closed.endswith("<|call|>")
        or not all(body in closed[len(before) :] for body in said)
    ):
        return None
    return after[len(closed) :]


def _assistants(chat: Chat, conversation: Conversation, before: str | None) -> Iterator[Message]:
    """The sampled turn as a message: with its thinking and calls told apart, and as it is."""
    body = conversation.turns[-1].text
    calls = chat.syntax.read(body, chat.tools)
    named = all(call.name for call in calls)
    if chat.syntax.channels:
        said = [text for head, text, _ in harmony_messages(body) if "to=" not in head]
        thought = {"thinking": said[0]} if said else {}
        if calls and named:
            yield {"role": "assistant", **thought, "tool_calls": _entries(calls, as_text=False)}
    else:
        opened = _OPENED.search(before or "")
        thought, closed, rest = ((opened[0] if opened else "") + body).partition("</think>")
        apart: dict[str, Any] = {"role": "assistant", "content": rest if closed else body}
        if closed:
            apart["reasoning_content"] = thought.partition("<think>")[2] or thought
        if calls and named:
            spoken = apart["content"].partition(chat.syntax.opens)[0]
            for as_text in (True, False):
                yield {**apart, "content": spoken, "tool_calls": _entries(calls, as_text)}
        if closed:
            yield apart
    yield {"role": "assistant", "content": body}


_OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")  # by the generation prompt


def _entries(calls: Sequence[ToolCall], as_text: bool) -> list[dict[str, Any]]:
    """Calls as messages hold them; some templates want the arguments as text, others as object."""
    return [
        {
            "id": _id(call, i),
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": call.source if as_text else dict(call.arguments),
            },
        }
        for i, call in enumerate(calls)
    ]


def _id(call: ToolCall, number: int) -> str:
    return call.id or f"call_{number}"


def _render(chat: Chat, messages: Sequence[Message], **arguments: Any) -> str | None:
    try:
        return chat.tokenizer.render_chat(messages, **chat.arguments | arguments)
    except ValueError:  # the template refuses these messages
        return None


def _body(chat: Chat, sampled: Sequence[int]) -> str:
    """The text of a turn without the token that ended it, unless that belongs to a call."""
    text = chat.tokenizer.decode(sampled, keep_special=True)
    if not sampled or sampled[-1] not in chat.tokenizer.eos_ids:
        return text
    end = chat.tokenizer.decode(sampled[-1:], keep_special=True)
    return text if end in chat.syntax.stops else text.removesuffix(end)


def _holds(text: str, parts: Sequence[str]) -> bool:
    """Whether all parts stand in a text, one behind the other, as they are or as JSON."""
    at = 0
    for part in parts:
        spellings = (part.strip(), json.dumps(part, ensure_ascii=False)[1:-1])
        found = [text.find(spelling, at) + len(spelling) for spelling in spellings]
        found = [end for end, s in zip(found, spellings, strict=True) if text.find(s, at) >= 0]
        if not found:
            return False
        at = min(found)
    return True
