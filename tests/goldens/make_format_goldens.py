"""Remakes the goldens of `formats/`: one weight of every deployed format, as independent readers
decode it.

Development only: `make goldens`. Each `.safetensors` file holds the stored tensors under their
suffixes, and `decoded_f32` (and `decoded_bf16` where the reader itself gives bf16) as bits; its
metadata say which scheme it is and whose decode it was. Codes take every value, and scales those
at the edges: the smallest, subnormal ones, negative ones.

compressed-tensors and transformers read their own formats. GPTQ, AWQ and ModelOpt have no reader
that runs on a CPU without further packages: for these the published unpacking is written out here
in torch.
"""

import json
import shutil
from pathlib import Path

import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    MXFP4PackedCompressor,
    MXFP8QuantizationCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FOLDER = Path(__file__).parent / "formats"
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
CT = "compressed-tensors 0.20.1"
HF = "transformers 5.24.0"
TORCH = "the published unpacking in torch"

Tensors = dict[str, torch.Tensor]


def main() -> None:
    torch.manual_seed(0)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    for bits, group, out, dtype in [
        (4, 32, 16, torch.bfloat16),
        (4, 64, 16, torch.float16),
        (4, 128, 16, torch.float32),
        (4, 24, 13, torch.bfloat16),
        (8, 32, 8, torch.bfloat16),
        (8, 0, 5, torch.float16),
    ]:
        for symmetric in (True, False):
            save_words(bits, group, out, dtype, symmetric)
    save_bytes("int-quantized_channel", 1)
    save_bytes("int-quantized_tensor", 0)
    save_nvfp4_inverse()
    save_nvfp4_direct()
    save_mxfp4("mxfp4-pack-quantized", "weight_packed", "weight_scale", torch.uint8)
    save_mxfp4("mxfp4_deepseek", "weight", "scale", E8M0)
    save_mxfp4_blocks()
    save_fp8_transformers("fp8_block_f32", torch.float32, "weight_scale_inv")
    save_fp8_transformers("fp8_block_bf16", torch.bfloat16, "weight_scale_inv")
    save_fp8_transformers("fp8_block_e8m0", E8M0, "scale")
    for name, args in {
        "fp8_partial_blocks": {"strategy": "block", "block_structure": [16, 32]},
        "fp8_channel": {"strategy": "channel"},
        "fp8_tensor": {"strategy": "tensor"},
    }.items():
        save_fp8(name, args, E4M3)
    save_fp8("fp8_e5m2", {"strategy": "channel"}, E5M2)
    save_mxfp8()
    for bits in (4, 8):
        for version in (1, 2):
            save_gptq(bits, version, act_order=False)
    save_gptq(4, 1, act_order=True)
    save_awq()


def save(name: str, scheme: dict, reader: str, tensors: Tensors, wide: torch.Tensor, **more):
    """Writes one golden; `wide` is the decode in f32, `more` may hold one in bf16."""
    assert wide.dtype == torch.float32
    decoded = {"decoded_f32": wide.contiguous().view(torch.int32)}
    if (narrow := more.get("narrow")) is not None:
        assert narrow.dtype == torch.bfloat16
        decoded["decoded_bf16"] = narrow.contiguous().view(torch.int16)
    held = {key: value.contiguous() for key, value in tensors.items()}
    # One entry: the package writes several in no fixed order.
    metadata = {"golden": json.dumps({"scheme": scheme, "reader": reader})}
    save_file(held | decoded, FOLDER / f"{name}.safetensors", metadata)


def all_codes(count: int, *shape: int) -> torch.Tensor:
    """Codes below `count` at random, every one of them at least once where there is room."""
    total = int(torch.Size(shape).numel())
    codes = torch.randint(0, count, (total,))
    codes[: min(count, total)] = torch.arange(min(count, total))
    return codes[torch.randperm(total)].reshape(shape)


