"""The same promises on a CUDA device, where equality is up to rounding. Run with `pytest -m gpu` on a machine with one."""

import pytest
import torch

from conftest import random_model
from sparse_rl import KV, Engine, Sampling, load_model, replay
from sparse_rl.kv.policies import POLICIES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SMALL = {"budget": 32, "interval": 8, "window": 4, "sinks": 2}
PROMPTS = [[7, 8, 9, 10, 11], list(range(3, 60))]


@pytest.fixture(scope="module", autouse=True)
def no_tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("policy", POLICIES)
def test_replay_reproduces_the_sampler_in_float32(policy, architecture):
    model = random_model(architecture).cuda()
    rollouts = Engine(model, KV(policy=policy, **SMALL), slots=3).generate(PROMPTS, 2, Sampling(max_tokens=130, stop=()))
    for ours, rollout in zip(replay(model, rollouts, "sparse"), rollouts, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), rollout.logprobs, atol=1e-3, rtol=0)


def test_cpu_and_gpu_sample_the_same_tokens():
    """The counter-based numbers are the same everywhere, so only a near tie could part them."""
    model = load_model("tiny", dtype="float32", device="cpu")
    sampling = Sampling(max_tokens=200, stop=())
    on_cpu = Engine(model, KV(policy="rkv", **SMALL), slots=2).generate(PROMPTS, sampling=sampling)
    on_gpu = Engine(model.cuda(), KV(policy="rkv", **SMALL), slots=2).generate(PROMPTS, sampling=sampling)
    for left, right in zip(on_cpu, on_gpu, strict=True):
        assert left.response[:50] == right.response[:50]


def test_bfloat16_noise_does_not_grow_with_length():
    model = load_model("tiny", dtype="bfloat16", device="cuda")
    rollouts = Engine(model, KV(policy="rkv", **SMALL), slots=64).generate([PROMPTS[1]], 64, Sampling(max_tokens=600, stop=()))
    noise = torch.stack(
        [(ours.detach().cpu() - r.logprobs).abs() for ours, r in zip(replay(model, rollouts, "sparse"), rollouts, strict=True)]
    )
    early, late = float(noise[:, :100].mean()), float(noise[:, 500:].mean())
    assert early < 0.1 and late < 2 * early + 0.01


def test_allocated_memory_is_the_capacity():
    model = load_model("tiny", dtype="bfloat16", device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine = Engine(model, KV(policy="rkv", budget=512, interval=128), slots=64)
    shape = engine.limits.shape
    expected = 2 * shape.layers * 64 * shape.kv_heads * 640 * shape.head_dim * 2
    assert engine.stats.peak_kv_bytes == 0 and engine.cache.kv_bytes == expected
    assert torch.cuda.memory_allocated() - before < expected * 1.2
