"""Tools, tokenizers and turns for tests of tool calls and conversations."""

import json
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from orbit_jax.checkpoint.byte_tokenizer import build_byte_tokenizer
from orbit_jax.checkpoint.tokenizer import Tokenizer
from orbit_jax.tasks.transcript import add_outputs, add_sampled, calls_of

GOLDENS = Path(__file__).parents[1] / "goldens/tokenizers"
USER = [{"role": "user", "content": "2*3?"}]

CHATML = (
    "{% if tools %}<|im_start|>system\n<tool_call>{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<s>")


class Calculator:
    name = "calculator"
    description = "computes"
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    }


class Weather:
    name = "weather"
    description = "tells the weather"
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    }


def make_tokenizer(folder: Path, template: str, special=CHATML_TOKENS, words=(), eos="<|im_end|>"):
    build_byte_tokenizer(folder)
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    fast.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    fast.add_tokens([AddedToken(text, normalized=False) for text in words])
    fast.save(str(folder / "tokenizer.json"))
    config = {"eos_token": eos, "pad_token": eos}
    config |= {"bos_token": "<s>", "add_bos_token": True} if "<s>" in special else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(folder)


def call(expression: str) -> str:
    arguments = json.dumps({"expression": expression})
    return f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>'


def one_turn(chat, conversation, text: str, *outputs: str):
    """The conversation after a sampled text and the outputs of its calls."""
    conversation = add_sampled(chat, conversation, chat.tokenizer.encode(text))
    return add_outputs(chat, conversation, calls_of(chat, conversation), outputs)


def given(chat, before, after) -> str:
    """The text that was appended to a conversation behind what was sampled."""
    fresh = after.ids[len(before.ids) :]
    mask = after.mask[len(before.ids) :]
    return chat.tokenizer.decode([i for i, m in zip(fresh, mask, strict=True) if not m], True)