def floats(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Scales of either sign, the first few at the edges of their type."""
    scales = (torch.randn(shape) * 0.1).to(dtype)
    info, flat = torch.finfo(dtype), scales.view(-1)
    edges = torch.tensor([info.tiny, info.smallest_normal * 2, 1.0, 0.0, -info.tiny / 2, 1e-30])
    if dtype != torch.float16:  # a subnormal of the type, which is one of f32 too
        edges = torch.cat([edges, torch.tensor([info.tiny / 16, -info.tiny / 4, info.tiny / 120])])
    count = min(len(edges), len(flat) // 2)
    flat[:count] = edges[:count].to(dtype)
    return scales


def save_words(bits: int, group: int, out: int, dtype: torch.dtype, symmetric: bool) -> None:
    width = 2 * group if group else 20
    groups, middle = (2, 2 ** (bits - 1)) if group else (1, 2 ** (bits - 1))
    args = QuantizationArgs(
        num_bits=bits,
        symmetric=symmetric,
        strategy="group" if group else "channel",
        group_size=group or None,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    codes = (all_codes(2**bits, out, width) - middle).to(torch.int8)
    tensors = {
        "weight_packed": pack_to_int32(codes, bits),
        "weight_scale": floats(dtype, out, groups),
        "weight_shape": torch.tensor([out, width]),
    }
    if not symmetric:
        zeros = (all_codes(2**bits, out, groups) - middle).to(torch.int8)
        tensors["weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0)

    def read(scale_dtype: torch.dtype) -> torch.Tensor:
        state = tensors | {"weight_scale": tensors["weight_scale"].to(scale_dtype)}
        return PackedQuantizationCompressor.decompress(state, scheme)["weight"]

    name = f"pack-quantized_int{bits}_g{group}_{'s' if symmetric else 'as'}ymmetric"
    facts = {"format": "pack-quantized", "bits": bits, "group": group, "symmetric": symmetric}
    narrow = read(torch.bfloat16) if dtype == torch.bfloat16 else None
    save(name, facts, CT, tensors, read(torch.float32), narrow=narrow)


def save_bytes(name: str, rows: int) -> None:
    args = QuantizationArgs(num_bits=8, strategy="channel" if rows else "tensor")
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = (all_codes(256, 24, 40) - 128).to(torch.int8)
    scale = floats(torch.float32, 24, 1) if rows else torch.tensor([3e-3])
    tensors = {"weight": weight, "weight_scale": scale}
    wide = IntQuantizationCompressor.decompress(tensors, scheme)["weight"]
    save(name, {"format": "int-quantized", "bits": 8, "rows": rows}, CT, tensors, wide)


def eighths(*shape: int) -> torch.Tensor:
    """e4m3 scales: every one that is not a NaN, subnormal and negative ones among them."""
    codes = all_codes(254, *shape)
    return (codes + (codes > 126)).to(torch.uint8).view(E4M3)


def pairs(out: int, width: int) -> torch.Tensor:
    """Bytes of two four-bit codes: each of the 256 pairs."""
    return all_codes(256, out, width // 2).to(torch.uint8)


def save_nvfp4_inverse() -> None:
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    tensors = {
        "weight_packed": pairs(16, 256),
        "weight_scale": eighths(16, 16),
        "weight_global_scale": torch.tensor([1717.3]),
    }
    narrow = NVFP4PackedCompressor.decompress(tensors, scheme)["weight"]
    wide = dequantize(
        x_q=unpack_fp4_from_uint8(tensors["weight_packed"], 16, 256, torch.float32),
        scale=tensors["weight_scale"].float(),
        args=args,
        global_scale=tensors["weight_global_scale"],
        dtype=torch.float32,
    )
    facts = {"format": "nvfp4", "scale": "weight_global_scale"}
    save("nvfp4-pack-quantized", facts, CT, tensors, wide, narrow=narrow)


def save_nvfp4_direct() -> None:
    tensors = {
        "weight": pairs(16, 256),
        "weight_scale": eighths(16, 16),
        "weight_scale_2": torch.tensor(3.3e-5),
    }
    scale = tensors["weight_scale"].float() * tensors["weight_scale_2"]
    codes = unpack_fp4_from_uint8(tensors["weight"], 16, 256, torch.float32)
    wide = (codes.unflatten(1, (-1, 16)) * scale[..., None]).flatten(1)
    save("nvfp4_modelopt", {"format": "nvfp4", "scale": "weight_scale_2"}, TORCH, tensors, wide)


def exponents(*shape: int) -> torch.Tensor:
    """E8M0 bytes but 255, which readers take for different things; 0 and 1 make subnormals."""
    codes = all_codes(255, *shape)
    codes.view(-1)[:4] = torch.tensor([0, 1, 254, 2])
    return codes.to(torch.uint8)


def save_mxfp4(name: str, codes: str, scales: str, dtype: torch.dtype) -> None:
    bytes_of = {"codes": pairs(12, 128), "scales": exponents(12, 4)}
    if dtype == E8M0:
        # As deployed: signed bytes. The package decodes them where their scales are E8M0.
        tensors = {codes: bytes_of["codes"].view(torch.int8), scales: bytes_of["scales"].view(E8M0)}
        read = Fp8Dequantize(None)._dequantize_one
        wide = read(tensors[codes], tensors[scales], torch.float32)
        narrow, reader = read(tensors[codes], tensors[scales], torch.bfloat16), HF
    else:
        tensors = {codes: bytes_of["codes"], scales: bytes_of["scales"]}
        args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        narrow = MXFP4PackedCompressor.decompress(tensors, scheme)["weight"]
        wide = dequantize(
            x_q=unpack_fp4_from_uint8(tensors[codes], 12, 128, torch.float32),
            scale=decompress_mx_scale(tensors[scales]).float(),
            args=args,
            dtype=torch.float32,
        )
        reader = CT
    save(name, {"format": "mxfp4", "scale": scales}, reader, tensors, wide, narrow=narrow)


def save_mxfp4_blocks() -> None:
    tensors = {
        "weight_blocks": pairs(12, 128).unflatten(1, (4, 16)),
        "weight_scales": exponents(12, 4),
    }

    def read(dtype: torch.dtype) -> torch.Tensor:
        one_expert = (tensor[None] for tensor in tensors.values())
        return convert_moe_packed_tensors(*one_expert, dtype=dtype)[0].T

    save(
        "mxfp4_gpt_oss",
        {"format": "mxfp4-blocks"},
        HF,
        tensors,
        read(torch.float32),
        narrow=read(torch.bfloat16),
    )


def eight_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """All finite values of an eight-bit float."""
    finite = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = finite[finite.float().isfinite()]
    return finite.view(torch.uint8)[all_codes(len(finite), *shape)].view(dtype)


def save_fp8_transformers(name: str, dtype: torch.dtype, suffix: str) -> None:
    scales = exponents(3, 4).view(E8M0) if dtype == E8M0 else floats(dtype, 3, 4)
    tensors = {"weight": eight_bits(E4M3, 48, 64), suffix: scales}
    read = Fp8Dequantize(None)._dequantize_one
    wide = read(tensors["weight"], tensors[suffix], torch.float32)
    narrow = read(tensors["weight"], tensors[suffix], torch.bfloat16)
    facts = {"format": "fp8", "rows": 16, "group": 16, "scale": suffix}
    save(name, facts, HF, tensors, wide, narrow=narrow)


def save_fp8(name: str, args: dict, dtype: torch.dtype) -> None:
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=8, type="float", **args)
    )
    rows, group = args.get("block_structure", (0 if args["strategy"] == "tensor" else 1, 0))
    out, width = 40, 72
    if group:
        shape = (-(-out // rows), -(-width // group))
    else:
        shape = (out, 1) if rows else (1,)
    scale = floats(torch.float32, *shape) if rows else torch.tensor([2.7e-3])
    tensors = {"weight": eight_bits(dtype, out, width), "weight_scale": scale}
    wide = FloatQuantizationCompressor.decompress(tensors, scheme)["weight"]
    save(name, {"format": "fp8", "rows": rows, "group": group}, CT, tensors, wide)


def save_mxfp8() -> None:
    args = QuantizationArgs(num_bits=8, type="float", strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    scales = exponents(12, 3).clamp(max=245)  # larger ones exceed bf16 in the reader
    tensors = {"weight": eight_bits(E4M3, 12, 96), "weight_scale": scales}
    narrow = MXFP8QuantizationCompressor.decompress(tensors, scheme)["weight"]
    wide = dequantize(
        tensors["weight"], decompress_mx_scale(scales).float(), args=args, dtype=torch.float32
    )
    facts = {"format": "fp8", "rows": 1, "group": 32}
    save("mxfp8-quantized", facts, CT, tensors, wide, narrow=narrow)


def nibbles(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes `[n, m]` packed along their rows into int32 words, lowest bits first."""
    each = 32 // bits
    shifts = torch.arange(each) * bits
    words = (codes.unflatten(0, (-1, each)).long() << shifts[:, None]).sum(1)
    return (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def save_gptq(bits: int, version: int, act_order: bool) -> None:
    out, width, group = 16, 64, 32
    codes, zeros = all_codes(2**bits, width, out), all_codes(2**bits, width // group, out)
    stored = zeros - 1 if version == 1 else zeros
    groups = torch.arange(width) // group
    if act_order:
        groups = groups[torch.randperm(width)]
    tensors = {
        "qweight": nibbles(codes, bits),
        "qzeros": nibbles((stored % 2**bits).T, bits).T,
        "scales": floats(torch.float16, width // group, out),
        "g_idx": groups.int(),
    }

    shifts = torch.arange(0, 32, bits)
    weight = tensors["qweight"][:, None, :] >> shifts[None, :, None] & 2**bits - 1
    zero = tensors["qzeros"][:, :, None] >> shifts & 2**bits - 1
    zero = (zero + (version == 1) & 2**bits - 1).flatten(1)
    weight, index = weight.flatten(0, 1), tensors["g_idx"].long()
    wide = ((weight - zero[index]).float() * tensors["scales"].float()[index]).T
    name = f"gptq_v{version}_int{bits}{'_act_order' if act_order else ''}"
    facts = {"format": "gptq", "bits": bits, "group": group, "symmetric": False}
    facts |= {"minus_one": version == 1, "ordered": not act_order}
    save(name, facts, TORCH, tensors, wide)


def save_awq() -> None:
    out, width, group = 24, 64, 32
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    codes, zeros = all_codes(16, width, out), all_codes(16, width // group, out)

    def pack(codes: torch.Tensor) -> torch.Tensor:
        return nibbles(codes.unflatten(1, (-1, 8))[..., order].flatten(1).T, 4).T

    tensors = {
        "qweight": pack(codes),
        "qzeros": pack(zeros),
        "scales": floats(torch.float16, width // group, out),
    }

    def read(words: torch.Tensor) -> torch.Tensor:
        in_word = words[..., None] >> torch.arange(0, 32, 4) & 15
        return in_word[..., torch.argsort(order)].flatten(1)

    weight, zero = read(tensors["qweight"]), read(tensors["qzeros"])
    spread = [x.repeat_interleave(group, 0) for x in (zero, tensors["scales"].float())]
    wide = ((weight - spread[0]).float() * spread[1]).T
    facts = {"format": "awq", "bits": 4, "group": group, "symmetric": False}
    save("awq", facts, TORCH, tensors, wide)


if __name__ == "__main__":
    main()
