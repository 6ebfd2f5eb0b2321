"""Conversations in the templates and tokenizers of model families."""

import json

import pytest
from conversations import GOLDENS, USER, Calculator, call, given, make_tokenizer, one_turn

from orbit_jax.checkpoint.tokenizer import Tokenizer
from orbit_jax.tasks.chats import chat_of
from orbit_jax.tasks.transcript import add_outputs, add_sampled, begin, calls_of


@pytest.mark.parametrize("name", ["mixtral", "unigram", "qwen", "llama3"])
def test_what_is_given_is_encoded_as_in_the_whole_text(name, tmp_path):
    for file in (GOLDENS / name).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    end = Tokenizer.load(tmp_path)
    end = end.decode(end.eos_ids, keep_special=True)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% if m.role == 'assistant' %}" + end + "{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    chat = chat_of(Tokenizer.load(tmp_path), [Calculator()])
    conversation = begin(chat, USER)
    for turn in range(3):
        conversation = one_turn(chat, conversation, f" I ask <tool>{turn}</tool>{end}", "so it is")
        ids = [*conversation.prompt, *conversation.ids]
        spoken = chat.tokenizer.decode(ids, keep_special=True)
        assert spoken.count("tool:<result>so it is</result>\nassistant:") == turn + 1
    tail = f"{end}\ntool:<result>so it is</result>\nassistant:"
    whole = chat.tokenizer.encode("word" + tail)
    place = whole.index(chat.tokenizer.eos_ids[0])
    assert conversation.ids[-len(whole[place:]) :] == tuple(whole[place:])


@pytest.mark.parametrize("name", ["mixtral", "unigram"])
def test_nothing_comes_between_a_turn_and_what_is_given(name, tmp_path):
    # These tokenizers write a space before a text that begins.
    for file in (GOLDENS / name).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }};{% endfor %}"
    )
    chat = chat_of(Tokenizer.load(tmp_path), [Calculator()])
    conversation = begin(chat, USER)
    for text in ("<tool>1</tool>", "so", "<tool>2</tool>"):
        conversation = add_sampled(chat, conversation, chat.tokenizer.encode(text))
    asked = add_sampled(chat, conversation, [])
    after = add_outputs(chat, asked, calls_of(chat, asked), ["1", "2"])
    assert given(chat, asked, after) == ";<result>1</result>;<result>2</result>;"
    assert chat.tokenizer.decode(after.ids).endswith(
        "<tool>2</tool>;<result>1</result>;<result>2</result>;"
    )


def test_a_template_that_marks_outputs_by_its_calls_is_given_the_calls(tmp_path):
    # As DeepSeek-V3's: the outputs of a turn are opened again only behind calls of their own.
    template = (
        "{% set ns = namespace(first=true) %}"
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if ns.first %}<outputs>{% set ns.first = false %}{% endif %}<{{ m.content }}>"
        "{% else %}<|im_start|>{{ m.role }}|{{ m.content }}"
        "{% if m.tool_calls %}{% set ns.first = true %}<｜tool▁calls▁begin｜>"
        "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        "{{ c.function.name }}{{ '\n' }}```json{{ '\n' }}{{ c.function.arguments | tojson }}"
        "{{ '\n' }}```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
        "<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant|{% endif %}"
    )
    chat = chat_of(make_tokenizer(tmp_path, template), [Calculator()])
    assert chat.syntax.name == "deepseek"
    conversation = begin(chat, USER)
    text = (
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n"
        '{"expression": "1"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><|im_end|>'
    )
    for _ in range(2):
        before, conversation = conversation, one_turn(chat, conversation, text, "1")
        assert given(chat, before, conversation) == "<outputs><1><|im_start|>assistant|"


THINKING = (
    # An empty thought opens the answer, and is kept only for a message that has one.
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content.strip('\n') }}\n</think>\n\n"
    "{{ m.content.lstrip('\n') }}{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ opened }}{% endif %}"
)


