"""Reading tool calls out of what a model wrote: one reader for each syntax.

A reader returns every call of a turn in order. A call that cannot be read is not dropped: it is a
`ToolCall` whose `error` says what is wrong with it, to be told to the model. Text around calls is
no concern of a reader. Nothing is evaluated.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orbit_jax.tasks.task import Tool

MAX_CALLS = 64  # of a turn; what comes behind them is one more call, with an error

_JSON = json.JSONDecoder()
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool.

    Attributes:
      name: of the tool; empty where it could not be read.
      arguments: by name; empty where they could not be read.
      source: the arguments as they were written.
      id: what the model named the call; empty in syntaxes without ids.
      error: what is wrong with it; empty for a call that can be run.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    id: str = ""
    error: str = ""


Reader = Callable[[str, Sequence[Tool]], tuple[ToolCall, ...]]


def read_hermes(text: str, tools: Sequence[Tool] = ()) -> tuple[ToolCall, ...]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes and Qwen."""

    def one(text: str, at: int) -> tuple[ToolCall, int]:
        call, at = _read_json(text, at, ToolCall(""))
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            raise _MalformedError('the call is no JSON object with "name" and "arguments"')
        named = ToolCall(call["name"])
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):  # some models write the object as a text
            arguments = _read_whole_json(arguments, named)
        arguments = _require_object(arguments, named)
        source = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(call["name"], arguments, source), _behind("</tool_call>", text, at, named)

    return tuple(_each("<tool_call>", "</tool_call>", text, one))


def read_qwen_xml(text: str, tools: Sequence[Tool] = ()) -> tuple[ToolCall, ...]:
    """`<tool_call><function=f><parameter=p>value</parameter></function></tool_call>`: Qwen3-Coder.

    A value is the text between two newlines that belong to the tags. Where the tool's schema says
    that a parameter is something else than a string, its value is read as JSON.
    """

    def one(text: str, at: int) -> tuple[ToolCall, int]:
        head = _FUNCTION.match(text, at)
        if head is None:
            raise _MalformedError("the call does not begin with <function=NAME>")
        named, at = ToolCall(head["name"].strip()), head.end()
        types, arguments = _types_of(named.name, tools), {}
        while parameter := _PARAMETER.match(text, at):
            name, at = parameter["name"].strip(), parameter.end()
            arguments[name] = _typed(parameter["value"], types.get(name, "string"))
        at = _behind("</function>", text, at, named)
        at = _behind("</tool_call>", text, at, named)
        source = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(named.name, arguments, source), at

    return tuple(_each("<tool_call>", "</tool_call>", text, one))


def read_deepseek(text: str, tools: Sequence[Tool] = ()) -> tuple[ToolCall, ...]:
    """DeepSeek's markers, in the form of V3 and R1 (a fenced block) and in that of V3.1 (bare)."""

    def one(text: str, at: int) -> tuple[ToolCall, int]:
        first, separator, _ = text[at:].partition("<｜tool▁sep｜>")
        if not separator or "<｜tool▁call▁end｜>" in first:
            raise _MalformedError("the call has no separator between its name and its arguments")
        at += len(first) + len(separator)
        fence = _FENCE.match(text, at)
        begin = fence.end() if fence else at
        source = text[begin:].partition("\n```" if fence else "<｜tool▁call▁end｜>")[0]
        named = ToolCall((fence["name"] if fence else first).strip(), source=source)
        arguments, at = _read_json(text, begin, named)
        _require_object(arguments, named)
        source = text[begin:at].strip()
        at = _behind("```", text, at, named) if fence else at
        at = _behind("<｜tool▁call▁end｜>", text, at, named)
        return ToolCall(named.name, arguments, source), at

    return tuple(_each("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", text, one))


def read_kimi(text: str, tools: Sequence[Tool] = ()) -> tuple[ToolCall, ...]:
    """Kimi-K2's markers around `functions.NAME:NUMBER`, which is the call's id, and JSON."""

    def one(text: str, at: int) -> tuple[ToolCall, int]:
        id, separator, _ = text[at:].partition("<|tool_call_argument_begin|>")
        name = _KIMI_ID.fullmatch(id)
        if not separator or name is None:
            raise _MalformedError("the call does not begin with functions.NAME:NUMBER")
        begin = at + len(id) + len(separator)
        source = text[begin:].partition("<|tool_call_end|>")[0]
        named = ToolCall(name["name"], source=source, id=id.strip())
        arguments, at = _read_json(text, begin, named)
        _require_object(arguments, named)
        source = text[begin:at].strip()
        at = _behind("<|tool_call_end|>", text, at, named)
        return ToolCall(named.name, arguments, source, named.id), at

    return tuple(_each("<|tool_call_begin|>", "<|tool_call_end|>", text, one))


def read_harmony(text: str, tools: Sequence[Tool] = ()) -> tuple[ToolCall, ...]:
    """gpt-oss: a message `to=functions.NAME` that ends with `<|call|>`.

    The recipient may stand before or behind the channel. What is sent to a tool of the model's own
    (`to=python`) need not be JSON: text is the argument `code`.
    """
    calls = []
    for head, body, end in harmony_messages(text):
        recipient = _RECIPIENT.search(head)
        if recipient is None:
            continue
        name = recipient["name"].removeprefix("functions.")
        named = ToolCall(name, source=body.strip())
        try:
            if end != "<|call|>":
                raise _MalformedError("the call does not end with the call token", named)
            if name == recipient["name"] and not body.lstrip().startswith("{"):
                calls.append(ToolCall(name, {"code": body}, body))
                continue
            arguments = _require_object(_read_whole_json(body, named), named)
            calls.append(ToolCall(name, arguments, named.source))
        except _MalformedError as fault:
            calls.append(ToolCall(name, source=named.source, error=str(fault)))
    return tuple(calls)


