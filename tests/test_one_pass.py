"""An update whose training pass gives its old log-probs equals the update with a pass of its own for them."""

import copy
import itertools
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch

from random_models import random_model
from sparse_rl import KV, Engine, Sampling, replay
from sparse_rl.config import PRESETS, Config, CorrectionSpec, LossConfig, OptimizerConfig
from sparse_rl.learner import update as update_module
from sparse_rl.learner.batch import make_batch, make_one_pass_batch, padded, response_mask
from sparse_rl.learner.correction import correct
from sparse_rl.learner.losses import LOSSES
from sparse_rl.learner.objective import Objective
from sparse_rl.learner.optimizer import Optimizer
from sparse_rl.learner.update import accumulate, update
from sparse_rl.train.passes import plan_passes
from sparse_rl.train.rollouts import RolloutBatch, RolloutGroup, Sample
from sparse_rl.train.step import split_groups

MAX_TOKENS = 24
SETTINGS = OptimizerConfig(lr=1e-3, tokens_per_microbatch=64, clip_norm=1e-3)
"""Micro-batches of two or three rollouts, and a bound that clips every gradient."""


@pytest.fixture(scope="module")
def sampled():
    """A float32 model, and rollouts that lost keys: log xi differs from 0."""
    model = random_model("qwen2")
    kv = KV(policy="random", budget=8, interval=4, window=2, sinks=1, protect_prompt=False)
    prompts = [[2, 5, 9, 4, 7], [2, 8, 3], [2, 30, 31, 32]]
    sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0.8, stop=(1,), seed=3)
    return model, Engine(model, kv, slots=4).generate(prompts, samples=4, sampling=sampling)


def spec_of(preset):
    """The preset with a veto that rejects some of these rollouts and not all."""
    spec = PRESETS[preset]
    return CorrectionSpec(**{**vars(spec), "veto": 0.2}) if spec.veto else spec


def advantages(count):
    """Every fourth rollout has no signal."""
    return torch.tensor([0.0 if row % 4 == 3 else (-1) ** row * (1 + row / count) for row in range(count)])


def weights_after(model, make, loss, opsm=None):
    """Return (weights after one update, its sums, its batch)."""
    learner = copy.deepcopy(model)
    optimizer = Optimizer(learner, SETTINGS, steps=1)
    batch = make(learner)
    updated = update(learner, optimizer, 0, batch, Objective(loss, opsm_delta=opsm))
    return [weight.detach().clone() for weight in learner.parameters()], updated, batch


def two_passes(rollouts, spec, loss, reference):
    def make(learner):
        with torch.no_grad():
            old = replay(learner, rollouts, "dense")
        log_xi = padded(old) - padded([rollout.logprobs for rollout in rollouts])
        corrected = correct(log_xi, response_mask(rollouts), spec)
        return make_batch(rollouts, advantages(len(rollouts)), old, corrected, loss, MAX_TOKENS, reference)

    return make


def one_pass(rollouts, spec, loss, reference):
    def make(learner):
        every_token = loss.kl_coef > 0 or loss.entropy_coef
        with torch.no_grad():
            old = replay(learner, rollouts, "dense")
        still = [row for row, value in enumerate(advantages(len(rollouts)).tolist()) if not value and not every_token]
        return make_one_pass_batch(
            rollouts,
            advantages(len(rollouts)),
            spec,
            loss,
            MAX_TOKENS,
            reference,
            device=learner.device,
            known={row: old[row] for row in still},
        )

    return make


CASES = [
    (name, preset, terms)
    for name, preset, terms in itertools.product(LOSSES, PRESETS, (False, True))
    if not (terms and PRESETS[preset].normalize)  # its mean scales the policy term alone: two passes
]


