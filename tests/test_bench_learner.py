"""`bench learner` on a CPU: it runs, says what it ran on, and its made-up evictions follow the schedule."""

import argparse
import json

import pytest
import torch

from sparse_rl import NEVER, load_model
from sparse_rl.bench.learner import bench, pass_flops, random_trace, synthetic_rollouts


def arguments(**changes):
    return argparse.Namespace(
        **{
            "model": "tiny",
            "tokens": 24,
            "prompt_tokens": 8,
            "tokens_per_microbatch": 64,
            "microbatches": 2,
            "gradient_checkpointing": False,
            "head_dtype": "float32",
            "seed": 0,
            "dtype": "float32",
            "device": "cpu",
            "json": None,
            "trust_remote_code": False,
        }
        | changes
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_measures_and_keeps_its_numbers(tmp_path, checkpointing, capsys):
    out = tmp_path / "learner.json"
    bench(arguments(json=out, gradient_checkpointing=checkpointing))
    record = json.loads(out.read_text())
    assert record["benchmark"] == "learner" and record["versions"]["torch"] == torch.__version__
    assert [arm["tokens"] for arm in record["arms"]] == [2 * 2 * 32] * 5
    assert all(arm["tokens_per_s"] > 0 for arm in record["arms"])
    assert "update, shadow" in capsys.readouterr().out


def test_made_up_evictions_keep_the_budget_at_every_token():
    budget, interval, prompt, tokens = 32, 8, 20, 100
    generator = torch.Generator().manual_seed(0)
    trace = random_trace(2, 2, prompt, tokens, generator, budget=budget, interval=interval)
    evicted_at = trace.evicted_at
    assert bool((evicted_at != NEVER).any()) and not torch.equal(evicted_at[0, 0], evicted_at[1, 1])
    for query in range(prompt, prompt + tokens):
        held = (evicted_at[:, :, :query] > query).sum(dim=-1)
        assert bool((held <= budget + interval).all())
        if query >= prompt + budget and (query - prompt) % interval == 0:
            assert bool((held == budget).all())


def test_flops_are_those_of_the_products():
    model = load_model("tiny", dtype="float32", device="cpu")
    (rollout,) = synthetic_rollouts(model, 1, 5, 12, seed=0)
    config = model.config
    heads = config.num_attention_heads * config.hidden_size // config.num_attention_heads
    products = sum(w.numel() for name, w in model.named_parameters() if "embed" not in name and "lm_head" not in name)
    head = config.vocab_size * config.hidden_size
    expected = 2 * products * 16 + 2 * head * 12 + config.num_hidden_layers * 4 * heads * 16 * 16 / 2
    assert pass_flops(model, [rollout]) == expected
