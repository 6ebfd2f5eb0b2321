"""Remakes `chats.json`: chat templates that use what deployed ones do, and their texts.

Development only, as `make_goldens.py` (written with transformers 5.24.0, which renders the texts).
The templates were written for this file; each stands for a habit of one family.
"""

import json
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

FILE = Path(__file__).parent / "chats.json"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ASK = {"role": "user", "content": "  Wie warm ist es in Zürich? <b> "}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"function": {"name": "warm", "arguments": {"place": "Zürich", "days": [1, 2]}}}
    ],
}
RESULT = {"role": "tool", "content": '{"c": 21}'}
THOUGHT = {
    "role": "assistant",
    "content": "<think>\nsum\n</think>\n\n21",
    "reasoning_content": "sum",
}
TOOLS = [{"type": "function", "function": {"name": "warm", "parameters": {"place": "<é>"}}}]

# ChatML: the last question found by a namespace, thinking cut from older answers or switched off.
CHATML = """\
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == 'user' %}
        {%- set ns.found = true %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}{{ '\\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- set text = message.content if message.content is string else '' %}
    {%- if loop.index0 < ns.last and '</think>' in text %}
        {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
# Macros that call each other, JSON with every option, arguments as a mapping's items.
MACROS = """\
{%- macro show(value, depth=0) -%}
    {%- if value is mapping -%}
        {%- for key, item in value | dictsort %}{{ '  ' * depth + key }}:
{{ show(item, depth + 1) }}{% endfor -%}
    {%- else -%}
        {{- '  ' * depth ~ (value | tojson) ~ '\\n' -}}
    {%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] %}{{ show(tool) }}{% endfor %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message['tool_calls'] %}
            {%- for key, value in call.function.arguments.items() %}
                {{- key ~ '=' ~ value | tojson(indent=2) }}
            {%- endfor %}
            {{- call | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}
        {%- endfor %}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '</s>' }}
{%- endfor %}
"""
# What the assistant wrote is marked; loops are left early; absent fields have defaults.
MARKED = """\
{{ bos_token }}
{% for message in messages %}
{% if message['role'] == 'system' %}{% continue %}{% endif %}
{% if message['role'] == 'assistant' %}
{% generation %}
{% set text = message.get('content') or '' %}
{{ text }}{{ eos_token }}
{% endgeneration %}
{{ text is defined }}
{% else %}
[{{ message.role | upper }}] {{ message.content }} {{ message.name | default('nobody') }}
{% endif %}
{% if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}
"""
STRICT = """\
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {{- message.content }}
{%- endfor %}
{%- for document in documents or [] %}{{ document.title }}{% endfor %}
{%- if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}
{{- reasoning_effort }}
"""

CASES = [
    (CHATML, [SYSTEM, ASK], {}),
    (CHATML, [ASK, THOUGHT, ASK], {"enable_thinking": False}),
    (CHATML, [ASK, CALL, RESULT], {"tools": TOOLS}),
    (CHATML, [ASK, THOUGHT], {"add_generation_prompt": False}),
    (MACROS, [ASK, CALL, RESULT], {"tools": TOOLS}),
    (MARKED, [SYSTEM, ASK, CALL, THOUGHT], {}),
    (STRICT, [ASK], {"documents": [{"title": "Ü"}], "reasoning_effort": "high"}),
    (STRICT, [ASK, THOUGHT], {}),
]


def main() -> None:
    chats = []
    for template, messages, arguments in CASES:
        asked = {"add_generation_prompt": True} | arguments
        texts, _ = render_jinja_template([messages], chat_template=template, **SPECIAL, **asked)
        chats.append(
            {
                "template": template,
                "messages": messages,
                "arguments": arguments,
                "text": texts[0],
            }
        )
    text = json.dumps(chats, indent=1, ensure_ascii=False) + "\n"
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
