"""The tokenizer of a GGUF file: the ids of llama.cpp, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_writer import read_all, write_gguf

from orbit_jax.checkpoint.tokenizer import Tokenizer

SIMPLE = Path(__file__).parents[1] / "goldens/gguf/simple.gguf"
LLAMA_CPP = json.loads(SIMPLE.with_suffix(".json").read_text())
METADATA, _ = read_all(SIMPLE)
USER = [{"role": "user", "content": "12 in"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(SIMPLE)


def changed(path: Path, **changes: Any) -> Tokenizer:
    """The golden's tokenizer after changes of its metadata; None takes a key away."""
    metadata = METADATA | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return Tokenizer.load(write_gguf(path / "changed.gguf", metadata))


@pytest.mark.parametrize("text", LLAMA_CPP["ids"])
def test_ids_are_those_of_llama_cpp_and_read_back_as_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids == LLAMA_CPP["ids"][text]
    assert tokenizer.decode(ids, keep_special=True) == text


def test_digits_stand_alone_though_a_merge_would_join_them(tokenizer):
    words = METADATA["tokenizer.ggml.tokens"]
    assert "12" in words
    assert [words[i] for i in tokenizer.encode("a12 12")] == ["a", "1", "2", "Ġ", "1", "2"]


def test_control_tokens_are_special_and_user_defined_ones_are_text(tokenizer):
    ids = tokenizer.encode("<|im_start|>the<think>the<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "the<think>the"


def test_the_chat_template_is_that_of_the_file(tokenizer):
    assert tokenizer.render_chat(USER) == LLAMA_CPP["chat"]
    assert tokenizer.encode_chat(USER) == LLAMA_CPP["chat_ids"]
    assert "<|im_start|>system\nYou help.<|im_end|>" in LLAMA_CPP["chat"]
    assert "You help" not in tokenizer.render_chat([{"role": "system", "content": "a"}, *USER])


def test_ends_and_padding_are_those_of_the_file(tokenizer, tmp_path):
    assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.vocab_size) == ((2,), 2, 271)
    other = changed(tmp_path, eos_token_id=0, eot_token_id=2, padding_token_id=1)
    assert (other.eos_ids, other.pad_id) == ((0, 2), 1)
    assert changed(tmp_path, eos_token_id=0, padding_token_id=None).pad_id == 0


def test_a_bos_is_added_if_the_file_asks_or_its_kind_always_does(tmp_path):
    bos = {"bos_token_id": 0}
    assert changed(tmp_path, **bos).encode_chat(USER) == LLAMA_CPP["chat_ids"]
    asked = changed(tmp_path, **bos, add_bos_token=True)
    assert asked.encode_chat(USER) == [0, *LLAMA_CPP["chat_ids"]]
    always = changed(tmp_path, **bos, add_bos_token=None, pre="llama-bpe")
    assert always.encode_chat(USER)[0] == 0
    refused = changed(tmp_path, **bos, add_bos_token=False, pre="llama-bpe")
    assert refused.encode_chat(USER)[0] == 1


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("default", ["a", "12", "3", "Ġ", "'", "S", "ĊĊ", "Ġ", "x"]),
        (None, ["a", "12", "3", "Ġ", "'", "S", "ĊĊ", "Ġ", "x"]),
        ("gpt-2", ["a", "12", "3", "Ġ", "'", "S", "ĊĊ", "Ġ", "x"]),
        ("qwen2", ["a", "1", "2", "3", "Ġ", "'", "S", "ĊĊ", "Ġ", "x"]),
        ("llama-bpe", ["a", "12", "3", "Ġ", "'", "S", "ĊĊ", "Ġ", "x"]),
    ],
)
def test_other_ways_of_splitting(pre, pieces, tmp_path):
    ids = changed(tmp_path, pre=pre).encode("a123 'S\n\n x")
    assert [METADATA["tokenizer.ggml.tokens"][i] for i in ids] == pieces


def test_only_llama_bpe_takes_a_whole_word_without_merges(tmp_path):
    kinds = [*METADATA["tokenizer.ggml.token_type"], 1]
    words = {"tokens": [*METADATA["tokenizer.ggml.tokens"], "xyz"], "token_type": kinds}
    assert changed(tmp_path, **words, pre="llama-bpe").encode("xyz") == [271]
    assert len(changed(tmp_path, **words, pre="qwen2").encode("xyz")) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model='llama' is not supported: .* 'gpt2'"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"pre": "viking"}, "tokenizer.ggml.pre='viking' is not supported: .* smollm, qwen2"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": ["a", "b", "a"]}, "3 tokens are 2 different ones with 271 types"),
        ({"token_type": [1, 1]}, "271 tokens are 271 different ones with 2 types"),
        ({"merges": ["a b"]}, "tokens and merges do not fit"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"eos_token_id": None}, "names no token that ends a completion"),
        ({"eos_token_id": 271}, "eos_token_id=271 exceeds its 271 tokens"),
    ],
)
def test_a_tokenizer_that_is_not_supported_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        changed(tmp_path, **changes)
    assert "changed.gguf" in str(error.value)
