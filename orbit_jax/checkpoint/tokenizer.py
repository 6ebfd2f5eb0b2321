"""Text to token ids and back, from a GGUF file or the tokenizer files of a Hugging Face folder.

Of a folder, `tokenizer.json` gives the ids, `chat_template.jinja` or `tokenizer_config.json` the
chat template (rendered in jinja2's sandbox, with the names that templates expect),
`generation_config.json`, `config.json` or `tokenizer_config.json`, in this order, the ids that end
a completion; of a GGUF file, its metadata give all of them. A prompt begins with exactly one BOS if
the template, the tokenizer's post-processor or `add_bos_token` asks for one, however many of them
do, and with none otherwise.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from orbit_jax.checkpoint.gguf_file import is_gguf
from orbit_jax.checkpoint.gguf_tokenizer import read_tokenizer


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer; make one with `Tokenizer.load(path)`.

    `vocab_size` is one more than the largest id (a model's embedding may have more rows), `eos_ids`
    are all ids that end a completion, `bos_id` is None where prompts begin without one.
    """

    fast: FastTokenizer
    template: jinja2.Template | None
    special_tokens: Mapping[str, str]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read the tokenizer of a Hugging Face folder or a GGUF file.

        Raises:
            ValueError: when the tokenizer is missing, cannot be read or is of a kind that is not
                supported, a file beside it is not valid JSON, the template does not compile, or no
                id ends a completion.
        """
        fast, config, eos_ids = read_tokenizer(path) if is_gguf(path) else _read_folder(Path(path))
        special = _special_tokens(config)
        pad_id = fast.token_to_id(special["pad_token"]) if "pad_token" in special else None
        return cls(
            fast=fast,
            template=_compile_template(path, config.get("chat_template")),
            special_tokens=special,
            bos_id=fast.token_to_id(special["bos_token"]) if "bos_token" in special else None,
            eos_ids=eos_ids,
            pad_id=eos_ids[0] if pad_id is None else pad_id,
            vocab_size=1 + max(fast.get_vocab(with_added_tokens=True).values()),
        )._with_bos_as_asked(bool(config.get("add_bos_token")))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text as it is: no BOS, no template."""
        return self.fast.encode(text, add_special_tokens=False).ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a prompt: messages in the chat template, ready for the completion.

        Without a template the contents are joined by newlines, and one newline follows.

        Raises:
            ValueError: when the template refuses the messages.
        """
        ids = self.encode(self.render_chat(messages))
        if self.bos_id is None:
            return ids
        while ids and ids[0] == self.bos_id:
            ids = ids[1:]
        return [self.bos_id, *ids]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text that `encode_chat` encodes."""
        if self.template is None:
            return "".join(message["content"] + "\n" for message in messages)
        try:
            return self.template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self.special_tokens,
            )
        except Exception as error:  # a template may raise anything
            raise ValueError(
                f"the chat template refuses the messages: {error}; change their roles or order."
            ) from error

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        """Return the text of ids; special tokens (such as end of turn) are left out or kept."""
        return self.fast.decode([int(i) for i in ids], skip_special_tokens=not keep_special)

    def _with_bos_as_asked(self, by_config: bool) -> "Tokenizer":
        """Drop `bos_id` unless something asks for a BOS, found out by trying."""
        if self.bos_id is None:
            return self
        by_processor = self.fast.encode("a", add_special_tokens=True).ids[:1] == [self.bos_id]
        try:
            text = self.render_chat([{"role": "user", "content": "a"}])
        except ValueError:
            text = ""
        by_template = self.encode(text)[:1] == [self.bos_id]
        if by_config or by_processor or by_template:
            return self
        return replace(self, bos_id=None)


def _read_folder(folder: Path) -> tuple[FastTokenizer, dict[str, Any], tuple[int, ...]]:
    """Return the tokenizer, what `tokenizer_config.json` says, and the ids that end a completion.

    A template in a file of its own goes before the one in `tokenizer_config.json`.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a Hugging Face folder that holds it.")
    try:
        fast = FastTokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers package raises bare Exception
        raise ValueError(f"{path} is not a tokenizer that can be read: {error}.") from error
    fast.no_truncation()  # settings that somebody's fine-tuning may have left in the file
    fast.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    template = folder / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    return fast, config, _eos_ids(folder, fast, _special_tokens(config))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object; replace it.")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token`, ...: each stands as text or as an object with `content`."""
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if value is not None:
            tokens[name] = value
    return tokens


def _eos_ids(folder: Path, fast: FastTokenizer, special: dict[str, str]) -> tuple[int, ...]:
    config = _read_json(folder / "config.json")
    sources = (_read_json(folder / "generation_config.json"), config, config.get("text_config"))
    for source in sources:
        ids = (source or {}).get("eos_token_id")
        if ids is not None and ids != []:
            ids = ids if isinstance(ids, list) else [ids]
            known = range(fast.get_vocab_size())
            if not all(type(i) is int and i in known for i in ids):
                raise ValueError(
                    f"{folder}: eos_token_id={ids} are not ids of its tokenizer, which has "
                    f"{len(known)}; mend generation_config.json or config.json."
                )
            return tuple(ids)
    token_id = fast.token_to_id(special["eos_token"]) if "eos_token" in special else None
    if token_id is None:
        raise ValueError(
            f"{folder} names no token that ends a completion; set eos_token_id in "
            "generation_config.json."
        )
    return (token_id,)


def _compile_template(path: str | Path, source: Any) -> jinja2.Template | None:
    if isinstance(source, list):  # several named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template of {path} does not compile: {error}.") from error


def _refuse(message: str):
    raise jinja2.TemplateError(message)
