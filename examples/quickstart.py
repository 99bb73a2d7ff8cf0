"""Sample the embedded arithmetic task with the embedded model, dense and sparse, and see what it costs.

python examples/quickstart.py [--problems 64] [--budget 104]
"""

import argparse
import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sparse_rl import KV, Engine, Sampling, load_model, load_tokenizer, replay
from sparse_rl.data.arithmetic import grade, make_problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=64, help="held-out problems, one rollout each [64]")
    parser.add_argument("--budget", type=int, default=104, help="tokens the sparse caches keep [104, half of what is needed]")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    console = Console()
    model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    problems = make_problems(args.problems, seed=args.seed, split="test")
    prompts = [tokenizer(problem.prompt).input_ids for problem in problems]
    sampling = Sampling(max_tokens=256, seed=args.seed)

    table = Table(title=f"{args.problems} sums of eleven numbers with written steps, sampled at temperature 1")
    for column in ("cache", "right", "tokens", "held", "KV", "saved", "tokens/s", "replay error"):
        table.add_column(column, justify="right" if column != "cache" else "left")
    for kv in (
        KV(policy="full"),
        KV(policy="rkv", budget=args.budget, interval=26),
        KV(policy="streaming", budget=args.budget, interval=26),
        KV(policy="random", budget=args.budget, interval=26),
    ):
        name = "dense" if kv.policy == "full" else f"{kv.policy} {kv.budget}+{kv.interval}"
        engine = Engine(model, kv, slots=32)
        with bar(console, name) as progress:
            rollouts = engine.generate(prompts, sampling=sampling, progress=progress)
        texts = [tokenizer.decode(rollout.response, skip_special_tokens=True) for rollout in rollouts]
        right = sum(grade(text, problem.answer) for text, problem in zip(texts, problems, strict=True))
        few = rollouts[:8]
        noise = [(ours.detach() - r.logprobs).abs().mean() for ours, r in zip(replay(model, few, "sparse"), few, strict=True)]
        table.add_row(
            name,
            f"{right:.0f}/{len(problems)}",
            f"{engine.stats.tokens:,}",
            str(max(rollout.kv_peak for rollout in rollouts)),
            f"{engine.stats.peak_kv_bytes / 2**20:.1f} MiB",
            f"{engine.stats.token_savings:.0%}",
            f"{engine.stats.tokens_per_s:,.0f}",
            f"{float(sum(noise) / len(noise)):.0e}",
        )
        if kv.policy == "rkv":
            console.print(
                f"\n[bold]One rollout[/bold] of {problems[0].prompt} with {name} (the answer is {problems[0].answer}):"
            )
            console.print(texts[0], markup=False, highlight=False)
            console.print()
    console.print(table)
    console.print(
        "held: most tokens of a sequence in any layer and head; KV: bytes allocated for keys and values; saved: tokens a dense "
        "cache would have held, over all steps; replay error: mean distance of the sampler's log-probs from the replayed ones.\n"
        "Next: docs/policies.md, or sparse-rl generate --help."
    )


class bar:
    """A progress bar over the rollouts with tokens/s and time left; plain silence where there is no terminal."""

    def __init__(self, console: Console, name: str):
        columns = (TextColumn(name), BarColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, transient=True, disable=not sys.stdout.isatty())

    def __enter__(self):
        self.progress.start()
        self.task = self.progress.add_task("", total=None, speed="")
        return lambda state: self.progress.update(
            self.task,
            total=state.total,
            completed=state.finished,
            speed=f"{state.tokens / max(state.seconds, 1e-9):,.0f} tokens/s",
        )

    def __exit__(self, *exception):
        self.progress.stop()


if __name__ == "__main__":
    main()
