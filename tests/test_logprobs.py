"""Log-probs, entropy and divergence without the logits: the same numbers and gradients, and no large tensor."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from random_models import random_model
from sparse_rl import UserError
from sparse_rl.learner import logprobs as chunked
from sparse_rl.learner.logprobs import divergence, token_logprobs
from sparse_rl.models import compile as compiler
from sparse_rl.models.head import Head
from sparse_rl.models.support import head_of

N, D, V = 37, 16, 50


@pytest.fixture
def small_chunks(monkeypatch):
    """Five tokens at a time: 37 tokens end in an uneven chunk."""
    monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", 5 * V + 3)


def inputs(dtype, *, bias=False, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden, weight = randn(N, D).requires_grad_(), (randn(V, D) * 0.5).requires_grad_()
    bias = randn(V).requires_grad_() if bias else None
    targets = torch.randint(V, (N,), generator=generator)
    temperatures = 0.5 + torch.rand(N, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, weight, bias, targets, temperatures


def plain(hidden, weight, bias, temperatures, scale=1.0):
    return (F.linear(hidden, weight, bias) * scale / temperatures[:, None]).log_softmax(dim=-1)


def gradients(value, *leaves):
    return torch.autograd.grad(value, [leaf for leaf in leaves if leaf is not None], retain_graph=True)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("bias", "scale"), [(False, 1.0), (True, 0.25)])
def test_equals_the_plain_computation_forward_and_backward(dtype, bound, bias, scale):
    hidden, weight, bias, targets, temperatures = inputs(dtype, bias=bias)
    ours, entropy = token_logprobs(Head(weight, bias, scale), hidden, targets, temperatures)
    all_logprobs = plain(hidden, weight, bias, temperatures, scale)
    expected = all_logprobs.gather(-1, targets[:, None]).squeeze(-1)
    expected_entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    torch.testing.assert_close(ours, expected, rtol=0, atol=bound)
    torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=bound)
    weights = torch.randn(2, N, generator=torch.Generator().manual_seed(1)).to(dtype)
    mine = gradients((weights[0] * ours + weights[1] * entropy).sum(), hidden, weight, bias)
    theirs = gradients((weights[0] * expected + weights[1] * expected_entropy).sum(), hidden, weight, bias)
    for got, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=10 * bound)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", ["kl", "jsd"])
def test_divergence_equals_the_plain_one_and_teaches_the_student_alone(kind):
    student, weight, _, _, temperatures = inputs(torch.float64)
    teacher = inputs(torch.float64, seed=1)[0]
    ours = divergence(Head(weight, None, 1.0), student, teacher, temperatures, kind=kind)
    p = plain(student, weight, None, temperatures)
    q = plain(teacher.detach(), weight.detach(), None, temperatures)
    if kind == "kl":
        expected = (p.exp() * (p - q)).sum(-1)
    else:
        middle = torch.log((p.exp() + q.exp()) / 2)
        expected = ((p.exp() * (p - middle)).sum(-1) + (q.exp() * (q - middle)).sum(-1)) / 2
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    for got, wanted in zip(gradients(ours.sum(), student, weight), gradients(expected.sum(), student, weight), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)
    assert torch.autograd.grad(ours.sum(), teacher, allow_unused=True, retain_graph=True) == (None,)


@pytest.mark.parametrize("kind", ["kl", "jsd"])
def test_what_is_equal_does_not_diverge_however_logits_are_scaled(kind):
    torch.manual_seed(0)
    weight, hidden = torch.randn(500, 64).bfloat16(), (3 * torch.randn(200, 64)).bfloat16()
    apart = divergence(Head(weight, None, 1 / 3), hidden, hidden.clone(), torch.ones(200), kind=kind)
    torch.testing.assert_close(apart, torch.zeros(200), rtol=0, atol=1e-6)


@pytest.mark.usefixtures("small_chunks")
def test_top_k_is_a_lower_bound_that_tightens_to_the_whole():
    student, weight, _, _, temperatures = inputs(torch.float64)
    teacher = inputs(torch.float64, seed=1)[0]
    head = Head(weight, None, 1.0)
    bounds = [divergence(head, student, teacher, temperatures, top=top) for top in (1, 4, 16, V - 1)]
    whole = divergence(head, student, teacher, temperatures)
    for looser, tighter in zip(bounds, [*bounds[1:], whole], strict=True):
        assert bool((looser <= tighter + 1e-12).all())
    torch.testing.assert_close(bounds[-1], whole, rtol=0, atol=1e-9)
    assert float((whole - bounds[0]).detach().max()) > 0.01


def test_a_policy_is_not_apart_from_itself():
    student, weight, _, _, temperatures = inputs(torch.float32)
    apart = divergence(Head(weight, None, 1.0), student, student, temperatures)
    assert float(apart.detach().abs().max()) < 1e-6
    assert float(gradients(apart.sum(), student)[0].abs().max()) < 1e-6


class LargestTensor(TorchDispatchMode):
    """Sees every tensor that any operation returns, in backward too."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("what", ["logprobs", "divergence"])
