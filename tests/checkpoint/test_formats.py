"""Deployed formats: widened weights have the bits of independent readers, in as many bytes."""

import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from orbit_jax.checkpoint.formats import (
    FORMATS,
    bytes_per_weight,
    check_shape,
    decode,
    stored_tensors,
    unpack,
)
from orbit_jax.checkpoint.safetensors_io import open_file
from orbit_jax.checkpoint.scheme import PLAIN, Scheme
from orbit_jax.quant.qtensor import QTensor, dequantize, select, take_rows, working_copy

FOLDER = Path(__file__).parents[1] / "goldens/formats"
NAMES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
every_golden = pytest.mark.parametrize("name", NAMES)
widen = jax.jit(dequantize, static_argnums=1)

INT4 = Scheme("pack-quantized", bits=4, group=32)
BLOCKS = Scheme("fp8", rows=128, group=128, scale="weight_scale_inv")
# Formats as deployed, with the bytes of a weight: codes, and scales over what shares one.
DEPLOYED = {
    PLAIN: 2,
    INT4: 0.5 + 2 / 32,
    Scheme("pack-quantized", bits=4, group=128, symmetric=False): 0.5 + 2.5 / 128,
    Scheme("pack-quantized", bits=8): 1,
    Scheme("int-quantized", bits=8): 1,
    Scheme("gptq", bits=4, group=128, symmetric=False): 0.5 + 2.5 / 128,
    Scheme("awq", bits=4, group=128, symmetric=False): 0.5 + 2.5 / 128,
    BLOCKS: 1,
    Scheme("fp8", rows=0): 1,
    Scheme("fp8", group=32): 1 + 2 / 32,
    Scheme("nvfp4", scale="weight_scale_2"): 0.5 + 1 / 16,
    Scheme("mxfp4", scale="weight_scale"): 0.5 + 1 / 32,
    Scheme("mxfp4-blocks"): 0.5 + 1 / 32,
}
every_format = pytest.mark.parametrize("scheme", DEPLOYED, ids=Scheme.words)


@functools.cache
def golden(name: str) -> tuple[Scheme, dict[str, np.ndarray], np.ndarray, np.ndarray | None]:
    """Scheme, stored tensors, and the reader's values in f32 and, where it gives them, bf16."""
    path = FOLDER / f"{name}.safetensors"
    header = path.read_bytes()
    length = int.from_bytes(header[:8], "little")
    metadata = json.loads(header[8 : 8 + length])["__metadata__"]
    scheme = Scheme(**json.loads(metadata["golden"])["scheme"])
    tensors = {key: np.array(ref.map()) for key, ref in open_file(path).items()}
    wide = tensors.pop("decoded_f32").view(np.float32)
    narrow = tensors.pop("decoded_bf16", None)
    return scheme, tensors, wide, None if narrow is None else narrow.view(ml_dtypes.bfloat16)


def packed(name: str) -> QTensor:
    scheme, tensors, wide, _ = golden(name)
    return jax.tree.map(jnp.asarray, unpack(scheme, wide.shape, tensors))


def assert_same_bits(ours: jax.Array | np.ndarray, expected: np.ndarray) -> None:
    """Equal bits, the sign of zeros included; a NaN is like another."""
    ours = np.asarray(ours)
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(ours, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(ours)[numbers], np.signbit(expected)[numbers])


def test_every_format_has_a_golden():
    assert {golden(name)[0].format for name in NAMES} | {"plain"} == FORMATS.keys()


@every_golden
def test_the_reference_decode_has_the_bits_of_an_independent_reader(name: str):
    scheme, tensors, wide, _ = golden(name)
    assert_same_bits(decode(scheme, wide.shape, tensors), wide)


@every_golden
def test_widened_weights_have_the_bits_of_an_independent_reader(name: str):
    _, _, wide, narrow = golden(name)
    rounded = wide.astype(ml_dtypes.bfloat16)
    assert_same_bits(widen(packed(name), jnp.float32), wide)
    assert_same_bits(widen(packed(name), jnp.bfloat16), rounded)
    if narrow is not None:
        assert_same_bits(narrow, rounded)


