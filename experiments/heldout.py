"""Greedy answers to held-out problems: how many are right, and what was said on the way."""

from collections.abc import Sequence

import numpy as np

from orbit_jax import compile as compiler
from orbit_jax.checkpoint.tokenizer import Tokenizer
from orbit_jax.divergence import Passage
from orbit_jax.model.config import ModelConfig
from orbit_jax.rl import sampler
from orbit_jax.rl.rollouts import generate
from orbit_jax.tasks.grading import Grader
from orbit_jax.tasks.task import Example, posed

_ROWS = 64  # that are decoded at the same time


def prompts(tokenizer: Tokenizer, problems: Sequence[Example]) -> list[list[int]]:
    """The token ids that pose each problem."""
    return [tokenizer.encode_chat(posed(problem)) for problem in problems]


def answer(
    model: ModelConfig,
    base: dict,
    tokenizer: Tokenizer,
    problems: Sequence[Example],
    max_new_tokens: int = 64,
) -> tuple[float, list[Passage]]:
    """Lets a base answer by the sampler that trains it.

    Returns:
      The share of right answers, and each prompt with its answer, whose tokens count.
    """
    asked = prompts(tokenizer, problems)
    rows, longest = min(_ROWS, len(asked)), max(map(len, asked))
    width = -(-(longest + max_new_tokens) // 16) * 16
    if width > model.max_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} more exceed the model's "
            f"{model.max_positions} positions: measure without problems (--eval 0)"
        )
    state = sampler.empty_state(model, rows, width, len(tokenizer.eos_ids))
    sample = compiler.jit(
        sampler.sample,
        compiler.options("fast"),
        static_argnames=("config", "filters"),
        donate_argnames=("state",),
    )
    out, _ = generate(
        sample,
        model,
        base,
        None,
        state,
        asked,
        group_size=1,
        max_completion_tokens=max_new_tokens,
        stop_ids=tokenizer.eos_ids,
        temperature=0.0,
        seed=0,
        step=0,
    )
    said = [
        [i for i in out.completion(row) if i not in tokenizer.eos_ids] for row in range(len(asked))
    ]
    with Grader() as grader:
        grades = grader.grade_batch(
            [(tokenizer.decode(ids), p.answer) for ids, p in zip(said, problems, strict=True)]
        )
    passages = [
        Passage(prompt + ids, begin=len(prompt) - 1)
        for prompt, ids in zip(asked, said, strict=True)
    ]
    return float(np.nanmean([grade.value for grade in grades])), passages
