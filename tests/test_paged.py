"""A dense cache in pages: prompts once per group, pages as responses grow, and the same rollouts however few pages there are."""

import pytest
import torch

from sparse_rl import KV, Engine, Sampling, UserError, replay
from sparse_rl.kv.prompt_store import PagePool
from sparse_rl.rollout.request import Request
from sparse_rl.rollout.scheduler import Scheduler, Sequence
from sparse_rl.sizes import DENSE_SLOT_TOKENS, PAGE_TOKENS, dense_pages, least_dense_pages

FULL = KV(policy="full")
PROMPTS = (3, 130, 64, 200)
"""Prompts within a page, of a whole page, and of several."""


def prompt_of(tokens, seed=0):
    return torch.randint(3, 61, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_with(model, slots, pages):
    """A dense engine whose pool has so many pages."""
    engine = Engine(model, FULL, slots=slots)
    tokens = slots * DENSE_SLOT_TOKENS + pages * PAGE_TOKENS
    engine.reserve_dense(200, 270, 4, 2, kv_bytes=tokens * engine.cache.token_bytes)
    assert engine.cache.prompts.pages == pages and engine.cache.kv_bytes == tokens * engine.cache.token_bytes
    return engine


@pytest.fixture(scope="module")
def prompts():
    return [prompt_of(tokens, seed) for seed, tokens in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def expected(model, prompts):
    """Rollouts with pages for all."""
    engine = Engine(model, FULL, slots=8)
    rollouts = engine.generate(prompts, 2, Sampling(max_tokens=270, stop=(), seed=3))
    assert engine.stats.preemptions == engine.stats.recomputed_tokens == 0
    return rollouts


def test_sampler_equals_replay(model, expected):
    for rollout, ours in zip(expected, replay(model, expected, "dense"), strict=True):
        torch.testing.assert_close(rollout.logprobs, ours.detach(), atol=1e-4, rtol=0)
        assert rollout.kv_peak == len(rollout.prompt) + 269


@pytest.mark.parametrize(("slots", "pages"), [(8, 16), (8, 11), (3, 10)])
def test_preemption_changes_no_rollout(model, prompts, expected, slots, pages):
    """Few pages pause sequences, whose keys are computed again. Tokens and log-probs are those of a run with all pages, and
    every token is reported once."""
    engine, seen = engine_with(model, slots, pages), {index: [] for index in range(8)}

    def watch(progress):
        for index, pieces in progress.new.items():
            for piece in pieces:
                seen[index] += piece.tolist()

    found = engine.generate(prompts, 2, Sampling(max_tokens=270, stop=(), seed=3), progress=watch)
    assert [seen[index] for index in range(8)] == [each.response for each in expected]
    assert engine.stats.peak_pages <= pages == engine.stats.pool_pages
    assert engine.stats.preemptions > 0 and engine.stats.recomputed_tokens > 0
    assert engine.stats.tokens == 8 * 270
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.response == theirs.response and ours.finish == theirs.finish
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=1e-5, rtol=0)


def test_paused_sequences_keep_their_repetition_guard_and_limits(model):
    """Rollouts that end by repetition or by their own limit end at the same token after a pause."""
    prompts, sampling = (
        [prompt_of(40), prompt_of(100, 1)],
        Sampling(max_tokens=250, temperature=0.0, stop=(), repetition=(8, 220)),
    )
    limits = [20, 250, 231, 250]
    expected = Engine(model, FULL, slots=4).generate(prompts, 2, sampling, limits=limits)
    engine = Engine(model, FULL, slots=4)
    engine.reserve_dense(100, 250, 2, 2, kv_bytes=(4 * DENSE_SLOT_TOKENS + 8 * PAGE_TOKENS) * engine.cache.token_bytes)
    found = engine.generate(prompts, 2, sampling, limits=limits)
    assert engine.stats.preemptions > 0
    assert [(each.response, each.finish) for each in found] == [(each.response, each.finish) for each in expected]


@pytest.mark.parametrize("dtype", ["8bit", "4bit"])
def test_preemption_changes_no_quantised_rollout(model, prompts, dtype):
    """Recomputed keys and values get their codes again. A flipped code moves log-probs a little."""
    prompts = [prompts[1], prompts[3]]
    sampling, kv = Sampling(max_tokens=270, stop=(), seed=3), KV(policy="full", dtype=dtype)
    whole, engine = Engine(model, kv, slots=4), Engine(model, kv, slots=4)
    expected = whole.generate(prompts, 2, sampling)
    engine.load_statistics(whole.statistics)
    engine.reserve_dense(200, 270, 2, 2, kv_bytes=(4 * DENSE_SLOT_TOKENS + 12 * PAGE_TOKENS) * engine.cache.token_bytes)
    found = engine.generate(prompts, 2, sampling)
    assert engine.stats.preemptions > 0 and engine.stats.recomputed_tokens > 0
    assert [each.response for each in found] == [each.response for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=0.01, rtol=0)


def test_a_rollout_that_is_aborted_while_it_waits_is_not_recomputed(model, prompts, expected):
    engine = engine_with(model, 8, 11)

    def abort_all(progress):
        for index in range(8 if engine.stats.preemptions else 0):
            progress.abort(index)

    found = engine.generate(prompts, 2, Sampling(max_tokens=270, stop=(), seed=3), progress=abort_all)
    assert engine.stats.preemptions > 0 and engine.stats.recomputed_tokens == 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.finish == "abort" and ours.response == theirs.response[: len(ours.response)]


def test_prompts_from_a_queue_wait_for_pages(model, prompts, expected):
    order = iter([3, 1, 2, 0])
    found = engine_with(model, 4, 10).generate(
        prompts, 2, Sampling(max_tokens=270, stop=(), seed=3), take=lambda: next(order, None), record=False
    )
    assert [each.response for each in found] == [each.response for each in expected]


def test_long_prompts_and_long_responses_run_in_pieces(model):
    """A prompt, and a paused sequence, may exceed one forward pass."""
    prompts, sampling = [prompt_of(300), prompt_of(290, 1)], Sampling(max_tokens=250, stop=())
    expected = Engine(model, FULL, slots=4).generate(prompts, 2, sampling)
    engine = Engine(model, FULL, slots=4, prefill_tokens=50)
    engine.reserve_dense(300, 250, 2, 2, kv_bytes=(4 * DENSE_SLOT_TOKENS + 18 * PAGE_TOKENS) * engine.cache.token_bytes)
    found = engine.generate(prompts, 2, sampling)
    assert engine.stats.preemptions > 0
    assert [each.response for each in found] == [each.response for each in expected]


def test_a_prompt_is_stored_once_and_pages_follow_the_response(model):
    """Eight samples of a prompt of 1,100 tokens take its pages once, and pages for the tokens that they have sampled."""
    engine = Engine(model, FULL, slots=8)
    engine.generate([prompt_of(1100)], 8, Sampling(max_tokens=200, stop=()), limits=[1] * 7 + [200])
    stats, layers, heads, dim = engine.stats, 2, 2, 16
    assert stats.prompt_tokens == 1100
    assert stats.peak_pages == 17 + 2  # full pages of the prompt; of 12 + 199 tokens after them, the slot holds the newest
    assert stats.dense_peak_tokens == 1100 + 199
    store, token_bytes = engine.cache.prompts, 2 * layers * heads * dim * 4
    assert stats.peak_kv_bytes == (8 * DENSE_SLOT_TOKENS + store.pages * PAGE_TOKENS) * token_bytes
    assert store.pages < 8 * (1100 + 200) / PAGE_TOKENS / 3


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "slots", "samples"),
    [(18, 120, 6, 4), (63, 51, 4, 1), (63, 52, 4, 2), (64, 80, 5, 2), (127, 52, 4, 4), (20, 20, 6, 1)],
)
def test_reserved_pages_suffice_for_prompts_up_to_the_reserved_length(model, prompt_tokens, max_tokens, slots, samples):
    """No sequence waits for pages, and no slot idles for want of pages, with prompts of the reserved length or shorter."""
    count = 8 // samples
    pages = dense_pages([prompt_tokens] * count, max_tokens, slots, samples)
    engine = Engine(model, FULL, slots=slots)
    tokens = slots * DENSE_SLOT_TOKENS + pages * PAGE_TOKENS
    engine.reserve_dense(prompt_tokens, max_tokens, count, samples, kv_bytes=tokens * engine.cache.token_bytes)
    for shorter in (0, 1):
        prompts = [prompt_of(prompt_tokens - shorter * index) for index in range(count)]
        engine.generate(prompts, samples, Sampling(max_tokens=max_tokens, stop=()))
        assert engine.stats.preemptions == 0 and engine.stats.steps == 2 * (max_tokens - 1)


