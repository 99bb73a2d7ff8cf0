"""8-bit and 4-bit caches: everybody reads what is stored, and the bytes are those of codes and steps."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from flips import recorded_codes, sampled_and_replayed
from random_models import ARCHITECTURES
from sparse_rl import KV, NEVER, Engine, Sampling, UserError, replay, sizes
from sparse_rl.config import Config
from sparse_rl.integrations.transformers import BoundedCache
from sparse_rl.kernels import jit
from sparse_rl.kv.cache import SlotCache
from sparse_rl.kv.policies import POLICIES, Policy, Streaming
from sparse_rl.kv.prompt_store import PromptStore
from sparse_rl.kv.shape import CacheShape
from sparse_rl.kv.storage import KeyScales, Quantiser
from sparse_rl.models.shapes import SHAPES
from sparse_rl.plan.dimensions import from_config
from sparse_rl.plan.memory import make_plan
from sparse_rl.rollout import engine as engines
from sparse_rl.rollout import runner
from test_hybrid import family as hybrid
from test_windows import family as windowed

WINDOWED = ["gemma3", "gemma2", "gpt-oss"]
"""Windows beside plain attention, soft caps and learned sinks."""
HYBRIDS = ["lfm2", "falcon-h1", "nemotron-h"]
"""States beside attention, in the same layers, and beside layers that do not mix tokens."""
SHORT, LONG = [7, 8, 9, 10, 11], list(range(3, 60))
BOUNDED = KV(policy="rkv", budget=32, interval=8, window=4, sinks=2, protect_prompt=False)
DTYPES = ["8bit", "4bit"]
PAIRS = [
    (name, policy, DTYPES[(row + column) % 2])
    for row, name in enumerate(ARCHITECTURES)
    for column, policy in enumerate(POLICIES)
]
"""Any two of architecture, policy and dtype meet in one of these."""
EXACT = 1e-4
"""Largest distance of sampler and replay at a token that no flipped code has reached, in float32 on a CPU."""
FLIPS = 5e-4
"""Largest share of codes and steps that may flip first. The largest seen is 1e-4."""
AFTER = 0.01
"""Largest distance at tokens after a flip. The largest seen is 0.001, and 0.0026 in longer rollouts."""


@pytest.fixture(scope="module")
def families(models):
    return models | {name: windowed(name) for name in WINDOWED} | {name: hybrid(name) for name in HYBRIDS}


@pytest.mark.parametrize(
    ("architecture", "policy", "dtype"),
    [
        *PAIRS,
        *((name, *cache) for name in (*WINDOWED, *HYBRIDS) for cache in (("rkv", "8bit"), ("full", "4bit"))),
    ],
)
def test_replay_reproduces_the_sampler_up_to_flips(families, policy, architecture, dtype):
    """Rounding may flip a code, and then all later tokens see another key. Few codes flip, all tokens before are exact, and those
    after are close."""
    prompts, tokens = [LONG[n:] + LONG[:n] for n in range(5)], 10
    kv = BOUNDED.model_copy(update={"policy": policy, "dtype": dtype, "interval": 4})
    found = sampled_and_replayed(Engine(families[architecture], kv, slots=5), prompts, tokens)
    assert found.first_flips < FLIPS
    assert int(found.exact_Rt.sum()) >= len(prompts) * tokens // 3
    assert found.exact_max < EXACT and float(found.gaps_Rt.max()) < AFTER
    assert float(found.dense_gaps_Rt.max()) > EXACT  # else the replay above proves nothing
    evicted = [bool((rollout.evicted_at != NEVER).any()) for rollout in found.rollouts]
    assert evicted == [policy != "full"] * len(prompts)


class Recorder(Streaming):
    """Streaming, with a record of the keys and values from which it selects, and of what it keeps."""

    uses_values = True
    calls: ClassVar[list] = []

    def select(self, queries, keys, values, budget, **more):
        kept = super().select(queries, keys, values, budget, **more)
        self.calls.append((keys, values, kept))
        return kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefill_tokens", [8192, 16])
def test_policies_read_prompts_as_they_are_stored(families, dtype, prefill_tokens, monkeypatch):
    """A prompt that is compressed, whole or in pieces: what the policy sees of each kept key is what the slot holds."""
    monkeypatch.setattr(Recorder, "calls", [])
    kv = BOUNDED.model_copy(update={"policy": "test_quantised_cache:Recorder", "dtype": dtype})
    engine = Engine(families["qwen2"], kv, slots=1, prefill_tokens=prefill_tokens)
    engine.generate([LONG], sampling=Sampling(max_tokens=1, stop=()))
    cache = engine.cache
    assert len(Recorder.calls) == 2
    for layer, (keys, values, kept) in enumerate(Recorder.calls):
        assert keys.shape[2] == len(LONG)
        stored = cache.stored.map(lambda each, layer=layer: each[layer, :, :, : kv.budget])
        held = (
            cache.quantiser.decode_keys(layer, stored.keys, stored.key_steps, torch.float32),
            cache.quantiser.decode_values(stored.values, stored.value_steps, torch.float32),
        )
        for seen, decoded in zip((keys, values), held, strict=True):
            assert torch.equal(seen.gather(2, kept[..., None].expand_as(decoded)), decoded)


@pytest.mark.parametrize("protect_prompt", [False, True])
def test_a_prompt_is_encoded_once_for_all_its_samples(families, protect_prompt):
    engine = Engine(families["qwen2"], BOUNDED.model_copy(update={"dtype": "8bit", "protect_prompt": protect_prompt}), slots=4)
    with recorded_codes() as codes:
        engine.generate([SHORT], 4, Sampling(max_tokens=1))
    assert [len(calls) for calls in codes.values()] == [1, 1]


@pytest.mark.parametrize(
    ("name", "dtype", "prefill_tokens"),
    [
        *(("qwen2", dtype, prefill_tokens) for dtype in DTYPES for prefill_tokens in (8192, 40)),
        *(("gpt-oss", "4bit", 8192), ("lfm2", "8bit", 40)),
    ],
)
def test_a_stored_prompt_is_read_as_a_slot_is(families, name, dtype, prefill_tokens):
    """Prompts in pages, of one token and of several pages; groups that wait for slots; a prompt prefilled in pieces."""
    model = families[name]
    kv = KV(policy="rkv", budget=24, interval=8, window=4, sinks=2, protect_prompt=True, dtype=dtype)
    prompts = [[5], LONG, [3 + number % 50 for number in range(150)]]
    engine = Engine(model, kv, slots=3, prefill_tokens=prefill_tokens)
    rollouts = engine.generate(prompts, samples=2, sampling=Sampling(max_tokens=40, stop=()))
    gaps = torch.stack(
        [(ours.detach() - each.logprobs).abs() for ours, each in zip(replay(model, rollouts, "sparse"), rollouts, strict=True)]
    )
    assert float((gaps < 1e-4).float().mean()) > 0.8 and float((gaps[:, 0] < 1e-4).float().mean()) > 0.8
    assert all(bool((each.evicted_at != NEVER).any()) for each in rollouts)


@pytest.mark.parametrize(
    ("policy", "name"), [*((policy, "qwen2") for policy in ("rkv", "full", "random")), ("full", "gpt-oss")]
)
def test_slots_and_pieces_change_nothing(families, policy, name):
    """Prompts that are compressed or fit, whole or in pieces, copied from a stash or prefilled: the same tokens."""
    model = families[name]
    kv = BOUNDED.model_copy(update={"policy": policy, "dtype": "8bit"})
    sampling, prompts = Sampling(max_tokens=20, stop=(), seed=3), [SHORT, LONG, LONG[:31]]
    whole = Engine(model, kv, slots=9).generate(prompts, 3, sampling)
    pieces = Engine(model, kv, slots=2, prefill_tokens=16).generate(prompts, 3, sampling)
    for left, right in zip(whole, pieces, strict=True):
        assert left.response == right.response and torch.equal(left.evicted_at, right.evicted_at)


@pytest.mark.parametrize(("name", "dtype"), [*(("qwen2", dtype) for dtype in DTYPES), ("gpt-oss", "8bit")])
def test_the_gradient_is_that_of_unquantised_keys_and_values(families, name, dtype):
    """Straight through: the gradient of each weight stays close to the dense one, and attention's own weights have one."""
    model = families[name]
    engine = Engine(model, KV(policy="full", dtype=dtype), slots=2)
    rollouts = engine.generate([SHORT, LONG], sampling=Sampling(max_tokens=20, stop=()))
    grads = {}
    for view in ("dense", "sparse", "quantised"):
        learner = copy.deepcopy(model)
        torch.cat(replay(learner, rollouts, view)).sum().backward()
        grads[view] = {name: parameter.grad for name, parameter in learner.named_parameters()}
    for path, grad in grads["dense"].items():
        assert torch.equal(grads["sparse"][path], grads["quantised"][path])
        angle = torch.nn.functional.cosine_similarity(grad.flatten(), grads["sparse"][path].flatten(), dim=0)
        assert angle > (0.99 if dtype == "8bit" else 0.7), path


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_soft_caps_and_sinks_depend_on_the_centre_of_keys(name):
    """Plain attention does not, and reads keys less their centre."""
    model = windowed(name, attention_bias=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_(std=3)
    engine = Engine(model, KV(policy="full", dtype="8bit"), slots=1)
    (rollout,) = engine.generate([LONG], sampling=Sampling(max_tokens=20, stop=()))
    less = replace(rollout, quantiser=replace(rollout.quantiser, with_centre=False))
    with torch.no_grad():
        (dense,), (whole,), (centred,) = (
            replay(model, [each], view) for each, view in ((rollout, "dense"), (rollout, "sparse"), (less, "sparse"))
        )
    assert float((whole - rollout.logprobs).abs().max()) < 1e-4
    assert float((whole - dense).abs().mean()) < 0.25 * float((centred - dense).abs().mean())


@pytest.mark.parametrize(
    ("policy", "dtype", "head", "ring"),
    [("streaming", "auto", 32, 0), ("rkv", "8bit", 16 + 2, 8), ("streaming", "4bit", 8 + 2 * 2, 0)],
)
def test_bytes_are_codes_and_steps_of_pages_and_slots(model, policy, dtype, head, ring):
    """32 prompts of 1,100 tokens, 8 samples of each: the prompts once, and 640 response tokens for each sample. R-KV also keeps the
    last 8 queries of each sample in 16 bits. A head of 16 channels has two groups of 8 channels in 4 bits."""
    kv = KV(policy=policy, budget=512, interval=128, protect_prompt=True, dtype=dtype)
    engine = Engine(copy.deepcopy(model).bfloat16(), kv, slots=256)
    engine.generate([[5] * 1100] * 32, samples=8, sampling=Sampling(max_tokens=1, stop=()))
    cache, store = engine.cache, engine.cache.prompts
    token = 2 * 2 * 2 * head  # keys and values, layers, heads
    assert storage_bytes(*cache.stored, *store.stored) == (32 * 18 * 64 + 256 * 640) * token == engine.stats.peak_kv_bytes
    assert cache.token_bytes == token == sizes.token_bytes(engine.limits.shape, 2, dtype)
    queries = 2 * 256 * 4 * ring * 16 * 2  # layers, slots, heads, tokens, channels, bytes
    assert storage_bytes(cache.queries_LSQWD) == queries
    positions, lengths, tables = 2 * 256 * 2 * 640 * 4, 256 * 8, store.pages_SP.numel() * 4
    assert engine.stats.side_bytes == positions + lengths + tables + queries


def storage_bytes(*tensors):
    """Bytes allocated for these tensors, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.numel()]
    return sum({storage.data_ptr() or id(storage): storage.nbytes() for storage in storages}.values())


def test_the_docs_state_the_bytes_of_a_1_5b_model():
    """Counted from storage on the meta device: 32 prompts of 1,100 tokens, 8 samples of each, 512 + 128."""
    fields = SHAPES["1.5B"]
    heads = fields["num_attention_heads"]
    dim = fields["hidden_size"] // heads
    layers, kv_heads, device = fields["num_hidden_layers"], fields["num_key_value_heads"], torch.device("meta")
    shape = CacheShape(layers, heads, kv_heads, dim, torch.bfloat16, device)
    page = (Path(__file__).parents[1] / "docs/choosing-a-budget.md").read_text()
    for dtype, name in (("auto", "`auto` (bf16)"), ("8bit", "`8bit`"), ("4bit", "`4bit`")):
        quantiser = None if dtype == "auto" else Quantiser(dtype, KeyScales.unset(layers, kv_heads, dim, device))
        cache = SlotCache(shape, 256, 640, 8, quantiser=quantiser)
        store = PromptStore(shape, 256, sizes.pages_of(1100) * 32, 1100, quantiser)
        cells = [storage_bytes(*store.stored), storage_bytes(*cache.stored), storage_bytes(cache.queries_LSQWD)]
        cells.insert(2, storage_bytes(*store.stored, *cache.stored))
        assert f"| {name} | " + " | ".join(f"{each / 2**30:.2f}" for each in cells) + " |" in page


@pytest.mark.parametrize("dtype", ["auto", "8bit"])
def test_a_gpu_without_kernels_is_named_once(model, dtype, monkeypatch, capsys):
    """The engine then decodes with the torch reference, here on a CPU: the same tokens."""
    monkeypatch.setattr(jit, "why_not", lambda device: "it is from 2015")
    monkeypatch.setattr(runner, "why_not", jit.why_not)
    kv, sampling = KV(policy="full", dtype=dtype), Sampling(max_tokens=12, stop=())
    expected = Engine(model, kv, slots=1).generate([LONG], sampling=sampling)[0]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(engines, "graphs_work_on", lambda _, kv: runner.graphs_work_on(torch.device("cuda"), kv))
    found = [Engine(model, kv, slots=1).generate([LONG], sampling=sampling)[0] for _ in range(2)]
    assert all(each.response == expected.response for each in found)
    sentence = "Triton is not available on this GPU (it is from 2015): decoding runs eagerly and is slower."
    codes = " With kv.dtype = 8bit, each step also decodes all stored keys and values." if dtype == "8bit" else ""
    assert capsys.readouterr().err == f"sparse-rl: {sentence}{codes}\n"


class Precise(Policy):
    full_precision = True

    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        return keys.norm(dim=-1)


def test_what_cannot_be_quantised_is_refused(model):
    with pytest.raises(UserError, match=r"needs keys in the model's dtype, but kv.dtype = 4bit: set kv.dtype = auto\."):
        Engine(model, KV(policy="test_quantised_cache:Precise", dtype="4bit", protect_prompt=False), slots=1)
    with pytest.raises(ValueError, match="8bit"):
        KV(dtype="3bit")
    rollouts = [
        Engine(model, KV(policy="rkv", dtype="8bit", protect_prompt=False), slots=1).generate(
            [prompt], sampling=Sampling(max_tokens=2)
        )[0]
        for prompt in (SHORT, SHORT, LONG)
    ]
    assert len(replay(model, rollouts[:2], "sparse")) == 2  # equal statistics of two engines
    with pytest.raises(UserError, match="replay those of each call separately"):
        replay(model, rollouts, "sparse")


def test_bytes_of_a_head_of_128_channels(monkeypatch):
    """8 bits are half of bf16 and 4 bits a quarter, plus the steps: one per token, and one per group."""
    shape = CacheShape(1, 1, 1, 128, torch.bfloat16, torch.device("cpu"))
    assert [sizes.token_bytes(shape, 2, dtype) for dtype in ("auto", "8bit", "4bit")] == [512, 260, 2 * (64 + 8)]
    monkeypatch.setattr(sizes, "GROUP_CHANNELS", 16)
    assert sizes.token_bytes(shape, 2, "4bit") == 2 * (64 + 16)


@pytest.mark.parametrize(
    ("head", "dtype", "problem"),
    [
        (6, "8bit", "The model's head dimension = 6 is not a multiple of 4: set kv.dtype = auto"),
        (
            100,
            "4bit",
            "4bit saves nothing with the model's head dimension = 100: a head takes 150 bytes per token, and 102 with 8bit",
        ),
    ],
)
def test_heads_that_codes_do_not_suit_are_refused(head, dtype, problem, tmp_path):
    sizes = {"vocab_size": 61, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(**sizes, hidden_size=2 * head, num_key_value_heads=2)
    model, kv = AutoModelForCausalLM.from_config(config), {"policy": "rkv", "budget": 24, "interval": 4, "dtype": dtype}
    with pytest.raises(UserError, match=problem):
        Engine(model, KV(**kv), slots=1)
    model.set_attn_implementation("sparse_rl")
    with pytest.raises(UserError, match=problem):
        model.generate(torch.tensor([[5, 6, 7]]), past_key_values=BoundedCache(**kv), max_new_tokens=4)
    dims = from_config(config.to_dict(), "the model")
    assert not dims.takes_codes
    with pytest.raises(UserError, match=problem):
        make_plan(Config(kv=kv), dims)
