"""Tool calls in the syntaxes of model families: read, malformed, and where sampling pauses."""

import json

import pytest
from conversations import Calculator, Weather

from orbit_jax.tasks.tool_calls import SYNTAXES, find_stops, syntax_of

TOOLS = (Calculator(), Weather())


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def deepseek_v3(name: str, arguments: str) -> str:
    block = f"{name}\n```json\n{arguments}\n```"
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{block}<｜tool▁call▁end｜>"


def deepseek_v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def kimi(name: str, arguments: str) -> str:
    head = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
    return f"{head}{arguments}<|tool_call_end|>"


def harmony(name: str, arguments: str) -> str:
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{head}{arguments}<|call|>"


def harmony_by_role(name: str, arguments: str) -> str:
    return f" to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>"


def plain(name: str, arguments: str) -> str:
    return f"<tool>{name}: {arguments}</tool>"


# By syntax: how a call is written, and what stands before and behind the calls of a turn.
WRITTEN = {
    "hermes": ("hermes", hermes, "", ""),
    "deepseek_v3": ("deepseek", deepseek_v3, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("deepseek", deepseek_v31, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "kimi": ("kimi", kimi, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "harmony": ("harmony", harmony, "", ""),
    "harmony_by_role": ("harmony", harmony_by_role, "", ""),
    "plain": ("plain", plain, "", ""),
}
JSON_FORMS = pytest.mark.parametrize("form", WRITTEN)


def read(form: str, *calls: tuple[str, str], before: str = "", behind: str = ""):
    """The calls read from a turn that writes these; harmony has messages between them."""
    syntax, write, opens, closes = WRITTEN[form]
    between = "<|start|>assistant" if syntax == "harmony" else "\n"
    text = before + opens + between.join(write(*call) for call in calls) + closes + behind
    return SYNTAXES[syntax].read(text, TOOLS)


@JSON_FORMS
def test_one_call(form):
    (call,) = read(form, ("weather", '{"city": "Zürich 天気 🌧", "days": 2}'))
    assert (call.name, call.error) == ("weather", "")
    assert call.arguments == {"city": "Zürich 天気 🌧", "days": 2}


@JSON_FORMS
def test_several_calls_in_order(form):
    calls = read(
        form,
        ("weather", '{"city": "Rome"}'),
        ("calculator", '{"expression": "1+1"}'),
        ("weather", "{}"),
    )
    assert [c.name for c in calls] == ["weather", "calculator", "weather"]
    assert [c.arguments for c in calls] == [{"city": "Rome"}, {"expression": "1+1"}, {}]
    assert not any(c.error for c in calls)


@JSON_FORMS
def test_nested_braces_and_marks_inside_of_texts_do_not_end_a_call(form):
    arguments = {"a": {"b": [{"c": "}} { ``` \n```\n"}]}, "code": 'print("{")', "s": '"\\'}
    arguments["mark"] = {"hermes": "</tool_call>", "plain": ""}.get(form, "")
    (call,) = read(form, ("weather", json.dumps(arguments)))
    assert (call.error, call.arguments) == ("", arguments)


@JSON_FORMS
@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": "Rome"',
        '{"city": Rome}',
        '{"days": NaN}',
        '{"days": 1e999}',
        '{"city": "\\ud83d"}',
        '{"city": "Rome"}}',
        '{"a": ' + "[" * 20000 + "]" * 20000 + "}",
        '{"days": ' + "9" * 5000 + "}",
        '["Rome"]',
    ],
    ids=["open", "bare", "nan", "infinite", "surrogate", "brace", "deep", "huge", "list"],
)
def test_a_malformed_call_is_an_error_between_good_ones(form, arguments):
    good = ("weather", '{"city": "Rome"}')
    if (form, arguments[0]) == ("plain", "["):  # there it is a text
        return
    calls = read(form, good, ("weather", arguments), good)
    assert [bool(c.error) for c in calls] == [False, True, False]
    assert calls[1].arguments == {}
    assert len(calls[1].error) < 200


@JSON_FORMS
def test_a_call_that_is_not_closed_is_an_error(form):
    syntax, write, opens, _ = WRITTEN[form]
    whole = opens + write("weather", '{"city": "Rome"}')
    end = {"deepseek": "<｜tool▁call▁end｜>", "kimi": "<|tool_call_end|>", "harmony": "<|call|>"}
    text = whole.removesuffix(end.get(syntax, SYNTAXES[syntax].stops[0]))
    assert len(text) < len(whole)
    for cut in (text, text[:-3]):
        (call,) = SYNTAXES[syntax].read(cut, TOOLS)
        assert call.error


@JSON_FORMS
def test_a_turn_without_calls_has_none(form):
    syntax = SYNTAXES[WRITTEN[form][0]]
    for text in (
        "",
        "The answer is 4.",
        '{"name": "weather", "arguments": {}}',
        "<|start|>",
        "to=",
    ):
        assert syntax.read(text, TOOLS) == ()


@pytest.mark.parametrize("form", [f for f in WRITTEN if "harmony" not in f])
def test_text_around_calls_and_thoughts_before_them_do_not_count(form):
    city = ("weather", '{"city": "Rome"}')
    assert [c.name for c in read(form, city, before="I look it up.\n", behind="\nso.")] == [
        "weather"
    ]
    syntax, write, *_ = WRITTEN[form]
    thought = "<think>I could write " + write("calculator", "{}") + "\n</think>\n\n"
    assert [c.name for c in read(form, city, before=thought)] == ["weather"]
    assert SYNTAXES[syntax].read("<think>" + write("weather", "{}"), TOOLS) == ()


@pytest.mark.parametrize("form", [f for f in WRITTEN if "harmony" not in f])
def test_a_turn_has_a_bounded_number_of_calls(form):
    calls = read(form, *[("weather", '{"city": "Rome"}')] * 70)
    assert [bool(c.error) for c in calls] == [False] * 64 + [True]
    assert "more than 64 calls" in calls[-1].error


def test_hermes_tells_what_is_missing():
    for body, told in (
        ("[1]", "no JSON object"),
        ('{"arguments": {}}', '"name"'),
        ('{"name": "f", "arguments": [1]}', "arguments are no JSON object"),
        ('{"name": "f"} and more', "other text before </tool_call>"),
    ):
        (call,) = SYNTAXES["hermes"].read(f"<tool_call>{body}</tool_call>")
        assert told in call.error
    (call,) = SYNTAXES["hermes"].read(hermes("f", json.dumps('{"a": 1}')))
    assert call.arguments == {"a": 1}
    (call,) = SYNTAXES["hermes"].read('<tool_call>{"name": "f"}</tool_call>')
    assert (call.arguments, call.error) == ({}, "")


def test_what_is_wrong_with_json_is_told():
    for arguments, told in (
        ('{"city": Rome}', "not valid JSON: Expecting value at character"),
        ('{"city": "\\ud83d"}', "half a surrogate pair is no text"),
        ('{"days": NaN}', "a number is too large or no number"),
    ):
        (call,) = read("kimi", ("weather", arguments))
        assert told in call.error


def test_a_call_keeps_its_id_and_what_was_written():
    (call,) = read("kimi", ("weather", '{"city":"Rome"}'))
    assert (call.id, call.source) == ("functions.weather:0", '{"city":"Rome"}')
    (call,) = read("kimi", ("weather", '{"city":Rome}'))
    assert (call.id, call.name, call.source) == ("functions.weather:0", "weather", '{"city":Rome}')


def test_harmony_calls_stand_among_other_messages():
    text = (
        "<|channel|>analysis<|message|>to=functions.no, {<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
        + harmony("weather", '{"city": "Rome"}')
    )
    (call,) = SYNTAXES["harmony"].read(text)
    assert (call.name, call.arguments) == ("weather", {"city": "Rome"})
    python = "<|channel|>analysis to=python code<|message|>print(1)\n<|call|>"
    (call,) = SYNTAXES["harmony"].read(python)
    assert (call.name, call.arguments) == ("python", {"code": "print(1)\n"})


def test_qwen_coder_values_are_lines_of_text_or_json_by_the_schema():
    text = (
        "Well.\n<tool_call>\n<function=weather>\n<parameter=city>\n5\n</parameter>\n"
        "<parameter=days>\n12\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=calculator>\n<parameter=expression>\na < b {\n  c</parameter >\n\n"
        "</parameter>\n</function>\n</tool_call>"
    )
    weather, calculator = SYNTAXES["qwen_xml"].read(text, TOOLS)
    assert weather.arguments == {"city": "5", "days": 12}
    assert calculator.arguments == {"expression": "a < b {\n  c</parameter >\n"}
    assert weather.error == calculator.error == ""


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "weather"}',
        "<function=weather><parameter=city>Rome</function>",
        "<function=weather>Rome</function>",
        "<function=weather><parameter=city>Rome</parameter>",
    ],
)
def test_qwen_coder_calls_that_are_malformed_are_errors(body):
    syntax = SYNTAXES["qwen_xml"]
    good = "<tool_call><function=weather></function></tool_call>"
    calls = syntax.read(f"<tool_call>{body}</tool_call>{good}", TOOLS)
    assert [bool(c.error) for c in calls] == [True, False]
    (call,) = syntax.read("<tool_call><function=weather></function>", TOOLS)
    assert "not closed by </tool_call>" in call.error