@pytest.mark.parametrize(("name", "preset", "terms"), CASES, ids=lambda value: str(value))
def test_one_pass_equals_two(sampled, name, preset, terms):
    """Clipped gradients, so that their size matters: the factor of the update comes before the clip."""
    model, rollouts = sampled
    spec = spec_of(preset)
    loss = LossConfig(name=name, **({"kl_coef": 0.05, "entropy_coef": 0.01} if terms else {}))
    reference = None
    if terms:
        with torch.no_grad():
            reference = [each - 0.1 for each in replay(model, rollouts, "dense")]
    theirs, updated, batch = weights_after(model, two_passes(rollouts, spec, loss, reference), loss)
    ours, one, one_batch = weights_after(model, one_pass(rollouts, spec, loss, reference), loss)
    assert updated.learned and one.learned
    assert one.grad_norm == pytest.approx(updated.grad_norm, rel=1e-5) and one.sums["loss"] == pytest.approx(
        updated.sums["loss"], rel=1e-5, abs=1e-7
    )
    moved = max(float((a - b).abs().max()) for a, b in zip(theirs, map(torch.Tensor.detach, model.parameters()), strict=True))
    gap = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    assert moved > 1e-4 and gap <= 1e-6
    if spec.veto:
        assert 0 < int(batch.corrected.rejected.sum()) < len(rollouts)
    for row, old in one_batch.logprobs.items():
        assert torch.allclose(old, batch.old_BT[row, : len(old)], atol=1e-5)


def test_a_row_that_is_not_finite_leaves_its_pack(sampled):
    """Its gradient would be NaN times zero. The others learn as if it were rejected."""
    model, rollouts = copy.deepcopy(sampled)
    uses = Counter(token for rollout in rollouts for token in {*rollout.prompt, *rollout.response})
    poison = min(range(61), key=lambda token: uses[token])
    rollouts = [rollout for rollout in rollouts if poison not in [*rollout.prompt, *rollout.response]]
    assert len(rollouts) >= 6

    def break_rows(module, inputs, output):
        return output.masked_fill((inputs[0] == poison)[..., None], torch.nan)

    model.get_input_embeddings().register_forward_hook(break_rows)
    for row in (1, 4):
        rollouts[row] = replace(rollouts[row], prompt=[poison, *rollouts[row].prompt[1:]])
    spec, loss = PRESETS["paper"], LossConfig()
    theirs, updated, _ = weights_after(model, two_passes(rollouts, spec, loss, None), loss)
    ours, one, batch = weights_after(model, one_pass(rollouts, spec, loss, None), loss)
    assert updated.learned and one.learned and one.sums["active_rows"] == updated.sums["active_rows"]
    assert all(weight.isfinite().all() for weight in ours)
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) <= 1e-6
    broken = [row for row, old in batch.logprobs.items() if not old.isfinite().all()]
    assert sorted(broken) == [1, 4]


def test_a_pass_without_rows_does_nothing(sampled):
    """On a rank that has fewer rows than others, also if the first row is not finite."""
    model, rollouts = copy.deepcopy(sampled)
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output * (torch.nan if 5 < inputs[0].shape[1] < 12 else 1)
    )
    loss = LossConfig()
    rollouts[0] = replace(rollouts[0], response=rollouts[0].response[:3], logprobs=rollouts[0].logprobs[:3])
    batch = one_pass(rollouts, PRESETS["none"], loss, None)(model)
    accumulate(model, batch, [[1, 2], []], Objective(loss))
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)


@pytest.mark.parametrize("spec", [PRESETS["paper"], CorrectionSpec(drop="mean", low=1e3)], ids=["learned", "rejected"])
def test_the_graph_of_a_pass_is_gone_before_the_next(sampled, spec, monkeypatch):
    """Also if no row of it needs a backward: two graphs at once would double the memory of the update."""
    model, rollouts = copy.deepcopy(sampled)
    alive = []

    def watched(*args):
        assert not any(graph() is not None for graph in alive)
        output = forward_pass(*args)
        alive.append(weakref.ref(output.logprobs_n.grad_fn))
        return output

    forward_pass = update_module._forward_pass
    monkeypatch.setattr(update_module, "_forward_pass", watched)
    weights_after(model, one_pass(rollouts, spec, LossConfig(), None), LossConfig())
    assert len(alive) > 3


def test_an_update_that_rejects_every_row_changes_nothing(sampled):
    model, rollouts = sampled
    spec, loss = CorrectionSpec(drop="mean", low=1e3), LossConfig()
    weights, updated, _ = weights_after(model, one_pass(rollouts, spec, loss, None), loss)
    assert not updated.learned and updated.finite
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_opsm_drops_the_same_rows_in_one_pass(sampled):
    model, rollouts = sampled
    spec, loss = PRESETS["none"], LossConfig()
    theirs, updated, _ = weights_after(model, two_passes(rollouts, spec, loss, None), loss, opsm=0.01)
    ours, one, _ = weights_after(model, one_pass(rollouts, spec, loss, None), loss, opsm=0.01)
    assert 0 < one.sums["opsm_dropped"] == updated.sums["opsm_dropped"]
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) <= 1e-6


