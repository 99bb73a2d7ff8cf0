"""The raw metrics and evaluations of the questions, as tables and plots read them."""

import functools
import gzip
import json
import re
import statistics
from pathlib import Path

HERE = Path(__file__).parent
DENSE, SPARSE = "eval/pass@1", "eval/pass@1_sparse"
"""Keys of the test scores, without the name of the benchmark."""

TEST = re.compile("^eval/[^/]+/")

BESIDE = {
    "a-corrections": {arm: arm for arm in ("dense-4", "naive-4", "paper-4")},
    "b-budget": {"dense": "full", "dense-again": "full-again", "paper": "rkv-160"},
    "d-samples": {arm: arm for arm in ("dense", "paper")},
}
"""Arms of A that are compared in other questions, and their names there."""

Rows = list[dict[str, float]]
"""Metrics of one run by step. Step 0 has the first evaluation, the last step the last one."""


@functools.cache
def read(question: str) -> dict[str, dict[int, Rows]]:
    """Return the finished runs of a question, by arm and seed."""
    found: dict[str, dict[int, Rows]] = {}
    for path in sorted((HERE / question / "raw").glob("*.jsonl.gz")):
        arm, seed = path.name.removesuffix(".jsonl.gz").rsplit("-", 1)
        with gzip.open(path, "rt") as file:
            rows = [json.loads(line) for line in file]
        found.setdefault(arm, {})[int(seed)] = [{TEST.sub("eval/", key): value for key, value in row.items()} for row in rows]
    if question == "a-collapse":  # seeds 0 and 1 of its dense arm are the pilot's
        found["dense"] = read("pilot")["full-3e-6"] | found.get("dense", {})
    if found and question in BESIDE:
        found |= {name: runs for arm, runs in read("a-collapse").items() if (name := BESIDE[question].get(arm))}
    return {arm: dict(sorted(found[arm].items())) for arm in sorted(found, key=by_number)}


def by_number(name: str) -> list[str | int]:
    """Return a sort key that puts 96 before 128."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


@functools.cache
def evaluated(question: str) -> dict[str, dict]:
    """Return the scores of the trained models under other caches, by run."""
    paths = sorted((HERE / question / "raw").glob("*-eval.json"))
    return {path.name.removesuffix("-eval.json"): json.loads(path.read_text()) for path in paths}


SAMPLERS = "rkv@160"
"""The cache of A's sampler."""


def ends(question: str, key: str) -> dict[str, dict[int, float]]:
    """Return the last test Pass@1 in %, by arm and seed. Some dense runs were scored with the sampler's cache afterwards."""
    found = {
        arm: {seed: 100 * rows[-1][key] for seed, rows in runs.items() if key in rows[-1]}
        for arm, runs in read(question).items()
    }
    later = evaluated("a-collapse") if key == SPARSE and question.startswith("a-") else {}
    for run, result in later.items():
        arm, seed = run.rsplit("-", 1)
        score = next(row["pass@1"]["mean"] for row in result["results"] if row["setting"] == SAMPLERS)
        if arm in found:
            found[arm].setdefault(int(seed), 100 * score)
    return {arm: dict(sorted(of.items())) for arm, of in found.items()}


def starts(question: str, key: str) -> dict[int, float]:
    """Return the score of the model before training, by seed. Each seed draws once."""
    every = [(seed, rows[0]) for runs in read(question).values() for seed, rows in runs.items() if key in rows[0]]
    return {seed: 100 * statistics.mean(row[key] for other, row in every if other == seed) for seed in sorted(dict(every))}
