"""`BoundedCache` in `model.generate`: the engine's rollouts, in transformers' own loop."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from random_models import ARCHITECTURES
from small_models import covering
from small_runs import train
from sparse_rl import KV, Engine, Sampling, UserError
from sparse_rl.integrations.transformers import BoundedCache
from sparse_rl.kv.policies import POLICIES
from sparse_rl.kv.statistics import load

SETTINGS = {"budget": 24, "interval": 6, "window": 4, "sinks": 2}
PROMPTS = [[5, 6, 7], list(range(3, 40)), [9] * 20]


def greedy(model, prompts, cache, tokens=50, **options):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": -1, **options}
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    return [row.tolist() for row in out[:, width:]]


@pytest.fixture(autouse=True)
def our_attention(models):
    for model in models.values():
        model.set_attn_implementation("sparse_rl")


@pytest.mark.parametrize(
    ("architecture", "policy"), covering(ARCHITECTURES, [name for name in POLICIES if name not in ("full", "random")])
)
def test_generate_with_a_bounded_cache_is_the_engine(models, architecture, policy):
    """Left-padded, three lengths in a batch: the tokens are those the engine samples greedily."""
    model = models[architecture]
    engine = Engine(model, KV(policy=policy, protect_prompt=False, **SETTINGS), slots=3)
    expected = engine.generate(PROMPTS, sampling=Sampling(max_tokens=38, temperature=0, stop=()))
    cache = BoundedCache(policy, **SETTINGS, statistics=engine.statistics)
    assert greedy(model, PROMPTS, cache, tokens=38) == [rollout.response for rollout in expected]


def test_the_window_of_a_bounded_cache_follows_its_budget(model):
    engine = Engine(model, KV(policy="triattention", budget=24, interval=6, protect_prompt=False), slots=3)
    expected = engine.generate(PROMPTS, sampling=Sampling(max_tokens=38, temperature=0, stop=()))
    cache = BoundedCache("triattention", 24, interval=6, statistics=engine.statistics)
    assert greedy(model, PROMPTS, cache, tokens=38) == [rollout.response for rollout in expected]
    assert cache.layers[0].policy.window == 12


def test_statistics_of_another_number_of_layers_are_not_used(model, capsys):
    """Such as those of a model with windows, stored when statistics had an entry for every layer."""
    settings = KV(policy="triattention", budget=24, interval=6)
    engine = Engine(model, settings, slots=1)
    engine.generate(PROMPTS, sampling=Sampling(max_tokens=1, stop=()))
    more = {name: torch.cat([each, each]) for name, each in engine.statistics.items()}
    other = Engine(model, settings, slots=1)
    other.load_statistics(more)
    assert not other.statistics
    assert (
        "are of 4 layers, but 2 of the model attend to all tokens: all statistics are gathered again"
        in capsys.readouterr().err
    )
    cache = BoundedCache("triattention", 24, interval=6, statistics=more)
    model.set_attn_implementation("sparse_rl")
    with pytest.raises(UserError, match="The statistics are of 4 layers, but 2 of the model attend to all tokens"):
        model.generate(torch.tensor(PROMPTS[:1]), past_key_values=cache, max_new_tokens=3, do_sample=False)


def test_a_budget_that_only_a_run_sets_is_refused():
    with pytest.raises(UserError, match="kv.budget = auto works only in train and in eval --mismatch: set a number of tokens"):
        BoundedCache(policy="rkv", budget="auto")


def test_a_policy_without_its_statistics_is_refused():
    with pytest.raises(UserError, match="Policy triattention needs statistics of the model: pass statistics"):
        BoundedCache("triattention", **SETTINGS)


@pytest.mark.parametrize("policy", ["rkv", "snapkv", "tova", "knorm"])
def test_protected_prompts_are_those_of_the_engine(model, policy):
    """The rows hold their prompts, and the budget counts new tokens, as in the engine's slots beside its prompt store."""
    engine = Engine(model, KV(policy=policy, protect_prompt=True, **SETTINGS), slots=3)
    expected = engine.generate(PROMPTS, sampling=Sampling(max_tokens=70, temperature=0, stop=()))
    cache = BoundedCache(policy, protect_prompt=True, **SETTINGS)
    assert greedy(model, PROMPTS, cache, tokens=70) == [rollout.response for rollout in expected]
    assert cache.kv_bytes == 2 * model.config.num_hidden_layers * 3 * 2 * (37 + 24 + 6) * 16 * 4
    assert cache.layers[0].held == [len(prompt) + 24 + 3 for prompt in PROMPTS]


