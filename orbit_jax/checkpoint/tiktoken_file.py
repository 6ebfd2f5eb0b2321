"""Kimi's `tiktoken.model`, rebuilt for the `tokenizers` package: no code of a checkpoint is run.

A line of the file holds a token, as base64 of its bytes, and its rank, which is its id. Text is cut
by a pattern; a piece that is a token as a whole stays whole, any other is merged from its bytes: of
all neighbours that are a token together those of the lowest rank first, and the leftmost of equals.
The 256 ids after the ranks are control tokens, which count wherever they stand in a text.
`added_tokens_decoder` in `tokenizer_config.json` names some of them.
"""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from orbit_jax.checkpoint.byte_tokenizer import byte_characters

NUM_CONTROL_TOKENS = 256

# Runs of Han characters, then words by case with what is contracted to them, and the rest.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def read_tiktoken(path: Path, config: Mapping[str, Any]) -> FastTokenizer:
    """Return the tokenizer of a `tiktoken.model`; `config` is what `tokenizer_config.json` holds.

    Raises:
        ValueError: when the file or the named control tokens are not what they should be, or the
            tokenizer is not of Kimi's kind, the only one whose pattern is known here.
    """
    kind = config.get("tokenizer_class", "TikTokenTokenizer")
    if kind != "TikTokenTokenizer":
        raise ValueError(
            f"{path}: tokenizer_class={kind!r} is not supported; give a tokenizer of the class "
            "TikTokenTokenizer (Kimi), or a tokenizer.json."
        )
    ranks = _read_ranks(path)
    characters = byte_characters()
    vocab = {"".join(characters[b] for b in token): rank for token, rank in ranks.items()}
    fast = FastTokenizer(models.BPE(vocab, _merges(vocab), ignore_merges=True))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KIMI_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    # A name that is a word as well would get the word's id.
    control = _control_tokens(path, config, len(ranks))
    for token in control:
        if token.content in vocab:
            raise ValueError(
                f"{path}: the control token {token.content!r} is an ordinary token too; mend "
                "added_tokens_decoder in tokenizer_config.json."
            )
    fast.add_tokens(control)
    return fast


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Return the rank of every token, in the order of ranks: 0, 1, 2 and so on without a gap."""
    ranks: dict[bytes, int] = {}
    seen: dict[int, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            token, rank = base64.b64decode(token, validate=True), int(rank)
        except (ValueError, binascii.Error):
            token = b""
        if not token:
            raise ValueError(
                f"{path}: line {number} is {line[:40]!r}, not a token in base64 and its rank; "
                "download the file again."
            )
        if token in ranks or rank in seen:
            what = f"rank {rank}" if rank in seen else f"token {token!r}"
            raise ValueError(
                f"{path}: line {number} repeats the {what} of line "
                f"{seen[rank if rank in seen else ranks[token]]}; download the file again."
            )
        ranks[token], seen[rank] = rank, number
    gap = next((rank for rank in range(len(ranks)) if rank not in seen), None)
    if gap is not None:
        raise ValueError(f"{path}: no token has the rank {gap}; download the file again.")
    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent:
        raise ValueError(f"{path}: the byte {absent[0]:#04x} is no token; download the file again.")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _merges(vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return every pair of tokens that is a token together, the lowest rank of the whole first.

    Which pair a token comes from depends on nothing outside its two ends, so only one of its pairs
    ever arises, and their order among themselves does not matter.
    """
    return [
        (token[:at], token[at:])
        for token in vocab
        for at in range(1, len(token))
        if token[:at] in vocab and token[at:] in vocab
    ]


def _control_tokens(path: Path, config: Mapping[str, Any], first: int) -> list[AddedToken]:
    """Return the tokens of the ids from `first` on; those without a name are text when decoded."""
    ids = range(first, first + NUM_CONTROL_TOKENS)
    named = config.get("added_tokens_decoder") or {}
    if not named:
        raise ValueError(
            f"{path}: nothing names its control tokens; add the tokenizer_config.json with "
            "added_tokens_decoder that belongs to it."
        )
    wrong = [key for key in named if key not in {str(i) for i in ids}]
    if wrong:
        raise ValueError(
            f"{path}: added_tokens_decoder names the id {wrong[0]}, but its control tokens are "
            f"{ids[0]} to {ids[-1]}; take both files from the same model."
        )
    control = {}
    for i in ids:
        token = named.get(str(i), {"content": f"<|reserved_token_{i}|>"})
        text = token["content"]
        if text in control:
            raise ValueError(
                f"{path}: added_tokens_decoder names two ids {text!r}; mend tokenizer_config.json."
            )
        control[text] = AddedToken(text, normalized=False, special=bool(token.get("special")))
    return list(control.values())
