"""Remakes the goldens of `peft_oft/` with PEFT: rotations it wrote, and what it reads of ours.

Development only, as `make_peft_goldens.py`, after `write_peft_exports.py`. Both kinds of folders
have `reference.npz`: `tokens` int32 `[B, T]`, `logprobs` f32 `[B, T, V]` in float32, and by module
the whole rotation R `[in, in]`, by which PEFT multiplies an input from the right.

Not of `kv_b_proj`: transformers 5 gives it four dimensions, which PEFT takes for an image.
"""

import json
import shutil
import warnings
from pathlib import Path

import torch
from make_peft_goldens import FOLDER, load, reference
from peft import OFTConfig, PeftModel, get_peft_model
from peft.tuners.oft import OFTLayer
from transformers.utils import logging

WRITTEN, EXPORTS = FOLDER / "peft_oft" / "written", FOLDER / "peft_oft" / "exports"

# Case: the base, and PEFT's config.
CASES = {
    "blocks": ("qwen3_tied", {"oft_block_size": 8}),
    "exact_by_number": ("qwen3_tied", {"r": 2, "oft_block_size": 0, "use_cayley_neumann": False}),
    "shared_blocks": (
        "families/deepseek_v3",
        {"oft_block_size": 4, "block_share": True, "num_cayley_neumann_terms": 6},
    ),
}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    for name, (base, settings) in CASES.items():
        folder = WRITTEN / name
        shutil.rmtree(folder, ignore_errors=True)
        torch.manual_seed(0)
        latent = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
        targets = latent if "deepseek" in base else ["q_proj", "o_proj", "down_proj"]
        config = OFTConfig(target_modules=targets, task_type="CAUSAL_LM", **settings)
        model = get_peft_model(load(base), config)
        for key, tensor in model.named_parameters():
            if ".oft_R." in key:
                tensor.data = torch.randn(tensor.shape) / 8
        model.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)
        config = json.loads((folder / "adapter_config.json").read_text())
        config |= {"base_model_name_or_path": base, "target_modules": sorted(targets)}
        text = json.dumps(config, indent=2, sort_keys=True)
        (folder / "adapter_config.json").write_text(text + "\n")
        save_reference(folder, model)
    for folder in sorted(EXPORTS.iterdir()):
        config = json.loads((folder / "adapter_config.json").read_text())
        model = PeftModel.from_pretrained(load(config["base_model_name_or_path"]), folder)
        result = model.load_adapter(folder, adapter_name="again")
        missing = [key for key in result.missing_keys if "oft_" in key]
        if missing or result.unexpected_keys:
            raise SystemExit(
                f"{folder}: PEFT misses {missing} and did not expect {result.unexpected_keys}"
            )
        save_reference(folder, model)


def save_reference(folder: Path, model: PeftModel) -> None:
    rotations = {
        name: module.get_delta_weight("default").detach().numpy()
        for name, module in model.base_model.model.named_modules()
        if isinstance(module, OFTLayer)
    }
    reference(folder, model, rotations)


if __name__ == "__main__":
    main()
