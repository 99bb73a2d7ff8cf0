"""Which kernels take the time of a decode step, by slot count, and of an update?

    python benchmarks/step_kernels.py decode [--model 1.5B] [--slots 256 128 32]
    python benchmarks/step_kernels.py update [--model 1.5B] [--tokens 4096]

Random weights on one GPU. Decode runs R-KV 512 + 128 with all slots at the mean length. The update is that of `bench learner`.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from sparse_rl import KV, Engine, Sampling
from sparse_rl.bench.learner import synthetic_batch, synthetic_rollouts
from sparse_rl.config import LossConfig, OptimizerConfig
from sparse_rl.learner.objective import Objective
from sparse_rl.learner.optimizer import Optimizer
from sparse_rl.learner.packing import packs
from sparse_rl.learner.update import accumulate
from sparse_rl.models.shapes import SHAPES, random_model
from sparse_rl.models.support import set_head_dtype
from sparse_rl.rollout.clock import Clock, device_time
from sparse_rl.rollout.decode import SlotState

BUDGET, INTERVAL, PROMPT_TOKENS, MICROBATCH = 512, 128, 256, 16384
TIMED = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["decode", "update"])
    parser.add_argument("--model", default="1.5B", choices=SHAPES, help="shape of the random weights [1.5B]")
    parser.add_argument("--slots", type=int, nargs="+", default=[256, 128, 32], help="active slots, most first [256 128 32]")
    parser.add_argument("--tokens", type=int, default=4096, help="response tokens of the update's rollouts [4096]")
    parser.add_argument("--kv-dtype", default="auto", choices=["auto", "8bit", "4bit"], help="bits of keys and values [auto]")
    parser.add_argument("--head-dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--top", type=int, default=16, help="kernels to print [16]")
    args = parser.parse_args()
    model = random_model(args.model, dtype=torch.bfloat16, device="cuda", seed=0)
    set_head_dtype(model, args.head_dtype)
    decode(model, args) if args.what == "decode" else update(model, args)


def decode(model, args: argparse.Namespace) -> None:
    kv = KV(policy="rkv", budget=BUDGET, interval=INTERVAL, protect_prompt=False, dtype=args.kv_dtype)
    engine = Engine(model, kv, slots=args.slots[0])
    engine.generate([[5] * PROMPT_TOKENS], 8, Sampling(max_tokens=engine.chunk, stop=()))
    graphs, clock, held = engine._graphs(), Clock(model.device), BUDGET + INTERVAL // 2
    assert graphs is not None

    for slots in args.slots:
        state = SlotState(*([value] * slots for value in (5, held, held, 0, 1, 2**20)))

        @torch.no_grad()
        def run(state: SlotState = state) -> None:
            graphs.start(state, Sampling())
            graphs.launch(engine.chunk, clock).wait()

        seconds = timed(run, model.device) / engine.chunk
        print(f"{slots} slots: {1e3 * seconds:.3f} ms a step, {slots / seconds:,.0f} tokens/s")
        kernels(run, engine.chunk, args.top)


def update(model, args: argparse.Namespace) -> None:
    per_microbatch = max(1, MICROBATCH // (PROMPT_TOKENS + args.tokens))
    rollouts = synthetic_rollouts(model, 2 * per_microbatch, PROMPT_TOKENS, args.tokens, seed=0)
    batch, passes = synthetic_batch(model, rollouts), list(packs(rollouts, MICROBATCH, share_prompts=False))
    optimizer = Optimizer(model, OptimizerConfig(lr=1e-9, gradient_checkpointing=False), steps=1)
    optimizer.allocate()

    def run() -> None:
        accumulate(model, batch, passes, Objective(LossConfig()))
        optimizer.update(0)

    seconds = timed(run, model.device)
    tokens = len(rollouts) * (PROMPT_TOKENS + args.tokens)
    print(f"update of {tokens:,} tokens: {seconds:.3f} s, {tokens / seconds:,.0f} tokens/s")
    kernels(run, 1, args.top)


def timed(run: Callable[[], None], device: torch.device) -> float:
    """Return the median seconds of a run, after two that compile and warm up."""
    run()
    run()
    seconds = []
    for _ in range(TIMED):
        started = device_time(device)
        run()
        seconds.append(device_time(device) - started)
    return statistics.median(seconds)


def kernels(run: Callable[[], None], steps: int, top: int) -> None:
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    rows = sorted(recorded.key_averages(), key=lambda row: -row.self_device_time_total)
    print(f"  kernels: {sum(row.self_device_time_total for row in rows) / steps / 1e3:.3f} ms")
    for row in rows[:top]:
        spent, each = row.self_device_time_total / steps / 1e3, row.self_device_time_total / row.count
        print(f"  {spent:9.3f} ms  {row.count / steps:6.0f} x {each:8.1f} us  {row.key[:100]}")


if __name__ == "__main__":
    main()
