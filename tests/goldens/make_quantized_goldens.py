"""Adds to the folders of `quantized/` what other packages read in them.

Development only: `make goldens`, after `write_quantized_folders.py`. `reference.npz` holds
`tokens` int32 `[B, T]` and `logprobs` f32 `[B, T, V]`, computed in float32 from the weights that
compressed-tensors (for gpt-oss' blocks, transformers) decodes; `weights.json` the sha256 of each of
those weights as f32. transformers then loads the folder itself, dequantised, and must give the same
in bf16's precision: all but experts in NVFP4, whose overall scale its 5.24.0 leaves out.
"""

import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.utils.match import match_name
from make_goldens import save_reference
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FOLDER = Path(__file__).parent / "quantized"
NOT_READ = ("nvfp4",)  # by transformers 5.24.0 itself


def main() -> None:
    for folder in sorted(FOLDER.iterdir()):
        config = json.loads((folder / "config.json").read_text())
        decoded = decode(folder, config["quantization_config"])
        with tempfile.TemporaryDirectory() as plain:
            del config["quantization_config"]
            (Path(plain) / "config.json").write_text(json.dumps(config))
            save_file(decoded, Path(plain) / "model.safetensors", {"format": "pt"})
            torch.manual_seed(0)
            save_reference(folder, plain)
        stored = load_file(folder / "model.safetensors")
        low = {k: v for k, v in decoded.items() if k not in stored or stored[k].itemsize == 1}
        digests = {k: hashlib.sha256(v.numpy().tobytes()).hexdigest() for k, v in low.items()}
        (folder / "weights.json").write_text(json.dumps(digests, indent=2, sort_keys=True) + "\n")
        if folder.name not in NOT_READ:
            compare_with_transformers(folder)


def decode(folder: Path, quantization: dict) -> dict[str, torch.Tensor]:
    """All weights as a plain checkpoint in float32."""
    stored = load_file(folder / "model.safetensors")
    if quantization["quant_method"] == "mxfp4":
        return {k: v.contiguous() for k, v in decode_blocks(stored).items()}
    config = QuantizationConfig.model_validate(quantization)
    (scheme,) = config.config_groups.values()
    out = {}
    for module in sorted({name.rsplit(".", 1)[0] for name in stored}):
        state = {
            name.removeprefix(f"{module}."): tensor
            for name, tensor in stored.items()
            if name.rsplit(".", 1)[0] == module
        }
        is_low = "weight_scale" in state
        ignored = any(match_name(module, pattern) for pattern in config.ignore)
        assert is_low != ignored or state["weight"].ndim == 1, module
        weight = decode_module(state, scheme, config.format) if is_low else state["weight"]
        out[f"{module}.weight"] = weight.float().contiguous()
    return out


def decode_module(
    state: dict[str, torch.Tensor], scheme: QuantizationScheme, form: str
) -> torch.Tensor:
    """compressed-tensors' decode in float32; its own for four-bit floats rounds to bf16 between."""
    if "pack" in form and "fp4" in form:
        rows, half = state["weight_packed"].shape
        codes = unpack_fp4_from_uint8(state["weight_packed"], rows, half * 2, torch.float32)
        scale = state["weight_scale"]
        scale = decompress_mx_scale(scale) if form.startswith("mx") else scale
        overall = state.get("weight_global_scale")
        return dequantize(
            codes, scale.float(), args=scheme.weights, global_scale=overall, dtype=torch.float32
        )
    wide = state | {"weight_scale": state["weight_scale"].float()}
    compressor = BaseCompressor.get_value_from_registry(form)
    return compressor.decompress(wide, scheme)["weight"]


def decode_blocks(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """gpt-oss: transformers gives `[E, in, rows]` as the plain tensors stand."""
    out = {}
    for name, tensor in stored.items():
        if name.endswith("_blocks"):
            scales = stored[name.removesuffix("_blocks") + "_scales"]
            wide = convert_moe_packed_tensors(tensor, scales, dtype=torch.float32)
            out[name.removesuffix("_blocks")] = wide
        elif not name.endswith("_scales"):
            out[name] = tensor.float()
    return out


def compare_with_transformers(folder: Path) -> None:
    """The folder as transformers loads it, against the reference."""
    reference = np.load(folder / "reference.npz")
    how = (Mxfp4Config if folder.name == "mxfp4_blocks" else CompressedTensorsConfig)(
        dequantize=True
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=how
    ).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(reference["tokens"]).long()).logits
    gap = np.abs(torch.log_softmax(logits, -1).numpy() - reference["logprobs"])
    print(f"{folder.name}: transformers' own reading differs by {gap.mean():.1e} in the mean")
    assert gap.mean() < 0.02, folder.name


if __name__ == "__main__":
    main()