@pytest.mark.parametrize(("architecture", "dtype"), covering(ARCHITECTURES, ["8bit", "4bit"]))
def test_a_dense_cache_of_codes_is_the_engine(models, architecture, dtype):
    """Nothing is evicted. The responses outgrow the first allocation, and every sample has its own row."""
    model = models[architecture]
    engine = Engine(model, KV(policy="full", dtype=dtype), slots=6)
    expected = engine.generate(PROMPTS, 2, Sampling(max_tokens=100, temperature=0, stop=()))
    cache = BoundedCache("full", dtype=dtype, protect_prompt=True, statistics=engine.statistics)
    twice = [prompt for prompt in PROMPTS for _ in range(2)]
    assert greedy(model, twice, cache, tokens=100) == [rollout.response for rollout in expected]
    assert cache.layers[0].held == [len(prompt) + 99 for prompt in twice]
    assert cache.kv_bytes == 6 * 3 * 64 * engine.cache.token_bytes  # 37 + 99 tokens take three pages


def test_a_dense_cache_of_codes_samples_prompts_of_whole_pages(model):
    """`num_return_sequences` repeats prompts. A prompt that fills its pages has room for the first token."""
    prompts = [[3 + number % 50 for number in range(tokens)] for tokens in (64, 63)]
    engine = Engine(model, KV(policy="full", dtype="8bit"), slots=4)
    expected = engine.generate(prompts, 2, Sampling(max_tokens=4, temperature=0, stop=()))
    cache = BoundedCache("full", dtype="8bit", statistics=engine.statistics)
    sampled = {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
    assert greedy(model, prompts, cache, tokens=4, **sampled) == [rollout.response for rollout in expected]


def test_a_dense_cache_of_codes_has_beams_and_turns(model):
    """Beams carry their rows through an allocation. Without statistics the first prompts give the scales. A second turn adds
    many tokens at once, and a reset cache starts anew."""
    first, second = list(range(3, 40)), list(range(40, 0, -1))
    logits = []
    cache = BoundedCache("full", dtype="8bit")
    for pieces in ([first, second], [first, *([token] for token in second)]):
        cache.reset()
        with torch.no_grad():
            for piece in pieces:
                out = model(torch.tensor([piece]), past_key_values=cache)
        logits.append(out.logits[0, -1])
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
    with torch.no_grad():
        plain = model(torch.tensor([first + second])).logits[0, -1]
    assert 1e-4 < float((logits[0] - plain).abs().max()) < 1
    roomy = BoundedCache("rkv", budget=128, interval=32, dtype="8bit")
    assert greedy(model, PROMPTS, BoundedCache("full", dtype="8bit"), num_beams=3) == greedy(
        model, PROMPTS, roomy, num_beams=3
    )


def test_a_dense_cache_of_codes_has_the_settings_of_training(world, tmp_path):
    """The scales are those of the run's statistics."""
    train(world, tmp_path / "run", "--kv.policy", "full", "--kv.dtype", "4bit", "--steps", "1")
    folder = tmp_path / "run/model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.set_attn_implementation("sparse_rl")
    cache = BoundedCache.from_pretrained(folder)
    assert (cache.kv.policy, cache.kv.dtype) == ("full", "4bit")
    prompts = [[5, 6, 7], list(range(3, 14)), [9] * 8]
    engine = Engine(model, cache.kv, slots=3)
    engine.load_statistics(load(folder))
    expected = engine.generate(prompts, sampling=Sampling(max_tokens=60, temperature=0, stop=()))
    assert greedy(model, prompts, cache, tokens=60) == [rollout.response for rollout in expected]


def test_padding_changes_nothing_and_never_enters_the_cache(model):
    cache = BoundedCache("streaming", **SETTINGS)
    together = greedy(model, PROMPTS, cache)
    for prompt, row in zip(PROMPTS, together, strict=True):
        assert greedy(model, [prompt], BoundedCache("streaming", **SETTINGS)) == [row]
    for layer in cache.layers:
        positions = layer.cache.positions_LSHC[0, :, :, :2]
        assert bool((positions == torch.tensor([0, 1])).all())  # the sinks are each row's first real tokens


def test_bytes_are_those_of_the_capacity(model):
    cache = BoundedCache("rkv", **SETTINGS)
    greedy(model, PROMPTS, cache, tokens=200)
    assert cache.get_seq_length() == 37 + 199
    assert cache.kv_bytes == 2 * model.config.num_hidden_layers * 3 * 2 * (24 + 6) * 16 * 4
    assert max(int(layer.cache.lengths_S.max()) for layer in cache.layers) <= 30


def test_beams_carry_their_own_cache(model):
    """With a budget that evicts nothing, beam search gives what it gives with transformers' own cache."""
    roomy = BoundedCache("rkv", budget=128, interval=32)
    assert greedy(model, PROMPTS, roomy, num_beams=3) == greedy(model, PROMPTS, None, num_beams=3)


def test_a_second_turn_continues_the_cache(model):
    """More tokens at once on a filled cache: the same as feeding them one by one."""
    first, second = PROMPTS[1], [11, 12, 13, 14, 15, 16, 17]
    logits = []
    for pieces in ([first, second], [first, *([token] for token in second)]):
        cache = BoundedCache("rkv", **SETTINGS)
        with torch.no_grad():
            for piece in pieces:
                out = model(torch.tensor([piece]), past_key_values=cache)
        logits.append(out.logits[0, -1])
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_wrong_attention_is_named(model, attention):
    model.set_attn_implementation(attention)
    with pytest.raises(UserError, match=r"set_attn_implementation\('sparse_rl'\)"):
        greedy(model, PROMPTS, BoundedCache("rkv", **SETTINGS))


def test_padding_is_read_from_the_mask_when_no_positions_are_given(model):
    """A plain forward with a left-padded mask: as with transformers' own cache while nothing is evicted."""
    tokens = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with torch.no_grad():
        ours = model(tokens, attention_mask=mask, past_key_values=BoundedCache("rkv", **SETTINGS)).logits[:, -1]
        plain = model(tokens, attention_mask=mask).logits[:, -1]
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=0)


