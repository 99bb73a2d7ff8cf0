"""One optimizer update: its gradient is METHOD's objective token by token, however it is cut, for every method."""

import copy
import math

import pytest
import torch

from random_models import random_model
from sparse_rl import KV, Engine, Sampling, replay
from sparse_rl.config import PRESETS, LossConfig, OptimizerConfig, SMDConfig
from sparse_rl.learner import logprobs as chunked
from sparse_rl.learner.batch import make_batch, padded, response_mask
from sparse_rl.learner.correction import correct
from sparse_rl.learner.losses import LOSSES
from sparse_rl.learner.objective import Objective
from sparse_rl.learner.optimizer import Optimizer, checkpointed
from sparse_rl.learner.packing import packs
from sparse_rl.learner.replay import forward
from sparse_rl.learner.update import accumulate, update
from sparse_rl.models.compile import decoder_layers
from sparse_rl.models.support import head_of

MAX_TOKENS = 24
VETO = 0.2  # high enough to reject some of these rollouts and not all


@pytest.fixture(scope="module")
def sampled():
    """A float64 model, rollouts that lost keys, old log-probs of slightly other weights, and a reference."""
    model = random_model("qwen2").double()
    kv = KV(policy="random", budget=8, interval=4, window=2, sinks=1, protect_prompt=False)
    prompts = [[2, 5, 9, 4, 7], [2, 8, 3], [2, 30, 31, 32]]
    sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0.8, stop=(1,), seed=3)
    rollouts = Engine(model, kv, slots=4).generate(prompts, samples=4, sampling=sampling)
    assert len({len(rollout.response) for rollout in rollouts}) > 1
    return model, rollouts


