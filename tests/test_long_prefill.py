"""A prompt longer than one forward pass runs in pieces, and gives the rollouts of one pass."""

import pytest
import torch

from random_models import ARCHITECTURES
from small_models import covering
from sparse_rl import KV, NEVER, Engine, Sampling, UserError, replay
from sparse_rl.config import Config
from sparse_rl.kernels import form
from sparse_rl.kernels.attention import causal_attention
from sparse_rl.kernels.prefix_attention import last_tokens_attention
from sparse_rl.kv.policies import POLICIES
from sparse_rl.plan.dimensions import dimensions
from sparse_rl.plan.parts import prefill_parts
from sparse_rl.sizes import PREFILL_TOKENS, token_bytes

SAMPLING = Sampling(max_tokens=20, stop=())
SMALL = {"budget": 24, "interval": 6, "window": 4, "sinks": 2}
CACHES = [("full", False), ("rkv", False), *covering([policy for policy in POLICIES if policy != "full"], (True, False))]


def prompt_of(tokens, seed=0):
    return torch.randint(3, 61, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt_of(tokens, seed) for seed, tokens in enumerate((100, 7, 33, 64, 32, 150))]
"""Prompts of several pieces of 32 tokens, of whole pieces, of one token more, and prompts that fit one pass."""


def generate(model, kv, *, prefill_tokens=8192, slots=5, samples=1, prompts=PROMPTS, sampling=SAMPLING):
    engine = Engine(model, kv, slots=slots, prefill_tokens=prefill_tokens)
    return engine.generate(prompts, samples, sampling), engine.stats


def assert_same(left, right):
    assert left.response == right.response and left.finish == right.finish and left.kv_peak == right.kv_peak
    assert torch.equal(left.evicted_at, right.evicted_at)
    torch.testing.assert_close(left.logprobs, right.logprobs, atol=1e-5, rtol=0)


def assert_replayed(model, rollouts):
    for ours, rollout in zip(replay(model, rollouts, "sparse"), rollouts, strict=True):
        torch.testing.assert_close(ours.detach(), rollout.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("policy", "protect"), CACHES)
def test_pieces_give_the_rollouts_of_one_pass(model, policy, protect):
    kv = KV(policy=policy, protect_prompt=protect, **SMALL)
    whole, _ = generate(model, kv)
    pieces, stats = generate(model, kv, prefill_tokens=32)
    for left, right in zip(pieces, whole, strict=True):
        assert_same(left, right)
    assert_replayed(model, pieces)
    assert stats.prompt_tokens == sum(map(len, PROMPTS))
    evicted = [bool((rollout.evicted_at[:, :, : len(rollout.prompt)] != NEVER).any()) for rollout in pieces]
    assert evicted[0] == (policy != "full" and not protect)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pieces_may_be_shorter_than_the_window_and_end_anywhere(models, architecture):
    kv, model, prompts = KV(policy="rkv", protect_prompt=False, **SMALL), models[architecture], PROMPTS[:2]
    whole, _ = generate(model, kv, prompts=prompts)
    for piece in (1, 3, 99):
        pieces, _ = generate(model, kv, prefill_tokens=piece, prompts=prompts)
        for left, right in zip(pieces, whole, strict=True):
            assert_same(left, right)
    assert_replayed(model, whole)


@pytest.mark.parametrize(("policy", "protect"), [("rkv", False), ("random", False), ("full", False), ("rkv", True)])
def test_samples_share_a_long_prompt(model, policy, protect):
    """With few slots, some samples wait for the prefilled prompt, beside short prompts."""
    kv = KV(policy=policy, protect_prompt=protect, **SMALL)
    whole, _ = generate(model, kv, slots=12, samples=2)
    for slots in (1, 3, 12):
        pieces, stats = generate(model, kv, prefill_tokens=32, slots=slots, samples=2)
        for left, right in zip(pieces, whole, strict=True):
            assert_same(left, right)
        assert len({tuple(rollout.response) for rollout in pieces[:2]}) == 2
        assert policy == "random" or stats.prompt_tokens == sum(map(len, PROMPTS))


def test_a_long_prompt_within_the_budget_is_kept_whole(model):
    kv = KV(policy="rkv", budget=128, interval=8, window=4, sinks=2, protect_prompt=False)
    whole, _ = generate(model, kv, samples=2)
    pieces, _ = generate(model, kv, prefill_tokens=32, samples=2)
    for left, right in zip(pieces, whole, strict=True):
        assert_same(left, right)
    assert_replayed(model, pieces)
    assert bool((pieces[0].evicted_at[:, :, :100] == NEVER).any())


@pytest.mark.parametrize(
    ("kv", "layers"),
    [
        (KV(policy="rkv", protect_prompt=False, **SMALL), 2),
        (KV(policy="rkv", budget=128, interval=8, window=4, sinks=2, protect_prompt=False), 0),
        (KV(policy="full"), 1),
        (KV(policy="rkv", protect_prompt=True, **SMALL), 1),
    ],
    ids=["compressed", "fits", "full", "protected"],
)
def test_the_scratch_of_a_long_prompt_is_reported(model, kv, layers):
    """A piece of one layer, and the keys and values of the whole prompt outside the cache: in all layers if it is compressed."""
    _, stats = generate(model, kv, prefill_tokens=32, prompts=PROMPTS[:1])
    assert stats.scratch_bytes == (32 + 100 * layers) * 2 * 2 * 16 * 4
    _, once = generate(model, kv, prompts=PROMPTS[:1])
    assert once.scratch_bytes == 100 * 2 * 2 * 16 * 4 and once.peak_kv_bytes == stats.peak_kv_bytes


def test_the_plan_counts_the_scratch_of_a_long_prompt():
    config, dims = Config(), dimensions("1.5B")
    for kv, layers in ((KV(policy="rkv", protect_prompt=False), 28), (KV(policy="rkv", protect_prompt=True), 1)):
        for tokens in (PREFILL_TOKENS, PREFILL_TOKENS + 1, 100_000):
            parts = prefill_parts(config, dims, kv, 8, 4, tokens)
            expected = tokens * layers * token_bytes(dims, 2) // 28 if tokens > PREFILL_TOKENS else 0
            assert parts["long prompt"] == expected
            assert parts["prefill scratch"] == prefill_parts(config, dims, kv, 8, 4, PREFILL_TOKENS)["prefill scratch"]
    parts = prefill_parts(config, dims, KV(policy="full"), 8, 4, 256)  # a paused sequence is computed again, whole
    assert parts["long prompt"] == (256 + config.rollout.max_tokens) * token_bytes(dims, 2) // 28


def test_a_prompt_beyond_the_context_is_refused(model):
    with pytest.raises(UserError, match=" exceeds the model's context of 8192: shorten the prompt"):
        generate(model, KV(policy="rkv", protect_prompt=False, **SMALL), prefill_tokens=32, prompts=[[5] * 8192])


@pytest.mark.parametrize("tile", [512, 7])
def test_the_last_tokens_attend_as_in_the_whole_sequence(monkeypatch, tile):
    monkeypatch.setattr(form, "MASK_TILE", tile)
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 50, 16), torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16)
    whole = causal_attention(q, k, v, scale=0.3)
    for count in (1, 20, 49, 50):
        torch.testing.assert_close(last_tokens_attention(q[:, :, -count:], k, v, 0.3), whole[:, :, -count:])