def test_no_tensor_of_tokens_by_vocabulary_ever_exists(what, monkeypatch):
    tokens, vocab, dim = 512, 1000, 8
    monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", 16 * vocab)
    hidden, weight = torch.randn(tokens, dim, requires_grad=True), torch.randn(vocab, dim, requires_grad=True)
    head, ones = Head(weight, None, 1.0), torch.ones(tokens)
    with LargestTensor() as seen:
        if what == "logprobs":
            value = sum(part.sum() for part in token_logprobs(head, hidden, torch.zeros(tokens, dtype=torch.long), ones))
        else:
            value = divergence(head, hidden, hidden * 0.5, ones, kind="jsd").sum()
        value.backward()
    assert 16 * vocab <= seen.elements <= 2 * 16 * vocab < tokens * vocab


@pytest.mark.filterwarnings("ignore:torch.compile is not available")
def test_without_a_compiler_chunks_are_small_from_the_first_on(monkeypatch):
    """They are cut for one kernel before the compiler is asked; what it leaves to plain torch has several forms in float32."""
    monkeypatch.setattr(compiler, "_broken", [])
    monkeypatch.setattr(compiler, "_compiled", lambda function: fails)
    for module in (compiler, chunked):
        monkeypatch.setattr(module, "fuses", lambda device: not compiler._broken)
    monkeypatch.setattr(chunked, "LARGE_VOCABULARY", V)
    monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", 5 * V)
    rows = []
    for name in ("chunk_statistics", "chunk_gradient"):
        function = getattr(chunked, name)
        monkeypatch.setattr(chunked, name, lambda logits, *rest, f=function: rows.append(len(logits)) or f(logits, *rest))
    hidden, weight, _, targets, temperatures = inputs(torch.float64)
    ours, entropy = token_logprobs(Head(weight, None, 1.0), hidden, targets, temperatures)
    (grad,) = gradients((ours + entropy).sum(), hidden)
    assert compiler._broken and rows == 2 * [5, 5, 5, 5, 5, 5, 5, 2]
    everything = plain(hidden, weight, None, temperatures)
    expected = everything.gather(-1, targets[:, None])[:, 0] - (everything.exp() * everything).sum(-1)
    torch.testing.assert_close(ours + entropy, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(grad, gradients(expected.sum(), hidden)[0], rtol=0, atol=1e-11)


def fails(*args):
    raise torch._dynamo.exc.TorchDynamoException("no compiler")


def test_heads_that_scale_their_logits_are_found_and_others_refused():
    model = random_model("llama")
    own_forward = model.lm_head.forward
    head = head_of(random_model("llama"))
    assert head.scale == 1.0
    model.lm_head.forward = lambda hidden: own_forward(hidden) * 0.25
    assert head_of(model).scale == pytest.approx(0.25)
    model = random_model("llama")
    own = model.lm_head.forward
    model.lm_head.forward = lambda hidden: torch.tanh(own(hidden))
    with pytest.raises(
        UserError,
        match="post-processes its logits",
    ):
        head_of(model)
