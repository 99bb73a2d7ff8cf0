"""Losses: each is its paper's formula, value and gradient; micro-batches and padding change nothing."""

import math

import pytest
import torch

from sparse_rl import UserError
from sparse_rl.config import PRESETS, LossConfig, SMDConfig
from sparse_rl.learner.correction import correct
from sparse_rl.learner.losses import LOSSES, LossInputs, aggregate_of, get
from sparse_rl.learner.losses.aggregate import AGGREGATES
from sparse_rl.learner.losses.regularizers import kl, weighted_sum

MAX_TOKENS = 11


def batch(seed=0, rows=8, width=9):
    """(inputs as a dictionary, divisors): ratios on both sides of every clip, weights from the paper's correction."""
    torch.manual_seed(seed)
    mask = torch.arange(width) < torch.tensor([9, 9, 7, 5, 5, 3, 2, 1])[:rows, None]
    old = -torch.rand(rows, width, dtype=torch.float64) * 4
    logprobs = old + torch.randn_like(old) * 0.4
    logprobs[3] = old[3] + 1e-4 * torch.randn(width, dtype=torch.float64)  # inside GSPO's narrow clip
    log_ratio = torch.randn_like(old) * 0.5
    log_ratio[1, 2] = -10
    corrected = correct(log_ratio, mask, "paper")
    tensors = {"logprobs": logprobs, "old_logprobs": old, "advantages": torch.randn(rows, dtype=torch.float64)}
    return {**tensors, "weights": corrected.weights, "mask": mask}, corrected.divisors


def inputs_of(name, tensors, divisors, **changes):
    shares = AGGREGATES[LOSSES[name].aggregate].shares(tensors["mask"], divisors, MAX_TOKENS)
    low, high = LossConfig(name=name).clips
    return LossInputs(**{**tensors, "shares": shares, "clip_low": low, "clip_high": high, **changes})


def run(name, tensors, divisors, **changes):
    logprobs = tensors["logprobs"].clone().requires_grad_()
    value, metrics = LOSSES[name].loss(inputs_of(name, {**tensors, "logprobs": logprobs}, divisors, **changes))
    value.backward()
    return value.item(), logprobs.grad, {key: int(total) for key, total in metrics.items()}


def by_hand(name, tensors):
    """(loss, d loss / d log-prob, clipped tokens) in plain Python, divisors |o_i|."""
    low, high = {"grpo": (0.8, 1.2), "dr_grpo": (0.8, 1.2), "dapo": (0.8, 1.28), "gspo": (0.9997, 1.0004), "cispo": (0, 5)}[
        name
    ]
    lengths = tensors["mask"].sum(1).tolist()
    rows, total, gradient, clipped = len(lengths), 0.0, torch.zeros_like(tensors["logprobs"]), 0
    for i, length in enumerate(lengths):
        advantage = tensors["advantages"][i].item()
        new, old = tensors["logprobs"][i, :length].tolist(), tensors["old_logprobs"][i, :length].tolist()
        sequence = math.exp(sum(n - o for n, o in zip(new, old, strict=True)) / length)
        for t in range(length):
            if name in ("grpo", "gspo"):
                share = 1 / (rows * length)
            else:
                share = 1 / (rows * MAX_TOKENS) if name == "dr_grpo" else 1 / sum(lengths)
            factor = -share * tensors["weights"][i, t].item() * advantage
            ratio = sequence if name == "gspo" else math.exp(new[t] - old[t])
            bounded = min(max(ratio, low), high)
            if name == "cispo":
                total, gradient[i, t] = total + factor * bounded * new[t], factor * bounded
                clipped += bounded != ratio
                continue
            is_clipped = bounded * advantage < ratio * advantage
            total += factor * (bounded if is_clipped else ratio)
            gradient[i, t] = 0.0 if is_clipped else factor * ratio  # d ratio / d log-prob = ratio
            clipped += is_clipped
    return total, gradient, clipped


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_is_its_formula_and_so_is_its_gradient(name, seed):
    tensors, divisors = batch(seed)
    if name == "cispo":
        tensors["logprobs"][0, 0] = tensors["old_logprobs"][0, 0] + 2  # above its cap of 5
    value, gradient, metrics = run(name, tensors, divisors)
    expected, expected_gradient, clipped = by_hand(name, tensors)
    assert value == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-14)
    assert metrics == {"clipped_tokens": clipped, "tokens": int(tensors["mask"].sum())}
    assert 0 < clipped < metrics["tokens"]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("row", [0, 7])
