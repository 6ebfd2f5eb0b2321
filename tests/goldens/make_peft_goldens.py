"""Remakes the goldens of `peft/` with PEFT: adapters that it wrote, and what it reads of ours.

Development only: `make goldens` (written with torch 2.13.0, transformers 5.24.0, peft 0.21.2).
`peft/written/<case>` is a folder that PEFT saved for one of the bases beside this file;
`peft/exports/<case>` is one that `write_peft_exports.py` wrote with this package, which PEFT must
load without a missing or an unexpected key. Both have `reference.npz`: `tokens` int32 `[B, T]`,
`logprobs` f32 `[B, T, V]` in float32, and f32 deltas by module or parameter, those of experts as
`[E, out, in]`.

Values are quarters, so that products and their sums are exact in f32 in any order.
"""

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer, ParamWrapper
from transformers import AutoModelForCausalLM
from transformers.utils import logging

FOLDER = Path(__file__).parent
WRITTEN, EXPORTS = FOLDER / "peft" / "written", FOLDER / "peft" / "exports"
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}

# Case: the base, and PEFT's config.
CASES = {
    "dense_patterns": (
        "qwen3_tied",
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 1, "v_proj": 4},
            "alpha_pattern": {r"1\.self_attn\.q_proj": 4, r"self_attn\.v_proj": 2},
        },
    ),
    "rank_stabilized": (
        "qwen3_tied",
        {"r": 8, "lora_alpha": 16, "use_rslora": True, "target_modules": ["o_proj", "gate_proj"]},
    ),
    "experts_fused": ("qwen3_moe", {"target_modules": ["o_proj"], **EXPERTS}),
    "down_alone": ("qwen3_moe", {"target_modules": [], "target_parameters": ["experts.down_proj"]}),
    "experts_by_name": (
        "qwen3_moe",
        {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
    ),
    "gpt_oss": (
        "families/gpt_oss_no_window_small_limit",
        {"target_modules": ["q_proj"], **EXPERTS},
    ),
    "mixtral": ("families/mixtral_window_tied", {"target_modules": [], **EXPERTS}),
    "deepseek": (
        "families/deepseek_v3",
        {
            "lora_alpha": 1,
            "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"],
            **EXPERTS,
        },
    ),
}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    for name, (base, settings) in CASES.items():
        folder = WRITTEN / name
        shutil.rmtree(folder, ignore_errors=True)
        torch.manual_seed(0)
        config = LoraConfig(**{"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM"} | settings)
        model = get_peft_model(load(base), config)
        for key, tensor in model.named_parameters():
            if ".lora_" in key:
                tensor.data = torch.randint(-4, 5, tensor.shape) / 4
        model.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = base
        for field in ("target_modules", "target_parameters"):  # sets, in any order
            config[field] = sorted(config[field]) if config[field] else config[field]
        text = json.dumps(config, indent=2, sort_keys=True)
        (folder / "adapter_config.json").write_text(text + "\n")
        reference(folder, model, deltas(model))
    for folder in sorted(EXPORTS.iterdir()):
        config = json.loads((folder / "adapter_config.json").read_text())
        base = load(config["base_model_name_or_path"])
        model = PeftModel.from_pretrained(base, folder)
        result = model.load_adapter(folder, adapter_name="again")
        missing = [key for key in result.missing_keys if "lora_" in key]
        if missing or result.unexpected_keys:
            raise SystemExit(
                f"{folder}: PEFT misses {missing} and did not expect {result.unexpected_keys}"
            )
        reference(folder, model, deltas(model))


def load(base: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        FOLDER / base,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()


def reference(folder: Path, model: PeftModel, updates: dict[str, np.ndarray]) -> None:
    """Writes `reference.npz`: what the adapted model says, and its updates."""
    torch.manual_seed(1)
    tokens = torch.randint(0, model.config.vocab_size, (1, 12))
    with torch.no_grad():
        logprobs = model(input_ids=tokens).logits.log_softmax(-1)
    np.savez_compressed(
        folder / "reference.npz",
        tokens=tokens.numpy().astype(np.int32),
        logprobs=logprobs.numpy(),
        **updates,
    )


def deltas(model: PeftModel) -> dict[str, np.ndarray]:
    found = {}
    for name, module in model.base_model.model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        delta = module.get_delta_weight("default").detach()
        if isinstance(module, ParamWrapper):
            name = f"{name.replace('.base_layer', '')}.{module.parameter_name}"
            if getattr(module.get_base_layer(), "is_transposed", False):
                delta = delta.transpose(1, 2)
        found[name] = delta.numpy()
    return found


if __name__ == "__main__":
    main()
