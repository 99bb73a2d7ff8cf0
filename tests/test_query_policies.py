"""Policies that predict queries from statistics: triattention and expected attention, and what the engine gathers for them."""

import cmath
import json
from dataclasses import dataclass

import pytest
import torch
from transformers import GPT2Config

from random_models import ARCHITECTURES
from small_runs import metrics, one_thread, train
from sparse_rl import KV, NEVER, Engine, Sampling, UserError, replay
from sparse_rl.cli import main
from sparse_rl.integrations.transformers import BoundedCache
from sparse_rl.kv import statistics
from sparse_rl.kv.policies import Policy, get
from sparse_rl.kv.query_statistics import SKIPPED, QueryStatistics
from sparse_rl.kv.rotary import Rotary
from sparse_rl.kv.statistics import KeyRanges
from sparse_rl.rollout import calibrate
from test_models import build

SHORT, LONG = [7, 8, 9, 10, 11], list(range(3, 60))
BOUNDED = {"budget": 32, "interval": 8, "window": 4, "sinks": 2, "protect_prompt": False}
POLICIES = ["triattention", "expected"]


def rotations(kind, dim):
    """Pairs and frequencies of a rotary embedding, by its definition. A partial one rotates the first half of the dimensions."""
    rotated = dim // 2 if kind == "partial" else dim
    frequencies = [10_000.0 ** (-2 * f / rotated) / (4 if kind == "scaled" and f > 2 else 1) for f in range(rotated // 2)]
    if kind == "interleaved":
        pairs = [(2 * f, 2 * f + 1) for f in range(rotated // 2)]
    else:
        pairs = [(f, f + rotated // 2) for f in range(rotated // 2)]
    rest = list(range(rotated, dim))
    pairs += zip(rest[::2], rest[1::2], strict=True)
    return pairs, frequencies + [0.0] * (len(rest) // 2)


def known_statistics(kind, dim, q_heads, layers, seed=0):
    draw = torch.Generator().manual_seed(seed)
    pairs, frequencies = rotations(kind, dim)
    mean = torch.randn(layers, q_heads, dim, generator=draw)
    rotary = Rotary(
        torch.tensor(pairs).expand(layers, -1, -1), torch.tensor(frequencies, dtype=torch.float64).expand(layers, -1)
    )
    length = torch.stack([mean[..., pair].norm(dim=-1) for pair in pairs], dim=-1)
    extra = torch.rand(length.shape, generator=draw)
    return {"query_mean": mean, "query_lengths": length + extra, **rotary.statistics()}


@pytest.mark.parametrize("kind", ["half", "interleaved", "partial", "scaled"])
@pytest.mark.parametrize("normalize", [False, True])
def test_triattention_is_the_sum_over_offsets_of_keys_rotated_back(kind, normalize):
    """The paper's form in Python's own complex numbers: unrotate each key, then loop over heads, offsets and pairs."""
    q_heads, kv_heads, tokens, dim = 4, 2, 12, 16
    known = known_statistics(kind, dim, q_heads, layers=3)
    pairs, frequencies = rotations(kind, dim)
    draw = torch.Generator().manual_seed(1)
    keys = torch.randn(2, kv_heads, tokens, dim, generator=draw)
    positions = torch.stack([torch.arange(tokens) * 3 + 5, torch.arange(tokens) * 401]).unsqueeze(1).expand(-1, kv_heads, -1)
    layers = torch.tensor([2, 0])
    expected = torch.zeros(2, q_heads, tokens, dtype=torch.float64)
    for row in range(2):
        now = int(positions[row, 0, -1]) + 1
        for head in range(q_heads):
            mean = known["query_mean"][layers[row], head].tolist()
            lengths = known["query_lengths"][layers[row], head].tolist()
            for token in range(tokens):
                stored, at = keys[row, head // 2, token].tolist(), int(positions[row, 0, token])
                total = 0.0
                for (real, imaginary), frequency, length in zip(pairs, frequencies, lengths, strict=True):
                    centre = complex(mean[real], mean[imaginary])
                    key = complex(stored[real], stored[imaginary]) * cmath.exp(-1j * at * frequency)  # before rotation
                    for power in range(17):
                        distance = now + 2**power - at
                        total += (centre * key.conjugate() * cmath.exp(1j * distance * frequency)).real / 17
                    total += (length - abs(centre)) * abs(key)
                expected[row, head, token] = total
    if normalize:
        expected = (expected - expected.mean(dim=-1, keepdim=True)) / expected.std(dim=-1, correction=0, keepdim=True)
    expected = expected.unflatten(1, (kv_heads, -1)).amax(dim=2)
    policy = get("triattention", normalize=normalize)
    scores = policy.scores(None, keys, None, positions=positions, layers=layers, statistics=known)
    torch.testing.assert_close(scores.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["half", "interleaved", "partial", "scaled"])
def test_expected_attention_is_the_mean_over_drawn_queries(kind):
    """E[exp(q k / √D)] over Gaussian queries at one future position, by drawing many: with `future` = 1 the formula is exact."""
    dim, tokens, draw = 8, 6, torch.Generator().manual_seed(0)
    known = known_statistics(kind, dim, q_heads=1, layers=1)
    root = torch.randn(dim, dim, generator=draw) / 3
    known["query_covariance"] = (root @ root.T)[None, None]
    keys = torch.randn(1, 1, tokens, dim, generator=draw)
    values = torch.ones(1, 1, tokens, 1)
    positions = (torch.arange(tokens) * 7)[None, None]
    queries = known["query_mean"][0, 0] + torch.randn(400_000, dim, generator=draw) @ root.T
    turned = torch.zeros_like(queries)
    for (real, imaginary), frequency in zip(*rotations(kind, dim), strict=True):
        turn = torch.tensor(cmath.exp(1j * (5 * 7 + 1) * frequency), dtype=torch.complex64)
        pair = torch.complex(queries[:, real], queries[:, imaginary]) * turn
        turned[:, real], turned[:, imaginary] = pair.real, pair.imag
    weights = (turned @ keys[0, 0].T / dim**0.5).double().exp().mean(dim=0)
    options = {"positions": positions, "layers": torch.tensor([0]), "statistics": known}
    scores = get("expected", future=1).scores(None, keys, values, **options)
    torch.testing.assert_close(scores[0, 0].exp().double(), weights / weights.sum(), atol=0, rtol=0.02)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("dtype", ["auto", "8bit"])
def test_statistics_are_those_of_the_query_projection(models, architecture, dtype):
    """Means over the outputs of q_proj, which transformers rotates later: from hooks, with no view and no rotation."""
    model, prompts = models[architecture], [LONG, list(range(50, 20, -1)), [5] * 9]
    engine = Engine(model, KV(policy="expected", dtype=dtype, **BOUNDED), slots=2)
    engine.calibrate(prompts, tokens=900)  # for 8 bits, the prompts are also placed up to position 899
    found: dict[int, list] = {0: [], 1: []}
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda _, __, out, layer=number: found[layer].append(out[0, SKIPPED:]))
        for number, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        for prompt in prompts:
            model(torch.tensor([prompt]), use_cache=False)
    for hook in hooks:
        hook.remove()
    for layer, parts in found.items():
        queries_QND = torch.cat(parts).unflatten(-1, (4, -1)).transpose(0, 1).double()
        mean = queries_QND.mean(dim=1)
        covariance = torch.stack([torch.cov(of_head.T, correction=0) for of_head in queries_QND])
        torch.testing.assert_close(engine.statistics["query_mean"][layer].double(), mean, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(engine.statistics["query_covariance"][layer].double(), covariance, atol=1e-3, rtol=1e-3)


def test_first_tokens_of_each_sequence_are_left_out():
    rotary = Rotary.half_split(1, 4)
    queries = torch.zeros(1, 1, 16, 4)
    positions = torch.tensor([[*range(7, 16), *range(7, 13), 7]])  # three packed sequences, placed at position 7
    queries[0, 0, :4], queries[0, 0, 9:13], queries[0, 0, 15] = 100, 100, 100
    collector = QueryStatistics(rotary)
    collector.add(0, queries, queries, queries, positions)
    assert collector.tokens == {0: 5 + 2} and not bool(collector.statistics()["query_mean"].any())
    alone = QueryStatistics(rotary)
    alone.add(0, queries[:, :, 15:], queries, queries, positions[:, 15:])
    assert alone.tokens == {0: 1}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("policy", POLICIES)
def test_given_statistics_decide_not_the_prompts_of_the_call(models, policy, architecture):
    """Gathered once, kept over calls, and loaded into another engine: the same rollouts. Other statistics evict other keys."""
    model, kv = models[architecture], KV(policy=policy, **BOUNDED)
    sampling = Sampling(max_tokens=60, stop=())
    engines = [Engine(model, kv, slots=2) for _ in range(3)]
    engines[0].calibrate([LONG], 128)
    engines[0].generate([SHORT], sampling=sampling)
    engines[1].load_statistics(engines[0].statistics)
    left, right, other = (engine.generate([LONG, SHORT], sampling=sampling) for engine in engines)
    for one, two in zip(left, right, strict=True):
        assert one.response == two.response and torch.equal(one.evicted_at, two.evicted_at)
    assert any(not torch.equal(one.evicted_at, two.evicted_at) for one, two in zip(left, other, strict=True))
    for ours, rollout in zip(replay(model, left, "sparse"), left, strict=True):
        torch.testing.assert_close(ours.detach(), rollout.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_statistics_serve_a_quantised_cache_as_well(model, policy):
    engine = Engine(model, KV(policy=policy, dtype="8bit", **BOUNDED), slots=2)
    rollouts = engine.generate([LONG], sampling=Sampling(max_tokens=40, stop=()))
    assert {"key_step", "query_mean"} <= engine.statistics.keys()
    assert bool((rollouts[0].evicted_at != NEVER).any())


def test_statistics_that_lack_what_is_needed_are_not_used_and_that_is_said(model, capsys):
    quantised = Engine(model, KV(policy="rkv", dtype="8bit", **BOUNDED), slots=1)
    quantised.calibrate([LONG], 100)
    engine = Engine(model, KV(policy="triattention", **BOUNDED), slots=1)
    engine.load_statistics(quantised.statistics)
    assert engine.statistics == {} and "The stored statistics lack query_mean, query_lengths" in capsys.readouterr().err
    engine.load_statistics({})
    assert capsys.readouterr().err == ""
    engine.generate([SHORT], sampling=Sampling(max_tokens=40, stop=()))
    assert set(engine.statistics) == set(engine.policy.uses_statistics)


@pytest.mark.parametrize("policy", POLICIES)
def test_models_without_rotary_positions_are_refused(policy):
    model = build(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=256, bos_token_id=1, eos_token_id=2))
    with pytest.raises(
        UserError,
        match=f"GPT2LMHeadModel .* kv.policy = {policy} cannot predict its queries: set kv.policy = streaming or rkv.",
    ):
        Engine(model, KV(policy=policy, **BOUNDED), slots=1)


def test_a_policy_without_its_statistics_is_refused():
    keys = torch.randn(1, 1, 20, 8)
    with pytest.raises(UserError, match="TriAttention needs statistics"):
        get("triattention").select(None, keys, keys, 12)


@pytest.mark.parametrize("options", [{"future": 0}, {"epsilon": -1.0}])
def test_invalid_options_are_refused(options):
    with pytest.raises(UserError, match="is invalid"):
        get("expected", **options)


# A user's own policy with statistics of its own


class KeyMeans:
    """Collector of the mean key of each head."""

    def __init__(self):
        self.means = {}

    def add(self, layer, queries_1QND, keys_1HND, values_1HND, positions_1N):
        self.means[layer] = keys_1HND[0].mean(dim=1)

    def statistics(self):
        return {"key_mean": torch.stack([self.means[layer] for layer in sorted(self.means)])}


@dataclass(frozen=True)
class FarFromTheMean(Policy):
    uses_statistics = ("key_mean",)

    def collector(self, rotary):
        return KeyMeans()

    def scores(self, queries, keys, values, *, seeds=None, positions=None, layers=None, statistics=None):
        return (keys - statistics["key_mean"][layers][:, :, None]).norm(dim=-1)


def test_own_policy_with_statistics_of_its_own(model):
    engine = Engine(model, KV(policy=f"{__name__}:FarFromTheMean", **BOUNDED), slots=2)
    rollouts = engine.generate([LONG, SHORT], sampling=Sampling(max_tokens=50, stop=()))
    assert engine.statistics["key_mean"].shape == (2, 2, 16)
    for ours, rollout in zip(replay(model, rollouts, "sparse"), rollouts, strict=True):
        torch.testing.assert_close(ours.detach(), rollout.logprobs, atol=1e-4, rtol=0)


# Runs and evaluations


def test_a_run_writes_its_statistics_and_the_model_is_used_with_them(world, tmp_path):
    train(world, tmp_path / "run", "--kv.policy", "expected", "--steps", "2")
    assert metrics(tmp_path / "run")[-1]["sparse/engine_noise"] < 1e-3
    stored = statistics.load(tmp_path / "run/model")
    assert set(stored) == set(get("expected").uses_statistics)
    assert BoundedCache.from_pretrained(tmp_path / "run/model").kv.policy == "expected"  # refused without statistics


def test_an_evaluation_gathers_what_each_cache_needs(world, tmp_path):
    """Statistics of one cache do not stop another from gathering its own, and all are kept in the folder."""
    flags = ["--compare", "rkv@20:8bit,triattention@20,expected@20", "--mismatch", "--max-tokens", "30", "--problems", "4"]
    reward = ["--reward.function", f"{world / 'rewards.py'}:sums", "--reward.workers", "0"]
    out = tmp_path / "eval"
    with one_thread():
        main(["eval", str(world / "model"), "--benchmarks", str(world / "problems.jsonl"), *flags, *reward, "--out", str(out)])
    found = {row["setting"]: row["mismatch"] for row in json.loads((out / "results.json").read_text())["results"]}
    assert all(found[f"{policy}@20"]["engine_noise"] < 1e-3 < found[f"{policy}@20"]["mismatch_k3"] for policy in POLICIES)
    assert {"key_step", "query_lengths", "query_covariance"} <= statistics.load(out).keys()


def test_parts_of_the_ranks_make_the_statistics_of_all_prompts(model):
    """Also if a rank had no prompt. `test_distributed.py` trains on two ranks with statistics."""
    prompts = [LONG, list(range(50, 20, -1)), SHORT, [5] * 9]
    rotary = Engine(model, KV(policy="expected", **BOUNDED), slots=1).rotary

    def gathered(texts):
        collectors = [KeyRanges(), QueryStatistics(rotary, covariance=True)]
        if texts:
            calibrate.calibrate(model, texts, 200, collectors)
        return collectors

    parts = [gathered(prompts[:2]), gathered(prompts[2:]), gathered([])]
    for place, whole in enumerate(gathered(prompts)):
        combined = gathered([])[place]
        combined.combine([part[place].gathered() for part in parts])
        if place:  # ranges also depend on the positions, which follow from the longest prompt
            assert combined.tokens == whole.tokens
            for name, expected in whole.statistics().items():
                torch.testing.assert_close(combined.statistics()[name], expected, atol=1e-5, rtol=1e-5)
        else:
            assert combined.ranges.keys() == whole.ranges.keys()


def test_statistics_are_gathered_on_a_schedule_of_steps():
    assert [step for step in range(101) if calibrate.is_due(step)] == [1, 2, 4, 8, 16, 32, 64, 96]
