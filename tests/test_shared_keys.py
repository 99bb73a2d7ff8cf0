"""Models whose last layers read the keys of earlier ones, beside windowed layers with other head shapes: Gemma 3n and Gemma 4."""

import copy

import pytest
import torch
from transformers import Gemma3nTextConfig, Gemma4TextConfig

from small_models import SIZE, random_weights
from sparse_rl import KV, NEVER, Engine, Sampling, UserError, replay
from sparse_rl.integrations.transformers import BoundedCache
from sparse_rl.kernels.slot_attention import attend_and_append
from sparse_rl.models.reduced import reduced, stand_ins
from sparse_rl.models.support import next_logits
from sparse_rl.rollout.decode import DecodeView

WINDOW = 13


def config_of(name, layers=4, shared=2, dim=8, full_dim=16):
    """A configuration whose last `shared` layers have no keys of their own. Windowed and full layers alternate. Heads of Gemma 4's
    full layers have `full_dim` channels, all others `dim`."""
    kwargs = SIZE | {
        "num_hidden_layers": layers,
        "num_kv_shared_layers": shared,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "sliding_window": WINDOW,
        "head_dim": dim,
        "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 4,
    }
    if name == "gemma-4":
        return Gemma4TextConfig(**kwargs, global_head_dim=full_dim)
    return Gemma3nTextConfig(**kwargs, laurel_rank=4, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * layers)


FAMILIES = ["gemma-3n", "gemma-4"]
BOUNDED = KV(policy="rkv", budget=24, interval=8, window=4, sinks=2, protect_prompt=False)
SHORT, LONG = [7, 8, 9], list(range(3, 45))
TOKENS = 40


