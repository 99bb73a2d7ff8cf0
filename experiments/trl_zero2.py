"""Does `SparseGRPOTrainer` train under DeepSpeed ZeRO-2 as under DDP? Four steps of the embedded model on two CPU ranks, twice:

    pip install deepspeed
    DS_ACCELERATOR=cpu python experiments/trl_zero2.py [benchmarks/results/trl-zero2.json]

Prints the largest difference between the weights of the two runs, between their ranks, and how far the weights moved.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from datasets import Dataset

from sparse_rl import KV, load_tokenizer
from sparse_rl.bench.record import environment
from sparse_rl.data.arithmetic import make_problems
from sparse_rl.integrations.trl import SparseGRPOConfig, SparseGRPOTrainer
from sparse_rl.models.load import TINY

MODES = ("ddp", "zero2")
RANKS = 2
ZERO2 = {
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def by_text(completions: list[str], **columns: object) -> list[float]:
    """A reward that differs between completions."""
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


def train(mode: str, folder: Path) -> None:
    problems = make_problems(8, 0, sums=4)
    args = SparseGRPOConfig(
        output_dir=str(folder / mode),
        kv=KV(policy="random", budget=28, interval=4, window=4, sinks=2, protect_prompt=False),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=40,
        max_steps=4,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        ddp_backend="gloo",
        optim="adamw_torch",
        report_to="none",
        save_strategy="no",
        deepspeed=ZERO2 if mode == "zero2" else None,
    )
    data = Dataset.from_dict({"prompt": [each.prompt for each in problems], "answer": [each.answer for each in problems]})
    trainer = SparseGRPOTrainer(str(TINY), by_text, args, data, processing_class=load_tokenizer("tiny"))
    before = weights_of(trainer)
    trainer.train()
    torch.save((before, weights_of(trainer)), folder / f"{mode}-{os.environ['RANK']}.pt")


def weights_of(trainer: SparseGRPOTrainer) -> torch.Tensor:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return torch.cat([weight.detach().flatten().clone() for weight in model.parameters()])


def main(out: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for mode in MODES:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
            subprocess.run([*launch, __file__, mode, folder], check=True)
        before, (ddp, zero2) = None, ([], [])
        for mode, found in zip(MODES, (ddp, zero2), strict=True):
            for rank in range(RANKS):
                before, after = torch.load(Path(folder) / f"{mode}-{rank}.pt")
                found.append(after)
    measured = {
        "ZeRO-2 against DDP": float((ddp[0] - zero2[0]).abs().max()),
        "rank 0 against rank 1": max(float((a - b).abs().max()) for a, b in (ddp, zero2)),
        "weights moved by at most": float((ddp[0] - before).abs().max()),
    }
    for name, largest in measured.items():
        print(f"{name}: {largest:.1e}")
    if out is not None:
        versions = {name: version(name) for name in ("deepspeed", "trl")}
        record = environment("trl_zero2", torch.device("cpu")) | {"packages": versions, "steps": 4, "ranks": RANKS}
        out.write_text(json.dumps(record | measured, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in MODES:
        train(sys.argv[1], Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]) if sys.argv[1:] else None)
