"""Runs to look at: real ones of the embedded model, and folders in the same formats that no training made."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from small_runs import one_thread
from sparse_rl.cli import main
from sparse_rl.monitor.ratios import BINS
from sparse_rl.train.rollout_log import SCHEMA

NEVER = 2**31 - 1
TIGHT = [
    *("--compare", '["dense", "sparse_rl"]', "--steps", "2", "--model.path", "tiny", "--data.train", "arithmetic"),
    *("--kv.policy", "rkv", "--kv.budget", "14", "--kv.window", "4", "--kv.interval", "6", "--kv.protect-prompt", "false"),
    *("--rollout.prompts-per-step", "2", "--rollout.samples-per-prompt", "4"),
    *(
        "--rollout.max-tokens",
        "72",
        "--eval.problems",
        "6",
        "--eval.slots",
        "6",
        "--optimizer.lr",
        "1e-4",
        "--model.device",
        "cpu",
    ),
]
"""The quickstart in small, with a budget so tight that some rollouts are rejected."""

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "&lt;b&gt; &amp; &#x3c;",
    "\x1b[2J\x1b]0;gone\x07",
    "right \u202eto left\u202c \u2066",
    "nul \0 and \x7f \x85",
    "{{data}} ${1} `",
    "$\\frac{1}{2",
    "\ufeff\u200b\u2028\u2029",
]


def real_runs(folder: Path) -> Path:
    """A comparison of two methods, each with its own run folder in it."""
    with one_thread():
        main(["train", "--run-dir", str(folder), *TIGHT])
    return folder


def other_seed(run: Path, target: Path, seed: int) -> Path:
    """The run again, as if drawn with another seed: everything a little different."""
    target.mkdir(parents=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shaken = [{key: value if key == "step" else value * (1 + seed / 10) for key, value in row.items()} for row in lines]
    (target / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shaken))
    (target / "config.toml").write_text((run / "config.toml").read_text().replace("seed = 0", f"seed = {seed}", 1))
    return target


def write_run(folder: Path, rows: list[dict], config: str = 'method = "sparse_rl"\nsteps = 20\n') -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def curve(values, **others) -> list[dict]:
    """Rows of a run whose reward goes so; other metrics by name with `__` for a slash, a number or one for each step."""
    rows = []
    for place, value in enumerate(values):
        row = {"step": place + 1, "reward/mean": value}
        for key, each in others.items():
            row[key.replace("__", "/")] = each if isinstance(each, int | float) else each[place]
        rows.append(row)
    return rows


def rollout(step: int, tokens, *, prompt=(1, 2, 3), dense=None, sampler=None, evicted=None, shape=None, **values) -> dict:
    count = len(tokens)
    row = {
        "step": step,
        "prompt": "a prompt",
        "text": "a text",
        "prompt_tokens": list(prompt),
        "tokens": list(tokens),
        "sampler_logprobs": [-0.5] * count if sampler is None else sampler,
        "dense_logprobs": [-0.5] * count if dense is None else dense,
        "reward": 1.0,
        "verdict": True,
        "advantage": 0.5,
        "rejected": False,
        "finish": "stop",
        "answer": "42",
        "evicted_at": evicted,
        "evicted_at_shape": shape,
    }
    return row | values


def write_rollouts(run: Path, step: int, rows: list[dict]) -> Path:
    file = run / "rollouts" / f"step-{step}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), file, compression="zstd")
    return file


def big_run(folder: Path, like: Path, *, steps: int, rollouts: int, tokens: int, layers: int = 24, heads: int = 2) -> Path:
    """As many steps with the metrics of a real run, drifting; two rollouts a step with their evictions, the first rejected."""
    draw = np.random.default_rng(0)
    row = json.loads((like / "metrics.jsonl").read_text().splitlines()[1])
    shaken = 1 + 0.1 * draw.standard_normal((steps, len(row))).cumsum(axis=0) / 10
    rows = [
        {key: float(value * shake) for (key, value), shake in zip(row.items(), line, strict=True)} | {"step": step}
        for step, line in enumerate(shaken, 1)
    ]
    config = (like / "config.toml").read_text().replace("steps = 2", f"steps = {steps}", 1)
    write_run(folder, rows, config)
    counts = draw.poisson(np.exp(-((np.arange(BINS) - 40) ** 2) / 8) * 1e4, (steps, BINS)).tolist()
    lines = [json.dumps({"step": step, "counts": each}) + "\n" for step, each in enumerate(counts, 1)]
    (folder / "xi.jsonl").write_text("".join(lines))
    prompt = 20
    for step in range(1, steps + 1):
        per_step = [tokens] * rollouts
        times = prompt + 128 * draw.integers(1, max(2, tokens // 128), (2, layers * heads * (prompt + tokens)))
        evicted = np.where(draw.random(times.shape) < 0.5, NEVER, times).astype(np.int32)
        table = []
        for place, count in enumerate(per_step):
            sampler = -draw.exponential(0.4, count).astype(np.float32)
            dense = sampler + 0.05 * draw.standard_normal(count).astype(np.float32)
            rejected = place == 0
            if rejected:
                dense[count // 2] = sampler[count // 2] - 11
            trace = place < 2
            table.append(
                rollout(
                    step,
                    draw.integers(3, 15, count),
                    prompt=draw.integers(3, 15, prompt),
                    sampler=sampler,
                    dense=dense,
                    rejected=rejected,
                    evicted=evicted[place] if trace else None,
                    shape=[layers, heads, prompt + count] if trace else None,
                )
            )
        write_rollouts(folder, step, table)
    return folder
