"""The engine's contract: fields, endings, progress, figures, and one clear sentence for each mistake."""

import pickle
from dataclasses import replace

import pytest
import torch

from sparse_rl import KV, Engine, Sampling, UserError, replay
from sparse_rl.rewards.batch import Graded
from sparse_rl.rollout.exchange import from_arrays, to_arrays
from sparse_rl.rollout.graded import GradedRollouts
from sparse_rl.rollout.repetition import RepetitionGuard, first_repetitions
from sparse_rl.rollout.stats import Stats

SMALL = KV(policy="rkv", budget=24, interval=6, window=4, sinks=2, protect_prompt=False)


def test_rollouts_are_prompt_major_with_the_fields_of_the_contract(model):
    rollouts = Engine(model, SMALL, slots=4).generate([[5, 6], [7, 8, 9]], samples=3, sampling=Sampling(max_tokens=50))
    assert [rollout.prompt for rollout in rollouts] == [[5, 6]] * 3 + [[7, 8, 9]] * 3
    for rollout in rollouts:
        assert 1 <= len(rollout.response) <= 50 and rollout.logprobs.dtype == torch.float32
        assert rollout.logprobs.shape == (len(rollout.response),) and bool((rollout.logprobs <= 0).all())
        assert (rollout.finish == "stop") == (rollout.response[-1] == 1)
        assert 1 not in rollout.response[:-1]
        assert rollout.kv_peak <= SMALL.capacity
        assert rollout.evicted_at.dtype == torch.int32
        assert rollout.evicted_at.shape[-1] == len(rollout.prompt) + len(rollout.response)


def test_stop_ids_are_the_models_unless_given(model):
    engine = Engine(model, SMALL, slots=4)
    free = engine.generate([[5, 6]], samples=8, sampling=Sampling(max_tokens=60, stop=()))
    assert {rollout.finish for rollout in free} == {"length"} and {len(rollout.response) for rollout in free} == {60}
    stop = free[0].response[20]
    stopped = engine.generate([[5, 6]], samples=8, sampling=Sampling(max_tokens=60, stop=(stop,)))
    for whole, cut in zip(free, stopped, strict=True):
        end = whole.response.index(stop) + 1 if stop in whole.response else 60
        assert cut.response == whole.response[:end]
        torch.testing.assert_close(cut.logprobs, whole.logprobs[:end], atol=1e-5, rtol=0)


def test_a_rollout_may_end_with_its_first_token(model):
    engine = Engine(model, SMALL, slots=2)
    (rollout,) = engine.generate([[5, 6]], sampling=Sampling(max_tokens=1))
    assert len(rollout.response) == 1 and rollout.finish == "length" and rollout.kv_peak == 2
    everything = Sampling(max_tokens=9, stop=tuple(range(61)))
    rollouts = engine.generate([[5, 6]], samples=5, sampling=everything)
    assert {(len(rollout.response), rollout.finish) for rollout in rollouts} == {(1, "stop")}


def test_repetition_guard_ends_a_rollout_that_repeats(model):
    def repeats(tokens, period, span):
        last = tokens[-span:]
        return len(last) == span and any(last[p:] == last[:-p] for p in range(1, period + 1))

    sampling = Sampling(max_tokens=200, stop=(), temperature=0.0)
    engine = Engine(model, SMALL, slots=1)
    (free,) = engine.generate([[5, 6]], sampling=sampling)
    (guarded,) = engine.generate([[5, 6]], sampling=sampling.model_copy(update={"repetition": (8, 24)}))
    ends = [end for end in range(1, 201) if repeats(free.response[:end], 8, 24)]
    assert ends, "greedy decoding of this model should fall into a loop"
    assert guarded.finish == "repetition" and guarded.response == free.response[: ends[0]]


