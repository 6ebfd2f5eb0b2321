"""Chat templates: where a Hugging Face folder keeps them, and how a conversation is rendered.

They run in jinja2's sandbox, with the names, filters and tags that deployed templates expect. A
loop over `range` and the rendered text are bounded; other work that a template does is not.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orbit_jax.checkpoint.safetensors_io import read_json

MAX_CHARACTERS = 1 << 24


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the sources of a folder's chat templates by name; most have one, named `default`.

    `chat_template.jinja` and the files of `additional_chat_templates` go before the ones in
    `tokenizer_config.json` (whose contents `config` is), and these before `chat_template.json`.
    """
    names = {"default": folder / "chat_template.jinja"}
    names |= {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    sources = {n: path.read_text(encoding="utf-8") for n, path in names.items() if path.is_file()}
    if sources:
        return sources
    source, older = config.get("chat_template"), folder / "chat_template.json"
    if source is None and older.is_file():
        source = read_json(older).get("chat_template")
    if isinstance(source, list):
        return {entry["name"]: entry["template"] for entry in source}
    return {} if source is None else {"default": source}


def compile_templates(path: str | Path, sources: Mapping[str, str]) -> dict[str, jinja2.Template]:
    """Compile the chat templates that `path` holds.

    Raises:
        ValueError: for a template that is not valid, or several of which none is the default.
    """
    if sources and "default" not in sources:
        raise ValueError(
            f"{path} has chat templates named {', '.join(sorted(sources))} but no default; rename "
            "one to 'default'."
        )
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    templates = {}
    for name, source in sources.items():
        try:
            templates[name] = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(
                f"the chat template {name!r} of {path} does not compile: {error}; mend it."
            ) from error
    return templates


def render(
    templates: Mapping[str, jinja2.Template],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    **arguments: Any,
) -> str:
    """Return the text of a conversation; with tools, by the template named `tool_use` if any.

    Raises:
        ValueError: when the template refuses the messages, fails, or writes more than
            `MAX_CHARACTERS`.
    """
    name = "tool_use" if tools is not None and "tool_use" in templates else "default"
    messages = [dict(message) for message in messages]
    parts, length = [], 0
    try:
        for part in templates[name].generate(messages=messages, tools=tools, **arguments):
            parts.append(part)
            length += len(part)
            if length > MAX_CHARACTERS:
                _refuse(f"it writes more than {MAX_CHARACTERS} characters")
    except Exception as error:  # a template may raise anything
        raise ValueError(
            f"the chat template refuses the messages: {error}; change their roles or order."
        ) from error
    return "".join(parts)


class _Generation(Extension):
    """`{% generation %}`, around what the assistant wrote: rendered as if it were not there."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else tuple(separators),
        sort_keys=sort_keys,
    )


def _refuse(message: str):
    raise jinja2.TemplateError(message)
