"""Seconds per step of one TRL script with three samplers: transformers' `generate`, vLLM in the same process, and sparse-rl.

    python benchmarks/trl_sampling.py sparse --model FOLDER --json out.json [--steps 3] [--tokens 2048] [--tiny]

The task is that of experiments/evidence/l-long: 16 problems in a prompt, so most answers reach the limit of tokens. 64 answers per
step, one update. The first step compiles and captures; the median of the others counts. `--tiny` tries the script on a CPU.
"""

import argparse
import gzip
import importlib.util
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from sparse_rl.bench.record import environment
from sparse_rl.integrations.trl import SparseGRPOConfig, SparseGRPOTrainer
from sparse_rl.models.load import TINY

TASK = Path(__file__).parents[1] / "experiments/evidence/l-long"
KV = {"policy": "rkv", "budget": 512, "interval": 128, "protect_prompt": True}


class Clock(TrainerCallback):
    """Record the seconds of every step."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.steps.append(time.perf_counter() - self.began)
        print(f"step {len(self.steps)}: {self.steps[-1]:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sampler", choices=["generate", "vllm", "sparse"])
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048, help="longest answer [2048]")
    parser.add_argument("--vllm-memory", type=float, default=0.3, help="share of the GPU that vLLM takes [0.3]")
    parser.add_argument("--tiny", action="store_true", help="8 answers of 32 tokens to short prompts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with gzip.open(TASK / "train.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    data = Dataset.from_list(
        [{"prompt": row["prompt"][-40:] if args.tiny else chat(row), "answers": row["answers"]} for row in rows]
    )
    batch, tokens = (8, 32) if args.tiny else (64, args.tokens)
    settings: dict[str, Any] = {
        "output_dir": "trl-sampling",
        "max_steps": args.steps,
        "learning_rate": 1e-6,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": batch // 8,
        "num_generations": 8,
        "max_completion_length": tokens,
        "gradient_checkpointing": not args.tiny,
        "bf16": not args.tiny,
        "model_init_kwargs": {"dtype": "float32"},
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
    }
    clock = Clock()
    trainer = trainer_of(args, settings, data, clock)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "completions/mean_length" in row]
    record = {
        "seed": settings.get("seed", 42),
        "trl": trl.__version__,
        "sampler": args.sampler,
        "kv": KV if args.sampler == "sparse" else None,
        "model": Path(args.model).name,
        "answers": batch,
        "tokens": tokens,
        "seconds": clock.steps,
        "median_s": statistics.median(clock.steps[1:] or clock.steps),
        "mean_length": [row["completions/mean_length"] for row in logged],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
    }
    print(json.dumps(record), flush=True)
    if args.json:
        args.json.write_text(json.dumps(environment("trl_sampling", trainer.accelerator.device) | record, indent=1) + "\n")


def chat(row: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["prompt"]}]


def trainer_of(args: argparse.Namespace, settings: dict[str, Any], data: Dataset, clock: Clock) -> GRPOTrainer:
    common: dict[str, Any] = {"model": args.model, "reward_funcs": reward(), "train_dataset": data, "callbacks": [clock]}
    if args.sampler == "sparse":
        kv = {"policy": "rkv", "budget": 24, "interval": 8, "protect_prompt": False} if args.tiny else KV
        return SparseGRPOTrainer(args=SparseGRPOConfig(kv=kv, **settings), **common)
    if args.sampler == "vllm":
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": args.vllm_memory}
    return GRPOTrainer(args=GRPOConfig(**settings), **common)


def reward() -> Any:
    """Return the reward of the task, which takes TRL's arguments."""
    spec = importlib.util.spec_from_file_location("reward", TASK / "reward.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.share_right


if __name__ == "__main__":
    main()
