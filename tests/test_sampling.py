"""Sampling is right: draws follow the sparse policy's own probabilities, and truncation cuts where it should."""

import itertools
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

from random_models import random_model
from sparse_rl import KV, Engine, Sampling, replay
from sparse_rl.kernels.counter_rng import derive, mix, uniform
from sparse_rl.rollout.sampling import sample, truncate

DRAWS = 20_000


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_draws_follow_the_sparse_policy(temperature):
    """Two tokens after a compressed prompt, all pairs counted; the dense policy's probabilities must NOT fit."""
    vocab, draws = 7, 10_000
    model = random_model("qwen2", vocab=vocab, seed=3)
    prompt = [2, 3, 4, 5, 6, 0, 1] * 5
    engine = Engine(model, KV(policy="streaming", budget=8, interval=4, window=4, sinks=1, protect_prompt=False), slots=500)
    sampling = Sampling(max_tokens=2, stop=(), temperature=temperature, seed=11)
    rollouts = engine.generate([prompt], samples=draws, sampling=sampling, record={0})  # evictions are alike in all
    counts = torch.zeros(vocab, vocab)
    for rollout in rollouts:
        counts[rollout.response[0], rollout.response[1]] += 1
    pairs = [replace(rollouts[0], response=list(pair)) for pair in itertools.product(range(vocab), repeat=2)]
    fits = {}
    for view in ("sparse", "dense"):
        logprobs = torch.stack([each.detach().double().sum() for each in replay(model, pairs, view)])
        expected = logprobs.exp() / logprobs.exp().sum() * draws
        common = expected > 5
        observed, expected = counts.flatten().double()[common], expected[common]
        fits[view] = chisquare(observed, expected * observed.sum() / expected.sum()).pvalue
    assert fits["sparse"] > 1e-3
    assert fits["dense"] < 1e-9


def test_uniform_numbers_are_uniform_and_independent_of_neighbours():
    seeds = torch.tensor([derive(0, group, number) for group in range(100) for number in range(10)])
    positions = torch.arange(50)
    numbers = uniform(seeds[:, None], positions)
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    assert chisquare(torch.histc(numbers, bins=100, min=0, max=1).numpy()).pvalue > 1e-3
    for left, right in ((numbers[:, :-1], numbers[:, 1:]), (numbers[:-1], numbers[1:])):
        correlation = torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]
        assert abs(float(correlation)) < 0.02
    assert float(uniform(seeds[3:4], 7)) == float(numbers[3, 7])


def test_derived_seeds_are_different_and_the_same_for_scalars_and_tensors():
    seeds = {derive(seed, group, number) for seed in range(10) for group in range(10) for number in range(10)}
    assert len(seeds) == 1000
    assert int(mix(torch.tensor(derive(3)), 4)) == derive(3, 4)


def test_top_k_and_top_p_cut_where_they_should():
    weights = torch.tensor([[0.1, 0.4, 0.05, 0.25, 0.2], [0.2, 0.2, 0.2, 0.2, 0.2]])
    kept = lambda **options: [row.nonzero().flatten().tolist() for row in truncate(weights.clone(), **options)]  # noqa: E731
    assert kept(top_k=2, top_p=1.0) == [[1, 3], [0, 1]]
    assert kept(top_k=0, top_p=0.39) == [[1], [0, 1]]  # the set that reaches the share, not one more
    assert kept(top_k=0, top_p=0.41) == [[1, 3], [0, 1, 2]]
    assert kept(top_k=0, top_p=0.84) == [[1, 3, 4], [0, 1, 2, 3, 4]]
    assert kept(top_k=2, top_p=0.6) == [[1], [0, 1]]  # the share is of what top_k left: 0.4 of 0.65 is over 0.6
    halves = torch.tensor([[0.125, 0.5, 0.25, 0.125]])  # shares that are reached to the bit need no more
    assert [truncate(halves.clone(), 0, share).count_nonzero().item() for share in (0.5, 0.75, 0.875)] == [1, 2, 3]
    torch.testing.assert_close(truncate(weights.clone(), 3, 1.0)[0], torch.tensor([0, 0.4, 0, 0.25, 0.2]))


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.7}])
def test_truncated_draws_keep_their_proportions_and_untruncated_log_probs(options):
    torch.manual_seed(0)
    logits = torch.randn(1, 12)
    sampling = Sampling(temperature=0.8, **options)
    uniforms = uniform(torch.arange(DRAWS), 0)
    tokens, logprobs = sample(logits.expand(DRAWS, -1), uniforms, sampling)
    probabilities = (logits[0] / 0.8).softmax(-1)
    torch.testing.assert_close(logprobs, probabilities.log()[tokens], atol=1e-5, rtol=0)
    allowed = truncate(probabilities[None].clone(), sampling.top_k, sampling.top_p)[0]
    counts = torch.bincount(tokens, minlength=12)
    assert bool((counts[allowed == 0] == 0).all())
    kept = allowed > 0
    assert kept.sum() > 1
    expected = allowed[kept].double() / allowed[kept].double().sum() * DRAWS
    assert chisquare(counts[kept].numpy(), expected.numpy()).pvalue > 1e-3


def test_greedy_takes_the_most_likely_and_scores_it_at_temperature_one():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    tokens, logprobs = sample(logits, torch.tensor([0.99, 0.99]).double(), Sampling(temperature=0))
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])


def test_a_token_without_probability_is_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(3, -1)
    tokens, _ = sample(logits, torch.tensor([0.0, 0.5, 1 - 2.0**-52], dtype=torch.float64), Sampling())
    assert tokens.tolist() == [1, 1, 1]