@pytest.mark.parametrize(
    "name",
    [
        "pack-quantized_int4_g32_asymmetric",
        "int-quantized_channel",
        "gptq_v1_int4_act_order",
        "fp8_partial_blocks",
        "fp8_tensor",
        "nvfp4-pack-quantized",
        "mxfp4_gpt_oss",
    ],
)
def test_bits_do_not_depend_on_the_program(name: str):
    """Out of a stack in a loop, as a working copy of it, and by rows."""
    q, wide = packed(name), golden(name)[2]
    by_rows = q.offset is None or q.format == "int8"
    rows = np.array([len(wide) - 1, 0, 3])

    @jax.jit
    def programs(q: QTensor, stack: QTensor):
        layer = lambda _, i: (None, dequantize(select(stack, (i,)), jnp.float32))  # noqa: E731
        looped = jax.lax.scan(layer, None, jnp.arange(2))[1]
        taken = dequantize(take_rows(q, rows), jnp.float32) if by_rows else None
        return looped, taken, working_copy(stack)

    stack = jax.tree.map(lambda x: jnp.stack([x] * 2), q)
    looped, taken, copy = programs(q, stack)
    for layer, copied in zip(looped, copy.layers, strict=True):
        assert_same_bits(layer, wide)
        assert_same_bits(copied.codes, wide.astype(ml_dtypes.bfloat16))
    if by_rows:
        assert_same_bits(taken, wide[rows])
    else:
        with pytest.raises(ValueError, match="packed zero codes"):
            take_rows(q, rows)


def test_the_goldens_have_subnormal_values_and_negative_zeros():
    """XLA:CPU flushes the former in a product of floats: without care these tests would fail."""
    small, negative_zero = set(), set()
    for name in NAMES:
        wide = golden(name)[2]
        if ((np.abs(wide) > 0) & (np.abs(wide) < np.finfo(np.float32).tiny)).any():
            small.add(golden(name)[0].format)
            assert packed(name).subnormal
        if (np.signbit(wide) & (wide == 0)).any():
            negative_zero.add(golden(name)[0].format)
    assert small >= {"pack-quantized", "int-quantized", "fp8", "mxfp4", "mxfp4-blocks"}
    assert negative_zero >= {"pack-quantized", "fp8", "nvfp4", "mxfp4", "mxfp4-blocks"}


def test_a_scale_of_all_ones_is_not_a_number():
    """E8M0's byte 255, which some readers take for an infinity."""
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    tensors = {"weight": codes, "scale": np.full((4, 4), 255, np.uint8)}
    scheme = Scheme("mxfp4", scale="scale")
    q = unpack(scheme, (4, 128), tensors)
    assert np.isnan(decode(scheme, (4, 128), tensors)).all()
    assert np.isnan(widen(q, jnp.float32)).all()
    assert np.isnan(np.asarray(widen(q, jnp.bfloat16), np.float32)).all()


