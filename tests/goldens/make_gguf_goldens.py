"""Remakes the goldens of `gguf/` with the gguf package, transformers and llama.cpp.

Development only, as `make_goldens.py` (written with gguf 0.19.0, transformers 5.24.0 and llama.cpp
as in xllamacpp 2026.10.11549). `blocks.npz` holds random blocks of every tensor type and the gguf
package's decode of them. `simple.gguf` and `k_quants.gguf` are tiny random llama models in these
types; beside them lie `tokens` and `logprobs` of transformers reading the file in float32, the
sha256 of every weight that transformers found (float32, in Hugging Face's row order), and, where
there is a tokenizer, ids and a chat prompt by llama.cpp.
"""

import gc
import hashlib
import json
import urllib.request
from pathlib import Path

import gguf
import numpy as np
import torch
import xllamacpp
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent / "gguf"
# Where fp16 numbers stand in a block, as (first, last + 1) bytes.
HALVES = {
    Type.F16: [(0, 2)],
    Type.Q4_0: [(0, 2)],
    Type.Q4_1: [(0, 4)],
    Type.Q8_0: [(0, 2)],
    Type.Q4_K: [(0, 4)],
    Type.Q6_K: [(208, 210)],
}
TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.Q4_K, Type.Q6_K]
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = [
    "12 + 34 = 46",
    "the 12 inches, then\n\n  the\tin 1a2b",
    "  we'll  see\r\n\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<think>12</think><|endoftext|>",
    "naïve 汉字 😀 x² ½ ٣\u00a0!?…",
    "\x00\x07\ufeff'S 't",
    "",
]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    save_blocks()
    simple = LlamaConfig(
        vocab_size=len(vocabulary()[0]),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_theta=5000.0,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    types = {
        "token_embd": Type.Q8_0,
        "attn_q": Type.Q4_0,
        "attn_k": Type.Q4_1,
        "attn_v": Type.Q8_0,
        "attn_output": Type.BF16,
        "ffn_gate": Type.Q4_1,
        "ffn_up": Type.F16,
        "ffn_down": Type.Q4_0,
        "output": Type.F32,
    }
    save_model("simple", simple, types, tokenizer=True)
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    k_quants = LlamaConfig(**simple.to_dict() | wide | heads | {"tie_word_embeddings": True})
    types = {
        "token_embd": Type.Q6_K,
        "attn_q": Type.Q4_K,
        "attn_k": Type.Q6_K,
        "attn_v": Type.Q4_K,
        "attn_output": Type.Q4_0,
        "ffn_gate": Type.Q4_K,
        "ffn_up": Type.Q4_K,
        "ffn_down": Type.Q6_K,
    }
    save_model("k_quants", k_quants, types, tokenizer=False)


def save_blocks() -> None:
    """Two rows of random blocks of each type: all codes, fp16 numbers of any size and sign."""
    rng = np.random.default_rng(0)
    arrays = {}
    for kind in TYPES:
        elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (2, max(256 // elements, 1) * 2, nbytes), np.uint8)
        if kind in (Type.F32, Type.BF16):
            blocks[..., -1] = (blocks[..., -1] & 0x80) | rng.integers(0, 0x7F, blocks.shape[:-1])
        for first, last in HALVES.get(kind, []):
            bits = rng.integers(0, 0x7C00, (*blocks.shape[:-1], (last - first) // 2), np.uint16)
            bits |= rng.integers(0, 2, bits.shape, np.uint16) << 15
            blocks[..., first:last] = bits.view(np.uint8)
        decoded = gguf.dequantize(blocks.reshape(2, -1), kind)
        arrays |= {kind.name: blocks, f"{kind.name}_decoded": decoded.view(np.uint32)}
    np.savez_compressed(FOLDER / "blocks.npz", **arrays)


def save_model(name: str, config: LlamaConfig, types: dict[str, Type], tokenizer: bool) -> None:
    """Writes a random model as llama.cpp's converter would, and what transformers reads."""
    torch.manual_seed(0)
    weights = LlamaForCausalLM(config).state_dict()
    writer = gguf.GGUFWriter(FOLDER / f"{name}.gguf", "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        add_tokenizer(writer)
    for module, weight in weights.items():
        if module == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if weight.ndim == 1:
            weight.uniform_(0.5, 1.5)
        tensor = tensor_name(module)
        kind = types.get(tensor.split(".")[-2], Type.F32)
        for proj, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if f"{proj}_proj" in module:
                # From Hugging Face's halves of a head to llama.cpp's neighbours.
                halves = weight.reshape(heads, 2, config.head_dim // 2, -1)
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
        data = quantize(weight.numpy(), kind)
        writer.add_tensor(tensor, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_reference(name, tokenizer)


def quantize(weight: np.ndarray, kind: Type) -> np.ndarray:
    """The gguf package's quantiser; random blocks of about the same size for K-quants."""
    if kind not in (Type.Q4_K, Type.Q6_K):
        return gguf.quantize(np.ascontiguousarray(weight), kind)
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(weight.size)
    blocks = rng.integers(0, 256, (len(weight), weight.shape[1] // elements, nbytes), np.uint8)
    for first, last in HALVES[kind]:
        scale = rng.uniform(4e-5, 12e-5, (*blocks.shape[:-1], (last - first) // 2))
        if kind == Type.Q4_K:
            scale *= [8, 60]  # codes from 0 to 15 lie around a minimum of 7.5 steps
        blocks[..., first:last] = scale.astype(np.float16).view(np.uint8)
    return blocks.reshape(len(weight), -1)


def tensor_name(module: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module = module.removesuffix(".weight")
    if module in top:
        return f"{top[module]}.weight"
    layer, _, name = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[name]}.weight"


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, types and merges: 3 control tokens, the bytes, a few words, one user-defined token.

    "12" is a word that digits must never be merged into.
    """
    printable = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]
    merges = ["Ġ t", "h e", "Ġt he", "i n", "1 2", "Ġ Ġ", "Ċ Ċ", "l l", "' ll", "Ã ¯", "Ġ 1"]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = control + characters + [merge.replace(" ", "") for merge in merges] + ["<think>"]
    types = [3] * len(control) + [1] * (len(tokens) - len(control) - 1) + [4]
    return tokens, types, merges


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens, types, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def save_reference(name: str, tokenizer: bool) -> None:
    """What transformers and llama.cpp make of a file."""
    file = f"{name}.gguf"
    model = AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=file, dtype=torch.float32).eval()
    tokens = torch.randint(0, model.config.vocab_size, (2, 12))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens).logits, -1).numpy()
    print(f"{name}: log-probs spread over {np.ptp(logprobs, axis=-1).mean():.1f} nats")
    arrays = {"tokens": tokens.numpy().astype(np.int32), "logprobs": logprobs}
    np.savez_compressed(FOLDER / f"{name}.npz", **arrays)
    weights = {
        module.removesuffix(".weight"): hashlib.sha256(weight.numpy().tobytes()).hexdigest()
        for module, weight in model.state_dict().items()
        if not (module == "lm_head.weight" and model.config.tie_word_embeddings)
    }
    reference: dict = {"sha256": weights}
    if tokenizer:
        messages = [{"role": "user", "content": "12 in"}]
        server = serve(FOLDER / file)
        reference["ids"] = {text: tokenize(server, text) for text in TEXTS}
        reference["chat"] = post(server, "/apply-template", {"messages": messages})["prompt"]
        reference["chat_ids"] = tokenize(server, reference["chat"])
        del server
        gc.collect()
    text = json.dumps(reference, indent=1) + "\n"
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


def serve(path: Path) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(path), 64, 1
    params.warmup, params.verbosity = False, -1
    return xllamacpp.Server(params)


def tokenize(server: xllamacpp.Server, text: str) -> list[int]:
    request = {"content": text, "add_special": False, "parse_special": True}
    return post(server, "/tokenize", request)["tokens"]


def post(server: xllamacpp.Server, route: str, request: dict) -> dict:
    header = {"Content-Type": "application/json"}
    body = json.dumps(request).encode()
    with urllib.request.urlopen(
        urllib.request.Request(server.listening_address + route, body, header)
    ) as answer:
        return json.loads(answer.read())


if __name__ == "__main__":
    main()
