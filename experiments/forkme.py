"""The shortest experiment, with the whole loop in your hands: copy it, change 1, 2 and 3.

    python experiments/forkme.py --config configs/tiny_moe.py
    python experiments/forkme.py --config configs/tiny_moe.py --resume runs/forkme-...

It does what no field of `ppo_math.py` can say: a prompt is sampled twice as often as it is trained
on, and the half whose rewards vary most is kept (PODS, Xu et al., 2025). Of the config `task`,
`reward`, `tools`, `ppo.loss`, `ppo.advantage` and `ppo.dynamic_sampling` are not read: what they
would say stands here. A run goes on where it was stopped, bit for bit, since a step follows from
the config, its number and the state that is saved; whatever else yours depends on belongs there.
"""

import dataclasses
import os
from collections.abc import Sequence

import jax
import numpy as np

from orbit_jax import parity, startup
from orbit_jax.config import Config, PPOConfig, to_dict
from orbit_jax.rl.advantages import dr_grpo
from orbit_jax.rl.batch import make_batch, token_buckets
from orbit_jax.rl.losses import Tokens
from orbit_jax.rl.rollouts import Rollouts, generate
from orbit_jax.runs.cli import main
from orbit_jax.runs.interrupt import StopFlag
from orbit_jax.runs.record import Recorder
from orbit_jax.tasks.answers import extract_answer, read_number
from orbit_jax.tasks.problems import is_heldout

# ---- 1. The task: what is asked, and what an answer earns ----------------------------------------

ANSWERS = {f"{a}+{b}-{c}": a + b - c for a in range(10) for b in range(10) for c in range(10)}
HELDOUT = [question for question in ANSWERS if is_heldout(question)]  # one in ten
TRAIN = [question for question in ANSWERS if not is_heldout(question)]


def reward(question: str, completion: str) -> float:
    """1 for the right number, else 0."""
    said = extract_answer(completion)
    return float(said is not None and read_number(said) == ANSWERS[question])


# ---- 2. The update: which rollouts it is made of, and how they move the policy -------------------


def most_telling(rewards: np.ndarray, count: int) -> np.ndarray:
    """[count] which of a prompt's rewards vary most: some of the lowest, the rest the highest."""
    order = np.argsort(rewards, kind="stable")
    sets = [np.r_[order[:low], order[len(order) - count + low :]] for low in range(count + 1)]
    return max(sets, key=lambda rows: rewards[rows].var())


advantage = dr_grpo  # the reward less the mean of the prompt's; or one's own, as in own_rl.py


def loss(config: PPOConfig, x: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Of each token [N], with metrics of each by name; see rl/losses.py."""
    return -x.advantages * x.logprobs, {}


# ---- 3. What is logged, beside what the step itself measures -------------------------------------


def measures(rollouts: Rollouts, rewards: np.ndarray, rows: np.ndarray) -> dict[str, float]:
    """Metrics of all rollouts and of the `rows` that are kept; the recorder needs `tokens`."""
    return {
        "tokens": rollouts.lengths.sum(),
        "completion/length_mean": rollouts.completion_lengths.mean(),
        "kept/reward_mean": rewards[rows].mean(),
        "kept/reward_spread": rewards[rows].std(),
    }


# ---- The loop: sample, score, choose, step, write down -------------------------------------------


def run(config: Config, resume: str = "", change: Sequence[str] = ()) -> dict:
    """Trains, and returns what `summary.json` holds."""
    startup.set_up_jax(config)
    here = os.path.relpath(__file__)  # the config says what is run, and a run keeps the file's hash
    ppo = dataclasses.replace(config.ppo, loss=f"{here}:loss", advantage=f"{here}:advantage")
    config = dataclasses.replace(config, experiment="forkme", ppo=ppo)
    sampler = config.sampler
    many, size = sampler.prompts_per_step, sampler.group_size
    frozen = startup.load(config)
    base, tokenizer, stop_ids = frozen.base, frozen.tokenizer, frozen.tokenizer.eos_ids
    prompts = {q: tokenizer.encode_chat([{"role": "user", "content": q}]) for q in ANSWERS}
    startup.check_prompts(config, prompts)
    state, slots = startup.train_state(config, frozen), startup.slots(config, frozen)

    def rollouts_of(questions: Sequence[str], each: int, temperature: float, step: int):
        """`each` rollouts of every question by the current policy, and what is written of each."""
        nonlocal slots
        limits = {"max_completion_tokens": sampler.max_completion_tokens, "stop_ids": stop_ids}
        noise = {"temperature": temperature, "seed": config.seed, "step": step}
        tokens = [prompts[q] for q in questions]
        policy = (programs.sample, programs.model, base, state.policy)
        rollouts, slots = generate(*policy, slots, tokens, group_size=each, **limits, **noise)
        lines = []
        for row, group in enumerate(rollouts.groups):
            ids = rollouts.completion(row)
            text = tokenizer.decode(ids)
            line = {"prompt": questions[group], "turns": [("assistant", text)]}
            line |= {"reward": reward(questions[group], text), "outcome": "scored"}
            lines.append(line | {"ids": ids, "sampled": [True] * len(ids)})
        return rollouts, np.array([line["reward"] for line in lines]), lines

    def evaluate() -> dict[str, float]:
        questions = HELDOUT[: config.evaluation.problems]
        return {"heldout/pass_greedy": rollouts_of(questions, 1, 0.0, 2**32 - 1)[1].mean()}

    facts = startup.facts(frozen, state) | {"code_hash": config.code_hash}
    with Recorder(to_dict(config), facts, resume, change) as record, StopFlag() as stop:
        state, start = record.restore(state)
        some = [prompts[q] for q in TRAIN[:many]]
        programs, slots, report = parity.choose(
            config, frozen.model, base, state, slots, some, stop_ids, loss, advantage
        )
        record.note(report.sentence)
        if not record.resumed:
            record.before(evaluate())
        for step in record.timed(range(start, config.steps)):
            dealt = np.random.default_rng((config.seed, step)).permutation(TRAIN)[:many].tolist()
            rollouts, rewards, lines = rollouts_of(dealt, 2 * size, sampler.temperature, step)
            groups = np.arange(len(rewards)).reshape(many, 2 * size)
            rows = np.concatenate([of[most_telling(rewards[of], size)] for of in groups])
            chosen, buckets = rollouts.take(rows), token_buckets(config)
            batch = make_batch(programs.model, chosen, rewards[rows], ppo.micro_batches, buckets)
            state, metrics = programs.ppo_step(programs.step, base, state, batch, loss, advantage)
            metrics = jax.device_get(metrics) | measures(rollouts, rewards, rows)
            record.check(step, state, metrics, batch, programs.recipe)
            if (step + 1) % config.evaluation.every_steps == 0 and step + 1 < config.steps:
                metrics |= evaluate()
            record.step(step, metrics, rewards, [line["outcome"] for line in lines], lines)
            record.save_if_due(step + 1, state)
            if stop.requested:
                return record.stopped(step + 1, state)
        return record.after(evaluate())


if __name__ == "__main__":
    main(run, default_config="configs/tiny_moe.py")
