"""Strings that tokenizers are compared on."""

import random
import zlib
from array import array
from collections.abc import Sequence

WORDS = (
    "the Brown fox's we'll I'M naïve café Привет мир 你好世界 こんにちは 안녕 שלום مرحبا "
    "हिन्दी ไทย 😀 é ﬁ Ⅷ ½ ² ٣ १२ x^2 \\frac{1}{2} $5.00 #tag @me foo_bar a->b == != >= && || /* */ "
    '— “q” \u200b \ufeff def f(x): return print("hi") http://a.b/c?d=e&f=1'
)
SPACES = (" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\n\n  ", "\u00a0", "\u2003")
MARKS = ("<|im_start|>", "<|im_end|>", "<|im_start|>user\n", "<|endoftext|>", "<|im_", "start|>")
# Special tokens of several families, and texts that only look like them.
MANY_MARKS = (
    *MARKS,
    *("<|im_user|>user", "<|im_middle|>", "[BOS]", "[EOS]", "[E", "OS]", "[eos]", "<think>"),
    *("</think>", "<|reserved_token_1100|>", "<|reserved_token_1|>", "<|reserved_token_", "<s>"),
    *("</s>", "<unk>", "[INST] ", " [/INST]", "<0x0A>", "▁", "<｜User｜>", "<｜end▁of▁sentence｜>"),
    *("<|begin_of_text|>", "<|eot_id|>", "<|start|>", "<|channel|>final", "<|end|>", "<|end"),
)


def mixed_strings(count: int, marks: Sequence[str] = MARKS) -> list[str]:
    """Words of many scripts, numbers, punctuation, white space, `marks`; always the same."""
    rng = random.Random(7)
    blocks = (
        (0x20, 0x250),
        (0x370, 0x1000),
        (0x2000, 0x2C00),
        (0x4E00, 0x9FFF),
        (0x1F300, 0x1F700),
    )
    kinds = (
        lambda: rng.choice(WORDS.split()),
        lambda: str(rng.randrange(10 ** rng.randrange(1, 9))),
        lambda: rng.choice("!?.,;:'\"()[]{}<>|/\\+-*=^~`@#$%&_") * rng.choice((1, 1, 2, 3)),
        lambda: rng.choice(SPACES),
        lambda: rng.choice(marks),
        lambda: chr(rng.randrange(*rng.choice(blocks))),
        lambda: "".join(rng.choices("abcdefghijklmnopqrstuvwxyzABC", k=rng.randrange(1, 12))),
    )
    weights = (30, 15, 15, 25, 5, 5, 5)
    return [
        "".join(pick() for pick in rng.choices(kinds, weights, k=rng.randrange(1, 40)))
        for _ in range(count)
    ]


def digest(ids: Sequence[int]) -> int:
    """A checksum of token ids."""
    return zlib.crc32(array("i", ids).tobytes())