def moved(model, seed, size=0.01):
    """A copy with other weights."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(size * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return other


def no_grad_replay(model, rollouts, view):
    with torch.no_grad():
        return replay(model, rollouts, view)


def batch_of(model, rollouts, loss, preset="paper", view="dense", reference=None):
    """As the trainer makes it: old log-probs of the weights that sampled, advantages that differ in sign and size."""
    old = no_grad_replay(model, rollouts, view)
    dense = no_grad_replay(model, rollouts, "dense")
    log_xi = padded(dense) - padded([rollout.logprobs for rollout in rollouts])
    veto = {"veto": VETO} if PRESETS[preset].veto else {}
    corrected = correct(torch.zeros_like(log_xi) if view == "sparse" else log_xi, response_mask(rollouts), preset, **veto)
    advantages = torch.linspace(-1.5, 1.2, len(rollouts), dtype=torch.float64)
    return make_batch(rollouts, advantages, old, corrected, loss, MAX_TOKENS, reference)


def gradients(model):
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def gradient_of(model, batch, loss, *, tokens=10**6, view="dense", smd=None):
    model.zero_grad()
    sums = accumulate(
        model, batch, list(packs(batch.rollouts, tokens, share_prompts=view == "dense")), Objective(loss, view, smd)
    )
    return gradients(model), sums


def assert_close(ours, theirs, bound):
    scale = max(float(each.abs().max()) for each in theirs)
    assert scale > 1e-6
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) <= bound * scale


def plain_logits(model, rollout):
    """Of plain transformers, with its own attention."""
    model.set_attn_implementation("eager")
    logits = model(torch.tensor([rollout.prompt + rollout.response[:-1]]), use_cache=False).logits[0]
    return logits[len(rollout.prompt) - 1 :] / rollout.temperature


@pytest.mark.parametrize("preset", ["none", "paper"])
def test_an_update_is_the_gradient_of_the_objective_token_by_token(sampled, preset):
    """METHOD §2 in a double loop over sequences and tokens, on logits of plain transformers attention."""
    sampler, rollouts = sampled
    learner, reference = moved(sampler, 1), moved(sampler, 2)
    loss = LossConfig(name="grpo", clip_low=0.02, clip_high=0.03, kl_coef=0.3, kl_estimator="k3", entropy_coef=0.1)
    ref_logprobs = no_grad_replay(reference, rollouts, "dense")
    batch = batch_of(sampler, rollouts, loss, preset, reference=ref_logprobs)
    ours, _ = gradient_of(learner, batch, loss)

    plain, plain_old, plain_ref = (copy.deepcopy(model) for model in (learner, sampler, reference))
    objective = torch.zeros((), dtype=torch.float64)
    vetoed, clipped = 0, 0
    for i, rollout in enumerate(rollouts):
        logits = plain_logits(plain, rollout)
        with torch.no_grad():
            old_logits, ref_logits = (plain_logits(each, rollout) for each in (plain_old, plain_ref))
        terms, ratios = [], []
        for t, token in enumerate(rollout.response):
            log_p = logits[t].log_softmax(-1)
            old, ref = float(old_logits[t].log_softmax(-1)[token]), float(ref_logits[t].log_softmax(-1)[token])
            xi = math.exp(old - float(rollout.logprobs[t]))
            ratios.append(xi)
            w = torch.exp(log_p[token] - old)
            advantage = float(batch.advantages_B[i])
            surrogate = torch.minimum(w * advantage, w.clamp(0.98, 1.03) * advantage)
            clipped += int(float(surrogate.detach()) != float((w * advantage).detach()))
            log_r = ref - log_p[token]
            kl = torch.exp(log_r) - 1 - log_r
            entropy = -(log_p.exp() * log_p).sum()
            terms.append((surrogate, xi, kl, entropy))
        keep = 1.0 if preset == "none" or min(ratios) >= VETO else 0.0
        vetoed += keep == 0.0
        for surrogate, xi, kl, entropy in terms:
            weight = 1.0 if preset == "none" else xi
            share = 1 / (len(rollouts) * len(rollout.response))
            objective = objective + share * (keep * weight * surrogate - 0.3 * kl + 0.1 * entropy)
    (-objective).backward()
    assert clipped > 5 and (preset == "none" or 0 < vetoed < len(rollouts))
    assert_close(ours, gradients(plain), 1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("preset", ["paper", "released"])
def test_nothing_depends_on_how_an_update_is_cut(sampled, name, preset):
    sampler, rollouts = sampled
    learner = moved(sampler, 1)
    loss = LossConfig(name=name, kl_coef=0.1, entropy_coef=0.05)
    batch = batch_of(sampler, rollouts, loss, preset, reference=no_grad_replay(sampler, rollouts, "dense"))
    whole, whole_sums = gradient_of(learner, batch, loss)
    for tokens in (1, 40, 100):
        cut, cut_sums = gradient_of(learner, batch, loss, tokens=tokens)
        assert_close(cut, whole, 1e-6)
        assert cut_sums == pytest.approx(whole_sums, rel=1e-9)


def test_nothing_depends_on_how_smd_is_cut(sampled):
    sampler, rollouts = sampled
    learner, loss = moved(sampler, 1), LossConfig()
    batch = batch_of(sampler, rollouts, loss, "none", view="sparse")
    whole, _ = gradient_of(learner, batch, loss, view="sparse", smd=SMDConfig())
    cut, _ = gradient_of(learner, batch, loss, tokens=40, view="sparse", smd=SMDConfig())
    assert_close(cut, whole, 1e-6)


def test_paper_with_a_ratio_of_one_is_plain_grpo(sampled):
    sampler, rollouts = sampled
    learner, loss = moved(sampler, 1), LossConfig()
    mask = response_mask(rollouts)
    old = no_grad_replay(sampler, rollouts, "dense")
    advantages = torch.linspace(-1, 1, len(rollouts), dtype=torch.float64)
    results = []
    for preset in ("paper", "none"):
        corrected = correct(torch.zeros(mask.shape, dtype=torch.float64), mask, preset)
        batch = make_batch(rollouts, advantages, old, corrected, loss, MAX_TOKENS)
        results.append(gradient_of(learner, batch, loss)[0])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_smd_with_nothing_evicted_is_on_policy_grpo_and_no_divergence(sampled):
    model, _ = sampled
    rollouts = Engine(model, KV(policy="random", budget=64, interval=8, protect_prompt=False), slots=4).generate(
        [[2, 5, 9]], samples=4, sampling=Sampling(max_tokens=12)
    )
    learner, loss = moved(model, 1), LossConfig()
    dense, _ = gradient_of(learner, batch_of(model, rollouts, loss, "none"), loss)
    batch = batch_of(model, rollouts, loss, "none", view="sparse")
    smd, sums = gradient_of(learner, batch, loss, view="sparse", smd=SMDConfig())
    assert abs(sums["distillation_kl"]) < 1e-9
    assert_close(smd, dense, 1e-9)


@pytest.mark.parametrize("direction", ["dense_to_shadow", "shadow_to_dense", "jsd"])
def test_distillation_takes_its_gradient_through_one_pass_alone(sampled, direction):
    """Against λ times the mean divergence from a second model, the teacher, that is out of reach of any gradient."""
    sampler, rollouts = sampled
    learner, loss = moved(sampler, 1), LossConfig()
    batch = batch_of(sampler, rollouts, loss, "none", view="sparse")
    with_kl, _ = gradient_of(learner, batch, loss, view="sparse", smd=SMDConfig(direction=direction, **{"lambda": 0.5}))
    without, _ = gradient_of(learner, batch, loss, view="sparse")
    student_view, teacher_view = ("sparse", "dense") if direction == "shadow_to_dense" else ("dense", "sparse")

    def all_logprobs(model, rollout, view):
        seen = forward(model, [rollout], view)
        return (head_of(model)(seen.hidden_nD) / seen.temperatures_n[:, None]).log_softmax(-1)

    teacher, student = copy.deepcopy(learner), copy.deepcopy(learner)
    student.zero_grad()
    objective = torch.zeros((), dtype=torch.float64)
    for rollout in rollouts:
        p = all_logprobs(student, rollout, student_view)
        q = all_logprobs(teacher, rollout, teacher_view).detach()
        kl = (p.exp() * (p - q)).sum(-1)
        if direction == "jsd":
            m = torch.log((p.exp() + q.exp()) / 2)
            kl = 0.5 * ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1))
        objective = objective + 0.5 * kl.mean() / len(rollouts)
    objective.backward()
    assert_close([a - b for a, b in zip(with_kl, without, strict=True)], gradients(student), 1e-6)


def test_log_prob_chunks_do_not_change_an_update(sampled, monkeypatch):
    sampler, rollouts = sampled
    learner, loss = moved(sampler, 1), LossConfig()
    batch = batch_of(sampler, rollouts, loss)
    whole, _ = gradient_of(learner, batch, loss)
    monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", 3 * 61)
    cut, _ = gradient_of(learner, batch, loss)
    assert_close(cut, whole, 1e-9)


@pytest.mark.parametrize("view", ["dense", "sparse"])
@pytest.mark.parametrize("layers", [1, 2])
def test_gradient_checkpointing_changes_no_gradient(sampled, view, layers):
    sampler, rollouts = sampled
    learner, loss = moved(sampler, 1), LossConfig()
    batch = batch_of(sampler, rollouts, loss, "none", view=view)
    plain, _ = gradient_of(learner, batch, loss, view=view)
    with checkpointed(learner, layers):
        training = [layer.training for layer in decoder_layers(learner)]
        assert training == [True] * layers + [False] * (len(training) - layers)
        again, _ = gradient_of(learner, batch, loss, view=view)
    assert not any(module.training for module in learner.modules())
    assert_close(again, plain, 1e-12)


def test_rows_that_teach_nothing_do_not_pass_through_the_model(sampled, monkeypatch):
    """Rejected or worth as much as their group: leaving them out changes nothing but the time."""
    sampler, rollouts = sampled
    learner, loss = moved(sampler, 1), LossConfig()
    batch = batch_of(sampler, rollouts, loss)
    batch.advantages_B[2] = 0
    active = batch.active
    assert 2 not in active and len(active) < len(rollouts) - 1  # some were rejected
    whole, _ = gradient_of(learner, batch, loss)
    learner.zero_grad()
    accumulate(learner, batch, [active], Objective(loss))
    assert_close(gradients(learner), whole, 1e-12)


@pytest.mark.parametrize("beside", [{"kl_coef": 0.3}, {"entropy_coef": 0.1}, {"smd": SMDConfig()}], ids=str)
def test_rejected_rollouts_count_in_the_terms_beside_the_loss(sampled, beside):
    """`update` runs the rows that the policy loss leaves out, so its gradient is that of the whole batch."""
    sampler, rollouts = sampled
    smd = beside.get("smd")
    learner, loss = moved(sampler, 1), LossConfig(**{key: value for key, value in beside.items() if key != "smd"})
    reference = no_grad_replay(moved(sampler, 2), rollouts, "dense") if loss.kl_coef else None
    batch = batch_of(sampler, rollouts, loss, reference=reference)
    shortest = min(range(len(rollouts)), key=lambda row: len(rollouts[row].response))
    batch.corrected.weights[shortest] = 0
    assert shortest not in batch.active and batch.active
    whole, _ = gradient_of(learner, batch, loss, smd=smd)
    learner.zero_grad()
    settings = OptimizerConfig(lr=1e-9, clip_norm=1e9)
    result = update(learner, Optimizer(learner, settings, steps=1), 0, batch, Objective(loss, smd=smd))
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in whole))
    assert result.grad_norm == pytest.approx(norm, rel=1e-6)


def test_opsm_counts_what_it_drops_and_takes_it_out_of_the_loss(sampled):
    sampler, rollouts = sampled
    learner, loss = moved(sampler, 1, size=0.05), LossConfig()
    batch = batch_of(sampler, rollouts, loss)
    now = padded(no_grad_replay(learner, rollouts, "dense"))
    apart_B = ((batch.sampler_BT - now) * batch.mask_BT).sum(dim=1) / batch.mask_BT.sum(dim=1)
    worse = [row for row in batch.active if batch.advantages_B[row] < 0]
    delta = float(apart_B[worse].median())
    dropped = [row for row in worse if apart_B[row] > delta]
    assert 0 < len(dropped) < len(worse)
    learner.zero_grad()
    sums = accumulate(learner, batch, [list(range(len(rollouts)))], Objective(loss, opsm_delta=delta))
    assert sums["opsm_dropped"] == len(dropped)
    ours = gradients(learner)
    batch.corrected.weights[dropped] = 0
    assert_close(ours, gradient_of(learner, batch, loss)[0], 1e-12)


def test_an_update_that_keeps_nothing_changes_nothing(sampled):
    sampler, rollouts = sampled
    learner, loss = moved(sampler, 1), LossConfig()
    batch = batch_of(sampler, rollouts, loss)
    batch.corrected.weights.zero_()
    before = copy.deepcopy(learner.state_dict())
    optimizer = Optimizer(learner, OptimizerConfig(lr=0.1), steps=1)
    result = update(learner, optimizer, 0, batch, Objective(loss))
    assert not result.learned and result.finite
    assert all(torch.equal(before[name], value) for name, value in learner.state_dict().items())


@pytest.mark.parametrize("broken", ["advantage", "weight"])
def test_a_loss_or_gradient_that_is_not_finite_changes_nothing(sampled, broken):
    sampler, rollouts = sampled
    learner, loss = moved(sampler, 1), LossConfig()
    batch = batch_of(sampler, rollouts, loss, "none")
    head_of(learner)  # a model that was whole when it was first used
    if broken == "advantage":
        batch.advantages_B[0] = math.inf
    else:
        with torch.no_grad():
            learner.lm_head.weight[3, 3] = math.nan
    before = copy.deepcopy(learner.state_dict())
    optimizer = Optimizer(learner, OptimizerConfig(lr=0.1), steps=1)
    result = update(learner, optimizer, 0, batch, Objective(loss))
    assert not result.learned and not result.finite
    for name, value in learner.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)
    assert all(weight.grad is None for weight in learner.parameters())


@pytest.mark.parametrize("beside", [{}, {"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"smd": SMDConfig()}], ids=str)
def test_a_rollout_that_is_not_finite_takes_no_part(sampled, beside):
    """Its activations are not, as where half precision overflows: also where a term beside the loss wants rejected rows, and where
    a rank has nothing to do and lets any rollout through."""
    sampler, rollouts = sampled
    smd = beside.get("smd")
    learner, loss = moved(sampler, 1), LossConfig(**{key: value for key, value in beside.items() if key != "smd"})
    token = rollouts[0].response[0]
    learner.get_input_embeddings().weight.data[token] = math.nan
    chosen = [each for each in rollouts if each is rollouts[0] or token not in [*each.prompt, *each.response]]
    old = no_grad_replay(sampler, chosen, "dense")
    log_xi = padded(old) - padded([rollout.logprobs for rollout in chosen])
    log_xi[0, 0] = math.nan
    advantages = torch.linspace(-1.5, 1.2, len(chosen), dtype=torch.float64)
    reference = old if loss.kl_coef else None
    batch = make_batch(chosen, advantages, old, correct(log_xi, response_mask(chosen), "paper"), loss, MAX_TOKENS, reference)
    assert 0 not in batch.active and batch.active
    optimizer = Optimizer(learner, OptimizerConfig(lr=1e-9, tokens_per_microbatch=32), steps=1)
    result = update(learner, optimizer, 0, batch, Objective(loss, smd=smd))
    assert result.learned and result.finite and result.grad_norm > 0
    accumulate(learner, batch, [batch.active, []], Objective(loss, smd=smd))
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in learner.parameters())


def test_weights_without_a_gradient_have_moments_too():
    """Else a checkpoint of one process is not that of another, which allocates all of them."""
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "unused": torch.nn.Linear(2, 2)})
    optimizer = Optimizer(model, OptimizerConfig(lr=1e-3), steps=2)
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.update(0)
    steps = {name: float(each["step"]) for name, each in optimizer.moments.items()}
    assert steps == {"used.weight": 1, "used.bias": 1, "unused.weight": 0, "unused.bias": 0}


def toy(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)).to(dtype)


def train_toy(model, settings, steps=5, micro=1):
    optimizer = Optimizer(model, settings, steps)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        data = torch.randn(8, 8, generator=generator)
        for part in data.chunk(micro):
            (model(part.to(next(model.parameters()).dtype)).float() ** 2).sum().backward()
        optimizer.update(step)
    return optimizer


def test_optimizer_is_torchs_adamw():
    ours, theirs = toy(), toy()
    train_toy(ours, OptimizerConfig(lr=1e-2, clip_norm=1e9, weight_decay=0.1, betas=(0.9, 0.95)))
    groups = [
        {"params": [w for w in theirs.parameters() if w.dim() > 1], "weight_decay": 0.1},
        {"params": [w for w in theirs.parameters() if w.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        (theirs(torch.randn(8, 8, generator=generator)) ** 2).sum().backward()
        adamw.step()
        adamw.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_small_updates_survive_bfloat16():
    """A rate below bfloat16's resolution moves nothing without master weights; with them the steps add up."""
    model = toy(torch.bfloat16)
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer = train_toy(model, OptimizerConfig(lr=2e-4, weight_decay=0.0), steps=1)
    assert all(master.dtype == torch.float32 for master in optimizer.masters)
    after_one = sum(int((a != b).sum()) for a, b in zip(before, model.parameters(), strict=True))
    model = toy(torch.bfloat16)
    train_toy(model, OptimizerConfig(lr=2e-4, weight_decay=0.0), steps=40)
    after_many = sum(int((a != b).sum()) for a, b in zip(before, model.parameters(), strict=True))
    assert after_many > 2 * after_one