def test_repetition_guard_agrees_with_a_look_at_the_whole_text():
    """Several sequences at once, in chunks of any length."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(2, (200, 40), generator=generator).numpy()
    guards = [RepetitionGuard(period=3, span=7) for _ in text]
    start = 0
    for length in (1, 5, 2, 16, 1, 1, 8, 6):
        found = first_repetitions(guards, text[:, start : start + length])
        for tokens, place in zip(text.tolist(), found, strict=True):
            expected = length
            for end in range(start + length, start, -1):
                last = tokens[max(0, end - 7) : end]
                if len(last) == 7 and any(last[p:] == last[:-p] for p in (1, 2, 3)):
                    expected = end - 1 - start
            assert place == expected
        start += length
    assert start == 40


def test_progress_tells_of_every_token_and_every_end(model):
    seen, ended, calls = {}, [], []

    def progress(state):
        calls.append((state.finished, state.tokens))
        ended.extend(state.ended)
        for index, pieces in state.new.items():
            seen.setdefault(index, []).extend(token for piece in pieces for token in piece.tolist())

    rollouts = Engine(model, SMALL, slots=2).generate(
        [[5, 6], [7]], samples=3, sampling=Sampling(max_tokens=30), progress=progress
    )
    assert [seen[index] for index in range(6)] == [rollout.response for rollout in rollouts]
    assert sorted(ended) == list(range(6))
    assert calls == sorted(calls) and calls[-1] == (6, sum(len(rollout.response) for rollout in rollouts))


def test_stats_count_what_happened(model):
    engine = Engine(model, SMALL, slots=2)
    rollouts = engine.generate([list(range(10, 50))], samples=2, sampling=Sampling(max_tokens=19, stop=()))
    stats = engine.stats
    assert stats.tokens == sum(len(rollout.response) for rollout in rollouts) == 38
    assert stats.prompt_tokens == 40 and stats.steps == 18 and stats.idle_share == 0
    assert stats.compactions == 2 * (1 + 2)  # the prompt, after 6 and after 12 tokens; at 18 it was over
    dense = sum(40 + step for step in range(1, 19))
    kept = sum(24 + (step - 1) % 6 + 1 for step in range(1, 19))
    assert stats.token_savings == pytest.approx(1 - kept / dense)
    assert stats.prefill_s > 0 and stats.decode_s > 0 and stats.tokens_per_s > 0
    assert stats.scratch_bytes == 2 * 40 * 2 * 16 * 4  # one layer's keys and values of the prompt


@pytest.mark.parametrize("protect", [True, False])
@pytest.mark.parametrize(("budget", "interval"), [(16, 8), (17, 8), (22, 1)])
def test_a_budget_is_said_to_never_evict_where_the_engine_never_compacts(model, budget, interval, protect):
    kv = KV(policy="rkv", budget=budget, interval=interval, window=4, sinks=2, protect_prompt=protect)
    prompt = [5, 6, 7]
    engine = Engine(model, kv, slots=2)
    for tokens in (16, 18, 19, 24, 25, 26, 34):  # 25 = 3 * 8 + 1: the compaction after 24 tokens would come after the end
        engine.generate([prompt], sampling=Sampling(max_tokens=tokens, stop=()))
        said = kv.never_evicts(len(prompt), tokens)
        assert (said is None) == (engine.stats.compactions > 0), (tokens, said)


def test_an_interval_that_is_suggested_evicts():
    kv = KV(policy="rkv", budget=97, interval=128, protect_prompt=True)
    for tokens, interval in ((100, 2), (101, 3), (110, 6), (128, 8)):
        said = kv.never_evicts(5, tokens)
        assert said.endswith(f"Lower kv.interval, for example to {interval}, or use a dense cache.")
        assert kv.changed(interval=interval).never_evicts(5, tokens) is None
    small = KV(policy="rkv", budget=998, interval=7, protect_prompt=True).never_evicts(5, 1002)
    assert small.endswith("Lower kv.interval, for example to 5, or use a dense cache.")
    told = "a response has at most 97 tokens at a compaction. Each slot still allocates 225 tokens. Lower kv.budget"
    assert told in kv.never_evicts(5, 99)  # no interval helps


def test_the_model_keeps_its_mode_and_its_gradients(model):
    model.train()
    Engine(model, SMALL, slots=1).generate([[5, 6]], sampling=Sampling(max_tokens=3))
    assert model.training
    model.eval()
    assert not any(parameter.is_inference() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"policy": "rkv", "budget": 12},
            r"kv.budget = 12 is too small: it must exceed window \+ sinks = 12. Try --kv.budget 64.",
        ),
        ({"policy": "expected", "budget": 8}, r"must exceed window \+ sinks = 8. Try --kv.budget 64."),
        ({"window": -1}, "kv.window = -1 is invalid: it must be at least 0, or auto."),
        ({"interval": 0}, "kv.interval = 0 is invalid: it must be at least 1. Try 128."),
        ({"budgte": 64}, "Unknown option kv.budgte: did you mean budget?"),
        ({"budget": "many"}, "kv.budget = 'many' is invalid: input should be a valid integer, or 'auto'."),
    ],
)
def test_wrong_kv_options_are_refused_in_one_sentence(options, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        KV(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kv", "sentence"),
    [
        ({"policy": "rvk"}, "Unknown KV policy 'rvk'.*did you mean 'rkv'"),
        ({"policy": "no.such:Thing"}, "could not be imported.*set PYTHONPATH to its folder."),
        ({"policy": "sparse_rl.text:Thing"}, "could not be imported.*write it as package.module:ClassName."),
        ({"options": {"mixx": 1}}, "Policy rkv has no option 'mixx'.*did you mean 'mix'"),
        ({"policy": "snapkv", "options": {"form": "dcode"}}, "snapkv form = "),
        ({"policy": "rkv", "window": 0}, "scores keys with the queries of the window: set window to at least 1."),
        ({"options": {"window": 4}}, "set kv.window = 4"),
        ({"options": {"kernel": 4}}, "is invalid: it must be a positive odd number of tokens, such as 7."),
        ({"options": {"mix": 7.0}}, " is invalid: it must be between 0 and 1."),
        ({"options": {"mix": "a"}}, " rejected its options: "),
    ],
)
def test_wrong_policies_are_refused_before_any_work(model, kv, sentence):
    with pytest.raises(UserError, match=sentence):
        Engine(model, KV(**{"policy": "rkv", "budget": 64, **kv}))


@pytest.mark.parametrize(
    ("prompts", "options", "sentence"),
    [
        ([], {}, "Nothing to sample: "),
        ([[5], []], {}, "Prompt 1 is empty"),
        ([[5, 61]], {}, "token id 61, outside the vocabulary of 61"),
        ([[5, -1]], {}, "token id -1"),
        (["text"], {}, "lists of token ids"),
        ([[5] * 100], {"sampling": Sampling(max_tokens=8100)}, " exceeds the model's context of 8192: max_tokens = 8092 fits"),
        ([[5] * 8192], {"sampling": Sampling(max_tokens=1)}, "shorten the prompt"),
        ([[5] * 9000], {}, "shorten the prompt"),
        (torch.tensor([5, 6]), {}, "lists of token ids"),
        ([[5.9]], {}, "token id 5.9"),
        ([[5]], {"seeds": [2**63]}, "from 0 to 2"),
        ([[5]], {"samples": 0}, "Nothing to sample: "),
        ([[5]], {"samples": 2, "seeds": [1]}, "1 seed given for 1 prompt with 2 samples"),
    ],
)
def test_wrong_requests_are_refused_in_one_sentence(model, prompts, options, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        Engine(model, SMALL, slots=1).generate(prompts, **options)
    assert "\n" not in str(error.value)


def test_beyond_the_context_is_allowed_when_asked_for(model):
    engine, sampling = Engine(model, SMALL, slots=1), Sampling(max_tokens=90, stop=())
    whole = engine.generate([[5] * 40], sampling=sampling)
    engine.limits = replace(engine.limits, context=64)
    with pytest.raises(UserError, match=" exceeds the model's context of 64: max_tokens = 24 fits"):
        engine.generate([[5] * 40], sampling=sampling)
    beyond = engine.generate([[5] * 40], sampling=sampling, allow_beyond_context=True)
    assert len(beyond[0].response) == 90 and beyond[0].response == whole[0].response
    torch.testing.assert_close(replay(model, beyond, "sparse")[0].detach(), beyond[0].logprobs, atol=1e-4, rtol=0)


def test_a_protected_prompt_may_be_longer_than_the_budget(model):
    engine = Engine(model, KV(policy="rkv", budget=24, interval=6, window=4, sinks=2, protect_prompt=True), slots=1)
    (rollout,) = engine.generate([[5] * 100], sampling=Sampling(max_tokens=2))
    assert rollout.kv_peak == 101 and engine.cache.capacity == 30


@pytest.mark.parametrize(
    "kv", [SMALL, KV(policy="rkv", budget=24, interval=6, window=4, sinks=2, protect_prompt=True)], ids=["free", "protected"]
)
def test_the_longest_prompt_is_the_one_before_the_first_that_is_refused(model, kv):
    engine, sampling = Engine(model, kv, slots=1, prefill_tokens=16), Sampling(max_tokens=100)
    most = engine.most_prompt_tokens(sampling)
    engine.check_prompt([5] * most, sampling)
    with pytest.raises(UserError, match=f"The prompt has {most + 1} tokens"):
        engine.check_prompt([5] * (most + 1), sampling)
    engine.limits = replace(engine.limits, context=None, sliding_window=None)
    assert engine.most_prompt_tokens(sampling) is None


def test_what_is_no_model_and_no_kv_is_refused(model):
    with pytest.raises(UserError, match="kv = .*'budget': 64.* is invalid: pass a KV"):
        Engine(model, {"policy": "rkv", "budget": 64})
    with pytest.raises(UserError, match=r"model = 'tiny' is a name, not a loaded model: .*load_model\('tiny'\)"):
        Engine("tiny", KV(budget=64))


def test_wrong_sampling_is_refused():
    for options, sentence in (
        ({"temperature": -1}, "sampling.temperature = -1 is invalid"),
        ({"max_tokens": 0}, "sampling.max_tokens = 0 is invalid"),
        ({"top_p": 0}, "sampling.top_p = 0 is invalid"),
        ({"repetition": (4, 4)}, " is invalid: period must be at least 1, and span must exceed period. Try"),
    ):
        with pytest.raises(UserError, match=sentence):
            Sampling(**options)


@pytest.mark.parametrize("prompt", [[[1, 2, 3]], torch.tensor([[1, 2, 3]]), [True, False], [1.5, 2.0]])
def test_a_prompt_that_is_no_list_of_ids_is_refused(model, prompt):
    with pytest.raises(UserError, match="Prompt 0"):
        Engine(model, SMALL, slots=2).generate([prompt], sampling=Sampling(max_tokens=2))


def test_limits_end_each_rollout_at_its_own_length(model):
    sampling = Sampling(max_tokens=20, stop=())
    rollouts = Engine(model, SMALL, slots=2).generate([[5, 6], [7]], 2, sampling, limits=[3, 50, 1, 20])
    assert [len(each.response) for each in rollouts] == [3, 20, 1, 20]
    free = Engine(model, SMALL, slots=2).generate([[5, 6], [7]], 2, sampling)
    assert all(left.response == right.response[: len(left.response)] for left, right in zip(rollouts, free, strict=True))
    with pytest.raises(UserError, match="1 limit given for 1 prompt with 2 samples each"):
        Engine(model, SMALL, slots=2).generate([[5, 6]], 2, sampling, limits=[3])


# Between ranks


def test_rollouts_in_arrays_are_the_same_rollouts_in_eight_bytes_a_token(model):
    """The bytes are pickled, as ranks send them. Prompts and seeds are the receiver's."""
    prompts, seeds = [[5, 6], [7, 8, 9] * 30, [3]], [11, 12, 13, 14, 15, 16]
    engine = Engine(model, SMALL, slots=6)
    long = engine.generate(prompts, samples=2, sampling=Sampling(max_tokens=400, stop=()), seeds=seeds)
    ended = engine.generate(prompts, samples=2, sampling=Sampling(max_tokens=400), seeds=seeds)
    rollouts = [*long[:4], *ended[4:]]
    assert {rollout.finish for rollout in rollouts} == {"length", "stop"}
    places = [2, 3, 4, 5]  # another rank has the first group
    graded = Graded([1.0, None, 0.5, 0.0], 1, 0, 0, None)
    sent = pickle.dumps(to_arrays(GradedRollouts(places, rollouts[2:], ["text"] * 4, graded, Stats(), 0.5)))
    tokens = sum(len(rollout.response) for rollout in rollouts[2:])
    assert tokens > 800 and len(sent) <= 8 * tokens + 1500
    back = from_arrays(pickle.loads(sent), prompts, 2, seeds)
    assert back.places == places and back.graded == graded and back.grade_s == 0.5 and back.stats == Stats()
    for ours, theirs in zip(rollouts[2:], back.rollouts, strict=True):
        assert torch.equal(ours.logprobs, theirs.logprobs) and theirs.trace is None
        assert replace(ours, logprobs=None, trace=None) == replace(theirs, logprobs=None)
        assert all(type(value) is int for value in (*theirs.response, theirs.kv_peak, theirs.seed))
    empty = to_arrays(GradedRollouts([], [], [], graded, Stats(), 0.0))
    nothing = from_arrays(pickle.loads(pickle.dumps(empty)), prompts, 2, seeds)
    assert nothing.rollouts == [] and nothing.places == []