# Which rows run through the learner, and what they stand for


def batch_of(advantages):
    """A batch of groups of four with these advantages; rollouts are not needed to plan."""
    samples = [
        Sample(row, example=None, rollout=None, reward=value, advantage=value, in_loss=True)
        for row, value in enumerate(advantages)
    ]
    return RolloutBatch(groups=[RolloutGroup(samples[start : start + 4]) for start in range(0, len(samples), 4)])


def planned(options, advantages, seed=0):
    config = Config(**options)
    batch = batch_of(advantages)
    updates = split_groups(batch.groups, config.optimizer.updates_per_step)
    return plan_passes(config, config.correction.spec(config.default_preset), batch, updates, seed)


SIGNAL = [1.0, -1.0, 1.0, -1.0]


def test_only_rows_that_no_training_pass_covers_run_before_the_update():
    assert planned({}, SIGNAL * 4).before == []
    assert planned({"optimizer": {"updates_per_step": 2}}, SIGNAL * 4).before == list(range(8, 16))
    assert planned({"method": "smd"}, SIGNAL * 4).before == list(range(16))
    released = {"method": "sparse_rl", "correction": {"preset": "released"}}
    assert planned(released, SIGNAL * 3 + [0.0] * 4).before == [12, 13, 14, 15]  # they count in its mean weight
    assert planned({**released, "loss": {"entropy_coef": 0.01}}, SIGNAL * 4).before == list(range(16))
    assert planned({"loss": {"kl_coef": 0.01}}, SIGNAL + [0.0] * 12).before == []  # the KL term trains them


def test_a_share_of_the_rows_without_signal_is_measured_and_stands_for_all():
    plan = planned({}, SIGNAL * 4 + [0.0] * 64)
    assert len(plan.before) == 16 and min(plan.before) >= 16
    assert sum(plan.row_weights.values()) == pytest.approx(80) and {plan.row_weights[row] for row in plan.before} == {4.0}
    assert planned({}, SIGNAL * 4 + [0.0] * 64).before == plan.before  # a resumed step measures the same rows
    assert planned({}, SIGNAL * 4 + [0.0] * 64, seed=1).before != plan.before
    few = planned({}, SIGNAL + [0.0] * 4)
    assert few.before == [4, 5, 6, 7] and set(few.row_weights.values()) == {1.0}


def test_a_row_that_stands_for_three_counts_as_three_in_every_metric():
    generator = torch.Generator().manual_seed(0)
    log_xi = 0.3 * torch.randn(6, 40, generator=generator, dtype=torch.float64)
    log_xi[1, 3] = -12.0  # rejected
    mask = torch.arange(40) < torch.tensor([40, 30, 7, 22, 1, 0])[:, None]
    weights = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0, 1.0])
    copies = torch.repeat_interleave(torch.arange(6), weights.long())
    ours = correct(log_xi, mask, "paper", row_weights=weights).metrics
    assert ours == pytest.approx(correct(log_xi[copies], mask[copies], "paper").metrics)
    assert ours != pytest.approx(correct(log_xi, mask, "paper").metrics)


def test_measured_metrics_estimate_those_of_all_rows():
    """Over many choices of rows their mean is the value of all rows, within its error."""
    generator = torch.Generator().manual_seed(1)
    rows = 80
    log_xi = 0.2 * torch.randn(rows, 50, generator=generator, dtype=torch.float64) * torch.linspace(0.5, 2, rows)[:, None]
    mask = torch.ones(rows, 50, dtype=torch.bool)
    whole = correct(log_xi, mask, "paper").metrics
    found = []
    for seed in range(200):
        weights = planned({}, SIGNAL * 4 + [0.0] * 64, seed).row_weights
        chosen = list(weights)
        row_weights = torch.tensor(list(weights.values()))
        found.append(correct(log_xi[chosen], mask[chosen], "paper", row_weights=row_weights).metrics)
    for key in ("sparse/mismatch_k1", "sparse/mismatch_k3", "sparse/xi_p05"):
        values = torch.tensor([each[key] for each in found])
        assert abs(float(values.mean()) - whole[key]) < 4 * float(values.std()) / len(found) ** 0.5 + 2e-3
        assert float(values.std()) > 0
