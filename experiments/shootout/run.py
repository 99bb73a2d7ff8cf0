"""Which cache keeps a model's answers at how many bytes? Every arm answers the same problems with the same seeds:

    python experiments/shootout/run.py long --model FOLDER --data DATA --out out/shootout [--arms rkv] [--seconds 1500]
    python experiments/shootout/page.py    # the tables and the figure of README.md

`arms.toml` lists the tasks and the arms. Each answer is replayed with a dense cache, which gives xi = pi_dense / pi_sampler of
every token: the mismatch k3, the share of answers that the paper's rule rejects (a xi below 1e-4), and both by position.
Bytes are those of a slot with its side tables and its share of a stored prompt. They are compared with a paged cache of all
keys in 16 bits that shares prompts, by the live tokens of the dense arm's answers (docs/performance.md).

Finished arms are kept in the --out folder; a second call continues there.
"""

import argparse
import gzip
import json
import statistics
import time
import tomllib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_rl import KV, Engine, Sampling, load_model, load_tokenizer, replay
from sparse_rl.bench.lengths import live_tokens
from sparse_rl.bench.record import environment
from sparse_rl.config import TASKS, RewardConfig
from sparse_rl.data.examples import load
from sparse_rl.data.prompts import encode
from sparse_rl.errors import first_line
from sparse_rl.evaluate.statistics import mean_interval
from sparse_rl.learner.batch import padded, response_mask
from sparse_rl.learner.correction import correct
from sparse_rl.rewards.find import find
from sparse_rl.rollout.rollout import Rollout
from sparse_rl.sizes import token_bytes

