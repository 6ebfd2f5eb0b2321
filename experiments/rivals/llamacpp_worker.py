"""llama.cpp's batched decoding as a contestant, by llama-cpp-python's low-level functions.

`worker.py` says what is spoken. All rollouts are sequences of one context; a prompt is processed
once and its cache copied to the rest of its group; each call decodes one token of every row that
goes on. Rows are sampled by llama.cpp's own chain (temperature 1, whole vocabulary) on all threads.
The base alone answers, without an adapter.

Settings of its own: `kv_unified` (False: a cache of its own for each sequence), `flash_attention`
(llama.cpp's choice, or True or False),
`extra_buffers` (True: weights repacked for AMX where the processor has it).
"""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import llama_cpp
import llama_cpp.llama_cpp as api
import numpy as np
from worker import counted, lengths_of, serve

SILENT = api.llama_log_callback(lambda *_: None)


class Contestant:
    """A model with one context that holds all rows."""

    def __init__(self, settings: dict):
        self.settings, self.threads = settings, settings["threads"]
        rows = len(settings["prompts"]) * settings["group_size"]
        longest = max(lengths_of(settings, "sample_varied")) + max(map(len, settings["prompt_ids"]))
        api.llama_log_set(SILENT, ctypes.c_void_p(0))
        api.llama_backend_init()
        how = api.llama_model_default_params()
        how.use_extra_bufts = settings.get("extra_buffers", True)
        model = api.llama_model_load_from_file(settings["base"].encode(), how)
        if not model:
            raise ValueError(f"llama.cpp cannot read {settings['base']}")
        options = api.llama_context_default_params()
        options.n_ctx, options.n_seq_max = rows * longest, rows
        options.n_batch = options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = self.threads
        options.kv_unified = settings.get("kv_unified", False)
        options.no_perf = True
        if "flash_attention" in settings:
            options.flash_attn_type = int(settings["flash_attention"])
        self.context = api.llama_init_from_model(model, options)
        self.memory = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(512, 0, 1)
        self.pool = ThreadPoolExecutor(self.threads)
        self.chains = []
        for row in range(rows):
            chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(1.0))
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(settings["seed"] + row))
            self.chains.append(chain)

    def run(self, case: str) -> dict:
        """All rollouts of a case."""
        samples, limits = self.settings["group_size"], lengths_of(self.settings, case)
        api.llama_memory_clear(self.memory, True)
        last = {}
        for i, ids in enumerate(self.settings["prompt_ids"]):
            self.decode([(i * samples, position, t) for position, t in enumerate(ids[:-1])])
            for row in range(i * samples, (i + 1) * samples):
                last[row] = ids[-1]
                if row != i * samples:
                    api.llama_memory_seq_cp(self.memory, i * samples, row, -1, -1)
        drawn: dict[int, list[int]] = {row: [] for row in last}
        while going := [row for row, ids in drawn.items() if len(ids) < limits[row]]:
            prompts = [len(self.settings["prompt_ids"][row // samples]) for row in going]
            self.decode(
                [
                    (row, prompt - 1 + len(drawn[row]), last[row])
                    for row, prompt in zip(going, prompts, strict=True)
                ]
            )
            for row, token in zip(going, self.sample(going), strict=True):
                drawn[row].append(token)
                last[row] = token
        lengths = [len(ids) for ids in drawn.values()]
        return {"tokens": counted(self.settings, case, lengths)}

    def decode(self, tokens: Sequence[tuple[int, int, int]]) -> None:
        """Processes (row, position, token) at once, with logits of each row's last."""
        for i, (row, position, token) in enumerate(tokens):
            self.batch.token[i], self.batch.pos[i] = token, position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, row
            self.batch.logits[i] = i + 1 == len(tokens) or tokens[i + 1][0] != row
        self.batch.n_tokens = len(tokens)
        if status := api.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode: {status}")

    def sample(self, rows: Sequence[int]) -> list[int]:
        """A token of each row of the last call, by all threads."""
        api.llama_get_logits(self.context)

        def part(first: int) -> list[int]:
            return [
                api.llama_sampler_sample(self.chains[rows[i]], self.context, i)
                for i in range(first, len(rows), self.threads)
            ]

        tokens = np.zeros(len(rows), int)
        for first, drawn in enumerate(self.pool.map(part, range(min(self.threads, len(rows))))):
            tokens[first :: self.threads] = drawn
        return tokens.tolist()


def load(settings: dict) -> tuple[dict, dict]:
    """The cases of llama.cpp."""
    contestant = Contestant(settings)
    system = api.llama_print_system_info().decode()
    facts = {"adapter": "none", "llama_cpp": llama_cpp.__version__, "system": system}
    return {c: lambda c=c: contestant.run(c) for c in ("sample", "sample_varied")}, facts


if __name__ == "__main__":
    serve(load)
