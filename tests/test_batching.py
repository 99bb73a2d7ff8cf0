"""A rollout is the same alone, in any batch, in any order, with any number of slots."""

import pytest
import torch

from sparse_rl import KV, NEVER, Engine, Sampling
from sparse_rl.kv.policies import POLICIES
from sparse_rl.rollout import engine as engine_module
from sparse_rl.rollout import generation
from sparse_rl.rollout.prefill import prefill
from sparse_rl.rollout.runner import EagerRunner, NotCapturable, graph_slots

PROMPTS = [[5, 6, 7], list(range(3, 60)), [9] * 20, [11, 12], list(range(59, 10, -1))]
SEEDS = [101, 102, 103, 104, 105]
SAMPLING = Sampling(max_tokens=32, temperature=1.0)  # token 1 stops, so lengths differ
LIMITS = [32, 19, 32, 11, 26]


def rollouts_with(model, policy, *, slots, order, prefill_tokens=8192):
    kv = KV(policy=policy, budget=24, interval=6, window=4, sinks=2, protect_prompt=False)
    engine = Engine(model, kv, slots=slots, prefill_tokens=prefill_tokens)
    engine.calibrate(PROMPTS, 128)  # by default with the prompts of the call
    seeds, limits = [SEEDS[i] for i in order], [LIMITS[i] for i in order]
    results = engine.generate([PROMPTS[i] for i in order], sampling=SAMPLING, seeds=seeds, limits=limits)
    return dict(zip(order, results, strict=True))


