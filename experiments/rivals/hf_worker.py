"""transformers' `generate` as a contestant: all rows in one batch; `worker.py` says what is spoken.

The base alone answers, without an adapter. A setting of its own: `dtype` (float32, or bfloat16).
"""

from pathlib import Path

import torch
import transformers
from worker import counted, lengths_of, serve


def load_base(settings: dict) -> tuple:
    """Model and tokenizer of a GGUF file or a Hugging Face folder.

    Raises:
      ValueError: if the tokenizer makes other ids of the prompts.
    """
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    path = Path(settings["base"])
    gguf = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = str(path.parent if gguf else path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **gguf)
    for prompt, ids in zip(settings["prompts"], settings["prompt_ids"], strict=True):
        if (found := tokenizer(prompt)["input_ids"]) != ids:
            raise ValueError(f"prompt {prompt[:40]!r}: {found[:8]}... here, {ids[:8]}... there")
    dtype = getattr(torch, settings.get("dtype", "float32"))
    if gguf:  # its kernels for packed weights are downloads, and cannot train
        gguf["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **gguf)
    return model, tokenizer


class ForcedLengths(transformers.LogitsProcessor):
    """No end before a row's length, and nothing but the end there."""

    def __init__(self, prompt_tokens: int, lengths: list[int], end: list[int]):
        self.last = prompt_tokens - 1 + torch.tensor(lengths)  # where the end stands
        self.end = torch.tensor(end)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores in which each row can do nothing else."""
        scores[:, self.end] = -torch.inf
        scores[self.last <= input_ids.shape[1], self.end[0]] = 1e9
        return scores


def load(settings: dict) -> tuple[dict, dict]:
    """The cases of transformers."""
    model, tokenizer = load_base(settings)
    end, samples = tokenizer.eos_token_id, settings["group_size"]
    prompts = torch.tensor([ids for ids in settings["prompt_ids"] for _ in range(samples)])

    def sample(case: str) -> dict:
        lengths = lengths_of(settings, case)
        rule = ForcedLengths(prompts.shape[1], lengths, [end])
        with torch.no_grad():
            drawn = model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max(lengths),
                eos_token_id=end,
                pad_token_id=end,
                logits_processor=transformers.LogitsProcessorList([rule]),
            )
        ends = (drawn[:, prompts.shape[1] :] == end).int()
        lengths = torch.where(ends.any(1), ends.argmax(1) + 1, ends.shape[1]).tolist()
        return {"tokens": counted(settings, case, lengths)}

    facts = {"dtype": str(model.dtype), "adapter": "none"}
    facts |= {"transformers": transformers.__version__, "torch": torch.__version__}
    return {c: lambda c=c: sample(c) for c in ("sample", "sample_varied")}, facts


if __name__ == "__main__":
    serve(load)
