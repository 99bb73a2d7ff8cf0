"""Does TRL's GRPO learn the same on a bounded cache? Runs the two examples over seeds, one after another:

    python experiments/trl_seeds.py --seeds 0 1 2 3 4 5 6 7 --json benchmarks/results/trl-seeds.json

Every trained model answers 200 held-out problems with a dense cache, and those of the bounded script also with the bounded
cache. The first shows what was learned, the second adds the loss of sparse inference. Runs in the JSON are not repeated.
`pairs` in the JSON compares both models of a seed answer by answer, and is kept as it stands.
`--kv '{"policy": "rkv", "budget": 54, "interval": 13}'` trains the bounded script with another cache.
"""

import argparse
import ast
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sparse_rl import KV, Engine, Sampling
from sparse_rl.bench.record import environment
from sparse_rl.data.arithmetic import grade, make_problems
from sparse_rl.evaluate.statistics import t_interval
from sparse_rl.models.load import TINY

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TRL, BOUNDED = "trl_grpo.py", "trl_sparse_grpo.py"
CACHE = re.compile(r"kv=(\{.*\})")
DENSE = KV(policy="full")
PROBLEMS, ANSWERS = 200, 4
ROWS = 32  # sequences that an example samples at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--kv", type=json.loads, help="cache of the bounded script, as JSON [that of the example]")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    kv = args.kv or ast.literal_eval(CACHE.search((EXAMPLES / BOUNDED).read_text())[1])
    record = json.loads(args.json.read_text()) if args.json.exists() else {"before": [], "runs": []}

    def keep(part: str, entry: dict[str, Any]) -> None:
        record[part].append(entry)
        where = environment("trl-seeds", torch.device("cpu")) | {"problems": PROBLEMS, "answers": ANSWERS}
        where["versions"]["trl"] = version("trl")
        args.json.write_text(json.dumps(record | where, indent=1) + "\n")
        print(part, entry, flush=True)

    for cache in (None, kv):
        if all(entry["kv"] != cache for entry in record["before"]):
            keep("before", {"kv": cache, "accuracy": accuracy(TINY, KV(**cache) if cache else DENSE, seed=0)})
    for seed in args.seeds:
        for script, cache in ((TRL, None), (BOUNDED, kv)):
            if all((run["script"], run["kv"], run["seed"]) != (script, cache, seed) for run in record["runs"]):
                keep("runs", {"script": script, "kv": cache, "seed": seed} | trained(script, cache, seed))
    print(summary(record, kv))


def trained(script: str, cache: dict[str, Any] | None, seed: int) -> dict[str, Any]:
    """Train in a process of its own. Return the accuracy of the model with both caches, and figures of the training."""
    code = CACHE.sub(f"kv={cache!r}", (EXAMPLES / script).read_text())
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [sys.executable, "-c", code, "--seed", str(seed), "--held-out", "4"], cwd=folder, capture_output=True, text=True
        )
        if ended.returncode:
            sys.exit(ended.stderr[-2000:])
        seconds = round(time.monotonic() - started, 1)
        (model,) = Path(folder).glob("trl-grpo/checkpoint-*")
        logged = json.loads((model / "trainer_state.json").read_text())["log_history"]
        steps = [entry for entry in logged if "reward" in entry]
        found: dict[str, Any] = {"dense_accuracy": accuracy(model, DENSE, seed)}
        if cache:
            found["bounded_accuracy"] = accuracy(model, KV(**cache), seed)
            found["rejected"] = sum(step["sparse/rejection_rate"] for step in steps) / len(steps)
            found["xi_min"] = min(step["sparse/xi_min"] for step in steps)
            held = [step["kv/peak_bytes"] for step in steps]
        else:
            held = [dense_bytes(step["completions/max_length"]) for step in steps]
    found["reward"] = sum(step["reward"] for step in steps) / len(steps)
    found["grad_norm"] = sum(step["grad_norm"] for step in steps) / len(steps)
    return found | {"kv_bytes": max(held), "kv_bytes_median": statistics.median(held), "steps": len(steps), "seconds": seconds}


def accuracy(model: Path, kv: KV, seed: int) -> float:
    """Return the share of right answers to the held-out problems, sampled as the examples do."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    problems = make_problems(PROBLEMS, seed=0, split="test")
    prompts = [tokenizer(problem.prompt)["input_ids"] for problem in problems]
    engine = Engine(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), kv, slots=200)
    rollouts = engine.generate(prompts, ANSWERS, Sampling(max_tokens=192, seed=seed), record=False)
    texts = [tokenizer.decode(rollout.response, skip_special_tokens=True) for rollout in rollouts]
    wanted = [problem.answer for problem in problems for _ in range(ANSWERS)]
    return sum(map(grade, texts, wanted)) / len(texts)


def dense_bytes(longest: float) -> int:
    """Return the bytes of transformers' cache at the end of a batch whose longest completion has this many tokens. The
    last token is sampled but never enters the cache."""
    config = AutoConfig.from_pretrained(TINY)
    prompt = len(make_problems(1, seed=0)[0].prompt)  # a character is a token
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    return ROWS * (prompt + int(longest) - 1) * config.num_hidden_layers * width * 2 * 4


def summary(record: dict[str, Any], kv: dict[str, Any]) -> str:
    """Return the means over seeds and the differences to TRL, paired by seed, with 95 % t-intervals."""

    def by_seed(script: str, cache: dict[str, Any] | None, key: str) -> dict[int, float]:
        return {run["seed"]: run[key] for run in record["runs"] if (run["script"], run["kv"]) == (script, cache)}

    base = by_seed(TRL, None, "dense_accuracy")
    lines = [f"before training: {record['before']}", f"TRL: {spread(list(base.values()))}"]
    for key in ("dense_accuracy", "bounded_accuracy"):
        found = by_seed(BOUNDED, kv, key)
        gaps = [found[seed] - base[seed] for seed in found if seed in base]
        lines.append(f"bounded, {key}: {spread(list(found.values()))}, difference to TRL {spread(gaps)}")
    for key in ("kv_bytes", "kv_bytes_median"):
        small, large = (statistics.mean(by_seed(*arm, key).values()) for arm in ((BOUNDED, kv), (TRL, None)))
        lines.append(f"{key}: {small:,.0f} of {large:,.0f} = {small / large:.3f}")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    mean, low, high = t_interval(values)
    return f"{mean:.3f} [{low:.3f}, {high:.3f}] ({len(values)} seeds)"


if __name__ == "__main__":
    main()