@pytest.mark.parametrize(
    ("opened", "sampled"),
    [
        ("<think>\n\n</think>\n\n", ""),
        ("<think>\n", "so\n</think>\n\n"),
        ("", "<think>\nso\n</think>\n\n"),
    ],
)
def test_thinking_that_the_prompt_opens_is_told_apart_as_the_template_wants_it(
    tmp_path, opened, sampled
):
    chat = chat_of(make_tokenizer(tmp_path, THINKING), [Calculator()], opened=opened)
    conversation = begin(chat, USER)
    for _ in range(3):
        conversation = one_turn(chat, conversation, f"{sampled}{call('1')}<|im_end|>", "1")
        assert conversation is not None
    bad = "<tool_call>{</tool_call>"
    assert one_turn(chat, conversation, f"{sampled}{bad}<|im_end|>", "error") is not None
    if opened and sampled:
        spelt_otherwise = sampled.replace("\n", "") + call("1")
        assert one_turn(chat, conversation, f"{spelt_otherwise}<|im_end|>", "1") is None


def test_a_template_with_its_own_path_for_calls_gets_the_calls_as_they_were_written(tmp_path):
    # As Kimi's: the marks are written by the template, and so are the ids of calls.
    template = (
        "{% if tools %}{{ tools | tojson }}<|tool_calls_section_begin|>{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}|"
        "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }} ({{ m.name }})\n{% endif %}"
        "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content if m.tool_calls }}"
        "</think>{% endif %}"
        "{{ m.content }}"
        "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments }}"
        "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant|{% endif %}"
    )
    chat = chat_of(make_tokenizer(tmp_path, template), [Calculator()])
    assert chat.syntax.name == "kimi"
    conversation = prompt = begin(chat, USER)
    for number, arguments in enumerate(('{"expression":"1"}', '{"expression":1"}')):
        text = (
            "<think>so </think>Well.<|tool_calls_section_begin|>"
            f"<|tool_call_begin|>functions.calculator:{number}<|tool_call_argument_begin|>"
            f"{arguments}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
        )
        before, conversation = conversation, one_turn(chat, conversation, text, "1")
        assert given(chat, before, conversation) == (
            f"<|im_start|>tool|## Return of functions.calculator:{number} (calculator)\n1<|im_end|>"
            "<|im_start|>assistant|"
        )
    assert len(conversation.messages) == len(prompt.messages) + 4


HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('no marks') }}{% endif %}"
    "{% if m.tool_calls %}"
    "{% if m.thinking and (not forgets or (forgets == 'later' and loop.last)) %}"
    "<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary"
    "<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>")


def test_harmony_goes_on_although_its_template_spells_calls_otherwise(tmp_path):
    tokenizer = make_tokenizer(tmp_path, HARMONY, HARMONY_TOKENS, eos="<|return|>")
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [tokenizer.encode(t)[0] for t in ("<|return|>", "<|call|>")]})
    )
    chat = chat_of(Tokenizer.load(tmp_path), [Calculator()])
    assert chat.syntax.name == "harmony"
    conversation = begin(chat, USER)
    thought = "<|channel|>analysis<|message|>I compute.<|end|><|start|>assistant"
    for head in ("<|channel|>commentary to=functions.calculator <|constrain|>json", None):
        head = head or " to=functions.calculator<|channel|>commentary json"
        text = (
            f'{thought if "constrain" in head else ""}{head}<|message|>{{"expression":"1"}}<|call|>'
        )
        before, conversation = conversation, one_turn(chat, conversation, text, 'it is "1"')
        assert given(chat, before, conversation) == (
            "<|start|>functions.calculator to=assistant<|channel|>commentary<|message|>"
            '"it is \\"1\\""<|end|><|start|>assistant'
        )
    # A template that forgets the thought, and a call that was not ended as the template ends it.
    assert one_turn(chat, conversation, text.removesuffix("<|call|>"), "1") is None
    text = thought + text
    assert one_turn(chat, begin(chat, USER), text, "1") is not None
    for when in ("always", "later"):
        forgets = chat_of(chat.tokenizer, [Calculator()], forgets=when)
        assert one_turn(forgets, begin(forgets, USER), text, "1") is None
    asked = add_sampled(chat, begin(chat, USER), chat.tokenizer.encode(text))
    assert [(c.arguments, c.error) for c in calls_of(chat, asked)] == [({"expression": "1"}, "")]