def harmony_messages(text: str) -> Iterator[tuple[str, str, str]]:
    """Yields head, body and end token of each message of an assistant's turn.

    The turn goes on behind `<|start|>assistant`; the end is empty for a message that is not closed.
    """
    for part in text.removeprefix("<|start|>").split("<|start|>"):
        head, separator, rest = part.partition("<|message|>")
        if separator:
            body, end, _ = (*_HARMONY_END.split(rest, maxsplit=1), "", "")[:3]
            yield head, body, end


def read_plain(text: str, tools: Sequence[Tool] = ()) -> tuple[ToolCall, ...]:
    """`<tool>name: arguments</tool>` or `<tool>argument</tool>`: for small models.

    Arguments are a JSON object, or text for the tool's first parameter. Without a name, or with
    one that no tool has, the whole text is for the first tool.
    """

    def one(text: str, at: int) -> tuple[ToolCall, int]:
        body, end, _ = text[at:].partition("</tool>")
        if not end or "<tool>" in body:
            raise _MalformedError("the call is not closed by </tool>")
        known = {tool.name: tool for tool in tools}
        head = _PLAIN_NAME.match(body)
        if head and (head["name"] in known or not known):
            name, source = head["name"], body[head.end() :].strip()
        else:
            name, source = (tools[0].name if tools else ""), body.strip()
        named = ToolCall(name, source=source)
        if not source:
            raise _MalformedError("the call is empty", named)
        at += len(body) + len(end)
        if source.startswith("{"):
            arguments = _require_object(_read_whole_json(source, named), named)
            return ToolCall(name, arguments, source), at
        first = _first_parameter(known[name]) if name in known else "input"
        return ToolCall(name, {first: source}, source), at

    return tuple(_each("<tool>", "</tool>", text, one))


_FUNCTION = re.compile(r"\s*<function=(?P<name>[^<>\n]+)>\s*")
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<name>[^<>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
    r"(?=\s*(?:<parameter=|</function>))",
    re.DOTALL,
)
_FENCE = re.compile(r"(?P<name>[^\n`{}]+)\n```(?:json)?\n")
_KIMI_ID = re.compile(r"\s*(?:functions\.)?(?P<name>[^\s:<>]+):\d+\s*")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=(?P<name>[^\s<]+)")
_HARMONY_END = re.compile(r"(<\|end\|>|<\|call\|>|<\|return\|>)")
_PLAIN_NAME = re.compile(r"\s*(?P<name>[A-Za-z_][\w.-]*)\s*:")


class _MalformedError(ValueError):
    """A call that cannot be read, with what of it could be."""

    def __init__(self, message: str, call: ToolCall | None = None):
        super().__init__(message)
        self.call = call or ToolCall("")


def _each(
    begin: str, end: str, text: str, one: Callable[[str, int], tuple[ToolCall, int]]
) -> Iterator[ToolCall]:
    """Reads a call behind each `begin`; a malformed one goes to its `end`, or to the next one."""
    at = number = 0
    while (start := text.find(begin, at)) >= 0:
        body, number = start + len(begin), number + 1
        if number > MAX_CALLS:
            yield ToolCall("", error=f"there are more than {MAX_CALLS} calls in one turn")
            return
        try:
            call, at = one(text, body)
        except _MalformedError as fault:
            stop = text.find(begin, body)
            stop = len(text) if stop < 0 else stop
            closed = text.find(end, body, stop)
            at = stop if closed < 0 else closed + len(end)
            source = fault.call.source or text[body : stop if closed < 0 else closed].strip()
            call = replace(fault.call, source=source, error=str(fault))
        yield call


def _read_json(text: str, at: int, call: ToolCall) -> tuple[Any, int]:
    """The JSON value that stands at a place of a text, and where it ends."""
    at = _SPACE.match(text, at).end()
    try:
        value, end = _JSON.raw_decode(text, at)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeError:
        problem = "half a surrogate pair is no text"
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at character {error.pos - at}"
    except RecursionError:
        problem = "it is nested too deeply"
    except ValueError:
        problem = "a number is too large or no number"
    else:
        return value, end
    raise _MalformedError(f"the call is not valid JSON: {problem}", call)


def _read_whole_json(text: str, call: ToolCall) -> Any:
    value, end = _read_json(text, 0, call)
    if text[end:].strip():
        raise _MalformedError("there is text behind the JSON of the arguments", call)
    return value


def _require_object(value: Any, call: ToolCall) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _MalformedError("the arguments are no JSON object", call)
    return value


def _behind(end: str, text: str, at: int, call: ToolCall) -> int:
    """The place behind `end`, which must be the next that stands there."""
    at = _SPACE.match(text, at).end()
    if not text.startswith(end, at):
        what = "there is other text before" if end in text[at:] else "the call is not closed by"
        raise _MalformedError(f"{what} {end}", call)
    return at + len(end)


def _types_of(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """The type of each parameter of the tool of that name; empty where there is none."""
    schemas = [tool.parameters.get("properties", {}) for tool in tools if tool.name == name]
    return {key: schema.get("type") for schema in schemas[:1] for key, schema in schema.items()}


def _typed(value: str, type: Any) -> Any:
    if type == "string" or (isinstance(type, list) and "string" in type):
        return value
    try:
        return _read_whole_json(value, ToolCall(""))
    except _MalformedError:
        return value


def _first_parameter(tool: Tool) -> str:
    names = [*tool.parameters.get("required", ()), *tool.parameters.get("properties", ())]
    return names[0] if names else "input"
