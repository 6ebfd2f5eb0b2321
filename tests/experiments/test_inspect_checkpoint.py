"""The printed inspection: what it says, how wide it is, how it ends."""

import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT)]

import inspect_checkpoint  # noqa: E402

GOLDENS = ROOT / "tests" / "goldens"
BASE = ROOT / "orbit_jax" / "assets" / "tiny_moe_int4"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the experiment; gives its status and what it printed."""

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["inspect_checkpoint.py", *map(str, arguments)])
        status = inspect_checkpoint.main()
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return call


def test_a_base_that_loads_is_told_in_tables(run, tmp_path):
    status, text = run(BASE, "--rank", "4", "--json", tmp_path / "facts.json")
    assert status == 0
    words = " ".join(text.split())
    for said in (
        "3 sparse (0-2)",
        "8 of width 96, 2 visited by a token",
        "261 ids, 258 end a completion; a chat template",
        "0-2 mlp.experts.down_proj pack-quantized",
        "24 165.89 kB 0.5625",
        "parameters 1,073,216",
        "in all 75,264 150.53 kB 903.17 kB",
        "left alone: embed_tokens, mlp.gate; norms",
    ):
        assert said in words, said
    assert text.rstrip().endswith("would load")
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert (facts["loads"], facts["parameters"], facts["refusals"]) == (True, 1073216, [])
    assert facts["config"]["family"] == "qwen3_moe"
    assert facts["weights"][0]["name"] == "embed_tokens"


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "kimi_k25"])
def test_lines_fit_a_hundred_columns(run, name):
    status, text = run(GOLDENS / "families" / name)
    assert status == 0
    tables = [line for line in text.splitlines() if str(GOLDENS) not in line]
    assert max(map(len, tables)) <= 100


def test_a_gguf_file_is_told(run):
    status, text = run(GOLDENS / "gguf" / "k_quants.gguf")
    assert status == 0
    assert "Q4_K" in text


def test_every_refusal_is_printed_and_the_status_is_1(run, tmp_path):
    shutil.copytree(GOLDENS / "llama_sharded", tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text('{"model_type": "unheard"}')
    next(tmp_path.glob("*.safetensors")).unlink()
    status, text = run(tmp_path)
    assert status == 1
    assert text.count("would be refused: ") == 2
    assert "would load" not in text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([BASE, "--targets", "gate"], "the adapter would be refused: adapter.targets=['gate']"),
        ([BASE, "--rank", "0"], "config.adapter.rank=0"),
        ([BASE, "--method", "oft", "--block-size", "40"], "does not divide its input width 96"),
        (["package:no_such_package/model.gguf"], "no package 'no_such_package' is installed"),
        (["nowhere"], "the checkpoint folder nowhere does not exist"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_status_1(run, arguments, reason):
    status, text = run(*arguments)
    assert status == 1
    assert reason in text
