"""Make the prompts of question L: several GSM8K problems in one prompt, each answered in a box under its own heading.

    python experiments/evidence/l-long/make_data.py DATA [--problems 16] [--out FOLDER]

DATA holds gsm8k-train.jsonl.gz and gsm8k-test.jsonl.gz, as `data.dir` does. Writes train.jsonl.gz and test.jsonl.gz, the same
ones every time. No problem is in two prompts.
"""

import argparse
import gzip
import json
import random
from pathlib import Path

HERE = Path(__file__).parent
INSTRUCTION = (
    "Solve these {count} problems, one after the other. Start each solution with the heading of its problem, as in "
    '"### Problem 1", reason step by step, and end it with the final answer in \\boxed{{}}. Do not skip a problem.'
)


def prompt_of(problems: list[str]) -> str:
    listed = "\n\n".join(f"### Problem {number}\n{problem}" for number, problem in enumerate(problems, 1))
    return f"{INSTRUCTION.format(count=len(problems))}\n\n{listed}"


def rows_of(source: Path, count: int, rng: random.Random) -> list[dict]:
    """Group the problems of a file in random order. Problems that do not fill a prompt are left out."""
    with gzip.open(source, "rt", encoding="utf-8") as file:
        found = [json.loads(line) for line in file]
    rng.shuffle(found)
    groups = [found[start : start + count] for start in range(0, len(found) - count + 1, count)]
    return [
        {"prompt": prompt_of([each["problem"] for each in group]), "answers": [each["answer"] for each in group]}
        for group in groups
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the files of GSM8K")
    parser.add_argument("--problems", type=int, default=16, help="problems per prompt [16]")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to [this one]")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for split in ("train", "test"):
        rows = rows_of(args.data / f"gsm8k-{split}.jsonl.gz", args.problems, rng)
        with gzip.GzipFile(args.out / f"{split}.jsonl.gz", "wb", mtime=0) as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        print(f"{split}: {len(rows)} prompts of {args.problems} problems")


if __name__ == "__main__":
    main()
