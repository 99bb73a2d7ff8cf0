"""Rotary positions read from a model: pairs, frequencies and layers, for every kind of rotary embedding in use."""

import pytest
import torch
from transformers import (
    Cohere2Config,
    CohereConfig,
    Gemma3TextConfig,
    GlmConfig,
    GPTNeoXConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    Qwen3Config,
    SmolLM3Config,
)

from sparse_rl import UserError
from sparse_rl.kv.rotary import Rotary, from_pairs, to_pairs
from sparse_rl.models.attention import attend_to_itself
from sparse_rl.models.head import decoder_output
from sparse_rl.models.rotary import rotary_of
from sparse_rl.models.support import prepare
from test_models import build

SIZE = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SIZE | {"num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 2048}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * f for f in range(8)],
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 8192,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
HALF, INTERLEAVED = (lambda f, n: (f, f + n)), (lambda f, n: (2 * f, 2 * f + 1))
CONFIGS = {
    "half-split": (LlamaConfig(**GROUPED), HALF),
    "low frequencies": (
        LlamaConfig(**GROUPED, head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 5e7}),
        HALF,
    ),
    "multi-query": (MistralConfig(**SIZE, num_key_value_heads=1), HALF),
    "normalised, own head dimension": (Qwen3Config(**GROUPED, head_dim=24), HALF),
    "llama3": (LlamaConfig(**GROUPED, rope_parameters=LLAMA3), HALF),
    "yarn": (LlamaConfig(**GROUPED, rope_parameters=YARN), HALF),
    "linear": (LlamaConfig(**GROUPED, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}), HALF),
    "dynamic": (LlamaConfig(**GROUPED, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), HALF),
    "longrope": (LlamaConfig(**GROUPED, rope_parameters=LONGROPE), HALF),
    "interleaved": (CohereConfig(**GROUPED), INTERLEAVED),
    "partial": (PhiConfig(**GROUPED), HALF),
    "partial, a quarter": (GPTNeoXConfig(**SIZE), HALF),
    "partial, interleaved": (GlmConfig(**GROUPED, head_dim=16), INTERLEAVED),
}


def frequencies_of(model, name="inv_freq"):
    """The frequencies in the model's own buffer, which its rotary embedding multiplies by positions."""
    (found,) = [buffer for path, buffer in model.named_buffers() if path.endswith(f"rotary_emb.{name}")]
    return found.double()


def layers_at(model, place):
    """Queries and keys of single tokens at one position, in every layer of the whole model."""
    found = {}

    class View:
        def attend(self, layer, queries, keys, values, scale, mask, form=None):
            found[layer] = (queries, keys)
            return attend_to_itself(queries, values)

    prepare(model)
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        decoder_output(model, tokens, torch.full_like(tokens, place), View())
    return found


def assert_unrotates(model, rotary):
    """Queries and keys at any position, rotated back, are those at position 0."""
    start = layers_at(model, 0)
    for place in (1, 37, 5000):
        positions = torch.full((1, 37), place)
        for layer, moved in layers_at(model, place).items():
            pairs = rotary.pairs_LF2[layer, None]
            for here, there in zip(start[layer], moved, strict=True):
                back = from_pairs(rotary.unrotated(layer, there, positions), pairs)
                torch.testing.assert_close(back, here, atol=2e-3 * float(here.abs().max()), rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_pairs_and_frequencies_are_those_of_the_model(name):
    config, pair = CONFIGS[name]
    model = build(config)
    rotary, known = rotary_of(model, "triattention"), frequencies_of(model)
    rotated = len(known)
    for layer in range(4):
        pairs = {tuple(each): f for f, each in enumerate(rotary.pairs_LF2[layer].tolist())}
        for f in range(rotated):
            found = rotary.frequencies_LF[layer, pairs[pair(f, rotated)]]
            assert float((found - known[f]).abs() / known[f]) < 1e-6
        assert not bool(rotary.frequencies_LF[layer, rotated:].any())
        assert sorted(rotary.pairs_LF2[layer].flatten().tolist()) == list(range(2 * rotary.pairs_LF2.shape[1]))
    assert_unrotates(model, rotary)


def test_half_precision_reads_the_same_frequencies():
    config, _ = CONFIGS["low frequencies"]
    model = build(config)
    exact = rotary_of(model, "triattention")
    half = rotary_of(build(config).to(torch.bfloat16), "triattention")  # the buffer of frequencies is rounded as well
    assert torch.equal(exact.pairs_LF2, half.pairs_LF2)
    torch.testing.assert_close(half.frequencies_LF, exact.frequencies_LF.bfloat16().double(), atol=0, rtol=1e-6)


def test_layers_may_rotate_differently_or_not_at_all():
    """Gemma 3 has two frequencies, and three families have layers without positions."""
    gemma = build(Gemma3TextConfig(**GROUPED, head_dim=16, layer_types=SLIDING, sliding_window=8192))
    rotary = rotary_of(gemma, "expected")
    for layer, kind in enumerate(SLIDING):
        known = frequencies_of(gemma, f"{kind}_inv_freq")
        torch.testing.assert_close(rotary.frequencies_LF[layer], known, atol=0, rtol=1e-6)
    assert not torch.equal(rotary.frequencies_LF[0], rotary.frequencies_LF[1])
    for config, still in (
        (SmolLM3Config(**GROUPED, no_rope_layers=[1, 1, 0, 1]), [2]),
        (Cohere2Config(**GROUPED, layer_types=SLIDING, sliding_window=8192), [1, 3]),
        (Llama4TextConfig(**GROUPED, head_dim=16, intermediate_size_mlp=48, num_local_experts=2), [3]),
    ):
        model = build(config)
        rotary = rotary_of(model, "expected")
        assert [layer for layer in range(4) if not bool(rotary.frequencies_LF[layer].any())] == still


def test_a_table_of_positions_is_refused():
    small = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32}
    model = build(OPTConfig(**small, word_embed_proj_dim=32, max_position_embeddings=256))
    with pytest.raises(
        UserError, match=r"OPTForCausalLM cannot be read .* not by a rotation.* set kv.policy = streaming or rkv"
    ):
        rotary_of(model, "triattention")


def test_no_positions_at_all_are_refused():
    model = build(SmolLM3Config(**GROUPED, no_rope_layers=[0, 0, 0, 0]))
    with pytest.raises(UserError, match="SmolLM3ForCausalLM has no rotary positions"):
        rotary_of(model, "triattention")


def test_pairs_and_vectors_convert_both_ways():
    pairs = torch.tensor([[[3, 0], [1, 5], [4, 2]], [[0, 1], [2, 3], [4, 5]]])
    vectors = torch.randn(2, 3, 4, 6)
    assert torch.equal(from_pairs(to_pairs(vectors, pairs), pairs), vectors)
    assert torch.equal(to_pairs(vectors, pairs)[0, ..., 1].imag, vectors[0, ..., 5])


def test_half_split_is_the_rotation_of_llama():
    model = build(LlamaConfig(**GROUPED))
    ours, read = Rotary.half_split(4, 16), rotary_of(model, "triattention")
    assert torch.equal(ours.pairs_LF2, read.pairs_LF2)
    torch.testing.assert_close(ours.frequencies_LF, read.frequencies_LF, atol=0, rtol=1e-6)
