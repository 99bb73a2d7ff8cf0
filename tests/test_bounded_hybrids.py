"""`BoundedCache` in `model.generate` for hybrid models: bounded attention beside transformers' own recurrent states."""

import pytest
import torch
from transformers import DynamicCache

from sparse_rl import Engine, Sampling, UserError
from sparse_rl.integrations.transformers import BoundedCache
from sparse_rl.kv.statistics import KeyRanges
from sparse_rl.rollout.calibrate import calibrate
from test_hybrid import BOUNDED, KINDS, LONG, ROUNDING, family
from test_transformers_cache import greedy
from test_windows import chosen, farthest

SETTINGS = BOUNDED.model_dump(include={"budget", "interval", "window", "sinks"})
PROMPTS = [LONG[:20], LONG]
ROOMY = {"policy": "rkv", "budget": 128, "interval": 32}
"""Settings with which nothing is evicted."""


@pytest.fixture(scope="module")
def models():
    made = {name: family(name) for name in [*KINDS, "olmo-hybrid"]}
    for model in made.values():
        model.set_attn_implementation("sparse_rl")
    return made


def last_logits(model, pieces, cache):
    """Logits after the last of the pieces, which enter the cache in turn."""
    with torch.no_grad():
        return [model(torch.tensor(piece), past_key_values=cache).logits[:, -1] for piece in pieces][-1]


@pytest.mark.parametrize(
    ("name", "policy", "protect_prompt"),
    [
        ("qwen3.5", "triattention", False),  # its statistics are of the attention layers alone
        ("lfm2", "rkv", False),
        ("falcon-h1", "rkv", True),
        ("nemotron-h", "rkv", False),
    ],
)
def test_generate_with_a_bounded_cache_is_the_engine(models, name, policy, protect_prompt):
    """Tokens and log-probs of two samples per prompt in a left-padded batch. `test_model_table.py` does so for each family."""
    model, kv = models[name], BOUNDED.model_copy(update={"policy": policy, "protect_prompt": protect_prompt})
    tokens, mask = torch.zeros(2, len(PROMPTS), len(LONG), dtype=torch.long)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, -len(prompt) :], mask[row, -len(prompt) :] = torch.tensor(prompt), 1
    engine = Engine(model, kv, slots=4)
    rollouts = engine.generate(PROMPTS, 2, Sampling(max_tokens=12, stop=(), temperature=0))
    cache = BoundedCache(policy, **SETTINGS, protect_prompt=protect_prompt, statistics=engine.statistics)
    sampled = {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "max_new_tokens": 12, "eos_token_id": None}
    out = model.generate(
        tokens, attention_mask=mask, past_key_values=cache, output_logits=True, return_dict_in_generate=True, **sampled
    )
    assert out.sequences[:, len(LONG) :].tolist() == [rollout.response for rollout in rollouts]
    logits = torch.stack(out.logits, dim=1)
    found = [chosen(logits[row], rollout.response) for row, rollout in enumerate(rollouts)]
    assert farthest(found, [rollout.logprobs for rollout in rollouts]) < 2 * ROUNDING
    if not protect_prompt:  # else each row has its own copy of the prompt
        assert cache.kv_bytes == engine.cache.kv_bytes  # with the states


@pytest.mark.parametrize("name", ["lfm2", "falcon-h1"])
def test_beams_carry_their_states(models, name):
    model = models[name]
    own = greedy(model, PROMPTS, None, tokens=8, num_beams=3)
    assert greedy(model, PROMPTS, BoundedCache(**ROOMY), tokens=8, num_beams=3) == own


@pytest.mark.parametrize("name", [*KINDS, "olmo-hybrid"])
def test_a_second_turn_continues_the_states(models, name):
    """More tokens at once on a filled cache: the same as one by one. A reset cache may have another number of rows."""
    model, cache = models[name], BoundedCache("rkv", **SETTINGS)
    first, second = LONG[:30], LONG[30:37]
    expected = last_logits(model, [[first], *([[token]] for token in second)], cache)
    for rows in (1, 2):
        cache.reset()
        assert cache.get_seq_length() == cache.kv_bytes == 0
        found = last_logits(model, [[first] * rows, [second] * rows], cache)
        torch.testing.assert_close(found, expected.expand(rows, -1), atol=2e-5, rtol=0)


def test_a_chunked_prefill_is_that_of_transformers(models):
    model, options = models["falcon-h1"], {"tokens": 8, "prefill_chunk_size": 20}
    own = greedy(model, [LONG], DynamicCache(config=model.config), **options)
    assert greedy(model, [LONG], BoundedCache(**ROOMY), **options) == own


def test_a_layer_that_names_no_layer_learns_if_the_pass_continues(models):
    """OLMo-Hybrid asks so in transformers 5.17, also after earlier layers of the first pass have a state."""
    model, cache, answers = models["olmo-hybrid"], BoundedCache("rkv", **SETTINGS), []
    hooks = [
        layer.register_forward_pre_hook(lambda *_: answers.append(cache.has_previous_state())) for layer in model.model.layers
    ]
    last_logits(model, [[LONG], [[5]]], cache)
    for hook in hooks:
        hook.remove()
    assert answers == [False] * 3 + [True] * 3


@pytest.mark.parametrize(("name", "dtype", "bound"), [("qwen3.5", "8bit", 0.01), ("falcon-h1", "4bit", 0.5)])
def test_keys_are_quantised_beside_states(models, name, dtype, bound):
    """Without evictions only the codes differ from transformers' own cache. Scales of statistics are those of the prompt here."""
    model, pieces, ranges = models[name], [[LONG[:40]], [LONG[40:]]], KeyRanges()
    plain = last_logits(model, pieces, DynamicCache(config=model.config))
    found = last_logits(model, pieces, BoundedCache("full", dtype=dtype))
    assert 1e-5 < float((found - plain).abs().max() / plain.std()) < bound
    calibrate(model, [LONG[:40]], 0, [ranges])
    again = last_logits(model, pieces, BoundedCache(**ROOMY, dtype=dtype, statistics=ranges.statistics()))
    torch.testing.assert_close(again, found, atol=bound / 10, rtol=0)


def test_layers_with_several_states_are_refused():
    cache = BoundedCache("rkv", **SETTINGS)
    with pytest.raises(UserError, match="supports one state per recurrent layer: use transformers' DynamicCache"):
        cache.get_conv_state(0, state_idx=1)
    with pytest.raises(UserError, match="supports one state per recurrent layer: use transformers' DynamicCache"):
        cache.update_conv_state(torch.zeros(1, 2, 3), 0, state_idx=1)
