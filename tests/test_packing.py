"""Rollouts of a group share their prompt in a pass: fewer tokens, the same numbers."""

import pytest
import torch

from random_models import random_model
from sparse_rl import KV, Engine, Sampling, replay
from sparse_rl.kernels.prefix_attention import PrefixAttention, Segment
from sparse_rl.learner.old_logprobs import old_logprobs
from sparse_rl.learner.packing import pack_tokens, packs
from sparse_rl.learner.replay import logprobs_of
from sparse_rl.rollout.rollout import Rollout


def rollout(prompt, response):
    return Rollout(prompt, response, torch.zeros(len(response)), "length", 0, 1.0, 0, None)


ONE, TWO = [5, 6, 7, 8], [9, 10, 11]
PACK = [
    rollout(ONE, [1, 2, 3, 4]),
    rollout(ONE, [1]),  # nothing of it is fed
    rollout(ONE, [30, 31, 32, 33, 34, 35]),
    rollout(TWO, [2, 3]),
    rollout(ONE, [4, 4, 4]),
    rollout(ONE, [4, 4, 5]),
]


def test_a_prompt_is_in_the_row_once_for_adjacent_rollouts():
    row = pack_tokens(PACK, share_prompts=True)
    assert row.tokens == [*ONE, 1, 2, 3, 30, 31, 32, 33, 34, *TWO, 2, *ONE, 4, 4, 4, 4]
    assert row.positions == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 4, 5]
    assert row.predicting == [3, 4, 5, 6, 3, 3, 7, 8, 9, 10, 11, 14, 15, 19, 20, 21, 19, 22, 23]
    assert [each.keys for each in row.segments] == [4, 7, 9, 4, 4, 6, 6]


def test_a_prompt_that_hardly_counts_is_not_shared():
    long = [rollout(ONE, [1] * 65), rollout(ONE, [2] * 65)]
    assert not pack_tokens(long, share_prompts=True).shared
    assert pack_tokens([rollout(ONE, [1] * 65), rollout(ONE, [2] * 64)], share_prompts=True).shared


def test_a_pass_counts_a_shared_prompt_once():
    assert list(packs(PACK, 15, share_prompts=True)) == [[0, 1, 2], [3, 4, 5]]
    assert list(packs(PACK, 15, share_prompts=False)) == [[0, 1], [2, 3], [4, 5]]
    assert list(packs(PACK, 1, share_prompts=True)) == [[index] for index in range(6)]


def test_a_pass_has_at_most_two_keys_per_token():
    short = [rollout(ONE * 10, [1])] * 100
    for pack in packs(short, 100, share_prompts=True):
        assert sum(each.keys for each in pack_tokens([short[index] for index in pack], share_prompts=True).segments) <= 200
    assert max(map(len, packs(short, 100, share_prompts=True))) == 4


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_shared_prompt_changes_neither_log_probs_nor_gradients(architecture):
    model = random_model(architecture)
    grads, found = [], []
    for passes in ([PACK], [[each] for each in PACK]):
        model.zero_grad()
        parts = [logprobs_of(model, pack, "dense") for pack in passes]
        logprobs_n, entropy_n = (torch.cat(each) for each in zip(*parts, strict=True))
        weights_n = torch.linspace(-1, 1, len(logprobs_n))
        (weights_n * logprobs_n + 0.3 * weights_n.flip(0) * entropy_n).sum().backward()
        found.append((logprobs_n.detach(), entropy_n.detach()))
        grads.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_groups_share_prompts_in_a_dense_pass_and_not_in_a_sparse_one():
    """Both reproduce the rollouts passed one by one."""
    model = random_model("qwen2")
    kv = KV(policy="rkv", budget=24, interval=8, window=4, sinks=2, protect_prompt=False)
    rollouts = Engine(model, kv, slots=4).generate([ONE * 4, TWO * 7], 4, Sampling(max_tokens=40, stop=()))
    fed = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: fed.append(args[0].numel()))
    # a check of the LM head feeds single tokens, too
    responses, prompts = sum(len(each.response) - 1 for each in rollouts), len(ONE * 4) + len(TWO * 7)
    for view in ("dense", "sparse"):
        fed.clear()
        together = replay(model, rollouts, view, tokens_per_pass=10_000)
        assert [count for count in fed if count > 1] == [responses + prompts * (1 if view == "dense" else 4)]
        alone = [replay(model, [each], view)[0] for each in rollouts]
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    fed.clear()
    logprobs, _ = old_logprobs(model, rollouts, "dense", 10_000)
    assert [count for count in fed if count > 1] == [responses + prompts]
    for ours, theirs in zip(logprobs, replay(model, rollouts, "dense", tokens_per_pass=64), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_prefix_attention_is_attention_of_whole_sequences_forward_and_backward():
    segments = [Segment(0, 5), Segment(5, 8, 0, 5), Segment(8, 14, 0, 5), Segment(14, 16)]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 16, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2))
    out = PrefixAttention(segments, torch.device("cpu")).attend(q, k, v, 0.3)
    sees = torch.zeros(16, 16, dtype=torch.bool)
    for each in segments:
        sees[each.start : each.stop, each.prefix_start : each.prefix_stop] = True
        sees[each.start : each.stop, each.start : each.stop] = torch.ones(each.queries, each.queries).tril().bool()
    logits = (q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) * 0.3).masked_fill(~sees, -torch.inf)
    expected = logits.softmax(dim=-1) @ v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(out, expected)
    grad = torch.randn(out.shape, generator=generator)
    for ours, theirs in zip(*(torch.autograd.grad(each, (q, k, v), grad) for each in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)
