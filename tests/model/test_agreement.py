"""Log-probs are the same bits whichever way a token is computed: the promise that RL rests on.

Every comparison is with the full forward pass over all rows, and the largest difference is 0.0.
"""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
import toy

from orbit_jax.adapters.adapter import LINEAR_LAYERS, Adapter, Method
from orbit_jax.adapters.lora import LoRA
from orbit_jax.adapters.oft import OFT
from orbit_jax.model.config import ModelConfig

PLAIN = LoRA(8, 16.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with the rows that go through it. `copied`: what is compared uses a working copy."""

    config: ModelConfig
    num_rows: int = 6
    num_slots: int = 64
    dense_bits: int = 16
    method: Method = PLAIN
    targets: tuple[str, ...] = ("q_proj", "o_proj", "down_proj")
    copied: bool = False

    @functools.cached_property
    def base(self) -> dict:
        return toy.make_base(self.config, self.dense_bits)

    @functools.cached_property
    def compared_base(self) -> dict:
        return jax.jit(toy.with_working_copy)(self.base) if self.copied else self.base

    @functools.cached_property
    def adapter(self) -> Adapter:
        return toy.make_adapter(self.base, self.method, self.targets)

    @functools.cached_property
    def rows(self) -> toy.Rows:
        return toy.Rows.draw(self.config, self.num_rows, self.num_slots)

    def forward(self, base: dict, **how) -> np.ndarray:
        stream, origin = self.rows.stream(**how)
        temperature = self.rows.temperature(origin)
        logprobs = toy.training_forward(self.config)(base, self.adapter, stream, temperature)
        return toy.table(self.rows, origin, logprobs)

    @functools.cached_property
    def full(self) -> np.ndarray:
        """All rows in order, nothing but a few padding tokens at the end."""
        return self.forward(self.base, size=self.num_rows * self.num_slots)


CASES = {
    "moe": Case(toy.MOE, targets=LINEAR_LAYERS),
    "dense, packed in 4 bits, without q/k norm, untied, 4 queries per key": Case(
        dataclasses.replace(
            toy.DENSE,
            num_kv_heads=1,
            head_dim=64,
            qk_norm="",
            tie_word_embeddings=False,
            vocab_size=101,
        ),
        num_rows=5,
        dense_bits=4,
        method=LoRA(3, 6.0),
    ),
    "mixed stacks, rows cut into blocks of queries, small chunks, working copy": Case(
        dataclasses.replace(
            toy.MOE,
            num_layers=3,
            sparse=(False, True, True),
            num_kv_heads=4,
            head_dim=16,
            norm_topk_prob=False,
            top_k=3,
            query_chunk=16,
            head_chunk=64,
            expert_block=16,
        ),
        num_rows=3,
        num_slots=128,
        copied=True,
    ),
    "fixed row tiles": Case(
        dataclasses.replace(toy.MOE, recipe="tiles", num_kv_heads=1, head_dim=128), num_rows=5
    ),
    "latent attention, adapted everywhere": Case(toy.LATENT, targets=LINEAR_LAYERS),
    "latent attention with plain queries, packed, working copy": Case(
        dataclasses.replace(
            toy.LATENT,
            latent=dataclasses.replace(toy.LATENT.latent, q_rank=0, value=32),
            num_heads=9,
            num_groups=1,
            top_groups=1,
        ),
        num_rows=5,
        dense_bits=8,
        copied=True,
        targets=("q_proj", "kv_b_proj", "shared_experts.down_proj"),
    ),
    "latent attention by tiles": Case(
        dataclasses.replace(toy.LATENT, recipe="tiles"), num_rows=3, targets=LINEAR_LAYERS
    ),
    "sinks, windows and biases": Case(toy.SINKS, targets=LINEAR_LAYERS),
    "exact rotations that experts share, by tiles": Case(
        dataclasses.replace(toy.MOE, recipe="tiles"),
        num_rows=3,
        method=OFT(16, neumann_terms=0, shared="a"),
        targets=LINEAR_LAYERS,
    ),
    "norms over all heads, clipped": Case(
        dataclasses.replace(toy.MOE, family="olmoe", qk_norm="all", clip_qkv=1.5), num_rows=3
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@every_case
def test_the_logprobs_are_worth_comparing(case: Case):
    known = case.full[~np.isnan(case.full)]
    assert len(known) == case.rows.lengths.sum() - case.num_rows
    assert np.isfinite(known).all()
    assert known.std() > 1


@every_case
def test_decoding_token_by_token_equals_the_full_forward(case: Case):
    prompts = [0] * case.num_rows
    decoded = toy.cached_table(case.config, case.compared_base, case.adapter, case.rows, prompts)
    assert toy.largest_gap(case.full, decoded) == 0.0
    np.testing.assert_array_equal(np.isnan(decoded), np.isnan(case.full))


@every_case
def test_a_prefilled_prompt_and_what_is_decoded_after_it_equal_the_full_forward(case: Case):
    prompts = [40, 1, 17, 0, 63, 5][: case.num_rows]
    table = toy.cached_table(case.config, case.compared_base, case.adapter, case.rows, prompts)
    assert toy.largest_gap(case.full, table) == 0.0
    # Only what follows a prompt's last token is not in the prompt's stream.
    assert 0 < np.isnan(table).sum() - np.isnan(case.full).sum() <= case.num_rows


@every_case
def test_row_order_and_padding_anywhere_change_nothing(case: Case):
    order = np.random.default_rng(3).permutation(case.num_rows)
    size = case.num_rows * case.num_slots
    moved = case.forward(case.base, order=order, padding=[3, 0, 1, 7], size=size)
    assert toy.largest_gap(case.full, moved) == 0.0


@pytest.mark.parametrize(
    ("config", "method"),
    [
        *((config, PLAIN) for config in (toy.MOE, toy.LATENT, toy.SINKS)),
        (toy.MOE, OFT(8)),
        (toy.LATENT, OFT(16, block_share=True)),
    ],
)
def test_no_dot_is_widened(config: ModelConfig, method: Method):
    """XLA:CPU widens a bf16 dot whose operand lies transposed, and its sums have other bits.

    At the widths of a test they may happen to be the same: at those of a real model they are not.
    """
    case = Case(config, num_rows=4, method=method, targets=LINEAR_LAYERS)
    stream, origin = case.rows.stream(size=4 * case.num_slots)
    ready = jax.jit(Adapter.prepared)(case.adapter)  # what f32 dots it takes is done
    args = case.base, ready, stream, case.rows.temperature(origin)
    text = toy.training_forward(config).lower(*args).compile().as_text()
    computations = re.findall(r"^%\S+ \((.*)\) -> .* \{\n(?:(?!^\}).*\n)*?.* dot\(", text, re.M)
    assert len(computations) > 5
    assert not [c for c in computations if " f32[" in c]


def test_a_smaller_micro_batch_with_more_slots_changes_nothing():
    case = CASES["moe"]
    some = case.forward(case.base, order=[4, 1], num_slots=128)
    assert toy.largest_gap(case.full, some) == 0.0


def test_the_forward_of_a_gradient_equals_the_full_forward():
    """Without remat; `tests/mesh` has the gradient with it, on one device and on eight."""
    case = CASES["moe"]
    stream, origin = case.rows.stream(size=case.num_rows * case.num_slots)
    run = toy.training_gradient(case.config)
    logprobs, _ = run(case.base, case.adapter, stream, case.rows.temperature(origin))
    assert toy.largest_gap(case.full, toy.table(case.rows, origin, logprobs)) == 0.0


def test_rows_do_not_see_each_other_nor_a_token_its_future():
    case = CASES["moe"]
    tokens = case.rows.tokens.copy()
    tokens[2] = (tokens[2] + 1) % case.config.vocab_size
    tokens[0, 30:] = (tokens[0, 30:] + 1) % case.config.vocab_size
    changed = dataclasses.replace(case, num_rows=case.num_rows)
    changed.__dict__["rows"] = toy.Rows(tokens, case.rows.lengths)
    full, other = (c.full.reshape(tokens.shape) for c in (case, changed))
    np.testing.assert_array_equal(other[[1, 3, 4, 5]], full[[1, 3, 4, 5]])
    # The log-prob at 29 is of the changed token at 30.
    np.testing.assert_array_equal(other[0, :29], full[0, :29])
    assert (other[0, 29:-1] != full[0, 29:-1]).all()
