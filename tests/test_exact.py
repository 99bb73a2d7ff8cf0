"""Exact: one parallel pass under the recorded evictions reproduces every log-prob the sampler recorded."""

import copy

import pytest
import torch
from transformers import AttentionInterface

from random_models import ARCHITECTURES, noise_early_and_late
from sparse_rl import KV, NEVER, Engine, Sampling, UserError, replay
from sparse_rl.kernels.counter_rng import derive
from sparse_rl.kv.policies import POLICIES, get
from sparse_rl.learner.replay import ReplayView, Span
from sparse_rl.models.attention import run

SHORT, LONG = [7, 8, 9, 10, 11], list(range(3, 60))
BOUNDED = KV(policy="rkv", budget=32, interval=8, window=4, sinks=2, protect_prompt=False)


def farthest(replayed, rollouts):
    return max(float((ours.detach() - rollout.logprobs).abs().max()) for ours, rollout in zip(replayed, rollouts, strict=True))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("policy", POLICIES)
def test_replay_reproduces_the_sampler(models, policy, architecture):
    model = models[architecture]
    engine = Engine(model, BOUNDED.model_copy(update={"policy": policy}), slots=4)
    rollouts = engine.generate([SHORT, LONG], samples=2, sampling=Sampling(max_tokens=70, stop=()))
    assert farthest(replay(model, rollouts, "sparse"), rollouts) < 1e-4
    evicted_at = rollouts[0].evicted_at
    assert evicted_at.shape == (2, model.config.num_key_value_heads, len(SHORT) + 70)
    if policy == "full":
        assert bool((evicted_at == NEVER).all())
        return
    events = evicted_at[evicted_at != NEVER].unique()
    assert len(events) >= 5 and bool(((events - len(SHORT)) % BOUNDED.interval == 0).all())
    assert len(LONG) in rollouts[2].evicted_at  # the prompt was compressed before the first response token
    assert farthest(replay(model, rollouts, "dense"), rollouts) > 0.01  # else the replay above proves nothing


def test_evictions_are_those_the_cache_held(model):
    """At the end of a rollout the cache's own positions are the keys that were never evicted, in time order."""
    engine = Engine(model, BOUNDED, slots=1)
    (rollout,) = engine.generate([LONG], sampling=Sampling(max_tokens=75, stop=()))
    fed = len(LONG) + 74  # the last token is sampled and never fed
    held = int(engine.cache.lengths_S[0])
    for layer in range(2):
        for head in range(2):
            alive = torch.nonzero(rollout.evicted_at[layer, head, :fed] == NEVER).flatten().tolist()
            assert engine.cache.positions_LSHC[layer, 0, head, :held].tolist() == alive


def test_with_nothing_evicted_sparse_and_dense_replay_are_equal_to_the_bit(model):
    rollouts = Engine(model, KV(policy="rkv", budget=256, interval=8, protect_prompt=False), slots=2).generate(
        [SHORT, LONG], sampling=Sampling(max_tokens=40, stop=())
    )
    sparse, dense = replay(model, rollouts, "sparse"), replay(model, rollouts, "dense")
    assert all(torch.equal(left, right) for left, right in zip(sparse, dense, strict=True))


def test_dense_replay_is_the_plain_model(model):
    """The reference is transformers alone: no view, no packing, a full softmax."""
    rollouts = Engine(model, BOUNDED, slots=2).generate(
        [SHORT, LONG], sampling=Sampling(max_tokens=20, stop=(), temperature=0.7)
    )
    for ours, rollout in zip(replay(model, rollouts, "dense"), rollouts, strict=True):
        tokens = torch.tensor([rollout.prompt + rollout.response])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(rollout.prompt) - 1 : -1] / 0.7
        plain = logits.log_softmax(-1).gather(-1, tokens[0, len(rollout.prompt) :, None])[:, 0]
        torch.testing.assert_close(ours.detach(), plain, atol=1e-5, rtol=0)


def test_sparse_replay_is_differentiable(model):
    """Log-probs and gradients are those of transformers with an attention that masks each query by hand."""
    (rollout,) = Engine(model, BOUNDED, slots=1).generate([LONG], sampling=Sampling(max_tokens=30, stop=()))
    assert bool((rollout.evicted_at[:, :, : len(LONG)] != NEVER).any())
    model.zero_grad()
    ours = replay(model, [rollout], "sparse")[0]
    (ours * torch.arange(30)).sum().backward()

    def by_hand(module, queries_1QTD, keys_1HTD, values_1HTD, mask, scaling, **rest):
        groups = queries_1QTD.shape[1] // keys_1HTD.shape[1]
        until_QT = rollout.evicted_at[module.layer_idx, :, : queries_1QTD.shape[2]].repeat_interleave(groups, dim=0)
        keys, values = keys_1HTD.repeat_interleave(groups, dim=1), values_1HTD.repeat_interleave(groups, dim=1)
        out = torch.zeros_like(queries_1QTD)
        for now in range(queries_1QTD.shape[2]):
            for head in range(queries_1QTD.shape[1]):
                seen = [key for key in range(now + 1) if now < until_QT[head, key]]
                weights = (queries_1QTD[0, head, now] @ keys[0, head, seen].T * scaling).softmax(dim=-1)
                out[0, head, now] = weights @ values[0, head, seen]
        return out.transpose(1, 2), None

    AttentionInterface.register("by_hand", by_hand)
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain.set_attn_implementation("by_hand")
    tokens = torch.tensor([rollout.prompt + rollout.response])
    logits = plain(tokens[:, :-1], use_cache=False).logits[0, len(LONG) - 1 :]
    theirs = logits.log_softmax(dim=-1).gather(-1, tokens[0, len(LONG) :, None])[:, 0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    (theirs * torch.arange(30)).sum().backward()
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        scale = float(other.grad.abs().max())
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-4 * scale, rtol=0, msg=name)
    model.zero_grad()