def test_short_sequences_take_few_pages_beside_their_slots():
    """A sequence of 210 tokens fills its slot of 128 and two pages; its prompt page returns when all samples have started."""
    assert dense_pages([18] * 4, 192, 32, 8) == 32 * 2 + 1
    assert dense_pages([18] * 160, 192, 160, 1) == 160 * 2 + 1
    assert dense_pages([60] * 4, 20, 32, 8) == 4  # the slots hold whole sequences; prompts enter through a page each
    assert dense_pages([640] * 4, 192, 32, 8) == 4 * 10 + 32 * 3 + 1  # shorter prompts leave up to 63 tokens to each slot


def test_dense_tokens_count_a_prompt_once_per_group(model):
    """A sparse rollout is compared with a dense cache that shares prompts, too."""
    engine = Engine(model, KV(policy="rkv", budget=24, interval=8, window=4, sinks=2, protect_prompt=False), slots=8)
    engine.generate([prompt_of(40), prompt_of(50, 1)], 4, Sampling(max_tokens=33, stop=()))
    assert engine.stats.dense_peak_tokens == 40 + 50 + 8 * 32


def test_too_little_memory_is_refused(model):
    engine = Engine(model, FULL, slots=2)
    with pytest.raises(UserError, match=r"kv_bytes = 1,000 is too small: 2 slots and one sequence of 350 tokens take"):
        engine.reserve_dense(200, 150, 1, 1, kv_bytes=1000)
    engine = engine_with(model, 2, least_dense_pages(200, 270))
    sampling = Sampling(max_tokens=270, stop=())
    assert engine.most_prompt_tokens(sampling) == 242
    engine.check_prompt(prompt_of(242), sampling)
    with pytest.raises(UserError, match="Prompt 0 has 243 tokens.*holds prompts of at most 242"):
        engine.generate([prompt_of(243)], 1, sampling)


