"""`full_width.py` on layers of small width: the formats, the sampler and the step are the same."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "experiments")]

import full_width  # noqa: E402


@pytest.mark.parametrize(
    "model", [pytest.param("kimi_k2_tiny", marks=pytest.mark.long), "gpt_oss_120b_tiny"]
)
def test_a_layer_goes_through_sampler_and_step_with_gap_zero(
    model: str, monkeypatch, tmp_path, capsys
):
    args = ["full_width.py", "--model", model, "--experts", "8", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", args)
    full_width.main()
    result = json.loads((tmp_path / f"full_width_{model}.json").read_text())
    assert result["parity_max_abs_diff"] == 0.0
    assert result["experts"] == 8
    assert str(result["base_bytes"]) in capsys.readouterr().out


def test_too_few_experts_for_a_token_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["full_width.py", "--experts", "3"])
    with pytest.raises(SystemExit, match="--experts=3: a token of kimi_k2 visits 8"):
        full_width.main()


def test_an_unknown_model_is_refused_with_those_that_are_known(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["full_width.py", "--model", "kimi"])
    with pytest.raises(SystemExit, match=r"--model=kimi: use one of .*kimi_k2,"):
        full_width.main()


def test_no_more_experts_are_drawn_than_the_model_has():
    assert full_width.experts_that_fit("gpt_oss_120b") == 128
