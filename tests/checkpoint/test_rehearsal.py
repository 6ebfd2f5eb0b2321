"""A base out of `config.json` alone, beside the one that loading the files gives."""

import shutil
import time
from pathlib import Path

import deployed
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deployed import CASES, Case

from orbit_jax.checkpoint.huggingface import load_base
from orbit_jax.checkpoint.layout import Leaf
from orbit_jax.checkpoint.placing import Placement
from orbit_jax.checkpoint.rehearsal import abstract_base, random_base, random_hash
from orbit_jax.checkpoint.scheme import PLAIN, Scheme
from orbit_jax.quant.qtensor import QTensor, dequantize

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


widen = jax.jit(dequantize, static_argnums=1)
is_weight = lambda node: isinstance(node, QTensor)  # noqa: E731


def alone(folder: Path, to: Path) -> Path:
    """A folder with no more than the configuration."""
    to.mkdir()
    for name in ("config.json", "hf_quant_config.json"):
        if (folder / name).is_file():
            shutil.copy(folder / name, to / name)
    return to


def structure(base: dict, types: bool = True) -> dict:
    """Shapes, types and static fields; without types, those of floats are left out."""
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


every_known_case = pytest.mark.parametrize(
    "name", [*sorted(CASES.keys() - {"gptq_act_order"}), "deepseek_v4"]
)


@every_known_case
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


@every_known_case
def test_random_weights_are_of_an_ordinary_size_in_the_structure_of_the_shapes(
    name: str, tmp_path: Path
):
    deployed.write((CASES | {"deepseek_v4": deepseek_v4})[name](), tmp_path / "whole")
    folder = alone(tmp_path / "whole", tmp_path / "alone")
    shapes = abstract_base(folder)[1]
    told = []
    base = random_base(folder, 3, Placement(progress=lambda *counts: told.append(counts)))[1]
    assert structure(base) == structure(shapes)
    assert told[-1][0] == told[-1][1] > 0
    for weight in jax.tree.leaves(base, is_leaf=is_weight):
        wide = np.asarray(widen(weight, jnp.float32) if is_weight(weight) else weight, np.float32)
        assert np.isfinite(wide).all()
        if is_weight(weight):
            assert not weight.subnormal
            assert 0.6 < wide.std() * weight.shape[-1] ** 0.5 < 1.6, weight.format
            assert abs(wide.mean()) < 0.2 * wide.std()


def test_random_weights_follow_from_the_seed_and_no_two_are_alike():
    folder = ROOT / "configs/models/kimi_k2_tiny"
    first, again, other = (random_base(folder, seed)[1] for seed in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, first, other)))
    experts = np.asarray(first["layers"][1]["mlp"]["experts"]["up_proj"].codes)
    experts = experts.reshape(-1, *experts.shape[2:])  # of all layers
    assert len({expert.tobytes() for expert in experts}) == len(experts) == 32
    assert random_hash(folder, 1) != random_hash(folder, 2)
    assert random_hash(folder, 1) != random_hash(ROOT / "configs/models/moe_1600b_tiny", 1)
