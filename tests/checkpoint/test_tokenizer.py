"""Tokenizers of folders: ids of transformers and tiktoken, BOS, ends, and what is refused."""

import itertools
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from orbit_jax.checkpoint.byte_tokenizer import VOCAB_SIZE, build_byte_tokenizer
from orbit_jax.checkpoint.tokenizer import Tokenizer

GOLDENS = Path(__file__).parents[1] / "goldens"
sys.path.insert(0, str(GOLDENS))

from mixed_strings import MANY_MARKS, digest, mixed_strings  # noqa: E402

IDS = dict(np.load(GOLDENS / "tokenizers/ids.npz"))
USER = [{"role": "user", "content": "hi"}]
PLAIN_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    build_byte_tokenizer(folder)
    return Tokenizer.load(folder)


def write_folder(folder, config, generation=None, post_processor=False):
    """A word tokenizer: 0 unknown, 1 BOS, 2 EOS, 3 hi; a post-processor adds BOS when asked to."""
    fast = FastTokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "hi": 3}, "<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    if post_processor:
        fast.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize("name", IDS)
def test_ids_are_those_of_transformers_or_tiktoken(name):
    tokenizer = Tokenizer.load(GOLDENS / "tokenizers" / name)
    strings = mixed_strings(1000, MANY_MARKS)
    found = np.array([digest(tokenizer.encode(text)) for text in strings])
    assert np.count_nonzero(found == IDS[name]) == len(strings)


@pytest.mark.parametrize("name", ["deepseek", "gpt_oss", "kimi", "llama3"])
def test_byte_level_ids_read_back_as_the_text(name):
    tokenizer = Tokenizer.load(GOLDENS / "tokenizers" / name)
    for text in mixed_strings(100, MANY_MARKS):
        assert tokenizer.decode(tokenizer.encode(text), keep_special=True) == text


@pytest.mark.parametrize(
    ("in_template", "in_processor", "in_config"), [*itertools.product([False, True], repeat=3)]
)
def test_a_prompt_begins_with_exactly_one_bos_if_anything_asks_for_it(
    tmp_path, in_template, in_processor, in_config
):
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "add_bos_token": in_config,
        "chat_template": ("{{ bos_token }}" if in_template else "") + PLAIN_TEMPLATE,
    }
    tokenizer = Tokenizer.load(write_folder(tmp_path, config, post_processor=in_processor))
    asked = in_template or in_processor or in_config
    assert tokenizer.encode_chat(USER) == ([1, 3] if asked else [3])


@pytest.mark.parametrize(
    ("generation", "expected"),
    [({"eos_token_id": [2, 3]}, (2, 3)), ({"eos_token_id": 0}, (0,)), ({}, (2,)), (None, (2,))],
)
def test_end_ids_are_a_list_an_int_or_the_named_token(tmp_path, generation, expected):
    tokenizer = Tokenizer.load(write_folder(tmp_path, {"eos_token": "</s>"}, generation))
    assert tokenizer.eos_ids == expected
    assert tokenizer.pad_id == expected[0]


def test_end_ids_come_from_generation_then_the_model_then_its_text_model(tmp_path):
    folder = write_folder(tmp_path, {"eos_token": "</s>"}, {"eos_token_id": None})
    (folder / "config.json").write_text('{"text_config": {"eos_token_id": [0, 2]}}')
    assert Tokenizer.load(folder).eos_ids == (0, 2)
    (folder / "config.json").write_text('{"eos_token_id": 3, "text_config": {"eos_token_id": 0}}')
    assert Tokenizer.load(folder).eos_ids == (3,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    assert Tokenizer.load(folder).eos_ids == (1, 3)


@pytest.mark.parametrize("ids", [4, [2, 4], -1, True, "2"])
def test_end_ids_that_are_no_tokens_are_refused(ids, tmp_path):
    with pytest.raises(ValueError, match="are not ids of its tokenizer, which has 4"):
        Tokenizer.load(write_folder(tmp_path, {"eos_token": "</s>"}, {"eos_token_id": ids}))


def test_padding_may_be_the_token_that_ends(tmp_path):
    config = {"eos_token": "</s>", "pad_token": "</s>"}
    tokenizer = Tokenizer.load(write_folder(tmp_path, config, {"eos_token_id": [1, 2]}))
    assert (tokenizer.eos_ids, tokenizer.pad_id) == ((1, 2), 2)
    assert tokenizer.encode("hi</s>") == [3, 2]
    assert tokenizer.decode([3, 2, 2], keep_special=True) == "hi </s> </s>"


def test_truncation_and_padding_left_in_the_file_are_not_applied(tmp_path):
    folder = write_folder(tmp_path, {"eos_token": "</s>"})
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    fast.enable_truncation(1)
    fast.enable_padding(length=8)
    fast.save(str(folder / "tokenizer.json"))
    assert Tokenizer.load(folder).encode_chat(USER * 3) == [3, 3, 3]


def test_template_file_wins_and_named_templates_are_understood(tmp_path):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "</s>"}]
    folder = write_folder(tmp_path, {"eos_token": "</s>", "chat_template": named})
    assert Tokenizer.load(folder).encode_chat(USER) == [2]
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }} {{ eos_token }}")
    assert Tokenizer.load(folder).encode_chat(USER) == [3, 2]


