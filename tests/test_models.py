"""Which models run: attention we get right, or a sentence that says what is in the way."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    DogeConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhimoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from sparse_rl import KV, Engine, Sampling, UserError, load_model, load_tokenizer, replay

SIZE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = KV(budget=24, interval=6, window=4, sinks=2)


def build(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (Gemma2Config(**SIZE, head_dim=16), "soft-capped logits"),
        (
            DeepseekV3Config(
                **{**SIZE, "num_key_value_heads": 2},
                q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12,
                moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=2,
            ),
            r"keys of 16 and values of 12 dimensions \(MLA\)",
        ),
        (
            JambaConfig(**{**SIZE, "num_hidden_layers": 4}, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False,
                        num_experts=2, num_experts_per_tok=1, mamba_d_state=4, mamba_dt_rank=4),
            "calls attention 2 times in 4 layers, as hybrid models do",
        ),
        (
            FalconH1Config(**SIZE, head_dim=16, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_expand=1,
                           mamba_n_groups=1, mamba_chunk_size=8),
            "does more than attention over cached keys",
        ),
        (DogeConfig(**SIZE, keep_window_size=8), "masks attention in a way of its own"),
        (BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=2), "does not"),
        (GptOssConfig(**SIZE, head_dim=16, num_local_experts=2, num_experts_per_tok=1), "learned sinks"),
        (Phi3Config(**{**SIZE, "original_max_position_embeddings": 128}, rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 128}), "rotates by sequence length"),
    ],
    ids=["gemma2", "deepseek-mla", "jamba-hybrid", "falcon-h1-hybrid", "doge", "bloom-alibi", "gpt-oss", "phi3-longrope"],
)  # fmt: skip
def test_attention_we_do_not_get_right_is_refused(config, sentence):
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():  # fresh weights hardly mix tokens at all
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    before = model.config._attn_implementation
    with pytest.raises(UserError, match=sentence) as error:
        Engine(model, SMALL, slots=1)
    assert "\n" not in str(error.value)
    assert model.config._attn_implementation == before  # left as it was


def test_encoder_decoders_are_refused():
    model = T5ForConditionalGeneration(T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(UserError, match="encoder-decoder"):
        Engine(model, SMALL, slots=1)


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SIZE, sliding_window=64),
        Gemma3TextConfig(**SIZE, head_dim=16, sliding_window=64, layer_types=["sliding_attention", "full_attention"]),
        Llama4TextConfig(
            **SIZE, head_dim=16, attention_chunk_size=64, intermediate_size_mlp=48, num_local_experts=2, num_experts_per_tok=1
        ),
        PhimoeConfig(**SIZE, sliding_window=64, num_local_experts=2, num_experts_per_tok=1),
    ],
    ids=["mistral", "gemma3", "llama4-chunks", "phimoe-window-in-the-mask"],
)
def test_sliding_windows_run_right_within_and_are_refused_beyond(config):
    model = build(config)
    engine = Engine(model, SMALL, slots=2)
    rollouts = engine.generate([[5, 6, 7], [8] * 30], sampling=Sampling(max_tokens=34, stop=()))
    for ours, rollout in zip(replay(model, rollouts, "sparse"), rollouts, strict=True):
        torch.testing.assert_close(ours.detach(), rollout.logprobs, atol=1e-4, rtol=0)
    with pytest.raises(UserError, match=r"sliding attention window.* of 64: max_tokens = 34 fits"):
        engine.generate([[8] * 30], sampling=Sampling(max_tokens=35), allow_beyond_context=True)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=256, bos_token_id=1, eos_token_id=2),
        LlamaConfig(
            **SIZE,
            rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128},
        ),
    ],
    ids=["gpt2-learned-positions", "llama-yarn"],
)
def test_other_models_with_the_same_interface_run(config):
    model = build(config)
    rollouts = Engine(model, SMALL, slots=2).generate([[5, 6, 7], [8] * 30], sampling=Sampling(max_tokens=60, stop=()))
    for ours, rollout in zip(replay(model, rollouts, "sparse"), rollouts, strict=True):
        torch.testing.assert_close(ours.detach(), rollout.logprobs, atol=1e-4, rtol=0)


def test_learned_positions_are_never_passed_by_idle_steps():
    """A sequence that ends inside a chunk idles beside others: its position stays within the context."""
    model = build(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2))
    engine = Engine(model, SMALL, slots=2)
    rollouts = engine.generate([[5] * 7], samples=12, sampling=Sampling(max_tokens=57))
    assert "length" in {rollout.finish for rollout in rollouts}


def test_an_engine_survives_a_change_of_attention_and_notices_a_change_of_dtype():
    model = build(LlamaConfig(**SIZE))
    engine = Engine(model, SMALL, slots=1)
    sampling = Sampling(max_tokens=20, stop=())
    (before,) = engine.generate([[5, 6, 7]], sampling=sampling)
    model.set_attn_implementation("sdpa")
    (after,) = engine.generate([[5, 6, 7]], sampling=sampling)
    assert after.response == before.response
    model.to(torch.float64)
    with pytest.raises(UserError, match="build a new Engine"):
        engine.generate([[5, 6, 7]])


def test_broken_weights_are_named_and_leave_no_trace():
    model = build(LlamaConfig(**SIZE))
    engine = Engine(model, SMALL, slots=1)
    sampling = Sampling(max_tokens=20, stop=())
    (before,) = engine.generate([[5, 6, 7]], sampling=sampling)
    weight = model.model.layers[0].self_attn.v_proj.weight
    kept = weight.detach().clone()
    weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match="logits are not finite"):
        engine.generate([[5, 6, 7]], sampling=sampling)
    weight.data.copy_(kept)
    (after,) = engine.generate([[5, 6, 7]], sampling=sampling)
    assert after.response == before.response


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_run_with_a_cache_of_their_dtype(models, dtype):
    model = models["llama"].to(dtype)
    try:
        engine = Engine(model, SMALL, slots=2)
        rollouts = engine.generate([[5, 6, 7], [8] * 30], sampling=Sampling(max_tokens=60, stop=()))
        assert engine.cache.keys_LSHCD.dtype == dtype
        noise = torch.cat(
            [ours.detach() - r.logprobs for ours, r in zip(replay(model, rollouts, "sparse"), rollouts, strict=True)]
        )
        assert float(noise.abs().mean()) < 0.1  # rounding, not another distribution
    finally:
        model.to(torch.float32)


def test_a_prepared_model_still_behaves_as_before(models):
    """Without a view our attention is transformers' SDPA, padding mask included."""
    model = models["qwen3"]
    tokens = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        plain = model(tokens, attention_mask=mask).logits
        Engine(model, SMALL, slots=1)
        assert model.config._attn_implementation == "sparse_rl"
        assert torch.equal(model(tokens, attention_mask=mask).logits, plain)


def test_embedded_model_loads_by_name_and_missing_ones_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    assert model.config.model_type == "qwen2" and model.config.vocab_size == len(tokenizer)
    for load in (load_model, load_tokenizer):
        with pytest.raises(UserError, match="could not be loaded.*give a hub id, a folder"):
            load(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="dtype 'int8' is unknown"):
        load_model("tiny", dtype="int8")
