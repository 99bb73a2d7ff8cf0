"""Corrections: every preset is its formula, nothing that breaks gets through, and the measures come before the masks."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sparse_rl import UserError
from sparse_rl.config import PRESETS, CorrectionConfig, CorrectionSpec
from sparse_rl.learner.correction import correct, opsm

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))
import enumeration  # noqa: E402

NEVER_DROPS = {"none", "reweight_only", "tis"}


def batch(seed=0):
    """Log-ratios at which every rule bites somewhere, with lengths from 1 to 9 of 9."""
    torch.manual_seed(seed)
    mask = torch.arange(9) < torch.tensor([9, 9, 7, 5, 5, 3, 2, 1])[:, None]
    log_ratio = torch.randn(8, 9, dtype=torch.float64) * torch.tensor([0.001, 0.3, 0.3, 0.9, 0.3, 0.9, 0.3, 0.9])[:, None]
    log_ratio[1, 4] = -9.5  # below 1e-4
    log_ratio[2, :3] = 0.9  # a product above 3
    log_ratio[4, 1] = -9.0  # just above 1e-4
    log_ratio[3, :2] = torch.tensor([4.8, 5.2]).log()  # on both sides of 5
    log_ratio[5, :3] = torch.tensor([2.5, 1.0, 1.0]).log()  # a product below 3
    log_ratio[6, :2] = math.log(1.02)  # a mean a little too far from 1
    return log_ratio.masked_fill(~mask, 1e6), mask  # padding holds garbage


def by_hand(preset, sequences):
    """The table of presets in plain Python: (weights, rejected, divisors, tokens of the KL term) per sequence."""
    every = [math.exp(x) for sequence in sequences for x in sequence]
    m = sum(min(xi, 1.5) for xi in every) / len(every)
    rows = []
    for sequence in sequences:
        xi = [math.exp(x) for x in sequence]
        product, geometric = math.exp(sum(sequence)), math.exp(sum(sequence) / len(sequence))
        vetoed = min(xi) < 1e-4
        weights, rejected, kept_only = {
            "none": ([1.0] * len(xi), False, False),
            "paper": (xi, vetoed, False),
            "released": ([min(x, 1.5) / m if 0.5 <= x <= 1.5 else 0.0 for x in xi], vetoed, True),
            "reject_only": ([1.0] * len(xi), vetoed, False),
            "reweight_only": (xi, False, False),
            "tis": ([min(x, 2.0) for x in xi], False, False),
            "icepop": ([x if 0.5 <= x <= 5 else 0.0 for x in xi], False, False),
            "sequence_mask": ([product] * len(xi), product > 3, False),
            "geometric_mask": ([1.0] * len(xi), not 0.99 <= geometric <= 1.01, False),
        }[preset]
        weights = [0.0] * len(xi) if rejected else weights
        kept = sum(weight > 0 for weight in weights)
        rows.append((weights, rejected, max(kept, 1) if kept_only else len(xi), kept if kept_only else len(xi)))
    return rows


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_formula(preset):
    log_ratio, mask = batch()
    out = correct(log_ratio, mask, preset)
    lengths = mask.sum(1).tolist()
    rows = by_hand(preset, [row[:length].tolist() for row, length in zip(log_ratio, lengths, strict=True)])
    for i, (weights, rejected, divisor, kl_tokens) in enumerate(rows):
        expected = torch.tensor(weights + [0.0] * (9 - lengths[i]), dtype=torch.float64)
        torch.testing.assert_close(out.weights[i], expected, rtol=1e-12, atol=0)
        assert out.rejected[i] == rejected
        assert out.divisors[i] == divisor
        assert out.kl_mask[i].sum() == kl_tokens
    assert torch.equal(out.keep, out.weights > 0)
    assert bool(out.keep.sum() < mask.sum()) == (preset not in NEVER_DROPS) and out.keep.any()


def test_the_weights_carry_no_gradient():
    log_ratio, mask = batch()
    assert not correct(log_ratio.requires_grad_(), mask, "paper").weights.requires_grad


@pytest.mark.parametrize("preset", PRESETS)
def test_measures_are_of_every_valid_token(preset):
    log_ratio, mask = batch()
    out = correct(log_ratio, mask, preset)
    logs = log_ratio[mask].numpy()
    xi = np.exp(logs)
    rows = by_hand(preset, [row[m].tolist() for row, m in zip(log_ratio, mask, strict=True)])
    all_weights = np.array([weight for weights, *_ in rows for weight in weights])
    assert out.metrics == pytest.approx(
        {
            "sparse/rejection_rate": np.mean([rejected for _, rejected, _, _ in rows]),
            "sparse/unlikely": np.mean(
                [bool((row[m] < math.log(1e-4)).any()) for row, m in zip(log_ratio, mask, strict=True)]
            ),
            "sparse/wasted_tokens": np.mean([weight == 0 for weights, *_ in rows for weight in weights]),
            "sparse/mismatch_k1": np.mean(-logs),
            "sparse/mismatch_k3": np.mean(xi - 1 - logs),
            "sparse/xi_p05": np.quantile(xi, 0.05, method="inverted_cdf"),
            "sparse/xi_min": xi.min(),
            "sparse/ess": xi.sum() ** 2 / (len(xi) * (xi**2).sum()),
            "sparse/effective": all_weights.sum() ** 2 / (len(xi) * (all_weights**2).sum()),
        },
        rel=1e-10,
    )


def test_a_small_mismatch_is_measured_in_float32():
    log_ratio = torch.tensor([[1e-4, -1e-4]])
    k3 = correct(log_ratio, torch.ones(1, 2, dtype=torch.bool)).metrics["sparse/mismatch_k3"]
    assert k3 == pytest.approx(0.5e-8, rel=1e-2)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("bad", [-math.inf, math.inf, math.nan])
def test_a_ratio_that_is_not_finite_rejects_its_sequence_and_no_other(preset, bad):
    log_ratio, mask = torch.zeros(3, 4), torch.ones(3, 4, dtype=torch.bool)
    log_ratio[1, 2] = bad
    out = correct(log_ratio, mask, preset)
    assert out.rejected.tolist() == [False, True, False]
    assert torch.equal(out.weights > 0, ~out.rejected[:, None].expand(3, 4))
    assert not out.kl_mask[1].any() and out.kl_mask[0].all()
    assert all(math.isfinite(value) for value in [*out.metrics.values(), *out.weights.flatten().tolist()])


def test_the_veto_sees_ratios_beyond_the_clamp_and_exp_does_not():
    log_ratio, mask = torch.tensor([[-25.0, 0.0], [500.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    assert correct(log_ratio, mask, "paper", veto=1e-10).rejected.tolist() == [True, False]
    assert correct(log_ratio, mask, "reweight_only").weights[:, 0].tolist() == pytest.approx([math.exp(-20), math.exp(20)])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_sequence_without_tokens_takes_no_part(preset):
    log_ratio, mask = batch()
    alone = correct(log_ratio, mask, preset)
    empty = torch.zeros(1, 9, dtype=torch.bool)
    out = correct(torch.cat([log_ratio, torch.full((1, 9), math.nan)]), torch.cat([mask, empty]), preset)
    assert torch.equal(out.weights[:-1], alone.weights) and not out.weights[-1].any()
    assert out.metrics == alone.metrics
    assert not out.rejected[-1] and out.divisors[-1] == 1
    assert not correct(torch.zeros(1, 9), empty, "none", drop="mean", low=1.5).rejected


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_valid_is_nothing_kept(preset):
    out = correct(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool), preset)
    assert not out.weights.any() and not out.kl_mask.any() and out.divisors.tolist() == [1, 1]


def test_nothing_kept_is_all_zero():
    out = correct(torch.full((2, 3), -15.0), torch.ones(2, 3, dtype=torch.bool), "released")
    assert not out.weights.any() and out.rejected.all() and out.divisors.tolist() == [1, 1]
    assert out.metrics["sparse/rejection_rate"] == out.metrics["sparse/wasted_tokens"] == 1
    assert out.metrics["sparse/effective"] == 0


def test_half_precision_ratios_are_weighed_in_float32():
    log_ratio = torch.tensor([[0.5, -0.25]], dtype=torch.bfloat16)
    weights = correct(log_ratio, torch.ones(1, 2, dtype=torch.bool)).weights
    torch.testing.assert_close(weights, torch.tensor([[0.5, -0.25]]).exp())


def test_options_replace_values_of_the_preset_in_force():
    log_ratio, mask = batch()
    icepop = correct(log_ratio, mask, "none", weight="token", drop="token", low=0.5, high=5.0)
    assert torch.equal(icepop.weights, correct(log_ratio, mask, "icepop").weights)
    assert CorrectionConfig(veto=1e-3).spec("paper") == CorrectionSpec(weight="token", veto=1e-3)
    assert CorrectionConfig(preset="tis", cap=3).spec("paper") == CorrectionSpec(weight="token", cap=3)
    assert torch.equal(correct(log_ratio, mask, "paper", veto=0.0).weights, correct(log_ratio, mask, "reweight_only").weights)
    assert torch.equal(correct(log_ratio, mask, PRESETS["tis"]).weights, correct(log_ratio, mask, "tis").weights)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"preset": "papers"}, "correction.preset = 'papers' is invalid"),
        ({"preset": "icepop", "vetoo": 1}, "did you mean veto"),
        ({"cap": 0}, "correction.cap = 0 is invalid: input should be greater than 0"),
        ({"veto": math.nan}, "correction.veto = nan is invalid"),
        ({"veto": 1}, "correction.veto = 1 is invalid: input should be less than 1"),
        ({"veto": -0.1}, "correction.veto = -0.1 is invalid"),
        ({"low": -0.1}, "correction.low = -0.1 is invalid"),
        ({"high": 0}, "correction.high = 0 is invalid"),
        ({"opsm": -0.1}, "correction.opsm = -0.1 is invalid"),
        ({"low": 0.5}, "set correction.drop to token, sequence or mean"),
        ({"drop": "token"}, "set correction.low or correction.high"),
        ({"drop": "token", "low": 2, "high": 1}, "low must be below high"),
        ({"preset": "none", "cap": 2}, "set correction.weight to token"),
    ],
)
def test_a_correction_that_does_nothing_is_refused_with_the_remedy(options, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        CorrectionConfig(**options).spec("paper")
    assert "\n" not in str(error.value)


def test_opsm_drops_bad_answers_the_learner_would_not_give():
    sampler = torch.tensor([[-1.0, -1.0, 9e9], [-1.0, -1.0, 9e9], [-1.0, -1.0, 9e9], [7.0, 7.0, 7.0]])
    learner = torch.tensor([[-2.0, -1.2, -9e9], [-2.0, -1.2, -9e9], [-1.8, -1.0, -9e9], [7.0, 7.0, 7.0]])
    mask = torch.tensor([[True, True, False]] * 3 + [[False] * 3])
    keep = opsm(learner, sampler, torch.tensor([-1.0, 1.0, -1.0, -1.0]), mask, delta=0.5)
    assert keep.tolist() == [False, True, True, True]


@pytest.mark.parametrize("case", enumeration.CASES)
def test_only_the_sequence_product_is_exact(case):
    """Over every sequence of a small vocabulary: E under the sampler of the corrected gradient against the dense one."""
    tree, generator = enumeration.Tree(3, 4), torch.Generator().manual_seed(1)
    rewards = torch.randint(2, (81,), generator=generator).double()
    dense, sparse = enumeration.instance(tree, case, generator)
    rows = enumeration.measure(tree, dense, sparse, rewards)
    assert rows.pop(enumeration.PRODUCT)["distance"] < 1e-10
    exact_here = {"sequence_mask"} if rows["sequence_mask"]["kept"] > 1 - 1e-9 else set()  # where no product exceeds 3
    assert {name for name in PRESETS if rows[name]["distance"] < 1e-3} == exact_here
    same = enumeration.measure(tree, dense, dense, rewards)
    assert all(same[name]["distance"] < 1e-10 for name in PRESETS)


def test_the_docs_show_what_was_measured():
    record = json.loads((ROOT / "benchmarks/results/enumeration.json").read_text())
    assert enumeration.tables(record) in (ROOT / "experiments/RESULTS.md").read_text()


def test_broken_rows_are_rejected_whatever_their_ratio():
    mask = torch.ones(2, 3, dtype=torch.bool)
    corrected = correct(torch.zeros(2, 3), mask, "none", broken=torch.tensor([False, True]))
    assert corrected.rejected.tolist() == [False, True]
    assert corrected.weights.tolist() == [[1, 1, 1], [0, 0, 0]]