def test_the_youngest_wait_and_the_oldest_continues():
    requests = [Request(index, index // 2, [5] * 64, 0, 640, False) for index in range(6)]
    pages = PagePool(9, responses=True)
    scheduler = Scheduler(requests, 6, pages=pages)
    entered = [request for group in scheduler.admit(1000) for request in group]
    assert [request.index for request in entered] == [0, 1, 2]  # prompts of one page, and two pages of headroom for each
    scheduler.active = [Sequence(request, 64, None, 64, number=number) for number, request in enumerate(entered)]
    pages.prefilled |= {0, 1}
    for sequence in scheduler.active:
        sequence.pages = pages.take_pages(2 * PAGE_TOKENS)
        sequence.entered = 130
    assert len(pages.free) == 1
    paused, moves = scheduler.make_room()
    assert [sequence.request.index for sequence in paused] == [2] and not moves
    assert scheduler.waiting[0].index == 2 and list(scheduler.paused) == [2]
    assert len(pages.free) == 3 and 1 in pages.of_group
    scheduler.active[0].held = scheduler.active[1].held = PAGE_TOKENS
    pages.take_pages(2 * PAGE_TOKENS)
    paused, _ = scheduler.make_room()
    assert not paused and 1 not in pages.of_group  # the prompt of a group that does not run gives way first
    assert not scheduler.should_prefill()