def test_an_update_of_one_sequence_is_its_formula(name, row):
    """Nine tokens, and one: no divisor is too small to count."""
    tensors, divisors = batch()
    one = {key: value[row : row + 1] for key, value in tensors.items()}
    value, gradient, _ = run(name, one, divisors[row : row + 1])
    expected, expected_gradient, _ = by_hand(name, one)
    assert value == pytest.approx(expected, rel=1e-12) and value != 0
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-14)


def test_gspo_with_weights_one_is_the_sequence_objective():
    tensors, divisors = batch()
    tensors["weights"] = tensors["mask"].double()

    def objective(logprobs):
        total = 0.0
        for i, length in enumerate(tensors["mask"].sum(1).tolist()):
            gaps = (logprobs - tensors["old_logprobs"])[i, :length].tolist()
            ratio, advantage = math.exp(sum(gaps) / length), tensors["advantages"][i].item()
            total += min(ratio * advantage, min(max(ratio, 1 - 0.1), 1 + 0.2) * advantage)
        return -total / len(tensors["mask"])

    value, gradient, _ = run("gspo", tensors, divisors, clip_low=0.1, clip_high=0.2)
    assert value == pytest.approx(objective(tensors["logprobs"]), rel=1e-12)
    for i, t in [(0, 0), (2, 6), (3, 1), (5, 2), (7, 0), (6, 1), (7, 5)]:
        step = torch.zeros_like(gradient)
        step[i, t] = 1e-6
        slope = (objective(tensors["logprobs"] + step) - objective(tensors["logprobs"] - step)) / 2e-6
        assert gradient[i, t].item() == pytest.approx(slope, abs=1e-9)


def test_the_paper_without_mismatch_is_plain_grpo():
    tensors, _ = batch()
    corrected = correct(torch.zeros_like(tensors["logprobs"]), tensors["mask"], "paper")
    value, gradient, _ = run("grpo", {**tensors, "weights": corrected.weights}, corrected.divisors)
    plain = {**tensors, "weights": tensors["mask"].double()}
    expected, expected_gradient, _ = by_hand("grpo", plain)
    assert value == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("preset", PRESETS)
def test_micro_batches_change_nothing(name, preset):
    tensors, _ = batch()
    corrected = correct(torch.randn(8, 9, dtype=torch.float64) * 0.5, tensors["mask"], preset)
    tensors["weights"] = corrected.weights
    whole, gradient, metrics = run(name, tensors, corrected.divisors)
    shares = AGGREGATES[LOSSES[name].aggregate].shares(tensors["mask"], corrected.divisors, MAX_TOKENS)
    parts = [slice(0, 1), slice(1, 4), slice(4, 8)]
    split = [
        run(name, {k: v[part] for k, v in tensors.items()}, corrected.divisors[part], shares=shares[part]) for part in parts
    ]
    assert sum(value for value, _, _ in split) == pytest.approx(whole, rel=1e-12, abs=1e-15)
    assert torch.equal(torch.cat([part for _, part, _ in split]), gradient)
    assert {key: sum(sums[key] for _, _, sums in split) for key in metrics} == metrics


