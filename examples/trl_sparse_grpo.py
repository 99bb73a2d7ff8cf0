"""trl_grpo.py with rollouts on a bounded KV cache: two lines differ. Run it: python examples/trl_sparse_grpo.py"""

import argparse

from datasets import Dataset
from sparse_rl.integrations.trl import SparseGRPOConfig as GRPOConfig, SparseGRPOTrainer as GRPOTrainer

from sparse_rl.data.arithmetic import grade, make_problems
from sparse_rl.models.load import TINY

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=18)
parser.add_argument("--sums", type=int, default=15, help="sums of a problem: an answer takes 11 tokens for each")
parser.add_argument("--held-out", type=int, default=40, help="held-out problems, with eight answers each")
parser.add_argument("--seed", type=int, default=42)
options = parser.parse_args()


def problems(split, count):
    made = make_problems(count, seed=0, sums=options.sums, split=split)
    return Dataset.from_dict({"prompt": [each.prompt for each in made], "answer": [each.answer for each in made]})


def right(completions, answer, **columns):
    return [grade(text, wanted) for text, wanted in zip(completions, answer, strict=True)]


trainer = GRPOTrainer(
    model=str(TINY),
    reward_funcs=right,
    args=GRPOConfig(
        "trl-grpo",
        kv={"policy": "rkv", "budget": 46, "interval": 11, "window": 16, "protect_prompt": False},
        max_steps=options.steps,
        seed=options.seed,
        learning_rate=1e-4,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=32,
        num_generations=8,
        max_completion_length=192,
        bf16=False,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=problems("train", 512),
    eval_dataset=problems("test", options.held_out),
)
trainer.train()
print(f"held-out accuracy {trainer.evaluate()['eval_reward']:.3f}")
