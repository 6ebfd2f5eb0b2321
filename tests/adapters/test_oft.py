"""OFT's rotations against another way to make them, and what they keep."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import PartitionSpec as P

from orbit_jax import mesh
from orbit_jax.adapters.adapter import attach
from orbit_jax.adapters.oft import OFT
from orbit_jax.model.config import MeshShape

WIDTH, OUT, ROWS = 24, 10, 7
X = np.random.default_rng(0).standard_normal((ROWS, WIDTH), np.float32)
EXACT, SERIES = OFT(8, neumann_terms=0), OFT(8)


def skew(method: OFT, size: float = 0.1) -> np.ndarray:
    shape = jax.eval_shape(lambda: method.init(jax.random.key(0), (OUT, WIDTH)))["skew"].shape
    return size * np.random.default_rng(1).standard_normal(shape, np.float32)


def ready(method: OFT, triangles: np.ndarray) -> dict[str, np.ndarray]:
    return jax.jit(method.prepare)({"skew": triangles})


def by_hand(method: OFT, triangles: np.ndarray) -> np.ndarray:
    """The whole R `[in, in]` in f64, a number after another."""
    b, whole = method.block_size, np.eye(WIDTH)
    for first in range(0, WIDTH, b):
        values = iter(triangles[0 if len(triangles) == 1 else first // b].astype(np.float64))
        q = np.zeros((b, b))
        for i in range(b):
            for j in range(i + 1, b):
                q[i, j] = next(values)
                q[j, i] = -q[i, j]
        powers = [np.linalg.matrix_power(q, k) for k in range(max(method.neumann_terms - 1, 0))]
        series = sum(powers) if powers else np.linalg.inv(np.eye(b) - q)
        whole[first : first + b, first : first + b] = (np.eye(b) + q) @ series
    return whole


@pytest.mark.parametrize(
    "method", [SERIES, EXACT, OFT(8, 4), OFT(12, 7), OFT(24), OFT(2, 0), OFT(8, block_share=True)]
)
def test_the_input_is_turned_as_by_a_rotation_made_by_hand(method):
    triangles = skew(method)
    rotation = by_hand(method, triangles)
    turned = jax.jit(method.input_side)(ready(method, triangles), X)
    np.testing.assert_allclose(turned, X @ rotation, atol=2e-6)
    assert np.abs(turned - X @ rotation.T).max() > 0.1  # the other way round is another one
    back = jax.jit(method.output_side_transposed)(ready(method, triangles), X, X)
    np.testing.assert_allclose(back, X @ rotation.T, atol=2e-6)


def test_a_merged_weight_has_its_columns_turned():
    w = np.random.default_rng(2).standard_normal((OUT, WIDTH), np.float32)
    triangles = skew(SERIES)
    merged = jax.jit(SERIES.merge)({"skew": triangles}, w)
    np.testing.assert_allclose(merged, w @ by_hand(SERIES, triangles).T, atol=2e-6)


def excess(method: OFT, triangles: np.ndarray) -> np.ndarray:
    """`R'R - I` of each block."""
    rotation = np.asarray(ready(method, triangles)["turn"], np.float64) + np.eye(method.block_size)
    return np.swapaxes(rotation, 1, 2) @ rotation - np.eye(method.block_size)


def test_the_exact_rotation_is_orthogonal_and_keeps_norms():
    triangles = skew(EXACT, size=0.5)
    assert np.abs(excess(EXACT, triangles)).max() < 2e-6
    turned = jax.jit(EXACT.input_side)(ready(EXACT, triangles), X)
    norms = np.linalg.norm(X, axis=1)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=1), norms, rtol=2e-6)


@pytest.mark.parametrize(("size", "bound"), [(0.01, 2e-5), (0.03, 1e-3), (0.1, 0.1)])
def test_five_terms_miss_orthogonality_by_twice_the_fourth_power(size, bound):
    """`R'R = (I - Q^4)^2`: little for small rotations, and no more than that."""
    triangles = skew(SERIES, size)
    found = excess(SERIES, triangles)
    upper = np.zeros((len(triangles), 8, 8))
    upper[:, *np.triu_indices(8, 1)] = triangles
    fourth = np.linalg.matrix_power(upper - np.swapaxes(upper, 1, 2), 4)
    np.testing.assert_allclose(found, fourth @ fourth - 2 * fourth, atol=2e-6)
    assert np.abs(found).max() < bound
    norms = np.linalg.norm(found, axis=(1, 2))
    np.testing.assert_allclose(SERIES.deviation({"skew": triangles}), norms, rtol=1e-2, atol=1e-6)


def test_a_small_rotation_keeps_norms_in_bf16():
    """Of R itself the diagonal would be ones in bf16, and norms grow by a thousandth."""
    cast = jax.tree.map(lambda p: p.astype(jnp.bfloat16), ready(EXACT, skew(EXACT, size=0.01)))
    x = np.random.default_rng(4).standard_normal((512, WIDTH), np.float32).astype(jnp.bfloat16)
    turned = jax.jit(EXACT.input_side)(cast, x)
    sizes = [np.linalg.norm(np.asarray(y, np.float32), axis=1) for y in (x, turned)]
    assert (turned != x).mean() > 0.5
    assert abs((sizes[1] / sizes[0]).mean() - 1) < 3e-4


@pytest.mark.parametrize("method", [SERIES, EXACT])
def test_the_gradient_of_a_skew_is_that_of_finite_differences(method):
    triangles, direction = skew(method), np.random.default_rng(3).standard_normal((ROWS, WIDTH))

    def moved(triangles: np.ndarray) -> float:
        return (X.astype(np.float64) @ by_hand(method, triangles) * direction).sum()

    def ours(params: dict) -> jax.Array:
        return (method.input_side(method.prepare(params), X) * direction).sum()

    found = jax.jit(jax.grad(ours))({"skew": triangles})["skew"]
    step = 1e-3
    for place in [(0, 0), (1, 5), (2, 27)]:
        up, down = triangles.astype(np.float64), triangles.astype(np.float64)
        up[place] += step
        down[place] -= step
        slope = (moved(up) - moved(down)) / (2 * step)
        assert found[place] == pytest.approx(slope, rel=1e-4, abs=1e-4)


def test_experts_share_a_rotation_where_a_of_lora_would_be():
    shape = (3, 5, OUT, WIDTH)
    sizes = {
        shared: jax.eval_shape(
            lambda shared=shared: OFT(8, shared=shared).init(jax.random.key(0), shape)
        )["skew"].shape
        for shared in ("", "a", "b", "ab")
    }
    each, one = (3, 5, 3, 28), (3, 1, 3, 28)
    assert sizes == {"": each, "a": one, "b": each, "ab": one}


def test_a_block_that_does_not_divide_the_input_is_refused_by_the_weights_name():
    base = jax.eval_shape(lambda: toy.make_base(toy.MOE))
    sentence = "adapter of self_attn.q_proj: block_size=12 does not divide its input width 64"
    with pytest.raises(ValueError, match=sentence):
        attach(OFT(12), jax.random.key(0), base, ("q_proj",))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [({"block_size": 1}, "at least 2"), ({"neumann_terms": 3}, "at least 4, or 0 for the exact")],
)
def test_what_is_no_rotation_is_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(SERIES, **given)


def test_rotations_lie_where_the_inputs_of_their_weights_do():
    """Experts' over all devices, others whole; on a mesh all is stored in parts."""
    base = jax.eval_shape(lambda: toy.make_base(toy.MOE))
    adapter = jax.eval_shape(lambda: attach(SERIES, jax.random.key(0), base))
    prepared = jax.eval_shape(lambda: adapter.prepared())
    for made, name in ((adapter, "skew"), (prepared, "turn")):
        specs = mesh.adapter_specs(made).params["layers"][0]
        assert set(specs["mlp"]["experts"]["up_proj"]) == {name}
        assert specs["mlp"]["experts"]["up_proj"][name][1] == ("data", "tensor")
        assert not any(specs["self_attn"]["q_proj"][name])
    stored = mesh.stored_specs(MeshShape(2, 4), adapter).params["layers"][0]
    assert stored["self_attn"]["q_proj"]["skew"] == P(None, "tensor", "data")  # [2, 8, 28]


def test_what_is_prepared_is_not_prepared_again_and_is_cast_only_then():
    base = jax.eval_shape(lambda: toy.make_base(toy.DENSE))
    adapter = jax.eval_shape(lambda: attach(SERIES, jax.random.key(0), base, ("q_proj",)))
    waiting = jax.eval_shape(lambda a: a.cast(jnp.bfloat16), adapter)
    assert {p.dtype for p in jax.tree.leaves(waiting)} == {jnp.dtype("float32")}
    once = jax.eval_shape(lambda a: a.prepared().cast(jnp.bfloat16), adapter)
    assert {p.dtype for p in jax.tree.leaves(once)} == {jnp.dtype("bfloat16")}
    assert jax.eval_shape(lambda a: a.prepared(), once) == once