def test_bfloat16_gradients_are_summed_in_float32():
    """So cutting a batch into many parts costs no precision: 64 parts of one sum, each rounded only once."""
    weight = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer = Optimizer(weight, OptimizerConfig(), steps=1)
    for part in [256.0] + [1.0] * 63:  # in bfloat16 256 + 1 is 256
        weight(torch.full((1, 1), part, dtype=torch.bfloat16)).sum().backward()
    assert float(optimizer.masters[0].grad) == 319.0


def test_offloaded_state_gives_the_same_weights():
    plain, offloaded = toy(), toy()
    train_toy(plain, OptimizerConfig(lr=1e-2), micro=2)
    train_toy(offloaded, OptimizerConfig(lr=1e-2, state="offload"), micro=2)
    for a, b in zip(plain.parameters(), offloaded.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_offloaded_half_precision_weights_are_the_same_and_gradients_gather_beside_them():
    """To the bit: they pass through memory of the host once in an update, and stand-ins for the masters take no room."""
    plain, offloaded = toy(torch.bfloat16), toy(torch.bfloat16)
    train_toy(plain, OptimizerConfig(lr=1e-2), micro=2)
    optimizer = train_toy(offloaded, OptimizerConfig(lr=1e-2, state="offload"), micro=2)
    for a, b in zip(plain.parameters(), offloaded.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(collector.untyped_storage().nbytes() == 4 for collector in optimizer.collectors)
    buffers = {grad.data_ptr() for grad in optimizer._host_grads.values()}
    (offloaded(torch.ones(4, 8, dtype=torch.bfloat16)) ** 2).sum().backward()
    assert all(master.grad is None for master in optimizer.masters)
    optimizer.update(0)
    assert {grad.data_ptr() for grad in optimizer._host_grads.values()} == buffers  # allocated once


def test_long_gradients_are_clipped_and_reported_whole():
    model = toy()
    optimizer = Optimizer(model, OptimizerConfig(clip_norm=1e-3), steps=1)
    (model(torch.ones(4, 8)) * 1e3).sum().backward()
    norm = torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm()
    assert optimizer.update(0) == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, 0.854, 0.5, 0.146]),
    ],
)
def test_the_rate_warms_up_and_then_follows_the_schedule(schedule, expected):
    optimizer = Optimizer(toy(), OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=4), steps=8)
    assert [optimizer.lr_at(step) for step in range(8)] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("state", ["fp32", "offload", "8bit"])
def test_allocating_the_moments_early_changes_nothing(state):
    early, late = toy(), toy()
    settings = OptimizerConfig(lr=1e-2, state=state)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles, which needs a compiler and takes long
        first = Optimizer(early, settings, steps=1)
        first.allocate()
        assert first.adamw.state
        second = Optimizer(late, settings, steps=1)
        for model, optimizer in ((early, first), (late, second)):
            (model(torch.ones(4, 8)) ** 2).sum().backward()
            optimizer.update(0)
    for a, b in zip(early.parameters(), late.parameters(), strict=True):
        assert torch.equal(a, b)
