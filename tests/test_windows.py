"""Sliding windows, soft caps and learned sinks: the sampler, replay and transformers agree far beyond the windows."""

import copy

import pytest
import torch
from transformers import (
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    Olmo3Config,
    Qwen2Config,
)

from small_models import SIZE, random_weights
from sparse_rl import KV, NEVER, Engine, Sampling, replay
from sparse_rl.integrations.transformers import BoundedCache
from sparse_rl.kv.policies import POLICIES
from sparse_rl.kv.windows import WindowStore
from sparse_rl.sizes import DENSE_SLOT_TOKENS, PAGE_TOKENS

WINDOW = 13
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
FAMILIES = {
    "mistral": MistralConfig(**SIZE, sliding_window=WINDOW),
    "qwen2": Qwen2Config(**SIZE, use_sliding_window=True, max_window_layers=1, sliding_window=WINDOW),
    "gemma3": Gemma3TextConfig(**SIZE, **MIXED, head_dim=8, query_pre_attn_scalar=8),
    "olmo3": Olmo3Config(**SIZE, **MIXED),
    "cohere2": Cohere2Config(**SIZE, **MIXED, logit_scale=0.25),
    "gemma2": Gemma2Config(
        **SIZE, **MIXED, head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=2.0, final_logit_softcapping=5.0
    ),
    "gpt-oss": GptOssConfig(**SIZE, **MIXED, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
}
KINDS = ["mistral", "gemma3", "gemma2", "gpt-oss"]
"""Windows in all layers, in some, with soft caps, and with learned sinks. `test_families.py` measures every family."""
BOUNDED = KV(policy="rkv", budget=24, interval=8, window=4, sinks=2, protect_prompt=False)
CACHES = [BOUNDED, BOUNDED.model_copy(update={"protect_prompt": True}), KV(policy="full")]
CACHE_NAMES = ["rkv", "protected", "full"]
CODES = [CACHES[1].model_copy(update={"dtype": "8bit"}), KV(policy="full", dtype="4bit")]
CODE_NAMES = ["protected-8bit", "full-4bit"]
SHORT, LONG = [7, 8, 9], list(range(3, 60))
TOKENS = 80
"""Response tokens: more than six windows, and at least five compactions."""
ROUNDING = 2e-5


def family(name, dtype=torch.float32, **changes):
    return random_weights(FAMILIES[name], dtype, **changes)


@pytest.fixture(scope="module")
def models():
    return {name: family(name) for name in FAMILIES}


def plain(model):
    """The model with transformers' own attention."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


def chosen(logits, tokens):
    return logits.float().cpu().log_softmax(-1).gather(-1, torch.as_tensor(tokens)[:, None])[:, 0]


def own_logprobs(model, rollout):
    """Log-probs of a response by transformers alone: token by token with its cache, and in one pass."""
    tokens = torch.tensor([rollout.prompt + rollout.response], device=model.device)
    start = len(rollout.prompt)
    with torch.no_grad():
        out = model(tokens[:, :start], use_cache=True)
        steps = [out.logits[0, -1]]
        for token in tokens[0, start:-1]:
            out = model(token[None, None], past_key_values=out.past_key_values, use_cache=True)
            steps.append(out.logits[0, -1])
        parallel = model(tokens, use_cache=False).logits[0, start - 1 : -1]
    return chosen(torch.stack(steps), rollout.response), chosen(parallel, rollout.response)


def farthest(left, right):
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_the_default_cache_works_beside_windows(models, name):
    rollouts = Engine(models[name], KV(budget=24, interval=8), slots=2).generate(
        [LONG], samples=2, sampling=Sampling(max_tokens=TOKENS // 2, stop=())
    )
    sampled = [rollout.logprobs for rollout in rollouts]
    assert farthest(replay(models[name], rollouts, "sparse"), sampled) < ROUNDING * 5


@pytest.mark.parametrize("name", KINDS)
def test_with_a_protected_prompt_replay_reproduces_the_sampler_beyond_the_window(models, name):
    """`test_families.py` does so without protection."""
    model = models[name]
    engine = Engine(model, BOUNDED.model_copy(update={"protect_prompt": True}), slots=4)
    rollouts = engine.generate([SHORT, LONG], samples=2, sampling=Sampling(max_tokens=TOKENS, stop=()))
    sampled = [rollout.logprobs for rollout in rollouts]
    for tokens_per_pass in (1, 4096):  # unpacked and packed
        assert farthest(replay(model, rollouts, "sparse", tokens_per_pass=tokens_per_pass), sampled) < ROUNDING * 5
    for rollout in rollouts:
        for layer in engine.limits.shape.windowed:  # implied by the window's size
            assert bool((rollout.evicted_at[layer] == NEVER).all())
    full = engine.limits.shape.full_layers
    if full:
        evicted_at = rollouts[0].evicted_at[full]
        assert len(evicted_at[evicted_at != NEVER].unique()) >= 5
        assert farthest(replay(model, rollouts, "dense"), sampled) > 0.01  # else the replay above proves nothing


@pytest.mark.parametrize("kv", CACHES, ids=CACHE_NAMES)
def test_rollouts_do_not_depend_on_slots_or_pieces(models, kv):
    """Samples that wait for a slot, and prompts in pieces shorter or longer than the window."""
    model, sampling = models["gemma3"], Sampling(max_tokens=24, stop=())
    prompts = [SHORT, LONG, LONG[::-1] * 2]
    expected = Engine(model, kv, slots=6).generate(prompts, 2, sampling)
    for slots, prefill_tokens in ((2, 8192), (6, 9), (4, 40)):
        found = Engine(model, kv, slots=slots, prefill_tokens=prefill_tokens).generate(prompts, 2, sampling)
        assert [each.response for each in found] == [each.response for each in expected]
        assert farthest([each.logprobs for each in found], [each.logprobs for each in expected]) < ROUNDING


def test_a_paused_sequence_continues_with_its_windows(models):
    model, sampling, prompts = models["gemma3"], Sampling(max_tokens=215, stop=()), [SHORT, LONG]
    expected = Engine(model, KV(policy="full"), slots=4).generate(prompts, 2, sampling)
    engine = Engine(model, KV(policy="full"), slots=4)
    tokens = 4 * DENSE_SLOT_TOKENS + 7 * PAGE_TOKENS
    needed = tokens * engine.cache.token_bytes + WindowStore(engine.limits.shape, 4, WINDOW).kv_bytes
    engine.reserve_dense(len(LONG), 215, 2, 2, kv_bytes=needed)
    found = engine.generate(prompts, 2, sampling)
    assert engine.stats.preemptions > 0 and engine.stats.peak_kv_bytes <= needed
    assert [each.response for each in found] == [each.response for each in expected]
    assert farthest([each.logprobs for each in found], [each.logprobs for each in expected]) < ROUNDING


@pytest.mark.parametrize(("policy", "dtype", "head"), [("rkv", "8bit", 8 + 2), ("full", "auto", 8 * 4)])
def test_windowed_layers_hold_their_window_and_no_more(models, policy, dtype, head):
    """The allocated bytes are those of the full layers, and of one window in the model's dtype per slot and windowed layer."""
    kv = (BOUNDED if policy == "rkv" else KV(policy="full")).model_copy(update={"dtype": dtype})
    engine = Engine(models["olmo3"], kv, slots=2)
    full_bytes, window_bytes = 2 * 2 * head, 2 * 2 * 8 * 4  # of a token: keys and values, 2 heads, 8 dimensions
    for tokens in (TOKENS, 2 * TOKENS):
        (rollout,) = engine.generate([SHORT], sampling=Sampling(max_tokens=tokens, stop=()))
        pages = 0 if policy == "rkv" else engine.cache.prompts.pages * PAGE_TOKENS
        capacity = BOUNDED.capacity if policy == "rkv" else DENSE_SLOT_TOKENS
        assert engine.cache.windows.kv_bytes == 2 * WINDOW * window_bytes
        assert engine.cache.token_bytes == full_bytes
        assert engine.stats.peak_kv_bytes == (2 * capacity + pages) * full_bytes + 2 * WINDOW * window_bytes
        assert engine.cache.dense_bytes(tokens) == (tokens + 2 * WINDOW) * window_bytes  # in the model's dtype
        assert rollout.trace.codes_LHT.shape == (1, 2, len(SHORT) + tokens)  # no codes of the windowed layer


def own_parallel(model, rollout):
    tokens = torch.tensor([rollout.prompt + rollout.response])
    return chosen(model(tokens, use_cache=False).logits[0, len(rollout.prompt) - 1 : -1], rollout.response)


@pytest.mark.parametrize(
    ("name", "dtype", "head"),
    [*((name, "auto", 8 * 4) for name in KINDS), ("gpt-oss", "8bit", 8 + 2)],
)
def test_a_bounded_cache_of_transformers_gives_the_rollouts_of_the_engine(models, name, dtype, head):
    """In a left-padded batch, whose padding is longer than the window."""
    model, prompts = models[name], [LONG, SHORT]
    engine = Engine(model, BOUNDED.model_copy(update={"dtype": dtype}), slots=2)
    rollouts = engine.generate(prompts, 1, Sampling(max_tokens=40, stop=(), temperature=0))
    tokens, mask = torch.zeros(2, len(LONG), dtype=torch.long), torch.zeros(2, len(LONG), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, -len(prompt) :], mask[row, -len(prompt) :] = torch.tensor(prompt), 1
    options = {"interval": BOUNDED.interval, "window": BOUNDED.window, "sinks": BOUNDED.sinks, "dtype": dtype}
    cache = BoundedCache("rkv", BOUNDED.budget, **options, statistics=engine.statistics)
    out = model.generate(
        tokens, attention_mask=mask, past_key_values=cache, max_new_tokens=40, do_sample=False, eos_token_id=None
    )
    assert out[:, len(LONG) :].tolist() == [rollout.response for rollout in rollouts]
    shape = engine.limits.shape
    held = len(shape.full_layers) * BOUNDED.capacity * head + len(shape.windowed) * WINDOW * 8 * 4
    assert cache.kv_bytes == 2 * 2 * 2 * held  # rows, keys and values, heads


@pytest.mark.parametrize(("name", "evicts"), [("mistral", False), ("gemma3", True)])
def test_tokens_that_leave_a_window_do_not_count_as_evicted(models, name, evicts):
    engine = Engine(models[name], BOUNDED, slots=2)
    engine.generate([SHORT, LONG], 1, Sampling(max_tokens=TOKENS))
    assert (engine.stats.token_savings > 0) == (engine.stats.compactions > 0) == evicts


def test_windows_are_not_quantised(models):
    """With a window in every layer, codes change nothing."""
    sampling, dense = Sampling(max_tokens=40, stop=()), KV(policy="full")
    expected, found = (
        Engine(models["mistral"], dense.model_copy(update={"dtype": dtype}), slots=2).generate([LONG], 2, sampling)
        for dtype in ("auto", "4bit")
    )
    for left, right in zip(expected, found, strict=True):
        assert left.response == right.response and torch.equal(left.logprobs, right.logprobs)
    assert farthest(replay(models["mistral"], found, "sparse"), [each.logprobs for each in found]) < 5 * ROUNDING


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in ("rkv", "full")])
def test_every_policy_evicts_from_the_full_layers_alone(models, policy):
    """Also policies with statistics and seeds, which are those of the model's own layers."""
    model = models["gemma3"]
    engine = Engine(model, BOUNDED.model_copy(update={"policy": policy}), slots=2)
    rollouts = engine.generate([SHORT, LONG], sampling=Sampling(max_tokens=30, stop=()))
    assert farthest(replay(model, rollouts, "sparse"), [rollout.logprobs for rollout in rollouts]) < 5 * ROUNDING
    assert bool((rollouts[1].evicted_at[1] != NEVER).any()) and bool((rollouts[1].evicted_at[0] == NEVER).all())