def test_padding_elsewhere_is_refused(model):
    cache = BoundedCache("rkv", **SETTINGS)
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    with torch.no_grad():
        with pytest.raises(UserError, match="padding_side = 'left'"):
            model(tokens, attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]), past_key_values=cache)
        cache = BoundedCache("rkv", **SETTINGS)
        model(tokens, past_key_values=cache)
        with pytest.raises(
            UserError, match="BoundedCache supports padding only on the left of the first prompt: remove later padding"
        ):
            model(tokens, attention_mask=torch.tensor([[1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1]]), past_key_values=cache)


def test_a_cache_that_holds_another_call_is_refused(model):
    cache = BoundedCache("rkv", **SETTINGS)
    greedy(model, PROMPTS[:1], cache, tokens=5)
    with pytest.raises(UserError, match=r"already holds 7 tokens of another call: use a new BoundedCache, or call reset\(\)"):
        greedy(model, PROMPTS[:1], cache, tokens=5)
    cache.reset()
    greedy(model, PROMPTS[:1], cache, tokens=5)


def test_what_it_cannot_do_is_refused(model):
    with pytest.raises(UserError, match="policy='full' with dtype='auto': use transformers' DynamicCache"):
        BoundedCache("full")
    with pytest.raises(UserError, match="is too small: it must exceed window"):
        BoundedCache("rkv", budget=8)
    with pytest.raises(
        UserError,
        match="BoundedCache does not support crop: disable assisted decoding.",
    ):
        BoundedCache("rkv").crop(-1)


def test_a_protected_prompt_in_chunks_is_refused(model):
    prompt, cache = torch.tensor([list(range(5, 35))]), BoundedCache("rkv", **SETTINGS, protect_prompt=True)
    with torch.no_grad():
        model(prompt[:, :20], past_key_values=cache)
        with pytest.raises(UserError, match="takes the whole prompt in one pass"):
            model(prompt[:, 20:], past_key_values=cache)