def test_without_a_template_contents_are_joined_by_newlines(tmp_path):
    tokenizer = Tokenizer.load(write_folder(tmp_path, {"eos_token": "</s>"}))
    assert tokenizer.render_chat(USER * 2) == "hi\nhi\n"
    assert tokenizer.encode_chat(USER * 2) == [3, 3]


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has neither tokenizer\.json nor tiktoken\.model"):
        Tokenizer.load(tmp_path)
    write_folder(tmp_path, {})
    with pytest.raises(ValueError, match="names no token that ends a completion"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer that can be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "pad_token"])
def test_a_special_token_that_the_tokenizer_lacks_is_refused(name, tmp_path):
    config = {"eos_token": "</s>", name: {"content": "<x>"}}
    with pytest.raises(ValueError, match=f"{name}='<x>' in tokenizer_config.json is no token"):
        Tokenizer.load(write_folder(tmp_path, config))


def test_a_token_that_only_the_configuration_adds_is_one_token(tmp_path):
    added = {"4": {"content": "<tool>", "special": True}, "2": {"content": "</s>"}}
    config = {"eos_token": "<tool>", "added_tokens_decoder": added}
    tokenizer = Tokenizer.load(write_folder(tmp_path, config))
    assert tokenizer.encode("hi<tool>hi") == [3, 4, 3]
    assert tokenizer.eos_ids == (4,)
    added["7"] = {"content": "<late>"}
    with pytest.raises(ValueError, match="gives '<late>' the id 7, its tokenizer the id 5"):
        Tokenizer.load(write_folder(tmp_path, config))


@pytest.mark.parametrize("nest", [lambda config: config, lambda config: {"text_config": config}])
def test_ids_without_a_row_in_the_models_embedding_are_refused(nest, tmp_path):
    folder = write_folder(tmp_path, {"eos_token": "</s>"})
    (folder / "config.json").write_text(json.dumps(nest({"vocab_size": 4})))
    assert Tokenizer.load(folder).vocab_size == 4
    (folder / "config.json").write_text(json.dumps(nest({"vocab_size": 3})))
    with pytest.raises(ValueError, match=r"vocab_size=3 .* leaves the token 'hi' \(id 3\) without"):
        Tokenizer.load(folder)


def test_byte_tokenizer_gives_every_byte_its_own_id(byte_tokenizer):
    assert byte_tokenizer.encode("é\n 7") == list("é\n 7".encode())
    assert byte_tokenizer.vocab_size == VOCAB_SIZE == 261


def test_byte_tokenizer_reads_back_any_text(byte_tokenizer):
    draw = random.Random(0)
    pieces = [
        "a",
        " ",
        " .",
        "\n",
        "\r\n",
        "\t",
        "é",
        "e\u0301",
        "\u2212",
        "汉",
        "😀",
        "\x00",
        "\ufeff",
    ]
    pieces += [r"\boxed{", "}", "\\", "{", "<|", "|>"]
    for _ in range(500):
        text = "".join(draw.choices(pieces, k=20))
        assert byte_tokenizer.decode(byte_tokenizer.encode(text)) == text


def test_byte_tokenizer_renders_the_chat_once(byte_tokenizer):
    ids = byte_tokenizer.encode_chat([{"role": "user", "content": "27 + 35"}])
    assert ids == [256, *b"27 + 35", 257]
    assert byte_tokenizer.decode(ids, keep_special=True) == "<|user|>27 + 35<|assistant|>"
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert (
        byte_tokenizer.render_chat(turns) == "<|user|>a<|assistant|>b<|end|><|user|>c<|assistant|>"
    )


def test_byte_tokenizer_keeps_the_box_and_drops_the_end_and_unused_rows(byte_tokenizer):
    ids = byte_tokenizer.encode(r"\boxed{48}<|end|>")
    assert ids == [260, *b"48}", 258]
    assert byte_tokenizer.eos_ids == (258,)
    assert byte_tokenizer.pad_id == 259
    assert byte_tokenizer.decode([*ids, 259, 280]) == r"\boxed{48}"
