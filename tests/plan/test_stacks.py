"""Programs that copy a whole stack of weights, and programs that do not."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orbit_jax import compile as programs
from orbit_jax.plan.stacks import stacks

LAYERS = 12
CODES = jax.ShapeDtypeStruct((LAYERS, 256, 128), jnp.uint8)  # two to a byte: weights [L, 256, 256]
ROWS = jax.ShapeDtypeStruct((32, 256), jnp.float32)


def widen(codes: jax.Array) -> jax.Array:
    nibbles = jnp.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    return nibbles.astype(jnp.float32) - 8


def layer_by_layer(codes, x):
    return lax.fori_loop(0, LAYERS, lambda i, x: jnp.tanh(x @ widen(codes[i]).T), x)


def widened_before_the_loop(codes, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w.T), None), x, widen(codes))[0]


def transposed_before_the_loop(codes, x):
    turned = jnp.swapaxes(codes, 1, 2)
    return lax.scan(lambda x, w: (jnp.tanh(x @ widen(w.T).T), None), x, turned)[0]


def saved_for_the_backward_pass(codes, x):
    def total(x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ widen(w).T), None), x, codes)[0].sum()

    return jax.grad(total)(x)


def widened_in_a_branch(codes, x):
    return lax.cond(x[0, 0] > 0, widened_before_the_loop, layer_by_layer, codes, x)


def with_a_cache(codes, x, cache):
    """The cache is larger than the stack, and every layer writes to it."""

    def layer(i, carry):
        x, cache = carry
        x = jnp.tanh(x @ widen(codes[i]).T)
        return x, lax.dynamic_update_slice(cache, x[None], (i, 0, 0))

    return lax.fori_loop(0, LAYERS, layer, (x, cache))


def text(fn, *arguments, **options) -> str:
    return jax.jit(fn, **options).lower(*arguments).compile().as_text()


@pytest.mark.parametrize("recipe", ["", "fast"])
def test_a_program_that_takes_layer_by_layer_holds_no_stack(recipe):
    program = text(layer_by_layer, CODES, ROWS, compiler_options=programs.options(recipe))
    assert stacks(program, [CODES]) == []


@pytest.mark.parametrize(
    ("fn", "shape", "source"),
    [
        (widened_before_the_loop, "f32[12,256,256]", "sub"),
        (transposed_before_the_loop, "u8[12,128,256]", ""),
        (saved_for_the_backward_pass, "f32[12,256,256]", "jvp"),
        (widened_in_a_branch, "f32[12,256,256]", "cond"),
    ],
)
def test_a_copy_of_the_stack_is_found_and_named(fn, shape, source):
    found = stacks(text(fn, CODES, ROWS), [CODES])
    assert found[0].shape == shape
    assert source in found[0].source
    assert found[0].bytes == max(stack.bytes for stack in found) >= LAYERS * 256 * 128


def test_a_cache_that_is_updated_is_no_stack():
    cache = jax.ShapeDtypeStruct((100, *ROWS.shape), jnp.float32)
    assert cache.size * 4 > CODES.size
    assert stacks(text(with_a_cache, CODES, ROWS, cache), [CODES]) == []


def test_a_parameter_that_the_program_does_not_have_is_refused():
    program = text(layer_by_layer, CODES, ROWS)
    wide = jax.ShapeDtypeStruct((LAYERS, 256, 256), jnp.uint8)
    with pytest.raises(ValueError, match=r"no parameter u8\[12,256,256\]"):
        stacks(program, [CODES, wide])


# As XLA:GPU spells it; a fusion's own instructions have no memory.
GATHERED = """HloModule jit_f, num_partitions=8

%fused (p: u8[12,32,128]) -> bf16[32,256] {
  %p = u8[12,32,128]{2,1,0} parameter(0)
  %wide = bf16[12,32,256]{2,1,0} convert(%p)
  ROOT %one = bf16[32,256]{1,0} slice(%wide), slice={[0:1], [0:32], [0:256]}
}

ENTRY %main (p0: u8[12,32,128]) -> bf16[32,256] {
  %p0 = u8[12,32,128]{2,1,0} parameter(0)
  %bitcast = u8[384,128]{1,0} bitcast(%p0)
  %start = (u8[12,32,128]{2,1,0}, u8[12,256,128]{2,1,0}) all-gather-start(%p0), \
replica_groups=[1,8]<=[8], dimensions={1}
  %done = u8[12,256,128]{2,1,0} all-gather-done(%start), metadata={op_name="jit(f)/gather"}
  ROOT %fusion = bf16[32,256]{1,0} fusion(%p0), kind=kLoop, calls=%fused
}
"""


def test_on_a_mesh_a_stack_is_what_one_device_holds_and_gathering_it_is_found():
    mesh = AbstractMesh((8,), ("tensor",))
    sharded = jax.ShapeDtypeStruct(
        CODES.shape, CODES.dtype, sharding=NamedSharding(mesh, P(None, "tensor", None))
    )
    (found,) = stacks(GATHERED, [sharded])
    assert (found.name, found.opcode) == ("done", "all-gather-done")
    assert (found.shape, found.bytes) == ("u8[12,256,128]", LAYERS * 256 * 128)
    assert found.source == "jit(f)/gather"
