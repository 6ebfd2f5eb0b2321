"""Chat templates: the texts of transformers, where they lie, and what the sandbox stops."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from orbit_jax.checkpoint import chat_template
from orbit_jax.checkpoint.byte_tokenizer import build_byte_tokenizer
from orbit_jax.checkpoint.chat_template import compile_templates, read_templates, render
from orbit_jax.checkpoint.tokenizer import Tokenizer

CHATS = json.loads((Path(__file__).parents[1] / "goldens/chats.json").read_text())
USER = [{"role": "user", "content": "hi"}]


def rendered(source: str, **arguments) -> str:
    return render(compile_templates("x", {"default": source}), USER, None, **arguments)


@pytest.mark.parametrize("chat", CHATS)
def test_texts_are_those_of_transformers(chat, tmp_path):
    build_byte_tokenizer(tmp_path)
    config = {"eos_token": "<|end|>", "unk_token": "?"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(chat["template"])
    tokenizer = Tokenizer.load(tmp_path)
    arguments = chat["arguments"] | {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.render_chat(chat["messages"], **arguments) == chat["text"]
    ids = tokenizer.encode_chat(chat["messages"], **arguments)
    assert tokenizer.decode(ids, keep_special=True) == chat["text"]


def test_the_date_of_today_may_be_asked_for():
    assert rendered("{{ strftime_now('%Y-%m') }}") == datetime.now().strftime("%Y-%m")


def test_files_of_templates_go_before_the_configuration_and_that_before_the_older_file(tmp_path):
    assert read_templates(tmp_path, {}) == {}
    (tmp_path / "chat_template.json").write_text('{"chat_template": "older"}')
    assert read_templates(tmp_path, {}) == {"default": "older"}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    for config, expected in (
        ("one", {"default": "one"}),
        (named, {"default": "a", "tool_use": "b"}),
    ):
        assert read_templates(tmp_path, {"chat_template": config}) == expected
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_templates(tmp_path, {"chat_template": named}) == {"default": "file"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("more")
    assert read_templates(tmp_path, {}) == {"default": "file", "tool_use": "more"}


def test_tools_take_the_template_that_is_named_for_them():
    templates = compile_templates("x", {"default": "plain", "tool_use": "{{ tools[0].name }}"})
    assert render(templates, USER, None) == "plain"
    assert render(templates, USER, [{"name": "f"}]) == "f"
    assert render({"default": templates["default"]}, USER, [{"name": "f"}]) == "plain"


def test_without_a_template_tools_are_refused(tmp_path):
    build_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.render_chat(USER, tools=[]) == "hi\n"
    for arguments in ({"tools": [{"name": "f"}]}, {"documents": [{"title": "t"}]}):
        with pytest.raises(ValueError, match="no chat template that tools or documents"):
            tokenizer.encode_chat(USER, **arguments)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no tools here') }}", "refuses the messages: no tools here; change"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}{{ i }}{% endfor %}{% endfor %}",
            "more than 5000 characters",
        ),
    ],
)
def test_a_template_may_refuse_but_not_reach_outside_or_run_away(source, message, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 5000)
    with pytest.raises(ValueError, match=message):
        rendered(source)


def test_a_template_that_is_not_valid_or_not_the_default_is_refused():
    with pytest.raises(ValueError, match=r"chat template 'default' of x does not compile: .*endif"):
        rendered("{% if messages %}")
    with pytest.raises(ValueError, match="x has chat templates named rag, tool_use but no default"):
        compile_templates("x", {"tool_use": "a", "rag": "b"})