def assert_same(left, right):
    assert left.prompt == right.prompt and left.response == right.response and left.finish == right.finish
    assert torch.equal(left.evicted_at, right.evicted_at) and left.kv_peak == right.kv_peak
    torch.testing.assert_close(left.logprobs, right.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_rollouts_do_not_depend_on_batch_order_or_slots(model, policy):
    reference = rollouts_with(model, policy, slots=5, order=[0, 1, 2, 3, 4])
    assert len({len(rollout.response) for rollout in reference.values()}) > 1  # slots do free up at different times
    for slots, order, tokens in (
        *((1, [1], 8192), (1, [4, 0], 8192), (2, [4, 3, 2, 1, 0], 8192)),
        *((3, [2, 0, 4, 1, 3], 60), (64, [1, 0, 3, 2, 4], 8192)),
    ):
        others = rollouts_with(model, policy, slots=slots, order=order, prefill_tokens=tokens)
        for index, rollout in others.items():
            assert_same(rollout, reference[index])


@pytest.mark.parametrize("policy", ["rkv", "random", "full"])
def test_samples_of_a_group_are_those_of_single_requests(model, policy):
    """More samples than slots: some wait for the prefilled prompt, and still nothing changes."""
    kv = KV(policy=policy, budget=24, interval=6, window=4, sinks=2, protect_prompt=False)
    grouped = Engine(model, kv, slots=3).generate(PROMPTS[:2], samples=4, sampling=SAMPLING)
    for index, rollout in enumerate(grouped):
        (single,) = Engine(model, kv, slots=1).generate([PROMPTS[index // 4]], sampling=SAMPLING, seeds=[rollout.seed])
        assert_same(single, rollout)
    assert len({tuple(rollout.response) for rollout in grouped}) == 8


def test_a_prompt_is_prefilled_once_for_its_group(model):
    engine = Engine(model, KV(policy="rkv", budget=24, interval=6, window=4, sinks=2, protect_prompt=False), slots=3)
    engine.generate(PROMPTS, samples=7, sampling=SAMPLING)
    assert engine.stats.prompt_tokens == sum(map(len, PROMPTS))


def test_the_same_call_gives_the_same_rollouts_and_another_seed_others(model):
    engine = Engine(model, KV(policy="rkv", budget=24, interval=6, window=4, sinks=2, protect_prompt=False), slots=3)
    first, again = (engine.generate(PROMPTS, sampling=SAMPLING) for _ in range(2))
    assert [rollout.response for rollout in first] == [rollout.response for rollout in again]
    other = engine.generate(PROMPTS, sampling=SAMPLING.model_copy(update={"seed": 1}))
    assert [rollout.response for rollout in first] != [rollout.response for rollout in other]


def test_weight_updates_between_calls_take_effect(model):
    engine = Engine(model, KV(policy="rkv", budget=24, interval=6, window=4, sinks=2, protect_prompt=False), slots=3)
    before = engine.generate(PROMPTS, sampling=SAMPLING)
    weight = model.lm_head.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(0.5)
    changed = engine.generate(PROMPTS, sampling=SAMPLING)
    with torch.no_grad():
        weight.copy_(kept)
    back = engine.generate(PROMPTS, sampling=SAMPLING)
    assert [r.response for r in changed] != [r.response for r in before] == [r.response for r in back]


@pytest.mark.parametrize("policy", ["rkv", "full"])
@pytest.mark.parametrize(("slots", "stop"), [(2, ()), (3, (1, 7, 20, 33))])
def test_steps_launched_ahead_change_nothing(model, policy, slots, stop, monkeypatch):
    """As on a GPU, where a chunk runs before the host has looked at the one before it."""
    kv = KV(policy=policy, budget=24, interval=12, window=4, sinks=2, protect_prompt=False)
    sampling = Sampling(max_tokens=70, stop=stop, repetition=(4, 16))
    limits = [70, 3, 41, 70, 25]
    runs = []
    for ahead in (False, True):
        monkeypatch.setattr(EagerRunner, "overlaps", ahead)
        engine = Engine(model, kv, slots=slots)
        engine.chunk = 3
        runs.append(engine.generate(PROMPTS, 1, sampling, limits=limits))
    for left, right in zip(*runs, strict=True):
        assert_same(left, right)


def test_a_prime_interval_runs_in_whole_chunks(model, monkeypatch):
    """Boundaries repeat with the interval, so sequences that start at different times are all compacted on time."""
    launched = []
    launch = EagerRunner.launch
    monkeypatch.setattr(EagerRunner, "launch", lambda self, steps, clock: launched.append(steps) or launch(self, steps, clock))
    kv = KV(policy="rkv", budget=24, interval=13, window=4, sinks=2, protect_prompt=False)
    limits = [70, 3, 41, 70, 25] * 2
    few = Engine(model, kv, slots=2).generate(PROMPTS, 2, Sampling(max_tokens=70, stop=()), limits=limits)
    assert set(launched[:8]) == {8, 5}
    many = Engine(model, kv, slots=10).generate(PROMPTS, 2, Sampling(max_tokens=70, stop=()), limits=limits)
    for left, right in zip(few, many, strict=True):
        assert_same(left, right)
        assert left.kv_peak <= kv.budget + kv.interval
        events = left.evicted_at[left.evicted_at != NEVER] - len(left.prompt)
        assert bool((events % 13 == 0).all()) and (len(left.response) < 40 or len(events))


def test_new_sequences_wait_for_each_other_and_change_nothing(model, monkeypatch):
    """As on a GPU, where a prefill of one prompt takes as long as one of several."""
    limits = [70, 3, 41, 60, 25] * 3
    monkeypatch.setattr(EagerRunner, "overlaps", True)
    runs, prefills = [], []
    for refill in (64, 128):  # one, and two of four slots
        monkeypatch.setattr(generation, "REFILL", refill)
        engine = Engine(model, KV(policy="rkv", budget=24, interval=12, window=4, sinks=2, protect_prompt=False), slots=4)
        calls = []
        monkeypatch.setattr(generation, "prefill", lambda *args, calls=calls: calls.append(1) or prefill(*args))
        runs.append(engine.generate(PROMPTS * 3, sampling=Sampling(max_tokens=70, stop=()), limits=limits))
        prefills.append(len(calls))
    for left, right in zip(*runs, strict=True):
        assert_same(left, right)
    assert prefills[1] < prefills[0]


def test_a_graph_holds_the_active_slots_and_few_more():
    for slots in (1, 7, 16, 40, 256, 300, 1024):
        sizes = [graph_slots(active, slots) for active in range(1, slots + 1)]
        assert sizes == sorted(sizes) and sizes[-1] == slots
        assert all(active <= size <= max(16, active + slots // 4, 2 * active - 1) for active, size in enumerate(sizes, 1))
        assert len(set(sizes)) <= 16  # each is captured once
    assert [graph_slots(active, 256) for active in (3, 17, 33, 129, 161, 225)] == [16, 32, 64, 160, 192, 256]


def test_a_step_that_cannot_be_captured_is_tried_once(model, monkeypatch):
    """As on a GPU, where a capture takes seconds, and captured steps read weights and caches at fixed addresses."""
    tried = []

    class Uncapturable(EagerRunner):
        overlaps = True

        def __init__(self, model, cache, chunk, *, compile):
            super().__init__(model, cache)

        def start(self, slots, sampling, routers=None):
            tried.append(slots)
            raise NotCapturable("the step asks the host")

    monkeypatch.setattr(engine_module, "GraphRunner", Uncapturable)
    engine = Engine(model, KV(policy="rkv", budget=24, interval=12, window=4, sinks=2), slots=2)
    engine.use_graphs = True
    runs = [engine.generate(PROMPTS, sampling=SAMPLING) for _ in range(2)]
    assert len(tried) == 1 and engine.graphs is None
    for left, right in zip(*runs, strict=True):
        assert_same(left, right)
