"""Collectives of compiled programs, against bytes worked out by hand."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from orbit_jax.plan.traffic import Collective, collectives, summary

HERE = Path(__file__).parent
GATHERED = 3 * 4096 // 4  # of f32[16,64] in groups of four: three quarters come from others


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    result = subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "eight_device_programs.py")],
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def kinds(found: list[Collective]) -> Counter:
    return Counter((one.purpose, one.kind, one.bytes, one.executions) for one in found)


def test_forward_and_backward_of_a_scan_count_once_per_layer(texts):
    found = [one for one in collectives(texts["gradient"]) if one.purpose in ("dense", "routing")]
    assert kinds(found) == {
        ("dense", "all-gather", GATHERED, 5): 1,
        ("dense", "reduce-scatter", 3 * 1024, 5): 1,  # operand f32[16,64], of the gradient
        ("routing", "all-gather", 4096, 5): 2,  # half of f32[32,64], forward and backward
        ("routing", "all-reduce", 2 * 3 * 8192 // 4, 5): 2,
        ("routing", "reduce-scatter", 4096, 5): 2,
    }
    assert {one.devices_in_group for one in found if one.purpose == "dense"} == {4}
    assert {one.shape for one in found if one.kind == "all-reduce"} == {"f32[32,64]"}


def test_the_adapters_gradient_is_reduced_once_over_all_devices(texts):
    reduced = [one for one in collectives(texts["gradient"]) if one.purpose == "adapter"]
    assert (
        Collective(
            kind="all-reduce",
            purpose="adapter",
            bytes=2 * 7 * 5 * 64 * 64 * 4 // 8,
            executions=1,
            devices_in_group=8,
            shape="f32[5,64,64]",
        )
        in reduced
    )


def test_a_summary_adds_up_all_executions_of_each_purpose(texts):
    sent = summary(collectives(texts["layers"]))
    assert sent["dense"] == 5 * GATHERED
    assert sent["routing"] == 5 * (4096 + 12288 + 4096)
    assert sent["head"] == sent["adapter"] == 0


def test_a_loop_of_unknown_length_counts_as_one_turn_and_is_marked(texts):
    found = collectives(texts["decode"])
    assert kinds(found) == {("dense", "all-gather", GATHERED, 3): 2}
    assert sorted(one.per_token for one in found) == [False, True]
    assert summary(found)["dense"] == 6 * GATHERED
    assert summary(found, turns=10)["dense"] == (3 + 10 * 3) * GATHERED
    assert summary(found, turns=10, calls=2)["dense"] == (2 * 3 + 10 * 3) * GATHERED


def test_of_several_loops_of_unknown_length_the_heaviest_counts_for_all_turns(texts):
    found = collectives(texts["two_loops"])
    assert len({one.loop for one in found}) == 2
    assert summary(found, turns=10)["dense"] == 10 * 2 * GATHERED


def test_of_a_conditional_the_heaviest_branch_counts(texts):
    assert kinds(collectives(texts["branches"])) == {("dense", "all-gather", GATHERED, 1): 2}


# As XLA:GPU spells it: asynchronous pairs, whose start returns operands before results.
GPU = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

%async_computation (p: bf16[8,8]) -> bf16[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  ROOT %wrapped = bf16[8,8]{1,0} all-to-all(%p), replica_groups={}, dimensions={0}
}

%body (arg: (s32[], bf16[16,64])) -> (s32[], bf16[16,64]) {
  %arg = (s32[], bf16[16,64]{1,0}) parameter(0)
  %x = bf16[16,64]{1,0} get-tuple-element(%arg), index=1
BODY
}

%condition (arg.1: (s32[], bf16[16,64])) -> pred[] {
  %arg.1 = (s32[], bf16[16,64]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (p0: bf16[16,64]) -> bf16[16,64] {
  %p0 = bf16[16,64]{1,0} parameter(0)
  %start = (s32[], /*index=1*/bf16[16,64]{1,0}) tuple(%zero, %p0)
  ROOT %while.1 = (s32[], bf16[16,64]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"61"},"known_init_step":{"init":"0","step":"1"}}
}
"""
BACKWARD = 'metadata={op_name="jit(f)/transpose(jvp(adapter))/while/transpose(jvp(routing))/psum"}'
HEAD = 'metadata={op_name="jit(f)/lm_head/dense/head/all_gather" stack_frame_id=3}'


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "%s = (bf16[16,16]{0,1}, bf16[16,64]{0,1}) all-gather-start(%x), "
            f"replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, dimensions={{1}}, {HEAD}",
            ("all-gather", "head", 2048 * 3 // 4, 4, "bf16[16,64]"),
        ),
        (
            "%s = ((bf16[8,8]{1,0}, f32[2]{0}), (bf16[32,8]{1,0}, f32[8]{0})) "
            "all-gather-start(%x, %y), replica_groups=[2,4]<=[8], dimensions={0}",
            ("all-gather", "other", (512 + 32) * 3 // 4, 4, "bf16[32,8], f32[8]"),
        ),
        (
            "%s = bf16[32,64]{1,0} all-reduce-start(%x), "
            "replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0','axis_2'}, "
            f"to_apply=%add, {BACKWARD}",
            ("all-reduce", "routing", 2 * 7 * 4096 // 8, 8, "bf16[32,64]"),
        ),
        (
            "%s = bf16[32,64]{1,0} all-reduce(%x), "
            "replica_groups=mesh['axis_0'=8] {'axis_0':(1)2}, to_apply=%add",
            ("all-reduce", "other", 4096, 2, "bf16[32,64]"),
        ),
        (
            "%s = ((bf16[32,64]{1,0}), bf16[16,64]{1,0}) reduce-scatter-start(%x), "
            "replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, to_apply=%add",
            ("reduce-scatter", "other", 2048, 2, "bf16[16,64]"),
        ),
        (
            "%s = (bf16[16,64]{1,0}, bf16[16,64]{1,0}, u32[], u32[]) "
            "collective-permute-start(%x), source_target_pairs={{0,4},{4,0}}",
            ("collective-permute", "other", 2048, 2, "bf16[16,64]"),
        ),
        (
            "%s = (f8e4m3fn[4]{0}, f8e4m3fn[4]{0}) all-to-all(%x, %y), replica_groups={{0,1}}",
            ("all-to-all", "other", 4, 2, "f8e4m3fn[4], f8e4m3fn[4]"),
        ),
        (
            "%s = ((bf16[8,8]{1,0}), bf16[8,8]{1,0}) async-start(%x), calls=%async_computation\n"
            "  %t = bf16[8,8]{1,0} async-done(%s), calls=%async_computation",
            ("all-to-all", "other", 128 * 7 // 8, 8, "bf16[8,8]"),
        ),
    ],
)
def test_spellings_of_gpu_programs(line, expected):
    found = collectives(GPU.replace("BODY", "  " + line))
    (same,) = {(one.kind, one.purpose, one.devices_in_group, one.executions) for one in found}
    sent, shapes = sum(one.bytes for one in found), ", ".join(one.shape for one in found)
    assert (*same[:2], sent, same[2], shapes) == expected
    assert same[3] == 61


@pytest.mark.parametrize(
    "lines",
    [
        "%s = (bf16[8,8]{1,0}, f32[8]{0}) all-gather(%x, %y), replica_groups=[1,8]<=[8], HEAD\n"
        "  %u = bf16[8,8]{1,0} get-tuple-element(%s), index=0, ADAPTER\n"
        "  %v = f32[8]{0} get-tuple-element(%s), index=1",
        "%s = ((bf16[1,8]{1,0}, f32[1]{0}), (bf16[8,8]{1,0}, f32[8]{0})) all-gather-start(%x, %y), "
        "replica_groups=[1,8]<=[8], HEAD\n"
        "  %d = (bf16[8,8]{1,0}, f32[8]{0}) all-gather-done(%s)\n"
        "  %u = bf16[8,8]{1,0} get-tuple-element(%d), index=0, ADAPTER\n"
        "  %v = f32[8]{0} get-tuple-element(%d), index=1",
    ],
)
def test_what_is_sent_together_counts_for_the_purpose_of_each_part(lines):
    adapter = 'metadata={op_name="jit(f)/adapter/all_gather"}'
    body = "  " + lines.replace("HEAD", HEAD).replace("ADAPTER", adapter)
    found = collectives(GPU.replace("BODY", body))
    assert [(one.purpose, one.bytes) for one in found] == [("adapter", 112), ("head", 28)]


def test_groups_in_an_unknown_spelling_are_refused():
    line = "%s = bf16[4]{0} all-gather(%x), replica_groups=new(1)"
    with pytest.raises(ValueError, match="unknown way"):
        collectives(GPU.replace("BODY", line))


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        collectives("module @jit_f attributes {}")
