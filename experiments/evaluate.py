"""How many problems a base solves, or what a run made of it: pass@1, pass@k, majority@k.

    python experiments/evaluate.py --config configs/tiny_moe.py --out runs/base
    python experiments/evaluate.py --config configs/tiny_tools.py:mixed --config.adapter.initial=DIR
    python experiments/evaluate.py --run runs/ppo_math-... --out runs/trained
    python experiments/evaluate.py --run runs/ppo_math-... --config.task.heldout_problems=100
    python experiments/evaluate.py --compare runs/base runs/trained

Every problem of the splits is answered once greedily and --samples times at --temperature, by the
sampler that trains, with the tools and the graders of `config.task.mixture`. Writes `results.json`
and `samples/*.jsonl`; intervals are of 95%, over problems. With --run its own config counts, in
which single fields may be overridden; with `config.adapter.initial` a PEFT folder's adapter
answers.

--compare sets two evaluations side by side, problem by problem: differences with intervals, and
p-values of McNemar's exact test or, for shares of samples, of flips of signs.
"""

import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags
from ppo_math import EVALUATION

from orbit_jax import parity, processes, startup, trained
from orbit_jax.adapters.adapter import Adapter
from orbit_jax.config import Config, to_dict
from orbit_jax.rl.rollouts import generate
from orbit_jax.rl.sampler import RUNNING, SamplerState
from orbit_jax.runs import evaluations
from orbit_jax.runs.cli import main
from orbit_jax.runs.files import to_json, write_atomic
from orbit_jax.runs.folder import RunFolder, require_new
from orbit_jax.runs.loading import Loading
from orbit_jax.runs.progress import Progress
from orbit_jax.tasks import comparison, evaluation
from orbit_jax.tasks.dialogues import Asked, Dialogues
from orbit_jax.tasks.evaluation import Sample, Settings
from orbit_jax.tasks.registry import Tasks, open_tasks
from orbit_jax.tasks.task import Example
from orbit_jax.tasks.tools import ToolPool

ROUNDS = 8  # of all slots, that are sampled before they are graded and written
FLAGS = flags.FLAGS
flags.DEFINE_string("run", "", "a run's folder, or a checkpoint in it, whose adapter answers")
flags.DEFINE_list("splits", [], "of the data; by default heldout, and unseen where there is one")
flags.DEFINE_integer("samples", 8, "completions of each problem at --temperature; 0 for none")
flags.DEFINE_float("temperature", 1.0, "of the samples")
flags.DEFINE_integer("top_k", 0, "most likely tokens that a sample may take; 0: all")
flags.DEFINE_float("top_p", 1.0, "probability of the most likely tokens that it may take")
flags.DEFINE_list("k", [], "of pass@k and majority@k; by default 1, 2, 4, ... and --samples")
flags.DEFINE_string("out", "", "a new folder; by default evaluate-... in config.run.root")
flags.DEFINE_list("compare", [], "instead: two evaluations, as results.json or their folders")


def run(config: Config) -> None:
    """What the command line asks for."""
    if FLAGS["compare"].present:
        first, second = comparison.read_two(FLAGS.compare)
        rows, remarks = comparison.compare(first, second), comparison.differences(first, second)
        names = first["name"], second["name"]
        evaluations.show_comparison(*names, rows, evaluation.shown(rows), remarks)
        return
    given = FLAGS.samples, FLAGS.temperature, FLAGS.top_k, FLAGS.top_p
    settings = Settings(*given, evaluation.read_ks(FLAGS.k))
    if FLAGS.run:
        overrides = config_flags.get_override_values(FLAGS["config"])
        config = trained.config_of(Path(FLAGS.run), overrides)
    found = evaluate(config, settings, FLAGS.splits, FLAGS.run, FLAGS.out)
    remarks = [*evaluation.remarks(found["problems"]), f"wrote {found['folder']}"]
    evaluations.show(found, evaluation.shown(found["table"]), remarks)