def test_a_plain_call_is_for_the_first_tool_unless_it_names_another():
    def arguments(text: str, tools=TOOLS):
        (call,) = SYNTAXES["plain"].read(f"so <tool>{text}</tool>", tools)
        return call.name, call.arguments, bool(call.error)

    assert arguments("12*3") == ("calculator", {"expression": "12*3"}, False)
    assert arguments("weather: Rome") == ("weather", {"city": "Rome"}, False)
    assert arguments("x: 3") == ("calculator", {"expression": "x: 3"}, False)
    assert arguments("weather:") == ("weather", {}, True)
    assert arguments(" ") == ("calculator", {}, True)
    assert arguments("f: 3", ()) == ("f", {"input": "3"}, False)
    (first, second) = SYNTAXES["plain"].read("<tool>1+ <tool>2+2</tool>", TOOLS)
    assert (bool(first.error), second.arguments) == (True, {"expression": "2+2"})


def test_a_template_shows_the_syntax_and_a_name_goes_before_it():
    for template, name in (
        ("{{ '<tool_call>\\n{\"name\": ' }}", "hermes"),
        ("<tool_call>\n<function=f>\n<parameter=p>", "qwen_xml"),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'}}", "deepseek"),
        ("<|im_system|>tool_declare<|im_middle|>", "kimi"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("<|im_start|>{{ message.role }}", "plain"),
        ("", "plain"),
    ):
        assert syntax_of(template).name == name
        assert syntax_of(template, "hermes").name == "hermes"
    with pytest.raises(ValueError, match="syntax='xml' is not known: use one of kimi"):
        syntax_of("", "xml")
    with pytest.raises(ValueError, match="'<arg_key>', which is not read: name one of"):
        syntax_of("<tool_call>{{ name }}<arg_key>")
    assert syntax_of("<arg_key>", "plain").name == "plain"


def test_stops_are_ids_where_they_are_one_token_and_texts_where_they_are_more():
    class Tokenizer:
        def encode(self, text: str) -> list[int]:
            return [7] if text in ("</tool_call>", "<|call|>") else [ord(c) for c in text]

    hermes = find_stops(SYNTAXES["hermes"], Tokenizer())
    assert (hermes.ids, hermes.texts) == ((7,), ())
    plain = find_stops(SYNTAXES["plain"], Tokenizer())
    assert (plain.ids, plain.texts) == ((), ("</tool>",))
    # Only the end of the turn tells that no further call comes, unless the syntax closes them all.
    several = find_stops(SYNTAXES["hermes"], Tokenizer(), one_call=False)
    assert (several.ids, several.texts) == ((), ())
    assert find_stops(SYNTAXES["harmony"], Tokenizer(), one_call=False).ids == (7,)
