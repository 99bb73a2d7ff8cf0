"""What makes a model quick to capture leaves it the model it was."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from conftest import ARCHITECTURES, random_model
from sparse_rl.config import OptimizerConfig
from sparse_rl.learner.optimizer import Optimizer
from sparse_rl.models.decoding import decoder_layers, decoding, fuse_projections

TOKENS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(params=ARCHITECTURES)
def model(request):
    return random_model(request.param)


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def test_projections_share_a_storage_and_stay_parameters(model):
    before, names = logits(model), {name: id(param) for name, param in model.named_parameters()}
    fuse_projections(model)
    attention = decoder_layers(model)[0].self_attn
    q, k, v = (getattr(attention, f"{name}_proj").weight for name in "qkv")
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert {name: id(param) for name, param in model.named_parameters()} == names
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
    pointer = k.data_ptr()
    fuse_projections(model)
    assert k.data_ptr() == pointer


def test_a_fused_model_is_saved_copied_and_trained_like_any_other(model, tmp_path):
    twin = copy.deepcopy(model)
    fuse_projections(model)
    before = logits(model)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[
            : model.config.num_hidden_layers
        ]  # the tests' models are cut short
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name, weight in twin.named_parameters():
        torch.testing.assert_close(saved[name], weight.detach(), rtol=0, atol=0)
    copied = copy.deepcopy(model)
    for each in (model, twin):
        optimizer = Optimizer(each, OptimizerConfig(lr=1e-2), steps=2)
        each(TOKENS, labels=TOKENS).loss.backward()
        optimizer.update(0)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=name)
    torch.testing.assert_close(logits(copied), before, rtol=0, atol=0)  # the copy has a storage of its own


@pytest.mark.slow
def test_inside_decoding_layers_are_compiled_and_outside_they_are_as_before():
    model = random_model("qwen2")
    fuse_projections(model)
    before = logits(model)
    layer = decoder_layers(model)[0]
    linear = layer.self_attn.q_proj
    with decoding(model, compile=True):
        assert type(layer.self_attn.q_proj) is not nn.Linear and "forward" in layer.__dict__
        torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            layer.mlp.down_proj.weight.mul_(2)
        changed = logits(model)
    assert layer.self_attn.q_proj is linear and "forward" not in layer.__dict__
    torch.testing.assert_close(logits(model), changed, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(changed, before)


def test_a_failure_inside_leaves_nothing_behind():
    model = random_model("llama")
    fuse_projections(model)
    layer = decoder_layers(model)[0]
    with pytest.raises(RuntimeError), decoding(model, compile=True):
        raise RuntimeError
    assert type(layer.self_attn.q_proj) is nn.Linear and "forward" not in layer.__dict__
