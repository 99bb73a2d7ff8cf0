"""Run the engine with all its decode and compaction kernels in Triton's interpreter. Replay reproduces the log-probs."""

import copy
import sys

import pytest
import torch

from sparse_rl import KV, NEVER, Engine, Sampling, replay
from sparse_rl.kernels import jit
from sparse_rl.kv import cache
from sparse_rl.kv.policies import base
from sparse_rl.rollout import decode
from test_windows import family

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPTS = [[5], list(range(3, 16))]
CACHES = {
    "rkv": {"policy": "rkv"},
    "rkv 8bit": {"policy": "rkv", "dtype": "8bit", "protect_prompt": True},
    "triattention": {"policy": "triattention", "protect_prompt": True},
    "snapkv 4bit": {"policy": "snapkv", "dtype": "4bit"},
    "full": {"policy": "full"},
}


@pytest.fixture
def kernels(monkeypatch):
    """Use the kernels on a CPU, too, where they are interpreted."""
    usable = jit.usable
    modules = [module for name, module in sys.modules.items() if name.startswith("sparse_rl.")]
    for module in modules:
        if getattr(module, "usable", None) is usable and module.__name__ != "sparse_rl.rollout.runner":  # no CUDA graphs
            monkeypatch.setattr(module, "usable", lambda device: jit.triton is not None)
    assert usable not in (decode.usable, cache.usable, base.usable)


@pytest.mark.parametrize("name", CACHES)
def test_replay_reproduces_what_the_kernels_sample(models, kernels, name):
    check(models["qwen2"], CACHES[name])


def test_replay_reproduces_what_the_kernels_of_windows_sample(kernels):
    check(family("gpt-oss"), CACHES["rkv"])


def check(model, settings):
    kv = KV(**{"budget": 8, "interval": 4, "window": 2, "sinks": 1, "protect_prompt": False} | settings)
    model = copy.deepcopy(model).to(DEVICE)
    engine = Engine(model, kv, slots=3)
    rollouts = engine.generate(PROMPTS, 2, Sampling(max_tokens=14, stop=()))
    with torch.no_grad():
        sparse, dense = (replay(model, rollouts, view) for view in ("sparse", "dense"))
    gaps, dense_gaps = (
        torch.stack([(ours.cpu() - each.logprobs).abs() for ours, each in zip(replayed, rollouts, strict=True)])
        for replayed in (sparse, dense)
    )
    evicts = kv.policy != "full" and len(engine.limits.shape.full_layers) > 0
    assert all(bool((each.evicted_at != NEVER).any()) == evicts for each in rollouts)
    if kv.quantised:  # a rounding that flips a code changes all later tokens a little
        assert float((gaps < 1e-4).float().mean()) > 0.8 and float(gaps.max()) < 0.01
    else:
        assert float(gaps.max()) < 1e-4
    assert not (evicts or kv.quantised) or float(dense_gaps.max()) > 0.01  # else the replay proves nothing
