"""Programs: what they are made of, and what is known of the last call."""

import functools

import jax.numpy as jnp

from orbit_jax import compile as programs


def scaled(factor: float, x):
    return factor * x


def test_a_part_of_a_function_can_be_a_program():
    program = programs.jit(functools.partial(scaled, 3.0), {})
    assert program(jnp.ones(2)).tolist() == [3, 3]


def test_static_arguments_are_found_by_name_and_shapes_counted_once():
    program = programs.jit(scaled, programs.options("fast"), static_argnames=("factor",))
    for x in (jnp.ones(2), jnp.zeros(2), jnp.ones(3)):
        assert program(2.0, x).tolist() == (2 * x).tolist()
    assert program.traces == program.executables == 2


def test_the_text_is_that_of_the_last_call_and_compiles_nothing():
    program = programs.jit(scaled, {}, static_argnames=("factor",))
    program(2.0, jnp.ones(4))
    assert "f32[4]" in program.text
    program(2.0, jnp.ones(7))
    assert "f32[7]" in program.text
    assert program.traces == 2
