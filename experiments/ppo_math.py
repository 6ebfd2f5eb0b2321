"""PPO on math problems: a frozen low-bit base, one adapter that trains, exact log-probs.

    python experiments/ppo_math.py --config configs/tiny_moe.py
    python experiments/ppo_math.py --config configs/tiny_moe.py:gae --config.seed=1
    python experiments/ppo_math.py --config configs/tiny_moe.py --resume runs/ppo_math-...

Made to be copied. `run` is the whole algorithm: sample, score, step; what a reader may want to
change (the loss, the advantage, the reward) is an argument of it or a line in it.
"""

from collections.abc import Sequence

import jax
import numpy as np

from orbit_jax import parity, startup
from orbit_jax.config import Config, to_dict
from orbit_jax.plan import traffic
from orbit_jax.rl import advantages, losses
from orbit_jax.rl.batch import make_batch, token_buckets
from orbit_jax.rl.rollouts import Rollouts, generate
from orbit_jax.rl.sampler import STOP_REASONS
from orbit_jax.runs.cli import main
from orbit_jax.runs.interrupt import StopFlag
from orbit_jax.runs.loading import Loading
from orbit_jax.runs.record import Recorder
from orbit_jax.tasks.grading import Grader
from orbit_jax.tasks.math import MathTask, load_data, problems_of_step
from orbit_jax.tasks.problems import Problem

EVALUATION = 2**32 - 1  # stands in for the step, and keys evaluation's noise apart from training's


def run(
    config: Config,
    resume: str = "",
    loss_fn: losses.LossFn = losses.ppo_clip,
    advantage_fn: advantages.AdvantageFn | None = None,
) -> dict:
    """Trains by PPO and returns what `summary.json` holds."""
    startup.set_up_jax(config)
    advantage_fn = advantage_fn or advantages.ADVANTAGES[config.ppo.advantage]
    sampler, ppo, task = config.sampler, config.ppo, config.task
    data = load_data(
        task.jsonl,
        task.data_seed,
        task.train_problems,
        task.heldout_problems,
        task.unseen_problems,
        task.difficulties,
        task.unseen_difficulty,
    )
    frozen = startup.load(config, Loading())
    base, tokenizer = frozen.base, frozen.tokenizer
    math = MathTask(Grader(task.grader_workers, task.grader_max_seconds), task.system)
    everything = (*data.train, *data.heldout, *data.unseen)
    prompts = startup.encode_prompts(
        config, tokenizer, {p.id: math.messages(p) for p in everything}
    )
    state, slots = startup.train_state(config, frozen), startup.slots(config, frozen)

    def rollouts(problems: Sequence[Problem], group_size: int, temperature: float, step: int):
        """Completions of each problem by the current policy, as ids and as text."""
        nonlocal slots
        out, slots = generate(
            programs.sample,
            programs.model,
            base,
            state.policy,
            slots,
            [prompts[p.id] for p in problems],
            group_size=group_size,
            max_completion_tokens=sampler.max_completion_tokens,
            stop_ids=tokenizer.eos_ids,
            temperature=temperature,
            seed=config.seed,
            step=step,
        )
        return out, [tokenizer.decode(out.completion(i)) for i in range(len(out.lengths))]

    def evaluate(parts: dict[str, Sequence[Problem]]) -> dict[str, float]:
        """Pass rates, greedy and at temperature 1, of each part of the data."""
        rates = {}
        for name, problems in parts.items():
            for how, temperature in (("greedy", 0.0), ("sampled", 1.0)):
                _, texts = rollouts(problems, 1, temperature, EVALUATION)
                rates[f"{name}/pass_{how}"] = float(np.nanmean(math.rewards(problems, texts)[0]))
        return rates

    whole = {"heldout": data.heldout} | ({"unseen": data.unseen} if data.unseen else {})
    part = {"heldout": data.heldout[: config.evaluation.problems]}
    with (
        Recorder(to_dict(config), startup.facts(frozen, state), resume) as record,
        math.grader,
    ):
        state, start = record.restore(state)
        record.note(f"problems: {len(data.train):,} to train on, {len(data.heldout):,} held out")
        record.note(startup.memory_sentence(config, frozen))
        record.note("compiling the sampler and the step, comparing their log-probs ...")
        programs, slots, report = parity.choose(
            config,
            frozen.model,
            base,
            state,
            slots,
            [prompts[p.id] for p in data.train[: sampler.prompts_per_step]],
            tokenizer.eos_ids,
            loss_fn,
            advantage_fn,
        )
        record.note(report.sentence)
        if not record.resumed:
            record.before(evaluate(whole))

        with StopFlag() as stop:
            for step in record.timed(range(start, config.steps)):
                problems = problems_of_step(data.train, step, sampler.prompts_per_step, config.seed)
                sampled, texts = rollouts(problems, sampler.group_size, sampler.temperature, step)
                asked = [problems[group] for group in sampled.groups]
                rewards, outcomes = math.rewards(asked, texts)
                batch = make_batch(
                    programs.model, sampled, rewards, ppo.micro_batches, token_buckets(config)
                )
                state, metrics = programs.ppo_step(
                    programs.step, base, state, batch, loss_fn, advantage_fn
                )
                metrics = jax.device_get(metrics) | describe(sampled, rewards)
                metrics |= traffic.of_step(programs, sampled)
                record.check(step, state, metrics, batch, programs.recipe)
                done = step + 1
                if done % config.evaluation.every_steps == 0 and done < config.steps:
                    metrics |= evaluate(part)
                samples = rows(sampled, asked, texts, rewards, outcomes)
                record.step(step, metrics, rewards, outcomes, samples)
                if done % config.run.checkpoint_every_steps == 0 or done == config.steps:
                    record.checkpoint(done, state)
                if stop.requested:
                    return record.stopped(done, state)
        return record.after(evaluate(whole))


def describe(sampled: Rollouts, rewards: np.ndarray) -> dict[str, float]:
    """Metrics of the rollouts themselves."""
    by_group = rewards.reshape(-1, np.bincount(sampled.groups)[0])
    # Samples without a reward (NaN) are left out of their group.
    lowest, highest = np.fmin.reduce(by_group, axis=1), np.fmax.reduce(by_group, axis=1)
    stopped = {f"stop/{r}": np.mean(sampled.status == i) for i, r in enumerate(STOP_REASONS)}
    return {
        "tokens": sampled.lengths.sum(),
        "completion/length_mean": sampled.sampled.sum(axis=1).mean(),
        "reward/flat_groups": np.mean(~(highest > lowest)),
        **{name: share for name, share in stopped.items() if share},
    }


def rows(
    sampled: Rollouts,
    asked: Sequence[Problem],
    texts: Sequence[str],
    rewards: np.ndarray,
    outcomes: Sequence[str],
) -> list[dict]:
    """One record a rollout, for `samples/`."""
    return [
        {
            "problem": problem.id,
            "prompt": problem.prompt,
            "answer": problem.answer,
            "completion": text,
            "reward": float(reward),
            "outcome": outcome,
            "stop": STOP_REASONS[sampled.status[i]],
            "prompt_ids": sampled.tokens[i, : sampled.prompt_lengths[i]].tolist(),
            "ids": sampled.completion(i),
            "logprobs": sampled.logprobs[i, sampled.sampled[i]].tolist(),
        }
        for i, (problem, text, reward, outcome) in enumerate(
            zip(asked, texts, rewards, outcomes, strict=True)
        )
    ]


if __name__ == "__main__":
    main(run, default_config="configs/tiny_moe.py")
