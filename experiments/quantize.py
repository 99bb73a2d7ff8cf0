"""Which 8-bit and 4-bit storage of keys and values does a model bear? Mismatch and bytes per scheme, on the same answers:

    python experiments/quantize.py --model FOLDER --data DATA --work out/quantize --json benchmarks/results/quantize.json
    python experiments/quantize.py --table benchmarks/results/quantize.json

A dense engine answers GSM8K problems, one per prompt and several per prompt; of the samples of a long prompt the longest is
measured. Each scheme then gets one teacher-forced pass over every answer. Its keys (after the rotary embedding) and values are
quantised and restored, and each query attends to restored ones only, its own included. R-KV runs on the same answers with
evictions at the engine's schedule, prompt evictable or protected. Static scales come from answers to other problems, placed at
all positions that occur.

The dense model samples here and the scheme is compared with it, so ratio = pi_scheme / pi_dense. k1 = mean(-log ratio) and
k3 = mean(ratio - 1 - log ratio) estimate KL(dense || scheme). An answer counts as rejected if a ratio is below 1e-4. In a block
of tokens the scale also covers later tokens of the block, which a running sampler does not know yet.

Finished passes are kept in the --work folder; a second call continues there.
"""

import argparse
import importlib.util
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from quantized_views import STORAGES, Calibration, Causal, Evicting, Quantised
from torch import Tensor

from sparse_rl import KV, Engine, Sampling, load_model, load_tokenizer
from sparse_rl.bench.record import environment
from sparse_rl.data.examples import Example, load
from sparse_rl.data.prompts import encode
from sparse_rl.learner.batch import padded
from sparse_rl.learner.correction import correct
from sparse_rl.learner.logprobs import token_logprobs
from sparse_rl.models.attention import AttentionView, eval_mode
from sparse_rl.models.head import hidden_states
from sparse_rl.models.support import head_of, prepare

BUCKET = 256
"""Tokens per group of positions in the results."""

EVICTIONS = {
    "R-KV 512+128": (KV(policy="rkv", budget=512, interval=128, protect_prompt=False), None),
    "R-KV 256+64, prompt protected": (KV(policy="rkv", budget=256, interval=64, protect_prompt=True), None),
    "R-KV 256+64, prompt protected, K8 pair V8 token": (
        KV(policy="rkv", budget=256, interval=64, protect_prompt=True),
        "K8 pair V8 token",
    ),
}
"""Settings of R-KV and their storage. A protected prompt is kept in addition to the budget."""
DENSE = "dense"


@dataclass(frozen=True)
class Answer:
    group: str
    prompt: list[int]
    response: list[int]


# Passes


def sample_answers(model, tokenizer, args) -> dict[str, list[Answer]]:
    """Sample all answers with a dense cache: those to calibrate with, and those to measure."""
    rng = random.Random(args.seed)
    test, train = (load("gsm8k", split, n=0, seed=0, dir=args.data).examples for split in ("test", "train"))
    rng.shuffle(test)
    rng.shuffle(train)
    singles, rest = test[: args.singles], test[args.singles :]
    listed = [rest[i * args.problems : (i + 1) * args.problems] for i in range(args.longs)]
    longs = [Example(long_prompt([example.prompt for example in each]), None, {}) for each in listed]
    groups = {
        "calibration": train[: args.calibration],
        "single": singles,
        "long": [x for x in longs for _ in range(args.tries)],
    }
    kinds = [kind for kind, examples in groups.items() for _ in examples]
    prompts = [encode(tokenizer, example) for examples in groups.values() for example in examples]
    engine = Engine(model, KV(policy="full"), slots=min(len(prompts), args.slots))
    sampling = Sampling(max_tokens=args.max_tokens, temperature=1.0, seed=args.seed)
    done: list[int] = []

    def report(index, rollout):
        done.append(index)
        say(f"answer {len(done)} of {len(prompts)}: {kinds[index]}, {len(rollout.prompt)} + {len(rollout.response)} tokens")

    rollouts = engine.generate(prompts, sampling=sampling, record=False, on_end=report)
    answers = [Answer(kind, each.prompt, each.response) for kind, each in zip(kinds, rollouts, strict=True)]
    tried = [answer for answer in answers if answer.group == "long"]
    tries = [tried[start : start + args.tries] for start in range(0, len(tried), args.tries)]
    return {
        "calibration": [answer for answer in answers if answer.group == "calibration"],
        "measured": [answer for answer in answers if answer.group == "single"]
        + [max(each, key=lambda answer: len(answer.response)) for each in tries],
    }


