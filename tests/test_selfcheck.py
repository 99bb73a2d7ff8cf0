"""Models that load and would be wrong are refused before they sample, and right ones are not."""

import pytest
import torch
from transformers import (
    FalconH1Config,
    Gemma3TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    NanoChatConfig,
    Qwen2Config,
    RobertaConfig,
)
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

from sparse_rl import Engine, UserError
from sparse_rl.models import support
from sparse_rl.models.reduced import reduced
from sparse_rl.models.support import head_of
from sparse_rl.rollout import selfcheck
from test_models import SIZE, SMALL, build, scaled


def llama4(**options):
    """With a layer without rotary embedding, whose attention grows with the position."""
    size = {**SIZE, "num_hidden_layers": 4, "intermediate_size_mlp": 48, "head_dim": 16}
    return Llama4TextConfig(
        **(size | {"num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 64} | options)
    )


FALCON_H1 = FalconH1Config(
    **SIZE, head_dim=16, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_expand=1, mamba_n_groups=1,
    mamba_chunk_size=8,
)  # fmt: skip
WRONG = {
    "roberta": RobertaConfig(**{name: value for name, value in SIZE.items() if name != "num_key_value_heads"}),
    "minimax-m3": MiniMaxM3VLTextConfig(
        **SIZE, head_dim=16, rotary_dim=8, num_local_experts=2, num_experts_per_tok=1, dense_intermediate_size=48,
        shared_intermediate_size=48, index_n_heads=1, index_head_dim=16, layer_types=["full_attention", "minimax_m3_sparse"],
    ),
    "llama4-positions": llama4(floor_scale=16),
    "llama4-positions-far-out": llama4(attention_chunk_size=8192, max_position_embeddings=65536),
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1), (torch.bfloat16, 4), (torch.float16, 1)])
@pytest.mark.parametrize("name", WRONG)
def test_models_that_would_be_wrong_are_refused_in_every_dtype(name, dtype, scale):
    """Also with fresh weights, which hardly mix tokens at all, and where rounding hides what is wrong."""
    with pytest.raises(UserError) as error:
        Engine(scaled(build(WRONG[name]), scale).to(dtype), SMALL, slots=1)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_beside_the_cache_shows_in_log_probs(monkeypatch, dtype):
    """Whatever the configuration calls its layers: here a recurrent layer that keeps its state to itself."""
    monkeypatch.setattr(support, "_refuse_by_layers", lambda model, config, kind: None)
    model = scaled(build(FALCON_H1), 4).to(dtype)
    for layer in model.model.layers:
        layer.mamba.__class__ = Unknown
    with pytest.raises(
        UserError,
        match="log-probs differ by up to .* between one pass and step-by-step decoding",
    ):
        Engine(model, SMALL, slots=1)


class Unknown(FalconH1Mixer):
    def forward(self, hidden_states, *, sparse_view=None, **kwargs):
        return super().forward(hidden_states, **kwargs)


@pytest.mark.parametrize("scale", [1, 16])
def test_a_soft_cap_of_the_logits_is_found(scale):
    """Also where the logits are at the cap. A cap that the configuration does not state is refused."""
    model = scaled(build(NanoChatConfig(**SIZE)), scale)
    assert (head_of(model).scale, head_of(model).softcap) == (pytest.approx(1.0, abs=1e-3), 15.0)
    model = build(NanoChatConfig(**SIZE))
    model.lm_head.forward = lambda hidden, own=model.lm_head.forward: 30 * torch.tanh(own(hidden) / 30)
    with pytest.raises(UserError, match="post-processes its logits"):
        head_of(model)


def magnifying(layers):
    """As Qwen2.5, whose keys have biases of hundreds."""
    model = build(Qwen2Config(**{**SIZE, "num_hidden_layers": layers}))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_(0, 1000)
    return model


def test_rounding_that_a_model_magnifies_is_not_held_against_it_but_for_a_bound(monkeypatch):
    Engine(magnifying(8), SMALL, slots=1)
    monkeypatch.setattr(selfcheck, "MAX_GAP_FLOAT32", 0.0)
    Engine(magnifying(8), SMALL, slots=1)
    monkeypatch.setattr(selfcheck, "MAX_TOLERANCE", 0.0)
    with pytest.raises(
        UserError,
        match=" between one pass and step-by-step decoding",
    ):
        Engine(magnifying(8), SMALL, slots=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stand_in_has_a_layer_of_each_kind_in_float32_and_says_what_the_model_says(dtype):
    config = Gemma3TextConfig(**{**SIZE, "num_hidden_layers": 7, "vocab_size": 3000}, head_dim=16, sliding_window=64)
    model = build(config).to(dtype)
    small = reduced(model)
    assert [layer.self_attn.layer_idx for layer in small.model.layers] == [0, 1] and model.config.num_hidden_layers == 7
    assert small.config.layer_types == ["sliding_attention", "full_attention"]
    assert {weight.dtype for weight in small.parameters()} == {torch.float32} and len(small.lm_head.weight) == 1024
    shared = small.model.layers[0].mlp.up_proj.weight.data_ptr() == model.model.layers[0].mlp.up_proj.weight.data_ptr()
    assert shared == (dtype == torch.float32)  # float32 weights are not copied
    model.model.layers = torch.nn.ModuleList([model.model.layers[0], model.model.layers[5]])
    model.config.layer_types, model.config.num_hidden_layers = small.config.layer_types, 2
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        theirs = model.to(torch.float32)(tokens, use_cache=False).logits[..., :1024]
    torch.testing.assert_close(small(tokens, use_cache=False).logits, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rule_that_the_stand_in_breaks_refuses_the_model(monkeypatch, dtype):
    """In half precision the whole model is looked at more loosely, so that is no way out."""

    def as_encoder_decoder(model):
        small = reduced(model)
        small.config.is_encoder_decoder = True
        return small

    monkeypatch.setattr(selfcheck, "reduced", as_encoder_decoder)
    with pytest.raises(UserError, match="is an encoder-decoder model"):
        Engine(build(LlamaConfig(**SIZE)).to(dtype), SMALL, slots=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_the_stand_in_does_not_run_the_model_is_looked_at_whole(monkeypatch, dtype):
    def broken(model):
        small = reduced(model)
        small.model.layers[0].mlp = torch.nn.Linear(1, 1)
        return small

    monkeypatch.setattr(selfcheck, "reduced", broken)
    model, comparisons = build(LlamaConfig(**SIZE)).to(dtype), []
    compare = selfcheck._compare
    monkeypatch.setattr(selfcheck, "_compare", lambda *args: comparisons.append(args) or compare(*args))
    Engine(model, SMALL, slots=1)
    assert comparisons[0][0] is model


def test_a_model_is_checked_once(monkeypatch):
    model, comparisons = build(LlamaConfig(**SIZE)), []
    compare = selfcheck._compare
    monkeypatch.setattr(selfcheck, "_compare", lambda *args: comparisons.append(args) or compare(*args))
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        Engine(model.to(dtype), SMALL, slots=1)
    assert len(comparisons) == 2
