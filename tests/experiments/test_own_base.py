"""A family and a format of one's own, named in a config; no file of the package changes.

The shipped base is written anew, under another family's names and in another packing. It must be
read back as the same bits, and a run on it must be the run on the shipped one.
"""

import dataclasses
import json
import re
import sys
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT)]

import inspect_checkpoint  # noqa: E402
import own_format  # noqa: E402
import ppo_math  # noqa: E402

from configs import tiny_moe  # noqa: E402
from orbit_jax.checkpoint import quantization  # noqa: E402
from orbit_jax.checkpoint.base import load_base  # noqa: E402
from orbit_jax.checkpoint.formats import FORMATS, unpack  # noqa: E402
from orbit_jax.checkpoint.safetensors_io import open_checkpoint, write_safetensors  # noqa: E402
from orbit_jax.checkpoint.scheme import Scheme  # noqa: E402
from orbit_jax.config import Config, from_config_dict  # noqa: E402
from orbit_jax.model.families import FAMILIES, facts  # noqa: E402
from orbit_jax.quant.qtensor import dequantize  # noqa: E402
from orbit_jax.runs.metrics import read_metrics  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_once")

SHIPPED = ROOT / tiny_moe.get_config().base.path
FAMILY, FORMAT = "experiments/own_family.py:tower", "experiments/own_format.py:halves"


@pytest.fixture(autouse=True)
def what_is_known_is_known_to_one_test():
    with patch.dict(FAMILIES), patch.dict(FORMATS), patch.dict(quantization._METHODS):
        yield


def recipe(root: Path, base: Path = SHIPPED, own: tuple[str, ...] = (), **fields) -> Config:
    config = tiny_moe.get_config("test")
    config.base.path, config.run.root = str(base), str(root)
    config.base.own = tuple(str(ROOT / name) for name in own)
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
    return from_config_dict(config)


def rewritten(folder: Path, family: bool, packing: bool) -> Path:
    """The shipped base as a tower, in halves, or both."""
    folder.mkdir()
    tensors = {name: np.array(ref.map()) for name, ref in open_checkpoint(SHIPPED).items()}
    hf = json.loads((SHIPPED / "config.json").read_text())
    if packing:
        hf["quantization_config"] = {"quant_method": "halves", "group_size": 32}
        tensors = in_halves(tensors)
    if family:
        hf = renamed_fields(hf)
        tensors = {renamed(name): tensor for name, tensor in tensors.items()}
    (folder / "config.json").write_text(json.dumps(hf))
    write_safetensors(folder / "model.safetensors", tensors)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (SHIPPED / name).exists():
            (folder / name).write_bytes((SHIPPED / name).read_bytes())
    return folder


