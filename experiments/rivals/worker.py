"""What every contestant of the benchmark speaks: one JSON object a line on stdin and stdout.

The first line that a worker reads holds its settings; it loads, and answers with the cases that it
can run. Each further line names a case; it runs the case once and answers with what that took. At
the end of its input it ends. Only the standard library is used here: a rival's environment has
nothing of this project.

Settings: `base` (path), `prompts` (texts) and `prompt_ids`, `group_size`, `new_tokens` (of each
rollout in `sample` and `step`), `varied_tokens` (of each rollout in `sample_varied` and
`step_varied`, prompt by prompt), `rank` and `alpha` of the adapter, `threads`, `seed`, and whatever
else a worker knows (its docstring says).

Cases: `sample` draws the rollouts, `step` is a whole step of training: rollouts, scoring, loss,
backward pass, optimiser.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping

CASES = ("sample", "step", "sample_varied", "step_varied")


class Channel:
    """Requests in, answers out; what libraries print goes to stderr from here on."""

    def __init__(self):
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def __iter__(self) -> Iterator[dict]:
        while line := sys.stdin.readline():
            yield json.loads(line)

    def send(self, answer: Mapping) -> None:
        """One answer."""
        print(json.dumps(answer), file=self._answers)


class Meter:
    """Wall time, CPU time of all threads and peak memory of this process, from here to `stop`."""

    highest = 0  # bytes, over the whole life of the process

    def __init__(self):
        Meter.highest = max(Meter.highest, _peak_bytes())
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # the peak starts anew
        except OSError:
            pass  # elsewhere than on Linux a peak is that of the process until now
        self.seconds, self.cpu_seconds = time.perf_counter(), time.process_time()

    def stop(self) -> dict[str, float]:
        """What was measured."""
        seconds, cpu_seconds = time.perf_counter(), time.process_time()
        peak = _peak_bytes()
        Meter.highest = max(Meter.highest, peak)
        return {
            "seconds": seconds - self.seconds,
            "cpu_seconds": cpu_seconds - self.cpu_seconds,
            "peak_memory_bytes": peak,
            "process_peak_memory_bytes": Meter.highest,
        }


def serve(load: Callable[[dict], tuple[dict[str, Callable[[], dict]], dict]]) -> None:
    """Answers requests until the input ends.

    Args:
      load: takes the settings; returns the cases, and facts for the report. A case returns at least
        `tokens`, those that its rate counts: the new ones of sampling, all of a step's rollouts.
    """
    channel = Channel()
    requests = iter(channel)
    cases, facts = load(next(requests))
    channel.send({"cases": list(cases), "facts": facts})
    for request in requests:
        meter = Meter()
        counts = cases[request["case"]]()
        channel.send(meter.stop() | counts)


def lengths_of(settings: Mapping, case: str) -> list[int]:
    """New tokens of each rollout of a case, prompt by prompt."""
    if case.endswith("varied"):
        return list(settings["varied_tokens"])
    return [settings["new_tokens"]] * (len(settings["prompts"]) * settings["group_size"])


def counted(settings: Mapping, case: str, lengths: list[int]) -> int:
    """The tokens that the rate of a case counts, from the completions' lengths.

    Raises:
      RuntimeError: if the rollouts do not have the lengths that were asked for.
    """
    if sorted(lengths) != sorted(lengths_of(settings, case)):
        raise RuntimeError(f"{case}: rollouts of {lengths} new tokens are not those asked for")
    prompts = sum(map(len, settings["prompt_ids"])) * settings["group_size"]
    return sum(lengths) + (prompts if case.startswith("step") else 0)


def _peak_bytes() -> int:
    try:
        with open("/proc/self/status") as file:
            return next(int(s.split()[1]) * 1024 for s in file if s.startswith("VmHWM"))
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
