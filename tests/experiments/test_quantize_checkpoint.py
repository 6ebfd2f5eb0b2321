"""experiments/quantize_checkpoint.py: from a bf16 folder to a low-bit one, with its price."""

import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from orbit_jax.checkpoint.huggingface import load_base
from orbit_jax.checkpoint.write_huggingface import save_base
from orbit_jax.divergence import Passage
from orbit_jax.quant.qtensor import QTensor, dequantize, from_float

ROOT = Path(__file__).parents[2]
TINY = ROOT / "orbit_jax" / "assets" / "tiny_moe_int4"
MIXTRAL = ROOT / "tests" / "goldens" / "families" / "mixtral"
sys.path.insert(0, str(ROOT / "experiments"))

import quantize_checkpoint  # noqa: E402


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """The shipped base in bf16, with its tokenizer."""
    folder = tmp_path_factory.mktemp("plain")
    is_packed = lambda node: isinstance(node, QTensor)  # noqa: E731
    widen = jax.jit(dequantize, static_argnums=1)
    base = jax.tree.map(
        lambda w: from_float(widen(w, jnp.bfloat16)) if is_packed(w) else w,
        load_base(TINY)[1],
        is_leaf=is_packed,
    )
    hf = json.loads((TINY / "config.json").read_text())
    del hf["quantization_config"]
    save_base(folder, hf, base, [*TINY.glob("token*.json"), TINY / "generation_config.json"])
    return folder


def test_a_base_is_quantised_measured_and_reported(plain, tmp_path, capsys):
    out = tmp_path / "out"
    quantize_checkpoint.run(plain, out, "fp8", only="experts", tokens=80, problems=12)
    report = json.loads((out / "quantization.json").read_text())
    assert report["format"] == "fp8"
    assert set(report["groups"]) == {rf"re:.*layers\.{i}\.mlp\.experts\b" for i in range(3)}
    assert 0.01 < report["relative_error"] < 0.03
    assert report["bytes_after"] / report["bytes_before"] == pytest.approx(0.5, abs=0.02)
    assert report["heldout_problems"] == 12
    assert 0 <= report["heldout_pass_after"] <= 1
    assert 0 < report["kl_per_token"] < 0.1
    assert all(0 < group["kl_alone"] < 0.1 for group in report["groups"].values())
    assert 80 <= report["tokens"] < 120
    for path in TINY.glob("token*.json"):
        assert (out / path.name).read_bytes() == path.read_bytes()
    text = capsys.readouterr().out
    for said in ("MB/s", "ETA", "mlp.experts", "12", "KL per token"):
        assert said in text


def test_without_a_tokenizer_ids_are_random(tmp_path, capsys):
    report = quantize_checkpoint.run(MIXTRAL, tmp_path / "out", "mxfp4", tokens=100)
    assert report["tokens_of"].startswith("random ids")
    assert report["kl_per_token"] > 0
    assert "heldout_problems" not in report


def test_nothing_is_loaded_if_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quantize_checkpoint, "load_base", None)
    report = quantize_checkpoint.run(MIXTRAL, tmp_path / "out", "int4", tokens=0, problems=0)
    assert "kl_per_token" not in report
    assert report["group"] == 32
    load_base(tmp_path / "out")


def test_groups_that_stand_out_are_suggested_worst_first():
    costs = {"a": 0.1, "b": 5.0, "c": 0.1, "d": 4.0, "e": 0.2}
    groups = {name: {"kl_alone": kl} for name, kl in costs.items()}
    assert quantize_checkpoint.suggest(groups) == ["b", "d"]
    assert quantize_checkpoint.suggest({name: {"kl_alone": 1.0} for name in costs}) == []


def test_suggestions_are_shown_as_they_are_typed(capsys):
    group = {"relative_error": 0.1, "bytes_before": 4e6, "bytes_after": 1e6, "kl_alone": 0.5}
    name = r"re:.*layers\.3\.self_attn\.o_proj$"
    report = {"kl_per_token": 0.6, "kl_largest": 2.0, "tokens": 9, "tokens_of": "random ids"}
    quantize_checkpoint.show(report | {"groups": {name: group}, "suggested_ignore": [name]})
    out = capsys.readouterr().out
    assert f"to leave alone (KL 0.50000, 3.00 MB more): --ignore '{name}'" in out
    quantize_checkpoint.show(report | {"groups": {name: group}, "suggested_ignore": []})
    assert "no group stands out" in capsys.readouterr().out


def test_passages_are_taken_until_enough_tokens_count():
    passages = [Passage([1] * 10, 5)] * 4
    assert [len(quantize_checkpoint.cut(passages, n)) for n in (1, 5, 6, 99)] == [1, 1, 2, 4]


def test_a_refusal_is_one_sentence(tmp_path, monkeypatch, capsys):
    shutil.copytree(MIXTRAL, tmp_path / "out")
    arguments = ["quantize_checkpoint.py", str(MIXTRAL), str(tmp_path / "out"), "--format", "fp8"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stopped:
        quantize_checkpoint.main()
    assert stopped.value.code == 2
    assert "already exists: name a new folder" in capsys.readouterr().err.splitlines()[-1]


def test_help_answers(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["quantize_checkpoint.py", "--help"])
    with pytest.raises(SystemExit) as stopped:
        quantize_checkpoint.main()
    assert stopped.value.code == 0
    assert "--only" in capsys.readouterr().out