WIDE = {"hidden_size": 64, "head_dim": 16}
"""FlexAttention needs heads of 16 dimensions."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kv", [*CACHES, *CODES], ids=[*CACHE_NAMES, *CODE_NAMES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_replay_reproduces_the_sampler(name, kv, dtype):
    """Graphs, kernels, FlexAttention and windows of packed attention. Codes that flip change few log-probs by much."""
    model = family(name, dtype, **WIDE).cuda()
    rollouts = Engine(model, kv, slots=4).generate([SHORT, LONG], 3, Sampling(max_tokens=TOKENS, stop=()))
    for view in ("sparse", "dense") if kv.policy == "full" and not kv.quantised else ("sparse",):
        pairs = zip(replay(model, rollouts, view), rollouts, strict=True)
        gaps = torch.cat([(ours.detach().cpu() - rollout.logprobs).abs() for ours, rollout in pairs])
        if kv.quantised and dtype == torch.float32:
            assert float(gaps.median()) < 2e-3
        elif dtype == torch.float32:
            assert float(gaps.max()) < 2e-3
        else:
            reference = plain(model)
            own = [left - right for left, right in (own_logprobs(reference, rollout) for rollout in rollouts)]
            assert float(gaps.mean()) < max(0.02, 2 * float(torch.cat(own).abs().mean()))
