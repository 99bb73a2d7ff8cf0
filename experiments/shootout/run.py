"""Which cache keeps a model's answers at how many bytes? Every arm answers the same problems with the same seeds:

    python experiments/shootout/run.py all --missing                        # what has no result yet, and about how long it takes
    python experiments/shootout/run.py all --model FOLDER --data DATA [--seconds 500]    # run it, then rebuild README.md

`arms.toml` lists the tasks and the arms. Each answer is replayed with a dense cache, which gives xi = pi_dense / pi_sampler of
every token: the mismatch k3, the share of answers that the paper's rule rejects (a xi below 1e-4), and both by position.
Bytes are those of a slot with its side tables and its share of a stored prompt. They are compared with a paged cache of all
keys in 16 bits that shares prompts, by the live tokens of the dense arm's answers (docs/performance.md).

Arms with a result in the --out folder are not run again; a second call continues there.
"""

import argparse
import gzip
import json
import statistics
import time
from pathlib import Path
from typing import Any

import page
import torch
from grid import DENSE, RESULTS, SPAN, Arm, cache_bytes, chosen_tasks, file_of, missing, read_plan, usual_seconds
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
from sparse_rl.models.support import prepare
from sparse_rl.rewards.find import find
from sparse_rl.rollout.rollout import Rollout
from sparse_rl.sizes import token_bytes

VETO = 1e-4
"""The paper's rule rejects an answer if a token's xi is below this."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", help="tasks of arms.toml, or all")
    parser.add_argument("--missing", action="store_true", help="list the arms without a result, and run nothing")
    parser.add_argument("--model", help="folder or hub id; needed to run arms")
    parser.add_argument("--name", help="name of the model in the results [the folder's]")
    parser.add_argument("--data", help="folder with the files of the tasks [the hub]")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results; continued if it exists [results]")
    parser.add_argument(
        "--arms", default="", help="only arms whose name contains one of these, with commas between; dense always runs"
    )
    parser.add_argument("--prompts", type=int, help="number of prompts [the task's]")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no arm after this time [no limit]")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    plan = read_plan()
    try:
        tasks = chosen_tasks(plan, args.tasks)
    except ValueError as error:
        parser.error(str(error))
    todo = missing(plan, tasks, args.out, args.arms.split(","))
    announce(todo, args.out)
    if args.missing or not todo:
        return
    if args.model is None:
        parser.error("--model is missing: pass a folder or a hub id, or --missing to list the arms only.")
    for task in tasks:
        plan["tasks"][task] |= {"prompts": args.prompts} if args.prompts else {}
    started = time.monotonic()
    runner = Runner(plan, args)
    for task, arm in todo:
        if time.monotonic() - started <= args.seconds:
            runner.run(task, arm)
    if args.out == RESULTS:
        try:
            page.main()
        except ModuleNotFoundError as error:  # the results are safe, and the tables are written first
            print(f"{error}, so docs/shootout.svg is not redrawn: run page.py where matplotlib is installed.")


def announce(todo: list[tuple[str, Arm]], folder: Path) -> None:
    """Print the arms to run and about how many seconds each takes, by the results of its task."""
    usual = {task: usual_seconds(folder, task) for task, _ in todo}
    for task, arm in todo:
        seconds = usual[task]
        print(f"{task:8} {arm.name:44} {'' if seconds is None else f'about {seconds:.0f} s'}")
    known = sum(usual[task] or 0 for task, _ in todo)
    print(f"{len(todo)} arms without a result{f', about {known:,.0f} s' if known else ''}", flush=True)


class Runner:
    """Runs arms and writes their results. The model is loaded once, the problems of a task when its first arm runs."""

    def __init__(self, plan: dict[str, Any], args: argparse.Namespace):
        self.plan, self.args = plan, args
        self.model, self.tokenizer = load_model(args.model, dtype=args.dtype), load_tokenizer(args.model)
        self.works: dict[str, Work] = {}

    def run(self, task: str, arm: Arm) -> None:
        out, started = file_of(self.args.out, task, arm.name), time.monotonic()
        try:
            work = self._work(task)
            dense_bytes = 0.0 if arm.saved is None else self._dense_bytes(task)
            kv = arm.cache(work.task, work.bytes_of, dense_bytes)
            summary, raw = work.measure(kv)
        except Exception as error:  # one arm that a model cannot run does not end the others
            print(f"{task} {arm.name}: failed: {first_line(error)}", flush=True)
            return
        with gzip.open(out.with_suffix(".raw.jsonl.gz"), "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in raw)
        measured = {"date": self._where["date"], "seconds": time.monotonic() - started}
        out.write_text(json.dumps({"arm": arm.name, "kv": kv.model_dump()} | measured | summary, indent=1) + "\n")
        print(line(f"{task} {arm.name}", summary), flush=True)

    def _work(self, task: str) -> "Work":
        if task not in self.works:
            self._describe(task)
            self.works[task] = Work(self.model, self.tokenizer, self.plan["tasks"][task], self.args.data, self.args.seed)
        return self.works[task]

    @property
    def _where(self) -> dict[str, Any]:
        args = self.args
        return environment("shootout", self.model.device) | {"model": args.name or Path(args.model).name, "seed": args.seed}

    def _describe(self, task: str) -> None:
        """Write what the results of a task have in common. Refuse a folder with results of something else."""
        file = self.args.out / task / "task.json"
        common = self._where | {"task": self.plan["tasks"][task], "dtype": self.args.dtype}
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(common, indent=1) + "\n")
            return
        earlier = json.loads(file.read_text())
        for name in ("model", "seed", "task", "dtype"):
            if earlier[name] != common[name]:
                raise SystemExit(f"{file.parent} has results with {name} = {earlier[name]}: choose another --out, or --name.")

    def _dense_bytes(self, task: str) -> float:
        file = file_of(self.args.out, task, DENSE)
        if not file.exists():
            raise ValueError(f"{DENSE} has no result, which the bytes are relative to")
        return json.loads(file.read_text())["live_bytes_16bit"]


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
        samples, slots = self.task["samples"], self._slots
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
        return prepare(self.model).shape

    @property
    def _slots(self) -> int:
        return min(self.task["slots"], len(self.prompts) * self.task["samples"])

    def bytes_of(self, kv: KV) -> float:
        """Return the bytes that a sequence takes in a cache that evicts, as `measure` will measure them."""
        sizes = (len(self.prompts), max(map(len, self.prompts)), self._slots, self.task["samples"])
        return cache_bytes(kv, self._shape, self.model.dtype.itemsize, *sizes)

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
        f"{name:44} right {row['accuracy']:.1%} rejected {row['rejected']:.1%} k3 {row['k3']:.4f} xi p05 {row['xi_p05']:.2f} "
        f"tokens {row['tokens']:,.0f} saved {saved:.0%} {row['tokens_per_s']:,.0f} tok/s"
    )


if __name__ == "__main__":
    main()
