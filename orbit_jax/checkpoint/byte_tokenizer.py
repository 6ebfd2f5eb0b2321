r"""The tokenizer of the tiny shipped base: one token a byte, and five more.

Ids 0 to 255 are the bytes, so any text can be read and written without an unknown token. Added are
the marks of the chat (`<|user|>`, `<|assistant|>`, `<|end|>`, `<|pad|>`) and `\boxed{`, which is
ordinary text in one token. Rows that a model adds to fill up its vocabulary decode to nothing.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

SPECIAL_TOKENS = ("<|user|>", "<|assistant|>", "<|end|>", "<|pad|>")
BOX = r"\boxed{"
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS) + 1

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_byte_tokenizer(folder: str | Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` to a folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(BOX, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|end|>",
            "pad_token": "<|pad|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        folder / "generation_config.json",
        {
            "eos_token_id": tokenizer.token_to_id("<|end|>"),
            "pad_token_id": tokenizer.token_to_id("<|pad|>"),
        },
    )


def byte_characters() -> list[str]:
    """Return the character that byte-level tokenizers write for each byte, in byte order.

    Printable Latin-1 characters stand for themselves, the other bytes for characters from 256 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