@pytest.fixture(scope="module")
def models():
    return {name: random_weights(config_of(name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def model(models):
    return models["gemma-4"]


def farthest(left, right):
    return max(float((a.detach() - b).abs().max()) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [{}, {"policy": "triattention", "window": "auto"}, {"protect_prompt": True}, {"policy": "full"}, {"dtype": "8bit"}],
    ids=["rkv", "triattention", "protected", "full", "8bit"],
)
def test_replay_reproduces_the_sampler(models, name, changes):
    model, kv = models[name], BOUNDED.model_copy(update=changes)
    rollouts = Engine(model, kv, slots=3).generate([SHORT, LONG], 2, Sampling(max_tokens=TOKENS, stop=()))
    assert kv.policy == "full" or all(bool((each.evicted_at != NEVER).any()) for each in rollouts)
    assert farthest(replay(model, rollouts, "sparse"), [each.logprobs for each in rollouts]) < 1e-5


def test_a_prompt_in_pieces_is_one_in_a_single_pass(model):
    """A piece overwrites the ring that a layer without keys still has to read."""
    for kv in (BOUNDED, BOUNDED.model_copy(update={"protect_prompt": True})):
        whole, pieces = (
            Engine(model, kv, slots=2, prefill_tokens=size).generate([LONG], 2, Sampling(max_tokens=20, stop=()))
            for size in (4096, 9)
        )
        assert [each.response for each in whole] == [each.response for each in pieces]
        assert farthest([each.logprobs for each in whole], [each.logprobs for each in pieces]) < 1e-5
        assert all(torch.equal(a.evicted_at, b.evicted_at) for a, b in zip(whole, pieces, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_deep_model_is_checked_on_one_layer_of_each_kind(name):
    """Both families give every layer an input of its own, which a smaller model must not mix up. In half precision a whole model
    of this depth would differ too much to be checked."""
    model = random_weights(config_of(name, layers=24, shared=10), torch.bfloat16)
    small = reduced(model)
    assert len(small.model.layers) == len(set(stand_ins(model))) == 6
    assert small.model.embed_tokens_per_layer.weight.shape == (61, 6 * 4)
    kv = BOUNDED.model_copy(update={"policy": "triattention", "window": "auto"})
    rollouts = Engine(model, kv, slots=2).generate([SHORT], 2, Sampling(max_tokens=8, stop=()))
    assert [len(each.response) for each in rollouts] == [8, 8]


def test_layers_without_keys_take_no_memory(model):
    engine = Engine(model, BOUNDED, slots=2)
    (rollout,) = engine.generate([LONG], sampling=Sampling(max_tokens=TOKENS, stop=()))
    full, window = 2 * 2 * 16 * 4, 2 * 2 * 8 * 4  # bytes of a token: keys and values, 2 heads, 16 and 8 dimensions
    assert engine.stats.peak_kv_bytes == 2 * (BOUNDED.capacity * full + WINDOW * window)
    assert rollout.trace.codes_LHT.shape[0] == 1
    lost = (rollout.evicted_at != NEVER).flatten(1).any(dim=1)
    assert lost.tolist() == [False, True, False, False]


def test_the_queries_of_the_layer_that_has_the_keys_choose_them(model):
    """Readers write neither the ring of queries nor, a second time, the choice of a prompt's keys."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in other.model.layers[2:]:
            layer.self_attn.q_proj.weight.mul_(-1)
    prompts, sampling = [LONG, LONG[::-1]], Sampling(max_tokens=1, stop=())
    kept = [
        [each.evicted_at for each in Engine(each, BOUNDED, slots=2).generate(prompts, 1, sampling)] for each in (model, other)
    ]
    assert all(torch.equal(left, right) for left, right in zip(*kept, strict=True))

    rings = []
    for each in (model, other):
        engine = Engine(each, BOUNDED, slots=2)
        engine._grow_windows(WINDOW)
        cache, positions = engine.cache, torch.tensor([0, 0])
        view = DecodeView(cache, positions, cache.lengths_S[:2], longest=1, even=True)
        next_logits(each, torch.tensor([[5], [6]]), positions[:, None], view, keep=1)
        rings.append(cache.queries_LSQWD.clone())
    assert bool(rings[0].any()) and torch.equal(*rings)


def test_the_decode_kernel_takes_no_queries_of_a_reader():
    """It stores the new key a second time at the same place, and attends as for the layer that has the keys."""
    draw = torch.Generator().manual_seed(0)
    new = [torch.randn(2, heads, 16, generator=draw) for heads in (4, 2, 2)]
    keys, values = (torch.randn(2, 2, 64, 16, generator=draw) for _ in range(2))
    positions, lengths = torch.zeros(2, 2, 64, dtype=torch.int32), torch.tensor([9, 33])
    ring = torch.zeros(2, 4, 4, 16)

    def step(ring):
        return attend_and_append(*new, keys, values, positions, ring, lengths, lengths, scale=0.25, splits=1)

    expected = step(ring)
    before = [each.clone() for each in (keys, values, ring)]
    new[0] = new[0].neg()  # other queries
    assert not torch.equal(step(ring[:, :, :0]), expected)
    assert bool(ring.any()) and all(torch.equal(a, b) for a, b in zip((keys, values, ring), before, strict=True))


def test_a_bounded_cache_of_transformers_names_the_layers(model):
    cache = BoundedCache("rkv", 24, interval=8, window=4, sinks=2)
    model.set_attn_implementation("sparse_rl")
    with pytest.raises(
        UserError, match=r"Layer 2 \(Gemma4TextAttention\) reads the keys of layer 0, which BoundedCache does not"
    ):
        model.generate(torch.tensor([SHORT]), past_key_values=cache, max_new_tokens=3, do_sample=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("full_dim", [16, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"protect_prompt": True}, {"policy": "full"}], ids=["rkv", "protected", "full"])
def test_on_a_gpu_replay_reproduces_the_sampler(name, full_dim, dtype, changes):
    """Graphs, kernels at the head sizes of Gemma 4, and the learner's attention beyond 256 channels."""
    model = random_weights(config_of(name, dim=16, full_dim=full_dim), dtype).cuda()
    kv = BOUNDED.model_copy(update=changes)
    rollouts = Engine(model, kv, slots=4).generate([SHORT, LONG], 3, Sampling(max_tokens=TOKENS, stop=()))
    pairs = zip(replay(model, rollouts, "sparse"), rollouts, strict=True)
    gaps = torch.cat([(ours.detach().cpu() - rollout.logprobs).abs() for ours, rollout in pairs])
    assert float(gaps.max() if dtype == torch.float32 else gaps.mean()) < (2e-3 if dtype == torch.float32 else 0.03)
