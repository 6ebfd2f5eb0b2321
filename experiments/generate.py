"""Talks to a base, and to what a run made of it: streams answers with tokens per second.

    python experiments/generate.py --prompt "7+8-3"
    python experiments/generate.py --run runs/ppo_math-... --prompt "7+8-3"
    python experiments/generate.py --base model.gguf            # a chat, one line a turn
    python experiments/generate.py --base model --adapter peft_folder --prompt "7+8-3"

With `--run`, base and newest adapter of that run answer one after the other; with `--adapter`, the
base and a PEFT adapter.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from orbit_jax import mesh, parity, startup
from orbit_jax.adapters.adapter import Adapter
from orbit_jax.checkpoint.peft import load_adapter
from orbit_jax.config import Config
from orbit_jax.rl import sampler
from orbit_jax.rl.admission import admit_prompts
from orbit_jax.rl.sampler import RUNNING
from orbit_jax.runs.loading import Loading
from orbit_jax.trained import config_of, load_policy

CHUNK = 8  # tokens that are drawn before they are printed


class Speaker:
    """A loaded base with the sampler's program, one row at a time."""

    def __init__(self, config: Config, frozen: startup.Frozen, settings: argparse.Namespace):
        self.frozen, self.settings = frozen, settings
        self.programs = parity.build("fast", frozen.model, config)

    def answer(self, adapter: Adapter | None, ids: Sequence[int]) -> Iterator[list[int]]:
        """The ids of a completion, a few at a time, without the one that ends it."""
        model, stop_ids = self.programs.model, self.frozen.tokenizer.eos_ids
        room = len(ids) + self.settings.max_tokens
        width = 64 << max(0, (room - 1).bit_length() - 6)  # few widths, few compilations
        state = sampler.empty_state(model, 1, width, len(stop_ids))
        state = mesh.place(model, state, sampler.state_specs(model, state))
        settings = (self.settings.max_tokens, stop_ids, self.settings.temperature)
        filters = {"top_k": self.settings.top_k, "top_p": self.settings.top_p}
        noise, done = (self.settings.seed, 0, 0, 0), len(ids)
        new = admit_prompts(model, state, [ids], [noise], [0], *settings, **filters)
        nothing = admit_prompts(model, state, [], [], [], *settings, **filters)
        while True:
            state = self.programs.sample(
                model,
                self.frozen.base,
                adapter,
                state,
                new,
                np.int32(CHUNK),
                filters=self.settings.top_k > 0 or self.settings.top_p < 1,
            )
            length, new = int(state.lengths[0]), nothing
            drawn = np.asarray(state.tokens[0, done:length]).tolist()
            done = length
            yield [i for i in drawn if i not in stop_ids]
            if int(state.status[0]) != RUNNING:
                return

    def say(self, name: str, adapter: Adapter | None, messages: Sequence[dict[str, str]]) -> str:
        """Prints an answer as it comes, and its speed; returns its text."""
        tokenizer = self.frozen.tokenizer
        print(f"{name}> ", end="", flush=True)
        ids: list[int] = []
        shown, timed = "", None
        for new in self.answer(adapter, tokenizer.encode_chat(messages)):
            ids += new
            text = tokenizer.decode(ids)
            whole = text.rstrip("\ufffd")  # half a character waits for its other half
            print(whole[len(shown) :], end="", flush=True)
            shown = whole
            timed = timed or (time.monotonic(), len(ids))
        seconds, count = time.monotonic() - timed[0], len(ids) - timed[1]
        speed = f", {count / seconds:.1f} tokens/s after the first {timed[1]}" if count else ""
        print(flush=True)
        print(f"({len(ids)} tokens{speed})", file=sys.stderr)
        return shown


def load(arguments: argparse.Namespace) -> tuple[Config, startup.Frozen, dict[str, Adapter | None]]:
    """The base and who answers: the base itself and, of a run, the newest adapter."""
    config = config_of(arguments.run) if arguments.run else Config()
    if arguments.base:
        config = dataclasses.replace(
            config, base=dataclasses.replace(config.base, path=arguments.base)
        )
    startup.set_up_jax(config)
    frozen = startup.load(config, Loading())
    speakers: dict[str, Adapter | None] = {"base": None}
    if arguments.run:
        policy, step = load_policy(arguments.run, config, frozen)
        speakers[f"step {step}"] = policy
    if arguments.adapter:
        loaded = load_adapter(arguments.adapter, frozen.model, frozen.hash)
        loaded = mesh.place(frozen.model, loaded, mesh.adapter_specs(loaded))
        speakers[arguments.adapter.name] = loaded
    return config, frozen, speakers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="", help="Hugging Face folder or .gguf file")
    parser.add_argument(
        "--run", type=Path, help="run folder, or a checkpoint of it, whose adapter answers too"
    )
    parser.add_argument("--adapter", type=Path, help="PEFT folder that answers too")
    parser.add_argument("--prompt", default="", help="ask this and end; without it, a chat")
    parser.add_argument("--system", default="", help="a system message before everything")
    parser.add_argument("--max_tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top_k", type=int, default=0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        config, frozen, speakers = load(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    speaker = Speaker(config, frozen, arguments)
    start = [{"role": "system", "content": arguments.system}] if arguments.system else []
    histories = {name: list(start) for name in speakers}
    while question := arguments.prompt or _ask():
        for name, adapter in speakers.items():
            histories[name].append({"role": "user", "content": question})
            text = speaker.say(name, adapter, histories[name])
            histories[name].append({"role": "assistant", "content": text})
        if arguments.prompt:
            return


def _ask() -> str:
    """A line from the user; empty at the end of input."""
    try:
        return input("you> ")
    except (EOFError, KeyboardInterrupt):
        return ""


if __name__ == "__main__":
    main()
