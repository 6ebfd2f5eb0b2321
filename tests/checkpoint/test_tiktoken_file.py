"""Kimi's `tiktoken.model`: the ids of tiktoken, control tokens, and what is refused."""

import base64
import json
import shutil
from pathlib import Path

import pytest

from orbit_jax.checkpoint.tokenizer import Tokenizer

KIMI = Path(__file__).parents[1] / "goldens/tokenizers/kimi"
LINES = (KIMI / "tiktoken.model").read_bytes().splitlines()
NUM_RANKS = len(LINES)
CONFIG = json.loads((KIMI / "tokenizer_config.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(KIMI)


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([i], keep_special=True) for i in tokenizer.encode(text)]


def changed(folder: Path, lines: list[bytes] = LINES, **config) -> Tokenizer:
    """The golden with other lines, or other entries of its configuration."""
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG | config))
    return Tokenizer.load(folder)


def with_tokens(*tokens: str) -> list[bytes]:
    """The 256 bytes, and these tokens in the order of their ranks."""
    every = [bytes([byte]) for byte in range(256)] + [token.encode() for token in tokens]
    return [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(every)]


def named(first: int, **names: str) -> dict:
    """Control tokens by name: `_3="[X]"` names the fourth one; the first two are BOS and EOS."""
    names = {"_0": "[BOS]", "_1": "[EOS]", "_255": "[PAD]"} | names
    added = {str(first + int(key[1:])): {"content": name} for key, name in names.items()}
    return {"added_tokens_decoder": added}


def test_neighbours_merge_by_the_rank_of_what_they_make_together(tmp_path):
    # "lines" comes about from l and ines here, never from lin and es, which make it too.
    tokens = ("in", "es", "ines", "ne", "new", "lines", "lin")
    tokenizer = changed(tmp_path, with_tokens(*tokens), **named(263))
    assert words(tokenizer, "newlines") == ["new", "lines"]
    assert words(tokenizer, "lins lines") == ["lin", "s", " ", "lines"]


def test_a_piece_that_is_a_token_is_not_merged_from_its_bytes(tmp_path):
    tokenizer = changed(tmp_path, with_tokens("ab", "cabc"), **named(258))
    assert words(tokenizer, "cabc") == ["cabc"]
    assert words(tokenizer, "cabcx") == ["c", "ab", "c", "x"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("汉ab", ["汉", "ab"]),
        ("xaBB", ["x", "a", "BB"]),
        ("1234512", ["1", "2", "3", "451", "2"]),
        ("n's n'x", ["n'", "s", " ", "n", "'", "x"]),
        ("a .", ["a", " ."]),
    ],
)
def test_text_is_cut_at_han_runs_case_digits_and_contractions(text, expected, tmp_path):
    # Each would be found in the texts if nothing were cut.
    tokens = ("汉", "汉a", "ab", "aB", "BB", "34", "451", "n'", " .")
    tokenizer = changed(tmp_path, with_tokens(*tokens), **named(256 + len(tokens)))
    assert words(tokenizer, text) == expected


def test_control_tokens_count_in_text_and_those_without_a_name_are_numbered(tokenizer):
    first = NUM_RANKS
    text = f"<|im_user|>a[EOS]<|reserved_token_{first + 9}|><think>[PAD]"
    ids = tokenizer.encode(text)
    assert ids[0] == first + 3
    assert ids[-4:] == [first + 1, first + 9, first + 22, first + 255]
    assert tokenizer.decode(ids) == f"a<|reserved_token_{first + 9}|><think>"
    assert tokenizer.decode(ids, keep_special=True) == text
    assert tokenizer.vocab_size == first + 256


def test_what_only_looks_like_a_control_token_is_text(tokenizer):
    numbers = "".join(f"<|reserved_token_{NUM_RANKS + i}|>" for i in (-1, 0, 17, 256))
    text = f"<|im_user |>[eos]{numbers}[BO"
    assert max(tokenizer.encode(text)) < NUM_RANKS


def test_ends_and_padding_are_those_of_the_folder(tokenizer):
    assert tokenizer.eos_ids == (NUM_RANKS + 2, NUM_RANKS + 1)
    assert tokenizer.pad_id == NUM_RANKS + 255
    assert tokenizer.bos_id is None


def test_a_tokenizer_json_beside_it_goes_first(tmp_path):
    shutil.copytree(KIMI, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*LINES[:4], b"IQ== 4 4"], r"line 5 is b'IQ== 4 4', not a token in base64 and its rank"),
        ([*LINES[:4], b"I?Q== 4"], r"line 5 is b'I\?Q== 4', not a token"),
        ([*LINES[:4], b"IQ== x"], r"line 5 is b'IQ== x', not a token"),
        ([*LINES, b"", b"YWJjZGVm 7"], rf"line {NUM_RANKS + 2} repeats the rank 7 of line 8"),
        ([*LINES, LINES[7].split()[0] + b" 99999"], rf"line {NUM_RANKS + 1} repeats the token"),
        (LINES[:300] + LINES[301:], "no token has the rank 300"),
        ([], "the byte 0x00 is no token"),
        (LINES[:-1], f"names the id {NUM_RANKS + 255}, but its control tokens are"),
    ],
)
def test_a_damaged_file_is_refused(lines, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        changed(tmp_path, lines)
    assert "tiktoken.model" in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tokenizer_class": "ChatGLMTokenizer"}, "tokenizer_class='ChatGLMTokenizer' is not"),
        ({"added_tokens_decoder": {}}, "nothing names its control tokens"),
        (named(NUM_RANKS, _8="[EOS]"), r"names two ids '\[EOS\]'"),
        (named(NUM_RANKS, _256="x"), f"names the id {NUM_RANKS + 256}, but its control tokens"),
        (named(NUM_RANKS, _8="the"), "the control token 'the' is an ordinary token too"),
        ({"eos_token": "[END]"}, r"eos_token='\[END\]' in tokenizer_config.json is no token"),
    ],
)
def test_control_tokens_that_cannot_be_are_refused(config, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        changed(tmp_path, **config)
