"""Remakes the goldens of `tokenizers/` with tokenizers, tiktoken and transformers.

Development only, as `make_goldens.py` (written with tokenizers 0.23.3, tiktoken 0.14.0 and
transformers 5.24.0). Each folder holds a tiny tokenizer that is built like the one of a model
family; `ids.npz` has a checksum of the ids that tiktoken (`kimi`) or transformers' AutoTokenizer
(the others) gives to each of 1,000 mixed strings. The others name the generic class of tokenizers:
transformers' own LlamaTokenizer leaves out the first "▁" of text that begins with a space, against
its file and sentencepiece.
"""

import base64
import json
import math
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import tiktoken
from mixed_strings import MANY_MARKS, digest, mixed_strings
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

FOLDER = Path(__file__).parent / "tokenizers"
STRINGS = mixed_strings(1000, MANY_MARKS)
CONTRACTED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BASE = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))
TAIL = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")


def either(*patterns: str) -> str:
    return "|".join(patterns)


def words_by_case(but: str, signs: str) -> str:
    """Cuts words by case, but not those characters that `but` takes away, with what follows."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return either(
        f"{before}{upper}*{lower}+{CONTRACTED}?",
        f"{before}{upper}+{lower}*{CONTRACTED}?",
        r"\p{N}{1,3}",
        rf" ?[^\s\p{{L}}\p{{N}}]+{signs}*",
        *TAIL,
    )


def words(digits: str) -> str:
    return either(
        CONTRACTED, r"[^\r\n\p{L}\p{N}]?\p{L}+", digits, r" ?[^\s\p{L}\p{N}]+[\r\n]*", *TAIL
    )


KIMI = either(r"[\p{Han}]+", words_by_case(r"&&[^\p{Han}]", r"[\r\n]"))
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    either(
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        *TAIL,
    ),
)


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    ids = {
        "kimi": kimi(),
        "qwen": qwen(),
        "deepseek": deepseek(),
        "gpt_oss": gpt_oss(),
        "llama3": llama3(),
        "mixtral": mixtral(),
        "unigram": unigram(),
    }
    np.savez_compressed(FOLDER / "ids.npz", **{k: np.uint32(v) for k, v in ids.items()})


def byte_level(patterns: tuple[str, ...], size: int = 420, **model: bool) -> Tokenizer:
    """Byte-level BPE, trained on other strings than the compared ones."""
    fast = Tokenizer(models.BPE(**model))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator(mixed_strings(3000)[1000:], trainer)
    return fast


def qwen() -> list[int]:
    fast = byte_level((words(r"\p{N}"),))
    fast.normalizer = normalizers.NFC()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
    return save("qwen", fast, special, config, "Qwen2Tokenizer", text=("<think>", "</think>"))


def deepseek() -> list[int]:
    fast = byte_level(DEEPSEEK)
    special = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>")
    config = {"bos_token": special[0], "eos_token": special[1], "pad_token": special[1]}
    config |= {"add_bos_token": True}
    return save("deepseek", fast, special, config, "PreTrainedTokenizerFast")


def gpt_oss() -> list[int]:
    fast = byte_level((words_by_case("", r"[\r\n/]"),), ignore_merges=True)
    special = ("<|startoftext|>", "<|endoftext|>", "<|start|>", "<|end|>", "<|channel|>")
    config = {"bos_token": special[0], "eos_token": "<|end|>", "pad_token": "<|endoftext|>"}
    return save("gpt_oss", fast, special, config, "PreTrainedTokenizerFast")


def llama3() -> list[int]:
    fast = byte_level((words(r"\p{N}{1,3}"),), ignore_merges=True)
    special = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
    bos = (special[0], fast.get_vocab_size())
    fast.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos]),
        ]
    )
    config = {"bos_token": bos[0], "eos_token": "<|eot_id|>"}
    return save("llama3", fast, special, config, "PreTrainedTokenizerFast")


def mixtral() -> list[int]:
    """BPE of characters, spaces as ▁, bytes where a character is no token."""
    state = json.loads(by_characters().to_str())
    state["model"]["byte_fallback"] = True
    state["added_tokens"] = []
    fast = Tokenizer.from_str(json.dumps(state))
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": True}
    config |= {"add_bos_token": True}
    return save("mixtral", fast, BASE[:3], config, "PreTrainedTokenizerFast")


def unigram() -> list[int]:
    """The same pieces with log-probs that fall with their ids: the likeliest cut is taken."""
    pieces = sorted(by_characters().get_vocab().items(), key=lambda item: item[1])
    scores = [(piece, -math.log(2 + i) if i >= len(BASE) else 0.0) for piece, i in pieces]
    fast = Tokenizer(models.Unigram(scores, 0, byte_fallback=True))
    fast.normalizer = normalizers.NFKC()
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return save("unigram", fast, BASE[:3], config, "PreTrainedTokenizerFast")


def by_characters() -> Tokenizer:
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    texts = mixed_strings(3000)[1000:]
    common = Counter("".join(texts).replace(" ", "▁")).most_common(120)
    trainer = trainers.BpeTrainer(
        vocab_size=560,
        initial_alphabet=[character for character, _ in common],
        limit_alphabet=len(common),
        special_tokens=list(BASE),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    return trained


def save(
    name: str,
    fast: Tokenizer,
    special: tuple[str, ...],
    config: dict,
    kind: str,
    text: tuple[str, ...] = (),
) -> list[int]:
    """Writes a folder and returns what transformers makes of it."""
    (FOLDER / name).mkdir()
    fast.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    fast.add_tokens([AddedToken(token, normalized=False) for token in text])
    fast.save(str(FOLDER / name / "tokenizer.json"), pretty=False)
    added = {str(fast.token_to_id(t)): entry(t, t in special) for t in (*special, *text)}
    config = {"tokenizer_class": kind, "added_tokens_decoder": added, **config}
    write_json(FOLDER / name / "tokenizer_config.json", config)
    theirs = AutoTokenizer.from_pretrained(FOLDER / name)
    return report(name, [theirs.encode(text, add_special_tokens=False) for text in STRINGS])


def kimi() -> list[int]:
    """The same kind of ranks as Kimi's, and words that merging does not reach at their end."""
    folder = FOLDER / "kimi"
    folder.mkdir()
    trained = byte_level((KIMI,), size=1000)
    characters = {c: byte for byte, c in enumerate(byte_characters())}
    tokens = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    ranks = {bytes(characters[c] for c in token): rank for token, rank in tokens}
    cut = pre_tokenizers.Split(Regex(KIMI), "isolated")
    pieces = {piece.encode(): None for text in STRINGS for piece, _ in cut.pre_tokenize_str(text)}
    for piece in [piece for piece in pieces if len(piece) > 5 and piece not in ranks][::9][:60]:
        ranks[piece] = len(ranks)
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    first = len(ranks)
    names = {first: "[BOS]", first + 1: "[EOS]", first + 2: "<|im_end|>", first + 3: "<|im_user|>"}
    names |= {first + 17: "<|im_middle|>", first + 22: "<think>", first + 23: "</think>"}
    names |= {first + 255: "[PAD]"}
    added = {str(i): entry(name, "think" not in name) for i, name in names.items()}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added}
    config |= {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": [first + 2, first + 1]})
    every = {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(first, first + 256)}
    theirs = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens=every)
    return report("kimi", [theirs.encode(text, allowed_special="all") for text in STRINGS])


def entry(text: str, special: bool) -> dict:
    flags = ("lstrip", "normalized", "rstrip", "single_word")
    return {"content": text, **dict.fromkeys(flags, False), "special": special}


def byte_characters() -> list[str]:
    printable = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]


def report(name: str, ids: list[list[int]]) -> list[int]:
    used = {i for string in ids for i in string}
    print(f"{name}: {sum(map(len, ids))} ids, {len(used)} different ones", file=sys.stderr)
    return [digest(string) for string in ids]


def write_json(path: Path, value: dict | list) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
