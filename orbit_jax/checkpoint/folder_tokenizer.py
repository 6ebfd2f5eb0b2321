"""The tokenizer files of a Hugging Face folder.

`tokenizer.json`, or else Kimi's `tiktoken.model`, gives the ids; `tokenizer_config.json` the
special tokens; `generation_config.json`, `config.json` or `tokenizer_config.json`, in this order,
the ids that end a completion.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from orbit_jax.checkpoint.chat_template import read_templates
from orbit_jax.checkpoint.safetensors_io import read_json
from orbit_jax.checkpoint.tiktoken_file import read_tiktoken

_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


def read_folder(folder: Path) -> tuple[FastTokenizer, dict[str, Any], tuple[int, ...]]:
    """Read the tokenizer of a folder.

    Returns:
        The tokenizer; what `tokenizer_config.json` says, with the chat templates by name as its
        `chat_template`; and the ids that end a completion.

    Raises:
        ValueError: when a file is missing, cannot be read or contradicts another.
    """
    config = _read_if_any(folder / "tokenizer_config.json")
    fast = _read_fast(folder, config)
    fast.no_truncation()  # settings that somebody's fine-tuning may have left in the file
    fast.no_padding()
    _add_tokens(folder, fast, config)
    special = special_tokens(config)
    for name in {"bos_token", "eos_token", "pad_token"} & special.keys():
        if fast.token_to_id(special[name]) is None:
            raise ValueError(
                f"{folder}: {name}={special[name]!r} in tokenizer_config.json is no token of its "
                "tokenizer; mend one of them."
            )
    model = _read_if_any(folder / "config.json")
    text_model = model.get("text_config") or {}
    _check_rows(folder, fast, model.get("vocab_size", text_model.get("vocab_size")))
    generation = _read_if_any(folder / "generation_config.json")
    eos_ids = _eos_ids(folder, fast, special, (generation, model, text_model))
    return fast, config | {"chat_template": read_templates(folder, config)}, eos_ids


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token`, ...: each stands as text or as an object with `content`."""
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if value is not None:
            tokens[name] = value
    return tokens


def _read_if_any(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_fast(folder: Path, config: Mapping[str, Any]) -> FastTokenizer:
    path, tiktoken = folder / "tokenizer.json", folder / "tiktoken.model"
    if not path.is_file() and tiktoken.is_file():
        return read_tiktoken(tiktoken, config)
    if not folder.is_dir():
        raise ValueError(f"the folder {folder} does not exist: check the path")
    if not path.is_file():
        raise ValueError(
            f"{folder} has neither tokenizer.json nor tiktoken.model; save the tokenizer there "
            "with transformers' save_pretrained."
        )
    try:
        return FastTokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers package raises bare Exception
        raise ValueError(f"{path} is not a tokenizer that can be read: {error}.") from error


def _add_tokens(folder: Path, fast: FastTokenizer, config: Mapping[str, Any]) -> None:
    """Add what only `tokenizer_config.json` names; text would be cut where such a token stands."""
    named = {int(i): entry for i, entry in (config.get("added_tokens_decoder") or {}).items()}
    known = {token.content for token in fast.get_added_tokens_decoder().values()}
    for i, entry in sorted(named.items()):
        text = entry["content"]
        if text not in known:
            flags = {flag: entry.get(flag, False) for flag in _FLAGS}
            fast.add_tokens([AddedToken(text, **flags)])
        if fast.token_to_id(text) != i:
            raise ValueError(
                f"{folder}: added_tokens_decoder gives {text!r} the id {i}, its tokenizer the id "
                f"{fast.token_to_id(text)}; take both files from the same model."
            )


def _check_rows(folder: Path, fast: FastTokenizer, rows: int | None) -> None:
    text, last = max(fast.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    if rows is not None and last >= rows:
        raise ValueError(
            f"{folder}: vocab_size={rows} in config.json leaves the token {text!r} (id {last}) "
            "without a row of the embedding; take the tokenizer of this model."
        )


def _eos_ids(
    folder: Path,
    fast: FastTokenizer,
    special: Mapping[str, str],
    sources: tuple[Mapping[str, Any], ...],
) -> tuple[int, ...]:
    for source in sources:
        ids = source.get("eos_token_id")
        if ids is None or ids == []:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(type(i) is int and i >= 0 and fast.id_to_token(i) is not None for i in ids):
            raise ValueError(
                f"{folder}: eos_token_id={ids} are not ids of its tokenizer, which has "
                f"{fast.get_vocab_size()}; mend generation_config.json or config.json."
            )
        return tuple(ids)
    if "eos_token" not in special:
        raise ValueError(
            f"{folder} names no token that ends a completion; set eos_token_id in "
            "generation_config.json."
        )
    return (fast.token_to_id(special["eos_token"]),)