def long_prompt(problems: list[str]) -> str:
    """Return the prompt of question L of the evidence, with these problems."""
    file = Path(__file__).parent / "evidence/l-long/make_data.py"
    spec = importlib.util.spec_from_file_location("make_data", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.prompt_of(problems)


@torch.no_grad()
def decoder_pass(model, answer: Answer, view: AttentionView, offset: int = 0) -> Tensor:
    """Return the inputs of the LM head that predict the response, with the answer starting at position `offset`."""
    tokens = torch.tensor([answer.prompt + answer.response[:-1]], device=model.device)
    places = torch.arange(tokens.shape[1], device=model.device)
    with eval_mode(model):
        return hidden_states(model, tokens, places[None] + offset, view, places[len(answer.prompt) - 1 :])


@torch.no_grad()
def logprobs(model, answer: Answer, view: AttentionView) -> Tensor:
    """Return the log-probs of the response under the view, at temperature 1."""
    hidden_nD = decoder_pass(model, answer, view)
    targets_n = torch.tensor(answer.response, device=model.device)
    return token_logprobs(head_of(model), hidden_nD, targets_n, torch.ones(len(targets_n), device=model.device))[0].cpu()


def view_of(name: str, answer: Answer, calibration: Calibration) -> Causal | Evicting | Quantised:
    if name == DENSE:
        return Causal()
    if name in STORAGES:
        return Quantised(STORAGES[name], calibration, Causal())
    kv, storage = EVICTIONS[name]
    evicting = Evicting(kv, len(answer.prompt))
    return evicting if storage is None else Quantised(STORAGES[storage], calibration, evicting)


def run_passes(model, answers: dict[str, list[Answer]], file: Path, args) -> dict[tuple[str, int], dict]:
    """Run the passes that are asked for and not yet in the file, and append each to it. Return all passes of the file, by name
    and answer."""
    lines = file.read_text().splitlines() if file.exists() else []
    found = {(line["name"], line["answer"]): line for line in map(json.loads, lines)}
    asked = [
        (name, index)
        for index, answer in enumerate(answers["measured"][: args.first])
        for name in (DENSE, *STORAGES, *(EVICTIONS if answer.group == "long" else ()))  # R-KV needs long answers
        if not args.only or name in (DENSE, *args.only)
    ]
    todo = [each for each in asked if each not in found]
    calibration = calibrated(model, answers, args) if todo else None
    for number, (name, index) in enumerate(todo, 1):
        start = time.perf_counter()
        view = view_of(name, answers["measured"][index], calibration)
        values = logprobs(model, answers["measured"][index], view).tolist()
        line = {"name": name, "answer": index, "kept_share": view.kept_share, "logprobs": values}
        found[name, index] = line
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")
        k3 = mismatch([log_ratio(found, name, index)])["k3"]
        say(f"pass {number} of {len(todo)}, answer {index}, {name}: k3 {k3:.5f}, {time.perf_counter() - start:.0f} s")
    return found


def log_ratio(passes: dict[tuple[str, int], dict], name: str, index: int) -> Tensor:
    return torch.tensor(passes[name, index]["logprobs"]) - torch.tensor(passes[DENSE, index]["logprobs"])


def calibrated(model, answers: dict[str, list[Answer]], args) -> Calibration:
    """Return the ranges of keys and values, from the --work folder if they are there."""
    file = args.work / "calibration.pt"
    if file.exists():
        return Calibration.of(torch.load(file, map_location=model.device))
    found = Calibration()
    longest = max(len(answer.prompt) for answer in answers["measured"]) + args.max_tokens
    for answer in answers["calibration"]:
        for offset in range(0, longest, BUCKET):  # short answers calibrate later positions, too: only the rotation differs
            decoder_pass(model, answer, found, offset)
    torch.save(found.tensors(), file)
    say(f"calibrated with {len(answers['calibration'])} answers, at positions up to {longest}")
    return found


# Results


def mismatch(log_ratios: list[Tensor]) -> dict[str, float]:
    """Return the metrics over all tokens of these answers. The ratio is pi_scheme / pi_dense."""
    mask = padded([torch.ones(len(each)) for each in log_ratios])
    metrics = correct(padded(log_ratios), mask, "paper").metrics
    names = {"k1": "mismatch_k1", "k3": "mismatch_k3", "p05": "xi_p05", "min": "xi_min", "rejected": "rejection_rate"}
    return {name: metrics[f"sparse/{key}"] for name, key in names.items()} | {"tokens": int(mask.sum())}


def results_of(answers: list[Answer], passes: dict[tuple[str, int], dict], dim: int) -> list[dict]:
    """Return one row per scheme: metrics of all answers, of each group, of each range of positions, and k3 of each answer."""
    rows = []
    for name in (*STORAGES, *EVICTIONS):
        indices = [index for index in range(len(answers)) if (name, index) in passes]
        if not indices:
            continue
        log_ratios = {index: log_ratio(passes, name, index) for index in indices}
        stored = EVICTIONS[name][1] if name in EVICTIONS else name
        kept = sum(passes[name, index]["kept_share"] * len(log_ratios[index]) for index in indices)
        kept /= sum(map(len, log_ratios.values()))
        row = {"scheme": name, "bytes": kept * (STORAGES[stored].share(dim) if stored else 1.0), "kept_tokens": kept}
        row |= mismatch(list(log_ratios.values()))
        groups = dict.fromkeys(answers[index].group for index in indices)
        row["groups"] = {
            group: mismatch([log_ratios[index] for index in indices if answers[index].group == group]) for group in groups
        }
        row["positions"] = {}
        for start in range(0, max(len(each.prompt) + len(each.response) for each in answers), BUCKET):
            cut = [each[within(answers[index], start)] for index, each in log_ratios.items()]
            if any(map(len, cut)):
                row["positions"][f"{start}-{start + BUCKET}"] = mismatch([each for each in cut if len(each)])
        row["k3_of_answers"] = {str(index): mismatch([each])["k3"] for index, each in log_ratios.items()}
        rows.append(row)
    return rows


def within(answer: Answer, start: int) -> slice:
    """Return the response tokens at positions `start` to `start` + BUCKET of the sequence."""
    first = start - len(answer.prompt)
    return slice(max(0, first), max(0, first + BUCKET))


def table(found: dict) -> str:
    """Return a Markdown table with a row for each scheme. The last columns are k3 by position."""
    starts = list(dict.fromkeys(key for row in found["results"] for key in row["positions"]))
    head = ["scheme", "answers", "bytes", "k1", "k3", "p05", "min", "rejected", *(f"k3 at {key}" for key in starts)]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for row in found["results"]:
        cells = [row["scheme"], f"{len(row['k3_of_answers'])}", f"{row['bytes']:.3f}", f"{row['k1']:.5f}", f"{row['k3']:.5f}"]
        cells += [f"{row['p05']:.3f}", f"{row['min']:.1e}", f"{row['rejected']:.0%}"]
        cells += [f"{row['positions'][key]['k3']:.5f}" if key in row["positions"] else "" for key in starts]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id")
    parser.add_argument("--name", help="name of the model in the JSON [the folder's]")
    parser.add_argument("--data", help="folder with gsm8k-train.jsonl.gz and gsm8k-test.jsonl.gz")
    parser.add_argument("--work", type=Path, help="folder of answers and finished passes; continued if it exists")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print this JSON as Markdown and do nothing else")
    parser.add_argument("--singles", type=int, default=8, help="answers to one problem [8]")
    parser.add_argument("--longs", type=int, default=3, help="answers to several problems in one prompt [3]")
    parser.add_argument("--tries", type=int, default=4, help="samples of a long prompt, of which the longest is measured [4]")
    parser.add_argument("--problems", type=int, default=4, help="problems of a long prompt [4]")
    parser.add_argument("--calibration", type=int, default=3, help="answers that static scales are taken from [3]")
    parser.add_argument("--max-tokens", type=int, default=800, help="longest answer [800]")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--only", nargs="+", metavar="SCHEME", help="schemes to run in this call [all]")
    parser.add_argument("--first", type=int, help="run only the first answers in this call [all]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    for name in args.only or ():
        if name not in (*STORAGES, *EVICTIONS):
            parser.error(f"scheme {name!r} is unknown: use some of {', '.join((*STORAGES, *EVICTIONS))}")
    if not (args.model and args.data and args.work):
        parser.error("--model, --data and --work are needed")
    names = ("singles", "longs", "tries", "problems", "calibration", "max_tokens", "slots", "seed", "dtype")
    asked = {"model": args.name or Path(args.model).name} | {name: getattr(args, name) for name in names}
    args.work.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(args.model, dtype=args.dtype, device=args.device), load_tokenizer(args.model)
    dim = prepare(model).shape.head_dim
    file = args.work / "answers.json"
    if not file.exists():
        sampled = sample_answers(model, tokenizer, args)
        stored = {group: [asdict(answer) for answer in each] for group, each in sampled.items()}
        file.write_text(json.dumps({"asked": asked, **stored}))
    stored = json.loads(file.read_text())
    if stored["asked"] != asked:
        parser.error(f"{file} holds answers for {stored['asked']}, not for {asked}: use another --work folder")
    answers = {group: [Answer(**answer) for answer in stored[group]] for group in ("calibration", "measured")}
    passes = run_passes(model, answers, args.work / "passes.jsonl", args)
    found = environment("quantize", model.device) | {
        "model": asked["model"],
        "head_dim": dim,
        "asked": asked,
        "answers": [
            {"group": answer.group, "prompt_tokens": len(answer.prompt), "response_tokens": len(answer.response)}
            for answer in answers["measured"]
        ],
        "results": results_of(answers["measured"], passes, dim),
    }
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
