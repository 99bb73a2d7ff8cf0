"""Protected prompts: held once per group, never evicted, and otherwise a cache whose budget also holds the prompt."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from random_models import random_model
from sparse_rl import KV, NEVER, Engine, Sampling, UserError, replay
from sparse_rl.kernels.counter_rng import uniform
from sparse_rl.kv.cache import SlotCache
from sparse_rl.kv.policies import POLICIES, Policy, from_settings
from sparse_rl.kv.prompt_store import PagePool, PromptStore
from sparse_rl.kv.schedule import DENSE
from sparse_rl.models.support import next_logits
from sparse_rl.rollout.decode import DecodeView
from sparse_rl.rollout.prefill import PromptInSlots, prefill
from sparse_rl.rollout.request import Request
from sparse_rl.rollout.sampling import sample
from sparse_rl.rollout.scheduler import Scheduler
from sparse_rl.sizes import PAGE_TOKENS, pages_of, pool_pages
from sparse_rl.train.metrics import kv_metrics

PROTECTED = KV(policy="rkv", budget=24, interval=8, window=4, sinks=2, protect_prompt=True)
EVICTING = [name for name in POLICIES if name != "full"]
LENGTHS = (1, 5, 57, 64, 150)
"""Prompts shorter than the sinks, within a page, of a whole page and of several."""


def prompt_of(tokens, seed=0):
    return torch.randint(3, 61, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def alone(engine, prompt, seed, max_tokens):
    """A rollout whose own slot holds the prompt and prompt + budget tokens: no store, one segment of attention. Returns tokens,
    log-probs and the positions that each layer and head holds at the end."""
    model, kv, policy, sampling = engine.model, engine.kv, from_settings(engine.kv), Sampling(stop=())
    total, ring = len(prompt) + kv.budget, kv.recent if policy.uses_queries else 0
    cache = SlotCache(engine.limits.shape, 1, total + kv.interval, ring)
    cache.statistics = engine.cache.statistics
    logits, *_ = prefill(model, cache, policy, DENSE, [PromptInSlots(prompt, [0], [seed])])
    seeds, tokens, logprobs = torch.tensor([seed]), [], []
    for position in range(len(prompt), len(prompt) + max_tokens):
        token, logprob = sample(logits, uniform(seeds, torch.tensor([position])), sampling)
        tokens.append(int(token))
        logprobs.append(float(logprob))
        held, entered = int(cache.lengths_S[0]), position - len(prompt)
        if entered and entered % kv.interval == 0 and held > total:
            cache.compact([0], held, total, policy, ends=[position], seeds=[seed], protected=len(prompt))
            held = total
        if position == len(prompt) + max_tokens - 1:
            return tokens, torch.tensor(logprobs), cache.positions_LSHC[:, 0, :, :held]
        fed = torch.tensor([position])
        view = DecodeView(cache, fed, cache.lengths_S, longest=held + 1)
        logits = next_logits(model, token[:, None], fed[:, None], view, keep=1)[:, -1]
        view.advance()


@pytest.mark.parametrize("policy", EVICTING)
def test_the_store_equals_a_protected_cache_with_room_for_the_prompt(model, policy):
    """The same tokens, log-probs and kept keys as sequences that run one by one in a slot of prompt + budget tokens."""
    engine = Engine(model, PROTECTED.model_copy(update={"policy": policy}), slots=5)
    prompts = [prompt_of(tokens) for tokens in LENGTHS]
    rollouts = engine.generate(prompts, samples=2, sampling=Sampling(max_tokens=43, stop=()))
    for number, rollout in enumerate(rollouts):
        if number in (0, 7, 8):  # of a prompt of one token, of a whole page and of several: one by one takes long
            tokens, logprobs, kept = alone(engine, rollout.prompt, rollout.seed, 43)
            assert rollout.response == tokens
            torch.testing.assert_close(rollout.logprobs, logprobs, atol=1e-5, rtol=0)
            fed = len(rollout.prompt) + 42
            for layer, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
                never = torch.nonzero(rollout.evicted_at[layer, head, :fed] == NEVER).flatten()
                assert torch.equal(never, kept[layer, head].long())
        assert bool((rollout.evicted_at[:, :, : len(rollout.prompt)] == NEVER).all())
        assert bool((rollout.evicted_at != NEVER).any())
        assert rollout.kv_peak == len(rollout.prompt) + PROTECTED.capacity
    gaps = [
        float((ours.detach() - rollout.logprobs).abs().max())
        for ours, rollout in zip(replay(model, rollouts, "sparse"), rollouts, strict=True)
    ]
    assert max(gaps) < 1e-4
    assert engine.stats.compactions == len(rollouts) * 2  # after 32 and 40 response tokens, whatever the prompt


def test_slots_and_neighbours_change_nothing(model):
    """Groups that wait for slots, that end one by one and whose slots are refilled: with few slots and with one for each."""
    prompts = [prompt_of(tokens, seed) for seed, tokens in enumerate((3, 130, 64, 9, 200, 65))]
    sampling = Sampling(max_tokens=50, stop=(), seed=3)
    limits = [1 + 7 * number % 50 for number in range(12)]
    whole = Engine(model, PROTECTED, slots=12).generate(prompts, 2, sampling, limits=limits)
    for slots in (1, 2, 7, 64):
        part = Engine(model, PROTECTED, slots=slots).generate(prompts, 2, sampling, limits=limits)
        for left, right in zip(whole, part, strict=True):
            assert left.response == right.response and torch.equal(left.evicted_at, right.evicted_at)
            torch.testing.assert_close(left.logprobs, right.logprobs, atol=1e-5, rtol=0)


def test_prompts_taken_from_a_queue_are_stored_when_they_are_taken(model):
    """Engines that share prompts take them in any order, and may wait for pages between two of them."""
    prompts = [prompt_of(tokens, seed) for seed, tokens in enumerate((100, 3, 129, 64, 70))]
    sampling = Sampling(max_tokens=40, stop=())
    expected = Engine(model, PROTECTED, slots=10).generate(prompts, 2, sampling)
    engine, order = Engine(model, PROTECTED, slots=3), iter([4, 1, 2, 0, 3])
    engine.reserve_prompts(129, prompts=1, samples=2)
    found = engine.generate(prompts, 2, sampling, take=lambda: next(order, None), record={0, 5})
    assert [rollout.response for rollout in found] == [rollout.response for rollout in expected]
    assert [rollout.trace is not None for rollout in found] == [index in (0, 5) for index in range(10)]
    assert torch.equal(found[5].evicted_at, expected[5].evicted_at)


class LargeValues(Policy):
    """A policy that reads values and says nothing of them: the base class then passes those of prompt and slot."""

    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        assert bool((positions.diff(dim=-1) > 0).all()) and bool((positions[..., 0] == 0).all())
        return values.float().norm(dim=-1) + 1e-3 * keys.float().norm(dim=-1)


def test_a_policy_sees_the_values_and_positions_of_the_prompt(model):
    engine = Engine(model, PROTECTED.model_copy(update={"policy": "test_prompt_store:LargeValues"}), slots=3)
    for rollout in engine.generate([prompt_of(70), prompt_of(9)], 2, Sampling(max_tokens=60, stop=())):
        tokens, _, kept = alone(engine, rollout.prompt, rollout.seed, 60)
        assert rollout.response == tokens
        never = torch.nonzero(rollout.evicted_at[1, 0, : len(rollout.prompt) + 59] == NEVER).flatten()
        assert torch.equal(never, kept[1, 0].long())


@pytest.mark.parametrize(("compares", "rows"), [(False, 2 * 3), (True, 2 * 1)])
def test_slots_are_compacted_together_if_the_policy_reads_no_prompt(model, compares, rows):
    """Prompts of three lengths: a policy that does not compare keys scores the rows of all slots and layers at once."""
    seen = []

    class Counted(POLICIES["knorm"]):
        compares_keys = compares

        def scores(self, queries, keys, values, *, seeds=None, positions=None):
            seen.append(len(keys))
            return super().scores(queries, keys, values)

    prompts, sampling = [list(range(3, 3 + tokens)) for tokens in (5, 20, 40)], Sampling(max_tokens=40, stop=())
    engine = Engine(model, KV(policy="knorm", budget=16, interval=8, window=4, sinks=4), slots=3)
    expected = engine.generate(prompts, sampling=sampling)
    engine.policy = Counted(window=4, sinks=4)
    found = engine.generate(prompts, sampling=sampling)
    assert set(seen) == {rows}
    for left, right in zip(found, expected, strict=True):
        assert left.response == right.response and torch.equal(left.evicted_at, right.evicted_at)


def test_groups_wait_for_pages(model):
    """A pool for one long prompt at a time: everything is sampled all the same, with fewer sequences at once."""
    prompts = [prompt_of(tokens, seed) for seed, tokens in enumerate((190, 180, 20, 192, 30))]
    sampling = Sampling(max_tokens=40, stop=())
    engine = Engine(model, PROTECTED, slots=10)
    engine.reserve_prompts(192, prompts=1, samples=2)
    assert engine.cache.prompts.pages == 3
    scarce = engine.generate(prompts, 2, sampling)
    assert engine.cache.prompts.pages == 3 and engine.stats.peak_pages == 3
    assert engine.stats.idle_share > 0.5
    for left, right in zip(scarce, Engine(model, PROTECTED, slots=10).generate(prompts, 2, sampling), strict=True):
        assert left.response == right.response
    with pytest.raises(UserError, match=r"Prompt 1 has 193 tokens, more than the reserved prompt store can hold \(192\)"):
        engine.generate([prompt_of(4), prompt_of(193)], 2, sampling)
    assert engine.most_prompt_tokens(sampling) == 192


def test_a_group_is_prefilled_once_and_keeps_its_pages_until_its_last_sample(model):
    engine = Engine(model, PROTECTED, slots=2)
    prompts = [prompt_of(100), prompt_of(70, 1)]
    engine.generate(prompts, samples=5, sampling=Sampling(max_tokens=30, stop=()))
    stats = engine.stats
    assert stats.prompt_tokens == 170 and stats.pages_taken == 4
    assert stats.page_waste == pytest.approx(1 - 170 / (4 * PAGE_TOKENS))
    assert stats.peak_pages <= stats.pool_pages == 4
    assert 0 < stats.straggler_share < 0.5


def test_metrics_of_pages_over_two_calls(model):
    """Two pages for 24 steps, of which one sample runs 16 alone, and then one full page for 8 steps."""
    engine = Engine(model, PROTECTED, slots=2)
    engine.reserve_prompts(192, prompts=2, samples=2)
    stats, rollouts = [], []
    for tokens, limits in ((100, [9, 25]), (64, [9, 9])):
        rollouts += engine.generate([prompt_of(tokens)], 2, Sampling(max_tokens=25, stop=()), limits=limits)
        stats.append(engine.stats)
    assert engine.chunk == 8 and [each.steps for each in stats] == [24, 8]
    found = kv_metrics(stats, rollouts, engine)
    assert found["kv/pool_used"] == 2 / 6
    assert found["kv/page_waste"] == pytest.approx(1 - 164 / 192)
    assert found["kv/straggler_pages"] == pytest.approx(2 * 16 / (2 * 24 + 1 * 8))


def test_the_scheduler_admits_a_group_only_with_its_pages():
    def group(number, tokens, samples):
        return [Request(number * 10 + each, number, [5] * tokens, 0, 9, False) for each in range(samples)]

    pages = PagePool(5)
    scheduler = Scheduler([*group(0, 65, 2), *group(1, 256, 2), *group(2, 1, 1)], 3, pages=pages)
    assert [len(each) for each in scheduler.admit(1000)] == [2]  # the second group needs four pages, and three are free
    assert pages.used == 2 and pages.samples_left == {0: 2}
    pages.end_sample(0)
    assert pages.straggler_pages == 2 and scheduler.admit(1000) == []
    pages.end_sample(0)
    assert pages.used == 0 and [len(each) for each in scheduler.admit(1000)] == [2, 1]
    assert pages.used == pages.peak == 5 and pages.taken == 7
    assert len({page for held in pages.of_group.values() for page in held}) == 5


def test_bytes_are_pages_and_slots(model):
    """32 prompts of 1,100 tokens, 8 samples of each: the prompts once, and 640 response tokens for each sample."""
    kv = KV(policy="streaming", budget=512, interval=128, protect_prompt=True)
    engine = Engine(model, kv, slots=256)
    engine.generate([[5] * 1100] * 32, samples=8, sampling=Sampling(max_tokens=1, stop=()))
    layers, heads, dim = 2, 2, 16
    token = 2 * layers * heads * dim * 4
    cache, store = engine.cache, engine.cache.prompts
    allocated = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (cache.keys_LSHCD, cache.values_LSHCD, store.stored.keys, store.stored.values)
    }
    assert sum(allocated.values()) == (32 * 18 * PAGE_TOKENS + 256 * 640) * token == engine.stats.peak_kv_bytes
    dense = Engine(model, kv.model_copy(update={"protect_prompt": False, "budget": 1100 + 512}), slots=256)
    assert engine.stats.peak_kv_bytes < 0.46 * dense.cache.kv_bytes


def test_a_similar_call_reuses_the_store(model):
    engine = Engine(model, PROTECTED, slots=8)
    sampling = Sampling(max_tokens=2, stop=())
    engine.generate([prompt_of(300)] * 4, samples=4, sampling=sampling)
    store = engine.cache.prompts
    engine.generate([prompt_of(40), prompt_of(310), prompt_of(1)], samples=2, sampling=sampling)
    assert engine.cache.prompts is store
    engine.generate([prompt_of(2000)], sampling=sampling)  # longer than the page table
    assert engine.cache.prompts is not store and engine.cache.prompts.pages >= max(store.pages, 32)


def test_the_pool_has_room_for_the_groups_that_run_at_once():
    assert pool_pages([65] * 4, slots=64, samples=8) == 8  # all prompts run at once
    assert pool_pages([64, 640, 1, 640], slots=1, samples=8) == 10  # one slot, one group: the longest
    assert pool_pages([64] * 1000, slots=64, samples=8) == 16  # eight groups fill the slots, as many end
    for groups in range(1, 400, 7):
        needed = groups * pages_of(100)
        assert needed <= pool_pages([100] * groups, slots=groups, samples=1) <= 1.13 * needed
    sizes = [pool_pages([64] * groups, slots=groups, samples=1) for groups in range(64, 128)]
    assert all(left <= right for left, right in pairwise(sizes)) and len(set(sizes)) == 9


@pytest.mark.parametrize(("kv", "tokens"), [(PROTECTED, 20), (KV(policy="full"), 100)], ids=["protected", "dense"])
def test_a_failed_call_leaves_no_page_behind(kv, tokens):
    broken = random_model("qwen2", seed=1)
    engine, sampling = Engine(broken, kv, slots=4), Sampling(max_tokens=tokens, stop=())
    expected = engine.generate([prompt_of(70)], 2, sampling)
    with torch.no_grad():
        weights = broken.model.layers[0].self_attn.k_proj.weight
        before = weights.clone()
        weights.fill_(torch.nan)
        with pytest.raises(UserError, match="not finite"):
            engine.generate([prompt_of(70)] * 3, 2, sampling)
        weights.copy_(before)
    again = engine.generate([prompt_of(70)], 2, sampling)
    assert [rollout.response for rollout in again] == [rollout.response for rollout in expected]


@pytest.mark.parametrize(
    ("slots", "lengths", "samples", "once"),
    [
        (256, [1100] * 32, 8, True),
        (64, [4200] * 8, 8, True),
        (64, [1100] * 8, 8, False),
        (256, [1100] * 256, 1, False),
        (256, [1100] * 8, 4, False),
        (256, [4096] + [64] * 31, 8, False),  # most prompts are short
        (256, [1100] * 8, 8, False),  # 64 slots run
    ],
)
def test_long_prompts_with_many_samples_are_read_once(slots, lengths, samples, once):
    """Where that was measured to be faster. It depends on the present call alone."""
    shape = Engine(random_model("qwen2").bfloat16(), PROTECTED, slots=1).limits.shape.full
    pages = pool_pages(lengths, slots, samples)
    store = PromptStore(shape, slots, pages, max(lengths))
    store.choose_reads([2000] * 32, 8)
    assert store.reads_once is (slots == 256)
    store.choose_reads(lengths, samples)
    assert store.reads_once is once
    float32 = PromptStore(replace(shape, dtype=torch.float32), slots, pages, max(lengths))
    for other in (float32, PromptStore(shape, slots, pages, max(lengths), responses=True)):
        other.choose_reads(lengths, samples)
        assert not other.reads_once


def test_a_pool_that_exceeds_the_memory_is_refused_with_the_remedy():
    engine = Engine(random_model("qwen2"), PROTECTED, slots=4)
    with pytest.raises(
        UserError, match=r"The pool of [\d,]+ pages of 64 tokens takes .* GiB, but this machine has .*: use shorter"
    ):
        engine.reserve_prompts(2**34, prompts=4, samples=1)
