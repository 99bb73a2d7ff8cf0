"""How many problems does a model solve with each storage of keys and values?

    python experiments/quantized_accuracy.py --model FOLDER --data DATA --json benchmarks/results/quantize-accuracy.json
    python experiments/quantized_accuracy.py --table benchmarks/results/quantize-accuracy.json

transformers' `generate` answers the same GSM8K problems with the schemes of `quantize.py`, except those whose scale covers a block of
tokens. Its cache quantises and restores each key (after the rotary embedding) and value when it stores them. Differences from 16 bits are paired by
problem. Static scales come from answers to other problems. Schemes with a result in the JSON are not run again.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from quantize import Answer, decoder_pass, say
from quantized_formats import widened
from quantized_views import STORAGES, Calibration, Storage, restored
from transformers import DynamicCache

from sparse_rl import KV, Engine, Sampling, load_model, load_tokenizer
from sparse_rl.bench.record import environment
from sparse_rl.config import RewardConfig
from sparse_rl.data.examples import Example, load
from sparse_rl.data.prompts import encode
from sparse_rl.evaluate.statistics import mean_interval, paired_difference
from sparse_rl.models.support import prepare
from sparse_rl.rewards.find import find

EXACT = "K16 V16"
SCHEMES = [name for name in STORAGES if "block" not in name]
"""A block of tokens gets its scale when its last token is known."""
PIECE = 64
"""Tokens between two removals of ended rows."""
OFFSET = 256
"""Static scales are calibrated at positions that are multiples of this, because rotation moves the ranges of channels."""


class QuantisedCache(DynamicCache):
    """A cache that returns keys and values as they are after quantisation."""

    def __init__(self, storage: Storage, calibration: Calibration, config: Any):
        super().__init__(config=config)
        self.storage, self.calibration = storage, calibration

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        ranges, storage = self.calibration.ranges, self.storage
        key_range = widened(ranges[storage.statistic][layer_idx], storage.widened)
        key_states = restored(key_states, storage.keys, key_range)
        value_states = restored(value_states, storage.values, ranges["values"][layer_idx])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def calibrate(model: Any, tokenizer: Any, problems: list[Example], longest: int, args: argparse.Namespace) -> Calibration:
    """Return the ranges of keys and values in answers to these problems."""
    prompts = [encode(tokenizer, problem) for problem in problems]
    sampling = Sampling(max_tokens=args.max_tokens, temperature=1.0, seed=args.seed)
    rollouts = Engine(model, KV(policy="full"), slots=len(prompts)).generate(prompts, sampling=sampling, record=False)
    found = Calibration()
    for rollout in rollouts:
        for offset in range(0, longest, OFFSET):
            decoder_pass(model, Answer("calibration", rollout.prompt, rollout.response), found, offset)
    return found


@torch.no_grad()
def sample(
    model: Any, prompts: list[list[int]], storage: Storage, calibration: Calibration, args: argparse.Namespace
) -> list[list[int]]:
    """Sample `args.samples` answers to each prompt. Every scheme draws with the same seed."""
    found: list[list[int]] = []
    repeated = [prompt for prompt in prompts for _ in range(args.samples)]
    for first in range(0, len(repeated), args.batch):
        torch.manual_seed(args.seed + first)
        cache = QuantisedCache(storage, calibration, model.config)
        found += generated(model, repeated[first : first + args.batch], cache, args.max_tokens)
    return found


def generated(model: Any, prompts: list[list[int]], cache: DynamicCache, longest: int, **options: Any) -> list[list[int]]:
    """Return an answer to each prompt, without its end token. Every PIECE tokens the rows that have ended leave the batch."""
    pad, stops = model.generation_config.pad_token_id, model.generation_config.eos_token_id
    ends = set(stops if isinstance(stops, list) else [stops])
    width = max(map(len, prompts))
    tokens = torch.tensor([[pad] * (width - len(row)) + row for row in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=model.device)
    going, found = list(range(len(prompts))), [[] for _ in prompts]
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0} | options
    for start in range(0, longest, PIECE):
        new = min(PIECE, longest - start)
        tokens = model.generate(tokens, attention_mask=mask, past_key_values=cache, max_new_tokens=new, **options)
        for index, row in zip(going, tokens[:, width + start :].tolist(), strict=True):
            found[index] += row[: next((place for place, token in enumerate(row) if token in ends), len(row))]
        stays = [place for place, index in enumerate(going) if len(found[index]) == start + new]
        if not stays:
            break
        going, rows = [going[place] for place in stays], torch.tensor(stays, device=model.device)
        cache.batch_select_indices(rows)
        tokens = tokens[rows]
        mask = torch.cat([mask[rows], mask.new_ones(len(stays), new)], 1)
    return found


def table(found: dict[str, Any]) -> str:
    """Return a Markdown table with a row per scheme. The difference from 16 bits is in points."""
    rows = {row["scheme"]: row for row in found["results"]}
    lines = ["| scheme | bytes | right, % | against 16 bits | answer, tokens |", "|---|---:|---:|---:|---:|"]
    for name, row in rows.items():
        share = STORAGES[name].share(found["head_dim"])
        right = mean_interval(row["right"], found["asked"]["samples"])
        cells = [name, f"{share:.2f}", "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * value for value in right)), ""]
        if name != EXACT and EXACT in rows:
            difference = paired_difference(row["right"], rows[EXACT]["right"], found["asked"]["samples"])
            cells[-1] = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * value for value in difference))
        lines.append("| " + " | ".join([*cells, f"{row['tokens']:.0f}"]) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id")
    parser.add_argument("--name", help="name of the model in the JSON [the folder's]")
    parser.add_argument("--data", help="folder with gsm8k-train.jsonl.gz and gsm8k-test.jsonl.gz")
    parser.add_argument("--json", type=Path, help="results; continued if it exists")
    parser.add_argument("--table", type=Path, help="print this JSON as Markdown and do nothing else")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, metavar="SCHEME", help="schemes to run in this call [all]")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="answers per problem [8]")
    parser.add_argument("--calibration", type=int, default=6, help="answers that static scales are taken from [6]")
    parser.add_argument("--max-tokens", type=int, default=768, help="longest answer [768]")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args(arguments)
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    if unknown := [name for name in args.schemes if name not in SCHEMES]:
        parser.error(f"scheme {unknown[0]!r} is unknown: use some of {', '.join(SCHEMES)}")
    if not (args.model and args.data and args.json):
        parser.error("--model, --data and --json are needed")
    model, tokenizer = load_model(args.model, dtype=args.dtype, device=args.device), load_tokenizer(args.model)
    names = ("problems", "samples", "calibration", "max_tokens", "batch", "seed", "dtype")
    asked = {"model": args.name or Path(args.model).name} | {name: getattr(args, name) for name in names}
    found = environment("quantized_accuracy", model.device) | {
        "head_dim": prepare(model).shape.head_dim,
        "asked": asked,
        "results": [],
    }
    if args.json.exists():
        found = json.loads(args.json.read_text())
        if found["asked"] != asked:
            parser.error(f"{args.json} holds results for {found['asked']}, not for {asked}: use another file")
    test, train = (load("gsm8k", split, n=0, seed=0, dir=args.data).examples for split in ("test", "train"))
    rng = random.Random(args.seed)
    rng.shuffle(test)
    rng.shuffle(train)
    problems = test[: args.problems]
    prompts = [encode(tokenizer, problem) for problem in problems]
    calibration = calibrate(model, tokenizer, train[: args.calibration], max(map(len, prompts)) + args.max_tokens, args)
    model.set_attn_implementation("sdpa")
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    reward = find(RewardConfig().function_for("gsm8k"))
    for name in args.schemes:
        if any(row["scheme"] == name for row in found["results"]):
            continue
        started = time.perf_counter()
        answers = sample(model, prompts, STORAGES[name], calibration, args)
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        each = [problem for problem in problems for _ in range(args.samples)]
        columns = {column: [problem.columns[column] for problem in each] for column in each[0].columns}
        graded = [float(value) for value in reward([problem.prompt for problem in each], texts, **columns)]
        right = [sum(graded[first : first + args.samples]) / args.samples for first in range(0, len(graded), args.samples)]
        row = {"scheme": name, "right": right, "tokens": sum(map(len, answers)) / len(answers)}
        found["results"].append(row | {"seconds": round(time.perf_counter() - started, 1)})
        args.json.write_text(json.dumps(found, indent=1) + "\n")
        say(
            f"{name}: {100 * sum(right) / len(right):.1f} % right, {row['tokens']:.0f} tokens an answer, {found['results'][-1]['seconds']} s"
        )
    print(table(found))


if __name__ == "__main__":
    main()
