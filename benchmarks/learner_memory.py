"""Peak memory of the learner against logits that are materialised: the same log-probs and gradients, both ways.

    python benchmarks/learner_memory.py --model 1.5B --tokens 4096 8192 16384 --out benchmarks/results/learner-memory.json

One forward and backward over packed sequences of random tokens, weights random, activations checkpointed in both arms.
"""

import argparse
import datetime
import json
import platform
import time
from pathlib import Path

import torch
import transformers

from sparse_rl.kv.trace import TraceRecorder
from sparse_rl.learner.optimizer import checkpointed
from sparse_rl.learner.replay import ReplayView, Span, forward, response_logprobs
from sparse_rl.models.attention import run
from sparse_rl.models.shapes import SHAPES, random_model
from sparse_rl.models.support import prepare
from sparse_rl.rollout.rollout import Rollout


def rollouts_of(tokens, length, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(tokens // length):
        ids = torch.randint(vocab, (length,), generator=generator).tolist()
        trace = TraceRecorder(1, 128).finish(1, 1, length)
        made.append(Rollout(ids[:1], ids[1:], torch.zeros(length - 1), "length", 0, 1.0, 0, trace))
    return made


def chunked(model, rollouts):
    logprobs, entropy = response_logprobs(model, forward(model, rollouts, "dense"))
    return logprobs.sum() + 0.01 * entropy.sum()


def materialised(model, rollouts):
    """What a trainer does that asks the model for its logits: float32 log-softmax over all of them."""
    tokens, positions, spans, keep = [], [], [], []
    for rollout in rollouts:
        fed, start = rollout.prompt + rollout.response[:-1], len(tokens)
        keep += range(start, start + len(fed))
        tokens, positions = tokens + fed, positions + list(range(len(fed)))
        spans.append(Span(start, start + len(fed), None))
    device = model.device
    where = torch.tensor(keep, device=device)
    logits = run(
        model, torch.tensor([tokens], device=device), torch.tensor([positions], device=device), ReplayView(spans), where
    )[0]
    all_logprobs = logits.float().log_softmax(dim=-1)
    targets = torch.tensor([token for rollout in rollouts for token in rollout.response], device=device)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return all_logprobs.gather(-1, targets[:, None]).sum() + 0.01 * entropy.sum()


def measure(way, model, rollouts):
    peaks, times, grads = [], [], None
    for _ in range(2):  # the second is warm
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, started = torch.cuda.memory_allocated(), time.perf_counter()
        with checkpointed(model, True):
            loss = way(model, rollouts)
            loss.backward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        grads = model.get_input_embeddings().weight.grad.float().norm().item()
    return {"peak_bytes_above_weights": peaks[-1], "seconds": times[-1], "loss": loss.item(), "embedding_grad_norm": grads}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.5B", choices=SHAPES)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = random_model(args.model, dtype=torch.bfloat16, device="cuda", seed=args.seed)
    prepare(model)
    rows = []
    for tokens in args.tokens:
        rollouts = rollouts_of(tokens, args.length, SHAPES[args.model]["vocab_size"], args.seed)
        row = {"tokens": tokens}
        for way in (chunked, materialised):
            try:
                row[way.__name__] = measure(way, model, rollouts)
            except torch.OutOfMemoryError:
                row[way.__name__] = "out of memory"
            model.zero_grad()
            torch.cuda.empty_cache()
        rows.append(row)
        print(json.dumps(row), flush=True)
    record = {
        "experiment": "learner_memory",
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "model": args.model,
        "dtype": "bfloat16",
        "seed": args.seed,
        "sequence_tokens": args.length,
        "rows": rows,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
