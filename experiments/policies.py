"""What each policy costs in accuracy at half the needed budget, on trained weights.

    python experiments/policies.py arithmetic --out benchmarks/results/policies-arithmetic.json
    python experiments/policies.py products --model FOLDER --out benchmarks/results/policies-products.json

`arithmetic` is the embedded task with the embedded model, sampled at temperature 1. `products` asks an instruction
model (SmolLM2-135M-Instruct) for products of small numbers, greedily; `--length 4` puts four worked ones before the
question. The needed budget is what a dense cache holds at the end of a long rollout: its 95th percentile. Every policy
runs at half of that (or another `--share`), with interval = budget / 4, sinks 0 and 4, on the same problems with the same seeds.
"""

import argparse
import datetime
import json
import platform
import random
import re
from pathlib import Path

import torch
import transformers

from sparse_rl import KV, Engine, Sampling, load_model, load_tokenizer, replay
from sparse_rl.data.arithmetic import SUMS, grade, make_problems
from sparse_rl.evaluate.statistics import mean_interval
from sparse_rl.kv.policies import POLICIES


def arithmetic(tokenizer, n, seed, sums):
    problems = make_problems(n, seed=seed, sums=sums, split="test")
    prompts = [tokenizer(problem.prompt).input_ids for problem in problems]
    return prompts, [lambda text, answer=problem.answer: bool(grade(text, answer)) for problem in problems]


def products(tokenizer, n, seed, shots):
    """Factors 2 to 12; the examples before the question are other products, so the question is what must be kept."""
    rng = random.Random(seed)
    prompts, graders = [], []
    for _ in range(n):
        pairs = [(rng.randint(2, 12), rng.randint(2, 12)) for _ in range(shots + 1)]
        messages = []
        for left, right in pairs:
            messages.append({"role": "user", "content": f"What is {left} times {right}?"})
            messages.append({"role": "assistant", "content": f"{left} times {right} is {left * right}."})
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
        prompts.append(list(prompt))
        answer = pairs[-1][0] * pairs[-1][1]
        graders.append(lambda text, answer=answer: (re.findall(r"\d+", text.replace(",", "")) or [""])[-1] == str(answer))
    return prompts, graders


TASKS = {
    "arithmetic": (arithmetic, "tiny", Sampling(max_tokens=192, temperature=1.0), SUMS),
    "products": (products, None, Sampling(max_tokens=64, temperature=0.0), 0),
}


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(model, tokenizer, kv, prompts, graders, sampling, slots):
    engine = Engine(model, kv, slots=slots)
    rollouts = engine.generate(prompts, sampling=sampling)
    right = [
        grader(tokenizer.decode(r.response, skip_special_tokens=True)) for grader, r in zip(graders, rollouts, strict=True)
    ]
    views = {}
    with torch.no_grad():
        for view in ("sparse", "dense"):
            replayed = replay(model, rollouts[:64], view)
            views[view] = torch.cat([ours.cpu() - r.logprobs for ours, r in zip(replayed, rollouts[:64], strict=True)])
    stats = engine.stats
    row = {
        "policy": kv.policy,
        "budget": None if kv.policy == "full" else kv.budget,
        "interval": None if kv.policy == "full" else kv.interval,
        "sinks": None if kv.policy == "full" else kv.sinks,
        "right": sum(right),
        "n": len(right),
        "accuracy": sum(right) / len(right),
        "interval_95": mean_interval([float(each) for each in right])[1:],
        "token_savings": stats.token_savings,
        "mean_response_tokens": stats.tokens / len(rollouts),
        "truncated": sum(r.finish == "length" for r in rollouts) / len(rollouts),
        "engine_noise_mean": float(views["sparse"].abs().mean()),
        "dense_gap_mean": float(views["dense"].abs().mean()),
        "dense_gap_max": float(views["dense"].abs().max()),
    }
    return row, right, rollouts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--model", help="hub id or folder; arithmetic takes tiny")
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--length", type=int, help="sums of a problem [15], worked products before the question [0]")
    parser.add_argument("--policies", nargs="+", default=[name for name in POLICIES if name != "full"], help="[all]")
    parser.add_argument("--share", type=float, default=0.5, help="of the needed budget that is kept [0.5]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    make, default_model, sampling, length = TASKS[args.task]
    length = args.length if args.length is not None else length
    path = args.model or default_model
    if path is None:
        parser.error(f"{args.task} needs --model")
    model, tokenizer = load_model(path, dtype=args.dtype), load_tokenizer(path)
    prompts, graders = make(tokenizer, args.problems, args.seed, length)
    sampling = sampling.model_copy(update={"seed": args.seed})

    dense, dense_right, rollouts = measure(model, tokenizer, KV(policy="full"), prompts, graders, sampling, args.slots)
    needed = percentile([len(r.prompt) + len(r.response) - 1 for r in rollouts], 0.95)
    budget = int(needed * args.share)
    interval = max(1, budget // 4)
    rows = [dense]
    report(dense)
    for policy in args.policies:
        for sinks in (0, 4):
            kv = KV(policy=policy, budget=budget, interval=interval, sinks=sinks, protect_prompt=False)
            row, right, _ = measure(model, tokenizer, kv, prompts, graders, sampling, args.slots)
            lost = sum(was and not now for was, now in zip(dense_right, right, strict=True))
            won = sum(now and not was for was, now in zip(dense_right, right, strict=True))
            row |= {"lost_against_dense": lost, "won_against_dense": won}
            rows.append(row)
            report(row)
    record = {
        "experiment": f"policies/{args.task}",
        "date": datetime.date.today().isoformat(),
        "model": Path(path).name,
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "seed": args.seed,
        "length": length,
        "sampling": sampling.model_dump(),
        "prompt_tokens_median": percentile([len(prompt) for prompt in prompts], 0.5),
        "needed_tokens": needed,
        "window": KV(policy="rkv").recent,
        "rows": rows,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")


def report(row):
    low, high = row["interval_95"]
    print(
        f"{row['policy']:10} sinks {row['sinks']!s:4} budget {row['budget']!s:4} accuracy {row['accuracy']:.3f} [{low:.3f}, {high:.3f}] "
        f"savings {row['token_savings']:.2f} noise {row['engine_noise_mean']:.1e} dense gap {row['dense_gap_mean']:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
