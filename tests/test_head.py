"""Logits in float32, in sampler and learner alike."""

import copy

import pytest
import torch
import torch.nn.functional as F

from random_models import random_model
from small_runs import arguments, refused
from sparse_rl import KV, Engine, Sampling, load_model, replay
from sparse_rl.config import LoraConfig
from sparse_rl.errors import UserError
from sparse_rl.learner.logprobs import token_logprobs
from sparse_rl.models.actor import Actor
from sparse_rl.models.head import Head
from sparse_rl.models.support import head_of, next_logits, set_head_dtype

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # bfloat16 on a CPU that has none


def half(name="qwen2", **how):
    return random_model(name, **how).to(torch.bfloat16)


def noise(dtype):
    """Return the mean distance of the sampler's log-probs and the replayed ones, of the embedded model in half precision."""
    model = load_model("tiny", dtype="bfloat16", device="cpu")
    set_head_dtype(model, dtype)
    vocab = model.config.vocab_size
    prompts = torch.randint(vocab, (4, 8), generator=torch.Generator().manual_seed(0)).tolist()
    engine = Engine(model, KV(policy="rkv", budget=16, interval=8, window=4, sinks=2, protect_prompt=False), slots=4)
    rollouts = engine.generate(prompts, sampling=Sampling(max_tokens=32, stop=()))
    with torch.no_grad():
        pairs = zip(replay(model, rollouts, "sparse"), rollouts, strict=True)
        return float(torch.cat([(ours - rollout.logprobs).abs() for ours, rollout in pairs]).mean())


def test_logits_in_float32_leave_less_noise_between_sampler_and_learner():
    assert noise("float32") < 0.6 * noise("bfloat16")


def test_log_probs_are_those_of_products_that_are_not_rounded():
    model = half()
    head = head_of(model)
    hidden = torch.randn(30, 64).bfloat16().requires_grad_()
    targets = torch.randint(61, (30,))
    ours, _ = token_logprobs(head, hidden, targets, torch.ones(30))
    leaf = hidden.detach().float().requires_grad_()
    expected = F.linear(leaf, head.weight_VD.float()).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    rounded, _ = token_logprobs(Head(head.weight_VD, None, 1.0), hidden, targets, torch.ones(30))
    assert float((rounded - expected).detach().abs().max()) > 1e-3
    (grad,) = torch.autograd.grad(ours.sum(), hidden)
    (wanted,) = torch.autograd.grad(expected.sum(), leaf)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad.float(), wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max()))


def test_the_sampler_and_every_copy_of_the_model_have_the_same_head():
    class Alone:
        def attend(self, layer, queries, keys, values, scale, mask, form=None):
            return values.repeat_interleave(queries.shape[1] // values.shape[1], dim=1)

    model, token = half(), torch.ones(1, 1, dtype=torch.long)
    head_of(model)
    assert next_logits(model, token, token, Alone(), keep=1).dtype == torch.float32
    set_head_dtype(model, "bfloat16")
    for each in (model, copy.deepcopy(model), Actor(model, LoraConfig(rank=2)).sampler):
        head_of(each)
        assert next_logits(each, token, token, Alone(), keep=1).dtype == head_of(each).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_a_float32_model_gives_its_own_logits(name):
    model = random_model(name)
    assert head_of(model).dtype == torch.float32
    with pytest.raises(UserError, match=r"model.head_dtype = bfloat16 is narrower than the model's dtype float32: set"):
        set_head_dtype(model, "bfloat16")


def test_a_head_that_is_too_narrow_ends_a_run_before_it_begins(world, tmp_path, capsys):
    flags = ("--model.head-dtype", "bfloat16", "--model.dtype", "float32")
    said = refused(capsys, *arguments(world, tmp_path / "run", *flags))
    assert "model.head_dtype = bfloat16 is narrower than the model's dtype float32" in said
    assert not (tmp_path / "run").exists()