HERE = Path(__file__).parent
SPAN = 256
"""Response tokens of a group of positions."""
VETO = 1e-4
"""The paper's rule rejects an answer if a token's xi is below this."""
DENSE = "full"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="a task of arms.toml")
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--name", help="name of the model in the results [the folder's]")
    parser.add_argument("--data", help="folder with the files of the tasks [the hub]")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; continued if it exists")
    parser.add_argument(
        "--arms", default="", help="only arms whose name contains one of these, with commas between; dense always runs"
    )
    parser.add_argument("--prompts", type=int, help="number of prompts [the task's]")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no arm after this time [no limit]")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    plan = tomllib.loads((HERE / "arms.toml").read_text())
    task = plan["tasks"][args.task] | ({"prompts": args.prompts} if args.prompts else {})
    model, tokenizer = load_model(args.model, dtype=args.dtype), load_tokenizer(args.model)
    work = Work(model, tokenizer, task, args.data, args.seed)
    folder = args.out / args.task
    folder.mkdir(parents=True, exist_ok=True)
    where = environment("shootout", model.device) | {"model": args.name or Path(args.model).name, "seed": args.seed}
    (folder / "task.json").write_text(json.dumps(where | {"task": task, "dtype": args.dtype}, indent=1) + "\n")
    started = time.monotonic()
    for name, kv in arms_of(plan, task).items():
        out = folder / f"{name.replace('/', '-').replace(' ', '_')}.json"
        if (
            out.exists()
            or (name != DENSE and not any(part in name for part in args.arms.split(",")))
            or time.monotonic() - started > args.seconds
        ):
            continue
        try:
            summary, raw = work.measure(kv)
        except Exception as error:  # one arm that a model cannot run does not end the others
            print(f"{name}: failed: {first_line(error)}", flush=True)
            continue
        with gzip.open(out.with_suffix(".raw.jsonl.gz"), "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in raw)
        out.write_text(json.dumps({"arm": name, "kv": kv.model_dump()} | summary, indent=1) + "\n")
        print(line(name, summary), flush=True)


def arms_of(plan: dict[str, Any], task: dict[str, Any]) -> dict[str, KV]:
    """Return the cache of every arm by name, dense first. An arm with `budgets` is one arm per budget.

    A budget is a share of the task's longest held sequence, or of its longest response with a protected prompt.
    """
    found = {DENSE: KV(policy="full")}
    for name, fields in plan["arms"].items():
        fields = dict(fields)
        shares, recent = fields.pop("budgets", None), fields.pop("recent", None)
        if shares is None:
            found[name] = KV(**fields)
            continue
        whole = task["response_tokens"] + (0 if fields.get("protect_prompt") else task["prompt_tokens"])
        for share in shares:
            budget = max(32, 16 * round(share * whole / 16))
            interval = fields.get("interval", max(16, 16 * round(budget / 64)))
            window = {} if recent is None else {"window": round(recent * budget)}
            found[f"{name} {share:g}"] = KV(**fields | window | {"budget": budget, "interval": interval})
    return found


class Work:
    """The problems of a task, and how an arm answers them."""

    def __init__(self, model: Any, tokenizer: Any, task: dict[str, Any], data: str | None, seed: int):
        self.model, self.tokenizer, self.task = model, tokenizer, task
        source = task["source"]
        examples = load(source, "test", n=task["prompts"], seed=seed, dir=data if source in TASKS else None).examples
        self.examples = examples[: task["prompts"]]
        self.prompts = [encode(tokenizer, example) for example in self.examples]
        self.reward = find(RewardConfig(function=task.get("reward")).function_for(source))
        self.sampling = Sampling(max_tokens=task["max_tokens"], temperature=1.0, seed=seed)
        self._texts: list[list[int]] = []

    def measure(self, kv: KV) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return (summary, one row per answer)."""
        samples, slots = self.task["samples"], min(self.task["slots"], len(self.prompts) * self.task["samples"])
        engine = Engine(self.model, kv, slots=slots)
        longest = max(map(len, self.prompts))
        engine.reserve_dense(longest, self.sampling.max_tokens, len(self.prompts), samples)
        engine.reserve_prompts(longest, len(self.prompts), samples)
        if engine.needed_statistics:
            engine.calibrate(self.texts(), longest + self.sampling.max_tokens)
        rollouts = engine.generate(self.prompts, samples, self.sampling, record=False)
        stats = engine.stats
        del engine
        torch.cuda.empty_cache()
        rewards = self._rewards(rollouts, samples)
        log_xi = self._log_xi(rollouts)
        corrected = correct(padded(log_xi), response_mask(rollouts), "paper")
        rejected = corrected.rejected.tolist()
        raw = [
            {
                "prompt_tokens": len(rollout.prompt),
                "tokens": len(rollout.response),
                "finish": rollout.finish,
                "reward": reward,
                "rejected": drop,
                "log_xi_min": round(float(each.min()), 3),
                "k3": [round(value, 6) for value in spans(k3(each), sum)],
                "below": [int(value) for value in spans((each < torch.tensor(VETO).log()).float(), sum)],
            }
            for rollout, reward, drop, each in zip(rollouts, rewards, rejected, log_xi, strict=True)
        ]
        lengths = [len(rollout.response) for rollout in rollouts]
        values = {name.removeprefix("sparse/"): value for name, value in corrected.metrics.items()}
        accuracy, low, high = mean_interval(rewards)
        return {
            "accuracy": accuracy,
            "accuracy_95": [low, high],
            "rejected": sum(rejected) / len(rejected),
            "k3": values["mismatch_k3"],
            "xi_p05": values["xi_p05"],
            "tokens": statistics.mean(lengths),
            "cut_off": sum(rollout.finish == "length" for rollout in rollouts) / len(rollouts),
            "bytes_per_sequence": self._bytes(kv, stats, lengths, slots),
            "live_bytes_16bit": self._live(lengths) * token_bytes(self._shape, 2),
            "tokens_per_s": stats.tokens_per_s,
            "decode_s": stats.decode_s,
            "slots": slots,
            "token_savings": stats.token_savings,
        }, raw

    def texts(self) -> list[list[int]]:
        """Return an answer per prompt, of all keys: a run, too, gathers its statistics from answers."""
        if not self._texts:
            sampling = self.sampling.model_copy(update={"seed": self.sampling.seed + 1})
            rollouts = Engine(self.model, KV(policy=DENSE), slots=len(self.prompts)).generate(self.prompts, sampling=sampling)
            self._texts = [rollout.prompt + rollout.response for rollout in rollouts]
        return self._texts

    @property
    def _shape(self) -> Any:
        from sparse_rl.models.support import prepare

        return prepare(self.model).shape

    def _live(self, lengths: list[int]) -> float:
        return live_tokens(lengths, statistics.mean(map(len, self.prompts)))

    def _bytes(self, kv: KV, stats: Any, lengths: list[int], slots: int) -> float:
        """Return the bytes of one sequence: its slot, or its live tokens if nothing is evicted, and its side tables."""
        if kv.policy == DENSE:
            return self._live(lengths) * token_bytes(self._shape, self.model.dtype.itemsize, kv.dtype)
        return (stats.peak_kv_bytes + stats.side_bytes) / slots

    def _rewards(self, rollouts: list[Rollout], samples: int) -> list[float]:
        examples = [example for example in self.examples for _ in range(samples)]
        texts = self.tokenizer.batch_decode([rollout.response for rollout in rollouts], skip_special_tokens=True)
        columns = {name: [example.columns[name] for example in examples] for name in examples[0].columns}
        finish = [rollout.finish for rollout in rollouts]
        return [float(each) for each in self.reward([e.prompt for e in examples], texts, finish=finish, **columns)]

    @torch.no_grad()
    def _log_xi(self, rollouts: list[Rollout]) -> list[Tensor]:
        dense = replay(self.model, rollouts, "dense", tokens_per_pass=16384)
        return [ours.cpu().float() - rollout.logprobs for ours, rollout in zip(dense, rollouts, strict=True)]


def k3(log_xi: Tensor) -> Tensor:
    return log_xi.exp() - 1 - log_xi


def spans(values: Tensor, of: Any) -> list[float]:
    return [float(of(part)) for part in values.split(SPAN)]


def line(name: str, row: dict[str, Any]) -> str:
    saved = 1 - row["bytes_per_sequence"] / row["live_bytes_16bit"]
    return (
        f"{name:32} right {row['accuracy']:.1%} rejected {row['rejected']:.1%} k3 {row['k3']:.4f} xi p05 {row['xi_p05']:.2f} "
        f"tokens {row['tokens']:,.0f} saved {saved:.0%} {row['tokens_per_s']:,.0f} tok/s"
    )


if __name__ == "__main__":
    main()
