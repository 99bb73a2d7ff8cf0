"""Which budget does a model bear on GSM8K, before any training? Accuracy and mismatch of four policies and five budgets:

    python experiments/budgets.py MODEL --data.dir DATA --json benchmarks/results/budgets.json
    python experiments/budgets.py --table benchmarks/results/budgets.json

The first 400 test problems, one sample each at temperature 1 and top_p 1 (what training samples with), at most 1,024 tokens,
interval = budget / 4. With a protected prompt the budget counts response tokens: 92 and 156 are 192 and 256 less a mean prompt. Every
policy is a `sparse-rl eval` of its own; they share the GPU, so tokens/s are not measured here.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

POLICIES = ("rkv", "snapkv", "streaming", "random")
BUDGETS = (96, 128, 160, 192, 256)
PROTECTED_BUDGETS = ("92+48", "156+64")
"""Budget and interval of 192 and 256 tokens with the prompt, which has 100 tokens on average."""
MISMATCH = {"rejection_rate": "rejected", "mismatch_k3": "k3", "xi_p05": "ξ p05", "ess": "ESS", "engine_noise": "noise"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--data.dir", dest="data")
    parser.add_argument("--problems", default="400")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print this JSON as Markdown and do nothing else")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    jobs = [("full", False, "full")]
    for policy in POLICIES:
        jobs += [(policy, False, ",".join(f"{policy}@{budget}" for budget in BUDGETS))]
        jobs += [(policy, True, ",".join(f"{policy}@{budget}" for budget in PROTECTED_BUDGETS))]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(len(jobs)) as threads:
        parts = list(threads.map(lambda job: run(args, Path(folder), *job), jobs))
    found = parts[0] | {"benchmark": "budgets", "results": [row for part in parts for row in part["results"]]}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(table(found))


def run(args: argparse.Namespace, folder: Path, policy: str, protect: bool, compare: str) -> dict:
    out = folder / f"{policy}-{protect}"
    command = [sys.executable, "-m", "sparse_rl", "eval", args.model, "--benchmarks", "gsm8k", "--problems", args.problems]
    command += ["--compare", compare, "--mismatch", "--temperature", "1", "--top-p", "1", "--max-tokens", "1024"]
    command += ["--out", str(out), "--slots", args.problems, "--reward.workers", "2"]
    command += ["--data.dir", args.data] if args.data else []
    command += ["--kv.protect-prompt", "true" if protect else "false"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    found = json.loads((out / "results.json").read_text())
    for row in found["results"]:
        row["protect_prompt"] = protect
    return found


def table(found: dict) -> str:
    """A row for each cache, the dense one first."""
    lines = ["| cache | prompt | Pass@1 | tokens | cut off | KV saved | " + " | ".join(MISMATCH.values()) + " |"]
    lines += ["|---|---|" + "---:|" * (4 + len(MISMATCH))]
    for row in found["results"]:
        score, mismatch = row["pass@1"], row["mismatch"]
        prompt = "" if row["setting"] == "full" else "protected" if row["protect_prompt"] else "free"
        cells = [row["setting"], prompt, f"{score['mean']:.1%} [{score['low']:.1%}, {score['high']:.1%}]"]
        cells += [f"{row['mean_tokens']:.0f}", f"{row['truncated']:.1%}", f"{row['token_savings']:.0%}"]
        cells += [f"{mismatch['rejection_rate']:.1%}", f"{mismatch['mismatch_k3']:.4f}", f"{mismatch['xi_p05']:.3f}"]
        cells += [f"{mismatch['ess']:.3f}", f"{mismatch['engine_noise']:.4f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