def evaluate(
    config: Config, settings: Settings, splits: Sequence[str], run: str = "", out: str = ""
) -> dict[str, Any]:
    """Samples, grades and writes everything; returns what `results.json` holds."""
    config = trained.in_one_process(config)
    startup.set_up_jax(config)
    root, called = (Path(out).parent, Path(out).name) if out else (config.run.root, "")
    if out:
        require_new(out, "--out")
    with open_tasks(config) as tasks:
        parts = evaluation.choose(tasks.split, splits)
        frozen = startup.load(config, Loading())
        policy, name = policy_of(config, frozen, run)
        asked = tasks.pose([e for examples in parts.values() for e in examples], frozen.tokenizer)
        startup.check_prompts(config, {key: one.prompt for key, one in asked.items()})
        folder = RunFolder.create(root, "evaluate", to_dict(config), called)
        total = len(asked) * sum(count for count, _ in settings.modes.values())
        problems_done: list[dict[str, Any]] = []
        with Progress(total, folder.log, unit="completions") as progress:
            counts = [f"{len(examples):,} {split}" for split, examples in parts.items()]
            progress.note(f"{name} on {' and '.join(counts)} problems; compiling the sampler ...")
            answerer = Answerer(config, frozen, policy, tasks, asked, progress)
            for split, examples in parts.items():
                by_mode: dict[str, list[Sample]] = {}
                for mode, (count, drawn) in settings.modes.items():
                    by_mode[mode] = []
                    with (folder.samples / f"{split}_{mode}.jsonl").open("w") as file:
                        for samples in answerer(examples, count, drawn):
                            file.writelines(f"{to_json(dataclasses.asdict(s))}\n" for s in samples)
                            by_mode[mode] += samples
                problems_done += evaluation.of_problems(split, examples, by_mode, settings.ks)
    found = {
        "name": name,
        "settings": dataclasses.asdict(settings),
        "base": config.base.path,
        "base_hash": frozen.hash,
        "run": run,
        "seed": config.seed,
        "seconds": answerer.seconds,
        "tokens": answerer.tokens,
        "table": evaluation.table(problems_done, settings.samples),
        "problems": problems_done,
    }
    write_atomic(folder.path / evaluation.FILE, to_json(found, indent=1))
    return found | {"folder": str(folder.path)}


def policy_of(config: Config, frozen: startup.Frozen, run: str) -> tuple[Adapter | None, str]:
    """Who answers, and what to call it: a run's adapter, a PEFT folder's, or the base alone."""
    if run:
        policy, step = trained.load_policy(Path(run), config, frozen)
        return policy, f"{trained.find_checkpoint(Path(run))[0].name} step {step}"
    if config.adapter.initial:
        return startup.train_state(config, frozen).policy, Path(config.adapter.initial).name
    return None, Path(config.base.path).name


class Answerer:
    """A policy with the sampler's program and slots, and the tasks that grade it."""

    def __init__(
        self,
        config: Config,
        frozen: startup.Frozen,
        policy: Adapter | None,
        tasks: Tasks,
        asked: Mapping[str, Asked],
        progress: Progress,
    ):
        self.config, self.frozen, self.policy = config, frozen, policy
        self.tasks, self.asked, self.progress = tasks, asked, progress
        recipe = "fast" if config.parity == "auto" else config.parity
        self.programs = parity.build(recipe, frozen.model, config)
        self.slots = startup.slots(config, frozen)
        self.begun = self.tokens = 0
        self.seconds = 0.0

    def __call__(
        self, examples: Sequence[Example], count: int, drawn: Mapping[str, float]
    ) -> Iterator[list[Sample]]:
        """Samples of the examples, `count` of each, a few examples at a time."""
        at_once = max(1, ROUNDS * self.config.decoded_rows // count)
        tools = self.config.tools
        for first in range(0, len(examples), at_once):
            began = time.monotonic()
            asked = [self.asked[e.key] for e in examples[first : first + at_once]]
            rows = [one for one in asked for _ in range(count)]
            pool = ToolPool(tools.max_seconds, tools.workers)
            with Dialogues(rows, pool, tools.max_turns) as dialogues:
                out, self.slots = generate(
                    self.sample,
                    self.programs.model,
                    self.frozen.base,
                    self.policy,
                    self.slots,
                    [one.prompt for one in asked],
                    group_size=count,
                    max_completion_tokens=self.config.sampler.max_completion_tokens,
                    stop_ids=self.frozen.tokenizer.eos_ids,
                    seed=self.config.seed,
                    step=EVALUATION,
                    prompt_ids=range(first, first + len(asked)),
                    environment=dialogues,
                    **drawn,
                )
                tokens = out.sampled.sum(axis=1)
                self.tokens += int(tokens.sum())
                self.seconds += time.monotonic() - began
                verdicts = self.tasks.judge(dialogues, out)
            yield evaluation.samples_of(verdicts, tokens, out.stops)

    def sample(self, *arguments: Any, **filters: bool) -> SamplerState:
        """The sampler's program, which tells how many completions have ended."""
        program, incoming = self.programs.sample, arguments[4]
        compiled = program.executables
        state = program(*arguments, **filters)
        self.begun += int(processes.read(incoming.update).sum())
        running = int((processes.read(state.status) == RUNNING).sum())
        self.progress.update(self.begun - running, {})
        if program.executables > compiled:
            self.progress.start_clock()  # compiling is not in the rate
        return state


def checked(arguments: list[str]) -> list[str]:
    """`--compare a b` as absl reads it, `--compare=a,b`; refuses a config beside a run's own."""
    if {"--run", "--config"} <= {argument.partition("=")[0] for argument in arguments}:
        print("error: --run has a config of its own: leave --config out", file=sys.stderr)
        sys.exit(2)
    if "--compare" not in arguments:
        return arguments
    at = arguments.index("--compare")
    return [*arguments[:at], f"--compare={','.join(arguments[at + 1 :])}"]


if __name__ == "__main__":
    sys.argv = checked(sys.argv)
    main(run, default_config="configs/tiny_moe.py", resumable=False)
