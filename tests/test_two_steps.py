"""A run of two steps ends with the weights that plain transformers and AdamW give for its rollouts.

The run samples through a bounded cache and learns from packs. The reference passes over each rollout alone, with all of its
keys.
"""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import test_hybrid
import test_windows
from small_runs import one_thread
from sparse_rl import Trainer, load_tokenizer
from sparse_rl.config import PRESETS
from test_windows import own_parallel, plain

MODELS = {"qwen3.5": test_hybrid.family, "gpt-oss": test_windows.family}
LR, BETAS, DECAY, CLIP = 2e-4, (0.9, 0.98), 0.1, 0.5
ROUNDING = 1e-5


def reward(completions, **columns):
    """Give almost every text a reward of its own."""
    return [float(sum(map(ord, text)) % 101) for text in completions]


def train(model, folder):
    """Run two steps of eight rollouts with the public API."""
    config = {
        "method": "sparse_rl",
        "steps": 2,
        "run_dir": str(folder / "run"),
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "kv": {"policy": "rkv", "budget": 20, "interval": 4, "window": 4, "sinks": 2},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 4, "max_tokens": 32},
        "optimizer": {"lr": LR, "betas": BETAS, "weight_decay": DECAY, "clip_norm": CLIP},
        "reward": {"truncated": "grade"},
        "eval": {"problems": 0},
    }
    for part in (model, load_tokenizer("tiny")):
        part.save_pretrained(folder / "model")
    problems = [{"prompt": f"{number}:4{number}+85=", "answer": "1"} for number in range(4)]
    return Trainer(config, reward=reward, dataset=problems).train()


def advantage(row, rows):
    group = torch.tensor([each["reward"] for each in rows if each["prompt"] == row["prompt"]])
    return float((row["reward"] - group.mean()) / (group.std() + 1e-6))


def step(model, adamw, rows):
    """Train one step of GRPO with the paper's correction, on the run's tokens and rewards. Return the gradient norm."""
    for row in rows:
        logprobs_T = own_parallel(model, SimpleNamespace(prompt=row["prompt_tokens"], response=row["tokens"]))
        xi_T = torch.exp(logprobs_T.detach() - torch.tensor(row["sampler_logprobs"]))
        if xi_T.min() >= PRESETS["paper"].veto:
            ratio_T = torch.exp(logprobs_T - logprobs_T.detach())  # 1, with a gradient
            (-(xi_T * ratio_T).mean() * advantage(row, rows) / len(rows)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    adamw.step()
    adamw.zero_grad()
    return float(norm)


@pytest.mark.parametrize("name", MODELS)
def test_two_steps_of_training_are_those_of_transformers(name, tmp_path):
    tokenizer = load_tokenizer("tiny")
    ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = MODELS[name](name, vocab_size=len(tokenizer), **ids)
    with one_thread():
        run = train(model, tmp_path)
        theirs = plain(model)
        matrices, vectors = ([each for each in theirs.parameters() if (each.dim() > 1) == many] for many in (True, False))
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        adamw = torch.optim.AdamW(groups, lr=LR, betas=BETAS, weight_decay=DECAY)
        for metrics in run.metrics[1:]:
            norm = step(theirs, adamw, run.rollouts(int(metrics["step"])))
            assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)
            assert metrics["sparse/engine_noise"] < ROUNDING < metrics["sparse/mismatch_k3"]  # evictions weigh the tokens
    ours = AutoModelForCausalLM.from_pretrained(run.model)
    for (path, mine), reference, start in zip(ours.named_parameters(), theirs.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=ROUNDING, msg=path)
        assert float((reference - start).detach().abs().max()) > LR, path