def draw(scheme: Scheme, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Random bits for each stored tensor, with scales of ordinary size."""
    rng = np.random.default_rng(0)
    tensors = {}
    for suffix, stored in stored_tensors(scheme, shape).items():
        dtype, size = stored.dtypes[0], stored.shapes[0]
        if suffix == "g_idx":
            continue
        if suffix == "weight_shape":
            tensors[suffix] = np.array(shape)
        elif np.issubdtype(dtype, np.integer) and "scale" not in suffix:
            raw = rng.integers(0, 256, math.prod(size) * dtype.itemsize, dtype=np.uint8)
            tensors[suffix] = raw.view(dtype).reshape(size)
        elif dtype == np.uint8:
            tensors[suffix] = rng.integers(100, 140, size, dtype=np.uint8)
        else:
            tensors[suffix] = rng.uniform(0.01, 1, size).astype(dtype)
    return tensors


@every_format
def test_a_weight_takes_the_bytes_of_its_tensors(scheme: Scheme):
    shape = (2048, 1024)
    tensors = draw(scheme, shape)
    q = unpack(scheme, shape, tensors)
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert q.shape == shape
    assert q.nbytes <= 1.002 * stored
    assert stored / math.prod(shape) == pytest.approx(bytes_per_weight(scheme, shape), rel=0.002)
    assert bytes_per_weight(scheme, shape) == pytest.approx(DEPLOYED[scheme], rel=0.01)


@every_format
@pytest.mark.parametrize("shape", [(200, 384), (136, 128)])
def test_wide_weights_have_the_bits_of_the_reference_decode(scheme: Scheme, shape: tuple):
    tensors = draw(scheme, shape)
    q, expected = unpack(scheme, shape, tensors), decode(scheme, shape, tensors)
    assert not q.subnormal
    assert_same_bits(widen(q, jnp.float32), expected)
    assert_same_bits(widen(q, jnp.bfloat16), expected.astype(ml_dtypes.bfloat16))


def test_blocks_may_be_cut_short_on_both_sides():
    tensors = draw(BLOCKS, (200, 300))
    q, expected = unpack(BLOCKS, (200, 300), tensors), decode(BLOCKS, (200, 300), tensors)
    assert q.scales.shape == (2, 3)
    assert_same_bits(widen(q, jnp.float32), expected)


def test_where_layouts_agree_nothing_is_copied():
    for scheme in (PLAIN, INT4, BLOCKS, Scheme("nvfp4", scale="weight_scale_2")):
        tensors = draw(scheme, (64, 256))
        q = unpack(scheme, (64, 256), tensors)
        held = [tensors[name] for name in tensors if name.startswith("weight")]
        assert any(np.shares_memory(q.codes, tensor) for tensor in held)
        assert q.scales is None or any(np.shares_memory(q.scales, tensor) for tensor in held)


def test_a_symmetric_weight_of_gptq_holds_no_zero_codes():
    scheme = Scheme("gptq", bits=4, group=32, symmetric=True, minus_one=True)
    tensors = draw(scheme, (8, 64)) | {"qzeros": np.full((2, 1), 0x77777777, np.int32)}
    q = unpack(scheme, (8, 64), tensors)
    assert q.offset is None
    assert_same_bits(widen(q, jnp.float32), decode(scheme, (8, 64), tensors))
    tensors["qzeros"][1] += 1
    with pytest.raises(ValueError, match=r"qzeros are not all in the middle .* sym=true"):
        unpack(scheme, (8, 64), tensors)


def test_groups_of_columns_must_exist():
    scheme = Scheme("gptq", bits=4, group=32, symmetric=False, ordered=False)
    for bad in (-1, 2):
        tensors = draw(scheme, (8, 64)) | {"g_idx": np.full(64, bad, np.int32)}
        with pytest.raises(ValueError, match=f"g_idx names group {bad} or {bad} of 2"):
            unpack(scheme, (8, 64), tensors)


@pytest.mark.parametrize(
    ("scheme", "shape", "message"),
    [
        (INT4, (8, 48), r"the input width 48 is not a multiple of 32, which pack-quantized \(4"),
        (Scheme("pack-quantized", bits=4), (8, 5), "input width 5 is not a multiple of 2"),
        (Scheme("gptq", bits=4, group=32), (12, 64), "output width 12 is not a multiple of 8"),
        (Scheme("nvfp4"), (8, 24), "input width 24 is not a multiple of 16"),
        (Scheme("mxfp4"), (8, 48), "input width 48 is not a multiple of 32"),
    ],
)
def test_a_shape_that_a_format_cannot_hold_is_refused(scheme, shape, message):
    with pytest.raises(ValueError, match=message):
        check_shape("model.layers.0.mlp.up_proj", scheme, shape)


def test_a_scheme_in_words_tells_the_size_of_its_groups():
    assert Scheme("mxfp4-blocks").words() == "mxfp4-blocks (groups of 32)"
    assert Scheme("nvfp4", scale="weight_scale_2").words() == "nvfp4 (groups of 16)"
    assert Scheme("fp8", rows=128, group=128).words() == "fp8 (blocks of 128x128)"
    assert Scheme("fp8").words() == "fp8 (one group a row)"
    asymmetric = Scheme("pack-quantized", bits=4, group=32, symmetric=False)
    assert asymmetric.words() == "pack-quantized (4 bits, groups of 32, asymmetric)"
