"""What the compiler sets aside: about one layer of widened weights, whatever the number of layers.

Programs are compiled for abstract arguments; nothing is run, so machine code need not be good.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import toy

from orbit_jax import compile as programs
from orbit_jax.adapters.adapter import Adapter, attach
from orbit_jax.adapters.lora import LoRA
from orbit_jax.model.init import freeze, init_weights
from orbit_jax.model.stream import Stream
from orbit_jax.rl.admission import admit_prompts
from orbit_jax.rl.sampler import empty_state, sample

# Weights outweigh everything else: a layer is 12.6 MB in bf16, a token's activations are 20 KB.
DEEP = dataclasses.replace(
    toy.MOE,
    hidden_size=512,
    expert_size=512,
    num_layers=12,
    sparse=(True,) * 12,
)
LAYER_BYTES = 2 * 3 * DEEP.num_experts * DEEP.hidden_size * DEEP.expert_size


def abstract_base(config) -> dict:
    return jax.eval_shape(lambda key: freeze(config, init_weights(config, key)), jax.random.key(0))


def abstract_adapter(base: dict) -> Adapter:
    targets = ("q_proj", "down_proj")
    return jax.eval_shape(lambda: attach(LoRA(8, 16.0), jax.random.key(0), base, targets))


def abstract_stream(tokens: int, rows: int, slots: int) -> tuple[Stream, jax.ShapeDtypeStruct]:
    ids = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    return Stream(ids, ids, ids, rows, slots), jax.ShapeDtypeStruct((tokens,), jnp.float32)


def compiled(program: programs.Program, *args) -> jax.stages.Compiled:
    return program.lower(*args).compile(toy.QUICK)


def temporary_bytes(program: programs.Program, *args) -> int:
    return compiled(program, *args).memory_analysis().temp_size_in_bytes


def test_the_guards_would_notice_a_stack():
    """Both what a stack costs packed and what it costs widened are far above the bound."""
    experts = abstract_base(DEEP)["layers"][0]["mlp"]["experts"]
    packed = sum(q.codes.size for q in experts.values())
    assert packed >= 3 * LAYER_BYTES
    base = abstract_base(DEEP)
    stream, temperature = abstract_stream(64, 2, 64)

    def widened(base: dict, stream: Stream, temperature: jax.Array) -> jax.Array:
        return toy.logprobs_of(DEEP, toy.with_working_copy(base), None, stream, temperature)

    program = programs.jit(widened, programs.options("fast"))
    assert temporary_bytes(program, base, stream, temperature) > 12 * LAYER_BYTES


def test_the_forward_pass_holds_no_more_than_a_layer():
    base = abstract_base(DEEP)
    args = (base, abstract_adapter(base), *abstract_stream(64, 2, 64))
    assert temporary_bytes(toy.training_forward(DEEP), *args) < LAYER_BYTES


def test_the_backward_pass_holds_no_more_than_a_layer():
    base = abstract_base(DEEP)
    args = (base, abstract_adapter(base), *abstract_stream(64, 2, 64))
    run = toy.training_gradient(dataclasses.replace(DEEP, remat=True))
    assert temporary_bytes(run, *args) < LAYER_BYTES


def test_decoding_holds_no_more_than_a_layer():
    base = abstract_base(DEEP)
    state = jax.eval_shape(lambda: empty_state(DEEP, 16, 64, 1))
    prompts, ids = [[1, 2, 3]] * 16, [(0, 0, 0, 0)] * 16
    incoming = admit_prompts(DEEP, state, prompts, ids, range(16), 8, [0], 1.0)
    program = programs.jit(
        sample,
        programs.options("fast"),
        static_argnames=("config", "filters"),
        donate_argnames=("state",),
    )
    args = (DEEP, base, abstract_adapter(base), state, incoming, np.int32(8))
    assert temporary_bytes(program, *args) < LAYER_BYTES


@functools.cache
def long_context():
    """A gradient over one row of 32,768 tokens."""
    length = 32_768
    config = dataclasses.replace(toy.DENSE, max_positions=length)
    base = abstract_base(config)
    adapter = abstract_adapter(base)
    args = (base, adapter, *abstract_stream(length, 1, length))
    return length, compiled(toy.training_gradient(dataclasses.replace(config, remat=True)), *args)


def test_a_context_of_32k_compiles_within_half_a_gigabyte():
    _, program = long_context()
    assert program.memory_analysis().temp_size_in_bytes < 1 << 29


def test_no_array_of_all_pairs_of_tokens_exists():
    length, program = long_context()
    shapes = re.findall(r"\b\w+\[([\d,]+)\]", program.as_text())
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in shapes]
    assert max(sizes) >= length * 128, "scores of one chunk of queries are there"
    assert max(sizes) < length * length / 16
