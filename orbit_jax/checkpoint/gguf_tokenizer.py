"""The tokenizer inside a GGUF file: byte-level BPE, rebuilt for the `tokenizers` package.

llama.cpp writes tokens, merges and the name of the rule that splits text before merging; the rules
themselves stand in its sources and are repeated here. Bytes that are no token (SmolLM2 lacks 21,
none of them in ordinary text) are left out of the ids, as llama.cpp does.
"""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from orbit_jax.checkpoint.gguf_file import GGUFFile, open_gguf

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Splitting:
    """How text is cut before merging: by each pattern in turn, the cuts of one after another."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token as a whole is not merged from its bytes
    add_bos: bool = False  # where the file does not say


# By `tokenizer.ggml.pre`.
_SPLITTINGS = {
    "default": _Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _Splitting((_GPT2,)),
    "smollm": _Splitting((r"\p{N}", _GPT2)),
    "qwen2": _Splitting((_TIKTOKEN.format(digits=r"\p{N}"),)),
    "llama-bpe": _Splitting((_TIKTOKEN.format(digits=r"\p{N}{1,3}"),), True, True),
}

# Token types; all but these are ordinary words.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


def read_tokenizer(path: str | Path) -> tuple[FastTokenizer, dict, tuple[int, ...]]:
    """Reads the tokenizer of a GGUF file.

    Returns:
      The tokenizer; what a Hugging Face `tokenizer_config.json` would say (special tokens by name,
      `add_bos_token`, `chat_template`); and the ids that end a completion: end of text, and end of
      turn where the file names one.

    Raises:
      ValueError: if the file cannot be read, if its tokenizer is of a kind that is not supported,
        or if its parts contradict each other.
    """
    file = open_gguf(path)
    splitting = _splitting(file)
    tokens = file.get("tokenizer.ggml.tokens", list)
    fast = _build(file, tokens, splitting)

    def token(name: str) -> str | None:
        index = file.get(f"tokenizer.ggml.{name}_token_id", int, -1)
        if index >= len(tokens):
            raise ValueError(
                f"{file.path}: tokenizer.ggml.{name}_token_id={index} exceeds its {len(tokens)} "
                "tokens: convert the model again"
            )
        return tokens[index] if index >= 0 else None

    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    config = {f"{ours}_token": token(theirs) for ours, theirs in names.items()}
    config["add_bos_token"] = file.get("tokenizer.ggml.add_bos_token", bool, splitting.add_bos)
    config["chat_template"] = file.get("tokenizer.chat_template", str, "") or None
    ends = [text for text in (config["eos_token"], token("eot")) if text is not None]
    if not ends:
        raise ValueError(
            f"{file.path} names no token that ends a completion: add tokenizer.ggml.eos_token_id "
            "with gguf-new-metadata"
        )
    return fast, config, tuple(dict.fromkeys(map(tokens.index, ends)))


def _splitting(file: GGUFFile) -> _Splitting:
    model = file.get("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model={model!r} is not supported: use a model with "
            "'gpt2' (byte-level BPE)"
        )
    name = file.get("tokenizer.ggml.pre", str, "default")
    if name not in _SPLITTINGS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre={name!r} is not supported: use a model with one of "
            f"{', '.join(_SPLITTINGS)}"
        )
    return _SPLITTINGS[name]


def _build(file: GGUFFile, tokens: list[str], splitting: _Splitting) -> FastTokenizer:
    kinds = file.get("tokenizer.ggml.token_type", list)
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(kinds) != len(tokens):
        raise ValueError(
            f"{file.path}: its {len(tokens)} tokens are {len(vocab)} different ones with "
            f"{len(kinds)} types: convert the model again"
        )
    # A merge is two tokens and a space between them; the first may begin with one.
    merges = [
        (merge[:at], merge[at + 1 :])
        for merge in file.get("tokenizer.ggml.merges", list)
        for at in [merge.find(" ", 1)]
    ]
    try:
        model = models.BPE(vocab, merges, ignore_merges=splitting.ignore_merges)
    except Exception as error:  # the tokenizers package raises bare Exception
        raise ValueError(f"{file.path}: its tokens and merges do not fit: {error}") from error
    fast = FastTokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    fast.decoder = decoders.ByteLevel()
    by_kind = {
        kind: [t for t, k in zip(tokens, kinds, strict=True) if k == kind] for kind in {*kinds}
    }
    special = by_kind.get(_CONTROL, []) + by_kind.get(_UNKNOWN, [])
    fast.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    user_defined = by_kind.get(_USER_DEFINED, [])
    fast.add_tokens([AddedToken(text, normalized=False) for text in user_defined])
    return fast
