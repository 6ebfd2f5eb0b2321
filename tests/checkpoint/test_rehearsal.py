"""A base out of `config.json` alone, beside the one that loading the files gives."""

import shutil
import time
from pathlib import Path

import deployed
import jax
import pytest
from deployed import CASES, Case

from orbit_jax.checkpoint.huggingface import load_base
from orbit_jax.checkpoint.layout import Leaf
from orbit_jax.checkpoint.rehearsal import abstract_base
from orbit_jax.checkpoint.scheme import PLAIN, Scheme
from orbit_jax.quant.qtensor import QTensor

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests/goldens"
KIMI = ROOT / "configs/models/kimi_k2"
FOLDERS = sorted(
    str(path.parent.relative_to(GOLDENS))
    for path in GOLDENS.glob("**/config.json")
    if (path.parent / "model.safetensors").is_file() and "act_order" not in str(path)
)
# Whose float types are not those of deployed checkpoints, which have f32 for the correction of a
# router and, in Qwen's and compressed-tensors' FP8, bf16 for scales.
OF_OTHER_TYPES = ("deepseek", "kimi", "llama_fp8_channels", "qwen3_moe_fp8")


def alone(folder: Path, to: Path) -> Path:
    """A folder with no more than the configuration."""
    to.mkdir()
    for name in ("config.json", "hf_quant_config.json"):
        if (folder / name).is_file():
            shutil.copy(folder / name, to / name)
    return to


def structure(base: dict, types: bool = True) -> dict:
    """Shapes, types and static fields; without types, those of floats are left out."""
    is_weight = lambda node: isinstance(node, QTensor)  # noqa: E731
    kept = {"subnormal": False} if types else {"subnormal": False, "scale_dtype": ""}
    base = jax.tree.map(lambda q: q.replace(**kept) if is_weight(q) else q, base, is_leaf=is_weight)
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name if types else ""), base)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_config_alone_gives_the_structure_of_its_checkpoint(name: str, tmp_path: Path):
    config, base = load_base(GOLDENS / name)
    found, shapes = abstract_base(alone(GOLDENS / name, tmp_path / "alone"))
    types = not any(other in name for other in OF_OTHER_TYPES)
    assert found == config
    assert structure(shapes, types) == structure(base, types)


def deepseek_v4() -> Case:
    """Experts in MXFP4, all else in FP8 by blocks whose scales are powers of two."""

    def scheme(leaf: Leaf) -> Scheme:
        if leaf.kind != "Linear" or not leaf.lead:
            return PLAIN
        if ".experts." in leaf.modules[0]:
            return Scheme("mxfp4", scale="scale")
        return Scheme("fp8", rows=16, group=16, scale="scale")

    config = deployed.quantised("fp8", fmt="e4m3", weight_block_size=[16, 16])
    hf = deployed.family("deepseek_v3", expert_dtype="fp4", moe_intermediate_size=32, **config)
    return Case(hf, scheme, scale_type="float8_e8m0fnu")


@pytest.mark.parametrize("name", [*sorted(CASES.keys() - {"gptq_act_order"}), "deepseek_v4"])
def test_every_way_of_quantising_is_known_by_its_config(name: str, tmp_path: Path):
    deployed.write((CASES | {"deepseek_v4": deepseek_v4})[name](), tmp_path / "whole")
    config, base = load_base(tmp_path / "whole")
    found, shapes = abstract_base(alone(tmp_path / "whole", tmp_path / "alone"))
    assert found == config
    assert structure(shapes, types=False) == structure(base, types=False)


def test_act_order_cannot_be_known_and_is_refused(tmp_path: Path):
    folder = alone(GOLDENS / "deployed/llama_gptq_act_order", tmp_path / "alone")
    with pytest.raises(ValueError, match=r"desc_act=true orders .* that only the files say: down"):
        abstract_base(folder)


def test_a_model_of_a_trillion_parameters_takes_seconds():
    start = time.process_time()
    _, base = abstract_base(KIMI)
    assert time.process_time() - start < 6
    experts = base["layers"][1]["mlp"]["experts"]["up_proj"]
    assert experts.codes.shape == (60, 384, 2048, 3584)
    assert experts.shape == (60, 384, 2048, 7168)
    assert (experts.format, experts.group_size, experts.scale_dtype) == ("int4", 32, "bfloat16")
    assert base["layers"][1]["mlp"]["shared_experts"]["up_proj"].format == "bfloat16"