def in_halves(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Words of eight codes, the lowest bits first, to halves of rows in two's complement."""
    found = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight_packed":
            codes = tensor.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
            signed = (codes.reshape(len(tensor), -1).astype(np.uint8) - 8) & 15
            left, right = np.split(signed, 2, axis=1)
            found[f"{module}.weight_codes"] = left | right << 4
        elif suffix != "weight_shape":
            found[name] = tensor
    return found


def renamed_fields(hf: dict) -> dict:
    names = {"hidden_size": "width", "num_hidden_layers": "depth", "num_attention_heads": "heads"}
    names |= {"num_key_value_heads": "key_heads", "moe_intermediate_size": "expert_width"}
    own = {names.get(name, name): value for name, value in hf.items()}
    if "ignore" in (quantization := own["quantization_config"]):
        plain = [renamed(name) for name in quantization["ignore"]]
        own["quantization_config"] = quantization | {"ignore": plain}
    return own | {"model_type": "tower", "norm_queries_and_keys": True}


def renamed(name: str) -> str:
    words = {"self_attn": "attention", "q_proj": "query", "k_proj": "key", "v_proj": "value"}
    words |= {"o_proj": "out", "mlp": "moe", "gate": "router"}
    words |= {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    return ".".join(words.get(part, part) for part in name.split("."))


@pytest.mark.parametrize(
    ("family", "packing"),
    [(True, False), (False, True), (True, True)],
    ids=["tower", "halves", "both"],
)
def test_the_base_is_read_as_the_same_bits_under_other_names_and_in_another_packing(
    tmp_path, family, packing
):
    recipe(tmp_path, own=(FAMILY,) * family + (FORMAT,) * packing)
    model, base = load_base(rewritten(tmp_path / "base", family, packing))
    known, expected = load_base(SHIPPED)
    assert model.family == ("tower" if family else "qwen3_moe")
    assert dataclasses.replace(model, family=known.family) == known  # so log-probs are the same
    assert jax.tree.structure(base) == jax.tree.structure(expected)  # static fields as well
    for one, other in zip(jax.tree.leaves(base), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_an_inspection_knows_what_it_is_told(tmp_path, monkeypatch, capsys):
    base = str(rewritten(tmp_path / "base", family=True, packing=True))
    told = [word for name in (FAMILY, FORMAT) for word in ("--own", str(ROOT / name))]
    monkeypatch.setattr(sys, "argv", ["inspect_checkpoint.py", base, *told])
    assert inspect_checkpoint.main() == 0
    said = capsys.readouterr().out
    assert {"tower", "halves"} <= set(said.split())


@pytest.mark.long
def test_a_run_on_it_is_the_run_on_the_shipped_base(tmp_path):
    base = rewritten(tmp_path / "base", family=True, packing=True)
    ppo_math.run(recipe(tmp_path / "own", base, (FAMILY, FORMAT), steps=1))
    ppo_math.run(recipe(tmp_path / "known", steps=1))
    own, known = (next((tmp_path / name).iterdir()) for name in ("own", "known"))
    (row,), (expected,) = ([r for r in read_metrics(f) if "tokens" in r] for f in (own, known))
    assert row["parity/max_abs_diff"] == 0
    assert row["update/applied"] == 1
    of_time = ("seconds/", "tokens_per_second", "hardware/", "memory/")
    for name in row.keys() | expected.keys():
        assert name.startswith(of_time) or row[name] == expected[name]
    samples = "samples/step_000001.jsonl"
    assert (own / samples).read_bytes() == (known / samples).read_bytes()


def test_the_switch_decides_about_a_part_of_the_layers():
    recipe(Path("runs"), own=(FAMILY,))
    hf = renamed_fields(json.loads((SHIPPED / "config.json").read_text()))
    assert facts(hf)["qk_norm"] == "head"
    assert facts(hf | {"norm_queries_and_keys": False})["qk_norm"] == ""


@pytest.mark.parametrize("scales", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_a_widened_weight_has_the_bits_of_the_reference_decode(scales):
    recipe(Path("runs"), own=(FORMAT,))
    rng = np.random.default_rng(0)
    scheme, shape = Scheme("halves", bits=4, group=16), (6, 48)
    tensors = {
        "weight_codes": rng.integers(0, 256, (6, 24), np.uint8),  # each code somewhere
        "weight_scale": rng.standard_normal((6, 3)).astype(scales),
    }
    expected = own_format.decode(scheme, shape, tensors)
    assert len(np.unique(expected / np.repeat(tensors["weight_scale"], 16, axis=1))) >= 16
    q = jax.tree.map(jnp.asarray, unpack(scheme, shape, tensors))
    np.testing.assert_array_equal(dequantize(q, jnp.float32), expected)
    narrow = expected.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(dequantize(q, jnp.bfloat16), narrow)


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        ("thing = 3", "thing", r"config.base.own='.*own.py:thing': it is 3: give an .*Family or"),
        ("", "thing", "has no thing"),
        ("", "a thing", "name each as 'my_file.py:name'"),
        (
            "from orbit_jax.model.family import Family\nthing = Family('llama', dict)",
            "thing",
            "'llama' is a family of this package",
        ),
        (
            "from orbit_jax.checkpoint.quantization import Method\nthing = Method('awq', dict)",
            "thing",
            "quant_method 'awq' is one of this package",
        ),
        (
            "from orbit_jax.checkpoint.quantization import Method\n"
            "thing = Method('mine', dict, {'fp8': None})",
            "thing",
            "format 'fp8' is one of this package",
        ),
    ],
)
def test_what_is_neither_or_takes_a_name_of_the_package_is_refused(tmp_path, text, name, sentence):
    (tmp_path / "own.py").write_text(text)
    config = tiny_moe.get_config("test")
    config.base.own = (f"{tmp_path}/own.py:{name}",)
    with pytest.raises(ValueError, match=sentence):
        from_config_dict(config)
    assert FAMILIES["llama"].name == "llama"


def test_a_checkpoint_cannot_name_code_that_runs(tmp_path):
    """Only a config does: a downloaded folder would be anybody's."""
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nthing = 1")
    hf = json.loads((SHIPPED / "config.json").read_text())
    hf |= {"model_type": f"{tmp_path}/code.py:thing"}
    with pytest.raises(ValueError, match=re.escape("describe your own in base.own")):
        facts(hf)
    assert not (tmp_path / "ran").exists()