@pytest.mark.parametrize("name", LOSSES)
def test_padding_may_hold_anything(name):
    tensors, divisors = batch()
    value, gradient, metrics = run(name, tensors, divisors)
    for new, old in [(1e300, -1e300), (-3e38, 3e38), (math.nan, math.inf), (0.0, -math.inf)]:
        dirty = {
            **tensors,
            "logprobs": tensors["logprobs"].masked_fill(~tensors["mask"], new),
            "old_logprobs": tensors["old_logprobs"].masked_fill(~tensors["mask"], old),
        }
        again, dirty_gradient, dirty_metrics = run(name, dirty, divisors)
        assert again == value and torch.equal(dirty_gradient, gradient) and dirty_metrics == metrics
    assert not gradient[~tensors["mask"]].any()


@pytest.mark.parametrize("name", LOSSES)
def test_rejected_sequences_stay_in_the_denominator_and_rows_without_tokens_do_not(name):
    tensors, divisors = batch()
    kept = tensors["weights"].any(1)
    assert kept.sum() == 7
    _, gradient, _ = run(name, tensors, divisors)
    rest = {key: value[kept] for key, value in tensors.items()}
    _, without, _ = run(name, rest, divisors[kept])
    scale = 32 / 41 if name in ("dapo", "cispo") else 7 / 8  # the rejected one has 9 of 41 tokens, and is 1 of 8
    torch.testing.assert_close(gradient[kept], without * scale)

    padded = {key: torch.cat([value, torch.zeros_like(value[:1])]) for key, value in tensors.items()}
    _, with_empty_row, _ = run(name, padded, torch.cat([divisors, torch.ones(1, dtype=torch.float64)]))
    assert torch.equal(with_empty_row[:-1], gradient)


@pytest.mark.parametrize("name", LOSSES)
def test_a_learner_far_from_the_old_policy_breaks_nothing(name):
    tensors, divisors = batch()
    far = {**tensors, "logprobs": tensors["old_logprobs"] + 1e4, "advantages": -torch.ones(8, dtype=torch.float64)}
    far = {key: value.float() if value.is_floating_point() else value for key, value in far.items()}
    value, gradient, _ = run(name, far, divisors.float())
    assert math.isfinite(value) and gradient.isfinite().all()
    if name != "cispo":  # whose weight is at most 5
        counted = (inputs_of(name, far, divisors.float()).shares * far["weights"]).sum().item()
        assert value == pytest.approx(math.exp(20) * counted, rel=1e-4), "a ratio counts as e^20 at most"


@pytest.mark.parametrize("name", LOSSES)
def test_a_rejected_sequence_with_an_impossible_token_breaks_nothing(name):
    tensors, _ = batch()
    tensors["old_logprobs"][2, 1] = tensors["logprobs"][2, 1] = -math.inf
    log_ratio = tensors["old_logprobs"] - (-1.0)
    corrected = correct(log_ratio, tensors["mask"], "none")
    value, gradient, _ = run(name, {**tensors, "weights": corrected.weights}, corrected.divisors)
    assert math.isfinite(value) and gradient.isfinite().all()
    assert not gradient[2].any() and gradient[0].any()


@pytest.mark.parametrize("name", LOSSES)
def test_an_update_that_keeps_nothing_is_zero(name):
    tensors, divisors = batch()
    value, gradient, _ = run(name, {**tensors, "weights": torch.zeros_like(tensors["weights"])}, divisors)
    assert value == 0 and not gradient.any()
    empty = {**tensors, "weights": torch.zeros_like(tensors["weights"]), "mask": torch.zeros_like(tensors["mask"])}
    assert run(name, empty, torch.ones_like(divisors))[0] == 0


