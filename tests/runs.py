"""Training runs small enough for tests: a random model of some ten thousand weights, eight problems, rewards that differ."""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from sparse_rl import load_tokenizer
from sparse_rl.cli import main

REWARDS = '''
import math, os, time

def digits(prompts, completions, **columns):
    """Any text has one, and few have the same."""
    return [float(sum(map(ord, text)) % 11) for text in completions]

def some(prompts, completions, **columns):
    """Tells the answers to only one prompt in four apart."""
    return digits(prompts, completions) if prompts[0].startswith(("2:", "6:")) else [1.0]

def same(prompts, completions, **columns):
    return [1.0]

def fails(prompts, completions, **columns):
    """One sample in two fails, in one of five ways."""
    ways = [lambda: 1 / 0, lambda: time.sleep(60), lambda: [math.nan], lambda: [None], lambda: [1.0, 2.0]]
    kind = sum(map(ord, completions[0])) % 10
    return ways[kind]() if kind < len(ways) else digits(prompts, completions)

def raises(prompts, completions, **columns):
    raise RuntimeError("the answer is\\nmissing")

def hangs(prompts, completions, **columns):
    time.sleep(60)

def none(prompts, completions, **columns):
    return [None]

def pid(prompts, completions, **columns):
    with open(os.environ["SPARSE_RL_TEST_PIDS"], "a") as file:
        file.write(f"{os.getpid()}\\n")
    return digits(prompts, completions)
'''


def make_world(folder: Path) -> Path:
    """The model, the problems and the rewards of the runs, in `folder`."""
    tokenizer = load_tokenizer("tiny")
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        **ids,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # fresh weights attend almost evenly, which would hide what eviction does
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": f"{number}:4{number}+85=", "answer": "1"} for number in range(8)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def arguments(world: Path, run: Path, *flags: str, reward: str = "digits") -> list[str]:
    """Of `sparse-rl train`, for two steps of four rollouts unless `flags` say otherwise."""
    settings = {
        "run-dir": run,
        "steps": 2,
        "model.path": world / "model",
        "data.train": world / "problems.jsonl",
        "reward.function": f"{world / 'rewards.py'}:{reward}",
        "reward.workers": 1,
        "kv.budget": 20,
        "kv.interval": 4,
        "kv.window": 4,
        "rollout.prompts-per-step": 2,
        "rollout.samples-per-prompt": 2,
        "rollout.max-tokens": 24,
        "optimizer.lr": 1e-2,
        "eval.problems": 0,
    }
    return ["train", *(text for key, value in settings.items() for text in (f"--{key}", str(value))), *flags]


def train(world: Path, run: Path, *flags: str, reward: str = "digits") -> None:
    main(arguments(world, run, *flags, reward=reward))
