"""Text to token ids and back, from a GGUF file or the tokenizer files of a Hugging Face folder.

A prompt begins with exactly one BOS if the chat template, the tokenizer's post-processor or
`add_bos_token` asks for one, however many of them do, and with none otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer as FastTokenizer

from orbit_jax.checkpoint.chat_template import compile_templates, render
from orbit_jax.checkpoint.folder_tokenizer import read_folder, special_tokens
from orbit_jax.checkpoint.gguf_file import is_gguf
from orbit_jax.checkpoint.gguf_tokenizer import read_tokenizer


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer; make one with `Tokenizer.load(path)`.

    `vocab_size` is one more than the largest id (a model's embedding may have more rows), `eos_ids`
    are all ids that end a completion (`pad_id` may be one of them), `bos_id` is None where prompts
    begin without one.
    """

    fast: FastTokenizer
    templates: Mapping[str, jinja2.Template]
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
                supported, the files beside it are not valid or contradict it, a template does not
                compile, or no id ends a completion.
        """
        fast, config, eos_ids = read_tokenizer(path) if is_gguf(path) else read_folder(Path(path))
        special, templates = special_tokens(config), config["chat_template"] or {}
        if isinstance(templates, str):
            templates = {"default": templates}
        pad_id = fast.token_to_id(special["pad_token"]) if "pad_token" in special else None
        return cls(
            fast=fast,
            templates=compile_templates(path, templates),
            special_tokens=special,
            bos_id=fast.token_to_id(special["bos_token"]) if "bos_token" in special else None,
            eos_ids=eos_ids,
            pad_id=eos_ids[0] if pad_id is None else pad_id,
            vocab_size=1 + max(fast.get_vocab(with_added_tokens=True).values()),
        )._with_bos_as_asked(bool(config.get("add_bos_token")))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text as it is: no BOS, no template.

        Special tokens written out in the text become their ids.
        """
        return self.fast.encode(text, add_special_tokens=False).ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> list[int]:
        """Return the ids of a prompt: messages in the chat template, ready for the completion.

        `arguments` are those of `render_chat`.

        Raises:
            ValueError: when the template refuses the messages.
        """
        ids = self.encode(self.render_chat(messages, **arguments))
        if self.bos_id is None:
            return ids
        while ids and ids[0] == self.bos_id:
            ids = ids[1:]
        return [self.bos_id, *ids]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> str:
        """Return the text that `encode_chat` encodes.

        Messages, `tools` and `documents` reach the template as they are, and so do `arguments` of
        its own, such as `enable_thinking`. Without a template the contents are joined by newlines,
        and one newline follows.

        Raises:
            ValueError: when the template refuses the messages, or there is none that takes tools.
        """
        if self.templates:
            arguments |= {"add_generation_prompt": add_generation_prompt, "documents": documents}
            return render(self.templates, messages, tools, **self.special_tokens | arguments)
        if tools or documents:
            raise ValueError(
                "the tokenizer has no chat template that tools or documents could be given to; "
                "leave them out, or add a chat_template.jinja."
            )
        return "".join(message["content"] + "\n" for message in messages)

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