def test_bfloat16_noise_does_not_grow_with_length(model):
    early, late = noise_early_and_late(copy.deepcopy(model).to(torch.bfloat16), samples=8, tokens=300)
    assert 0 < late < 1.1 * early < 0.1


def test_packing_does_not_change_the_replay(model):
    rollouts = Engine(model, BOUNDED, slots=4).generate([SHORT, LONG], samples=2, sampling=Sampling(max_tokens=40, stop=()))
    packed, alone = replay(model, rollouts, "sparse"), replay(model, rollouts, "sparse", tokens_per_pass=1)
    for left, right in zip(packed, alone, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=0)


def test_log_probs_are_those_of_the_sampling_temperature(model):
    for temperature, expected in ((0.7, 0.7), (0.0, 1.0)):
        sampling = Sampling(max_tokens=40, stop=(), temperature=temperature)
        rollouts = Engine(model, BOUNDED, slots=1).generate([LONG], sampling=sampling)
        assert rollouts[0].temperature == expected
        assert farthest(replay(model, rollouts, "sparse"), rollouts) < 1e-4
        assert farthest(replay(model, rollouts, "sparse", temperature=1.7), rollouts) > 1e-2


def test_replay_without_a_record_is_refused(model):
    rollouts = Engine(model, BOUNDED, slots=1).generate([LONG], sampling=Sampling(max_tokens=4), record=False)
    assert rollouts[0].evicted_at is None
    with pytest.raises(UserError, match="record=True"):
        replay(model, rollouts, "sparse")


def test_protected_prompt_is_never_evicted(model):
    kv = KV(policy="rkv", budget=72, interval=8, window=4, sinks=2, protect_prompt=True)
    rollouts = Engine(model, kv, slots=2).generate([SHORT, LONG], sampling=Sampling(max_tokens=150, stop=()))
    for rollout in rollouts:
        assert bool((rollout.evicted_at[:, :, : len(rollout.prompt)] == NEVER).all())
        assert bool((rollout.evicted_at != NEVER).any())
    assert farthest(replay(model, rollouts, "sparse"), rollouts) < 1e-4


@pytest.mark.parametrize(
    ("policy", "options"),
    [("rkv", {}), ("snapkv", {}), ("snapkv", {"form": "prefill"}), ("tova", {}), ("triattention", {}), ("random", {})],
)
@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
def test_evictions_are_the_policys_own_choice_on_the_schedule(model, policy, options, prompt):
    """Queries and keys taken from one parallel pass, the schedule walked by hand: the engine's ring, order and times."""
    kv = BOUNDED.model_copy(update={"policy": policy, "options": options})
    engine = Engine(model, kv, slots=2)
    rollout = engine.generate([SHORT, prompt], sampling=Sampling(max_tokens=70, stop=()))[1]
    seen = Recorded([Span(0, len(prompt) + 69, rollout.evicted_at[:, :, : len(prompt) + 69])])
    tokens = torch.tensor([(prompt + rollout.response)[:-1]])
    with torch.no_grad():
        run(model, tokens, torch.arange(tokens.shape[1])[None], seen, keep=1)
    chosen = get(policy, window=kv.recent, sinks=kv.sinks, **options)
    for layer, (queries, keys) in seen.layers.items():
        alive = torch.arange(len(prompt)).expand(1, 2, -1)
        expected = torch.full((2, len(prompt) + 70), NEVER, dtype=torch.int32)
        for n in range(70):
            now = len(prompt) + n
            if n:
                alive = torch.cat([alive, torch.full((1, 2, 1), now - 1)], dim=-1)
            if n % kv.interval == 0 and alive.shape[-1] > kv.budget:
                cached = keys.gather(2, alive[..., None].expand(-1, -1, -1, keys.shape[-1]))
                seeds = torch.tensor([derive(rollout.seed, layer)])
                window = queries[:, :, now - kv.recent : now]
                of_model = {"layers": torch.tensor([layer]), "statistics": engine.cache.statistics}
                kept = chosen.select(window, cached, cached, kv.budget, seeds=seeds, positions=alive, **of_model)
                survivors = alive.gather(-1, kept)
                for head in range(2):
                    gone = set(alive[0, head].tolist()) - set(survivors[0, head].tolist())
                    expected[head, list(gone)] = now
                alive = survivors
        assert torch.equal(rollout.evicted_at[layer], expected)


class Recorded(ReplayView):
    """A replay that keeps the queries and keys of each layer."""

    def attend(self, layer, queries, keys, values, scale, mask, form):
        self.__dict__.setdefault("layers", {})[layer] = (queries, keys)
        return super().attend(layer, queries, keys, values, scale, mask, form)
