"""Makes a low-bit base out of a bf16 Hugging Face folder, and says what that costs.

    python experiments/quantize_checkpoint.py IN OUT --format int4
    python experiments/quantize_checkpoint.py IN OUT --format mxfp4 --only experts
    python experiments/quantize_checkpoint.py IN OUT --format int4 --ignore 're:.*self_attn.*'

OUT is laid out as compressed-tensors has it (gpt-oss: its own MXFP4): for this project,
transformers and vLLM. transformers 5.24 misreads experts in nvfp4: it leaves their overall scale
out. A table on the screen and `quantization.json` in OUT tell the error of each group of weights;
KL(IN || OUT) per token of IN's answers to held-out problems, also with one group alone in low bits;
and how many of the problems each solves. `--tokens 0 --eval 0` loads no model to measure.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import heldout
import numpy as np
from rich.console import Console
from rich.table import Table

from orbit_jax.checkpoint.huggingface import load_base, open_base
from orbit_jax.checkpoint.quantized_plan import SCHEMES, Plan, make_plan
from orbit_jax.checkpoint.tokenizer import Tokenizer
from orbit_jax.checkpoint.write_quantized import Error, by_group, save_quantized, total
from orbit_jax.divergence import Divergence, Passage, one_group_at_a_time
from orbit_jax.runs.files import to_json, write_atomic
from orbit_jax.runs.progress import Progress
from orbit_jax.tasks.problems import generate_problems

MOST_SUGGESTED = 5  # groups to leave alone


def run(
    source: Path,
    out: Path,
    form: str,
    group: int | None = None,
    only: str = "",
    ignore: Sequence[str] = (),
    tokens: int = 2000,
    problems: int = 100,
) -> dict:
    """Quantises `source`, measures, and returns what `quantization.json` holds."""
    plan = make_plan(source, form, group, only, ignore)
    errors = by_group(plan, write(plan, out))
    report = {
        "source": str(source),
        "format": form,
        "group": plan.group,
        "only": only,
        "ignore": list(ignore),
        **figures(total(list(errors.values()))),
        "groups": {name: figures(error) for name, error in errors.items()},
    }
    if tokens or problems:
        report |= measure(plan, out, tokens, problems, report["groups"])
    write_atomic(out / "quantization.json", to_json(report, indent=2) + "\n")
    show(report)
    return report


def write(plan: Plan, out: Path) -> dict[str, Error]:
    """Writes the folder, and shows how far it is."""

    def tell(done: int, whole: int) -> None:
        progress.update(done // 10**6 + (done == whole), {})

    size = sum(ref.nbytes for ref in plan.refs.values()) // 10**6 + 1
    with Progress(size, log=lambda _: None, unit="MB") as progress:
        return save_quantized(out, plan, tell=tell)


def figures(error: Error) -> dict:
    """Of some weights, for the report."""
    return {
        "weights": error.weights,
        "relative_error": error.relative,
        "largest_error": error.largest,
        "bytes_before": error.bytes_before,
        "bytes_after": error.bytes_after,
    }


def measure(plan: Plan, out: Path, tokens: int, problems: int, groups: dict[str, dict]) -> dict:
    """Pass rates and KL; adds `kl_alone` to the groups."""
    (model, base), (low_model, low_base) = load_base(plan.folder), load_base(out)
    found: dict = {}
    if not (plan.folder / "tokenizer_config.json").is_file():
        length = min(128, model.max_positions)
        drawn = np.random.default_rng(0).integers(
            0, model.vocab_size, (-(-tokens // length), length)
        )
        found["tokens_of"] = "random ids, as there is no tokenizer"
        passages = [Passage(ids) for ids in drawn.tolist()]
    else:
        tokenizer, unseen = Tokenizer.load(plan.folder), generate_problems(seed=0)["heldout"]
        found["tokens_of"] = "prompts of held-out problems"
        passages = [Passage(ids) for ids in heldout.prompts(tokenizer, unseen)]
        if problems:
            asked = unseen[:problems]
            before, passages = heldout.answer(model, base, tokenizer, asked)
            after, _ = heldout.answer(low_model, low_base, tokenizer, asked)
            found["tokens_of"] = "the original's greedy answers to held-out problems"
            found["heldout_problems"] = len(asked)
            found |= {"heldout_pass_before": before, "heldout_pass_after": after}
    if not tokens:
        return found
    divergence = Divergence(model, base, cut(passages, tokens))
    mean, largest = divergence.of(low_model, low_base)
    found |= {"tokens": divergence.tokens, "kl_per_token": mean, "kl_largest": largest}
    with Progress(len(groups), log=lambda _: None, unit="group") as progress:
        for i, (name, changed) in enumerate(one_group_at_a_time(base, plan, open_base(out))):
            groups[name]["kl_alone"] = divergence.of(model, changed)[0]
            progress.update(i + 1, {})
    return found | {"suggested_ignore": suggest(groups)}


def cut(passages: Sequence[Passage], tokens: int) -> list[Passage]:
    """The first passages, until so many tokens count."""
    counted = np.cumsum([len(passage.ids) - passage.begin for passage in passages])
    return list(passages[: int(np.searchsorted(counted, tokens)) + 1])


def suggest(groups: dict[str, dict]) -> list[str]:
    """The groups that cost over twice their even share of the KL, the worst first."""
    ranked = sorted(groups, key=lambda name: -groups[name]["kl_alone"])
    even = np.mean([groups[name]["kl_alone"] for name in ranked])
    return [name for name in ranked[:MOST_SUGGESTED] if groups[name]["kl_alone"] > 2 * even]


def show(report: dict) -> None:
    """The report by kinds of groups, all layers together."""
    kinds: dict[str, list[dict]] = {}
    for name, group in report["groups"].items():
        kind = re.sub(r"^re:\.\*(layers\\\.\d+\\\.)?|\\b|\\|\$", "", name)
        kinds.setdefault(kind, []).append(group)
    columns = ("weights", "layers", "relative error", "worst", "MB", "MB after", "KL alone")
    table = Table(*columns, box=None)
    for kind, groups in kinds.items():
        column = lambda key, groups=groups: np.array([g.get(key, np.nan) for g in groups])  # noqa: E731
        table.add_row(
            kind,
            str(len(groups)),
            f"{column('relative_error').mean():.4f}",
            f"{column('relative_error').max():.4f}",
            *(f"{column(key).sum() / 1e6:,.2f}" for key in ("bytes_before", "bytes_after")),
            f"{column('kl_alone').sum():.5f}",
        )
    Console().print(table)
    if "heldout_pass_before" in report:
        print(
            f"held-out problems solved, greedy: {report['heldout_pass_before']:.1%} before, "
            f"{report['heldout_pass_after']:.1%} after, of {report['heldout_problems']}"
        )
    if "kl_per_token" not in report:
        return
    print(
        f"KL per token: {report['kl_per_token']:.5f} nats, at most {report['kl_largest']:.3f}, "
        f"over {report['tokens']} tokens ({report['tokens_of']})"
    )
    for name in report["suggested_ignore"]:
        group = report["groups"][name]
        more = (group["bytes_before"] - group["bytes_after"]) / 1e6
        print(
            f"to leave alone (KL {group['kl_alone']:.5f}, {more:,.2f} MB more): --ignore '{name}'"
        )
    if not report["suggested_ignore"]:
        print("no group stands out: none costs over twice its even share of the KL")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="IN", type=Path, help="a folder that is not quantised")
    parser.add_argument("out", metavar="OUT", type=Path, help="a new folder")
    parser.add_argument("--format", dest="form", required=True, choices=SCHEMES)
    parser.add_argument("--group", type=int, help="columns that share a scale (int4 alone; 32)")
    parser.add_argument("--only", default="", choices=["experts"], help="leave other layers alone")
    parser.add_argument(
        "--ignore", action="append", default=[], help="leave these modules alone; may be repeated"
    )
    parser.add_argument("--tokens", type=int, default=2000, help="to take KL on; 0: do not")
    parser.add_argument("--eval", dest="problems", type=int, default=100, help="to solve; 0: none")
    arguments = parser.parse_args()
    try:
        run(**vars(arguments))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