def test_kl_estimators_are_their_formulas_and_padding_leaks_nothing():
    mask = torch.tensor([[True, True, False]])
    logprobs = torch.tensor([[-1.0, -2.0, 3e38]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-1.5, -1.0, -3e38]], dtype=torch.float64)
    r = [math.exp(-0.5), math.exp(1.0)]
    expected = {
        "k1": [0.5, -1.0],
        "k2": [0.125, 0.5],
        "k3": [r[0] - 1 + 0.5, r[1] - 1 - 1.0],
    }
    for estimator, values in expected.items():
        tokens = kl(logprobs, reference, mask, estimator)
        assert tokens[0].tolist() == pytest.approx([*values, 0.0])
        (gradient,) = torch.autograd.grad(weighted_sum(tokens, mask, mask / 2), logprobs)
        slopes = {"k1": [1, 1], "k2": [0.5, -1.0], "k3": [1 - r[0], 1 - r[1]]}[estimator]
        assert gradient[0].tolist() == pytest.approx([slopes[0] / 2, slopes[1] / 2, 0.0])


def test_what_each_kl_estimator_pulls_to():
    """Over all tokens of a small vocabulary: k1 nowhere, k2 as KL(theta || ref), k3 as KL(ref || theta)."""
    torch.manual_seed(0)
    logits = torch.randn(1, 6, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(1, 6, dtype=torch.float64).log_softmax(-1)
    log_theta, mask = logits.log_softmax(-1), torch.ones(1, 6, dtype=torch.bool)
    theta = log_theta.exp().detach()

    def slope(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    pulls = {name: slope((theta * kl(log_theta, reference, mask, name)).sum()) for name in ("k1", "k2", "k3")}
    torch.testing.assert_close(pulls["k1"], torch.zeros_like(pulls["k1"]))
    torch.testing.assert_close(pulls["k2"], slope((log_theta.exp() * (log_theta - reference)).sum()))
    torch.testing.assert_close(pulls["k3"], slope((reference.exp() * (reference - log_theta)).sum()))


def test_clips_are_the_losss_own_unless_set():
    published = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
    assert {name: LossConfig(name=name).clips for name in LOSSES} == published
    assert LossConfig(name="dapo", clip_high=0.3).clips == (0.2, 0.3)
    assert not LOSSES["dr_grpo"].std and LOSSES["grpo"].std


def test_lambda_is_written_as_itself():
    assert LossConfig(smd={"lambda": 0.5, "top_k": 64}).smd == SMDConfig(lambda_=0.5, top_k=64)
    assert SMDConfig().top_k is None


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: get("drgrpo"), "did you mean dr_grpo"),
        (lambda: LossConfig(name="gpro"), "loss.name = 'gpro' is invalid"),
        (lambda: LossConfig(clip_low=1.5), "loss.clip_low = 1.5 is invalid: input should be less than or equal to 1"),
        (lambda: LossConfig(smd={"top_k": 0}), "loss.smd.top_k = 0 is invalid"),
        (lambda: LossConfig(smd={"lambda": -1}), "loss.smd.lambda = -1 is invalid"),
        (lambda: LossConfig(smd={"lamda": 1}), "loss.smd.lamda"),
        (lambda: LossConfig(clip=0.2), "did you mean clip_low"),
    ],
)
def test_a_loss_that_cannot_be_is_refused_in_one_sentence(make, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        make()
    assert "\n" not in str(error.value)


def test_an_aggregate_may_be_chosen_apart_from_the_loss():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    lengths = torch.tensor([3.0, 1.0, 1.0])
    sums = {
        name: aggregate_of(LossConfig(name="gspo", aggregate=name)).shares(mask, lengths, 8).sum(dim=1).tolist()
        for name in AGGREGATES
    }
    assert sums["sequence"] == pytest.approx([1 / 2, 1 / 2, 0])  # each sequence counts the same
    assert sums["token"] == pytest.approx([3 / 4, 1 / 4, 0])  # each token
    assert sums["constant"] == pytest.approx([3 / 16, 1 / 16, 0])  # each token, whatever the others are
    for name, own in {
        "grpo": "sequence",
        "gspo": "sequence",
        "dapo": "token",
        "cispo": "token",
        "dr_grpo": "constant",
    }.items():
        assert aggregate_of(LossConfig(name=name)) is AGGREGATES[own]
