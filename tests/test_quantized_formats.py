"""Formats of keys and values that `experiments/quantize.py` compares: what is restored, and how many bytes it takes."""

import sys
from pathlib import Path

import pytest
import torch

from sparse_rl.kv.quantize import INT4, INT8, Range, Scheme, channel_range, scales_of, unpack
from test_quantize import DTYPES, uneven_keys

sys.path.append(str(Path(__file__).parents[1] / "experiments"))

from quantized_formats import E4M3, Candidate, dequantised, pair_range, widened

CANDIDATES = {
    "int8 token": Candidate(INT8),
    "int8 token, asymmetric": Candidate(INT8, symmetric=False),
    "int8 block": Candidate(INT8, tokens=32, channels=1),
    "int8 static": Candidate(INT8, tokens=None, channels=1),
    "int8 equalised": Candidate(INT8, equalised=True),
    "e4m3 token": Candidate(E4M3),
    "e4m3 static": Candidate(E4M3, tokens=None, channels=1),
    "int4 group": Candidate(INT4, channels=32, symmetric=False),
    "int4 group, symmetric": Candidate(INT4, channels=32),
    "int4 block": Candidate(INT4, tokens=32, channels=1, symmetric=False),
    "int4 static": Candidate(INT4, tokens=None, channels=1, symmetric=False),
    "int4 equalised": Candidate(INT4, channels=32, symmetric=False, equalised=True),
    "int4 equalised, symmetric": Candidate(INT4, channels=32, equalised=True),
}


@pytest.fixture
def keys():
    return uneven_keys()


def steps(candidate, scales, keys):
    """The step of every value."""
    step = 1.0
    if scales is not None:
        scales = candidate.per_token(scales, keys.shape[-2])
        step = scales.spread(scales.step)
    if scales is None or candidate.equalised:
        step = step * candidate.static_scales(channel_range(keys)).step.float()
    return step.expand(keys.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("candidate", CANDIDATES.values(), ids=CANDIDATES)
def test_no_value_moves_by_more_than_half_a_step(candidate, dtype, keys):
    keys = keys.to(dtype)
    codes, scales = candidate.store(keys, channel_range(keys))
    error = (candidate.restore(codes, scales, channel_range(keys)) - keys.float()).abs()
    bound = steps(candidate, scales, keys).abs() * 0.5
    if candidate.format == INT4 and candidate.symmetric:  # a value opposite to the largest one is cut off at 7 steps
        bound = 2 * bound
    if candidate.format == E4M3:  # 3 bits after the point: half of 1/8 of the value, or half of the smallest number, 2^-9
        bound = torch.maximum(keys.float().abs() / 16, steps(candidate, scales, keys) * 2.0**-10)
    assert (error <= bound * 1.02 + 1e-5).all()


@pytest.mark.parametrize("candidate", CANDIDATES.values(), ids=CANDIDATES)
def test_restored_values_keep_their_dtype_and_are_the_same_every_time(candidate, keys):
    for dtype in DTYPES:
        first, second = (dequantised(keys.to(dtype), candidate, channel_range(keys)) for _ in range(2))
        assert first.dtype == dtype and torch.equal(first, second)


def test_values_beyond_static_scales_are_clamped():
    ones = torch.ones(1, 1, 1, 2)
    for format, most in ((INT8, 1.0), (E4M3, 1.0), (INT4, 1.0)):
        candidate = Candidate(format, tokens=None, channels=1)
        restored = dequantised(ones * torch.tensor([1e30, -1e30]), candidate, Range(-ones[0], ones[0]))
        torch.testing.assert_close(restored.abs().amin(), torch.tensor(most), rtol=0.2, atol=0)
        assert restored.isfinite().all() and restored[..., 0] > 0 > restored[..., 1]


@pytest.mark.parametrize("candidate", CANDIDATES.values(), ids=CANDIDATES)
@pytest.mark.parametrize("value", [0.0, 3.0, -250.0])
def test_a_constant_is_restored(candidate, value):
    values = torch.full((1, 2, 40, 64), value)
    torch.testing.assert_close(dequantised(values, candidate, channel_range(values)), values, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int8 token", 64 + 2),
        ("int8 token, asymmetric", 64 + 4),
        ("int8 block", 64 + 64 * 2 / 32),
        ("int8 static", 64),
        ("int8 equalised", 64 + 2),
        ("e4m3 token", 64 + 2),
        ("int4 group", 32 + 2 * 2 * 2),
        ("int4 group, symmetric", 32 + 2 * 2),
        ("int4 block", 32 + 64 * 4 / 32),
        ("int4 static", 32),
        ("int4 equalised", 32 + 2 * 2 * 2),
        ("int4 equalised, symmetric", 32 + 2 * 2),
    ],
)
def test_bytes_are_those_of_the_stored_tensors(name, expected, keys):
    candidate, keys = CANDIDATES[name], keys[:, :, :64]  # two whole blocks
    assert candidate.bytes_per_token(64) == expected
    codes, scales = candidate.store(keys, channel_range(keys))
    stored = [codes] if scales is None else [codes, scales.step, *([] if scales.centre is None else [scales.centre])]
    assert sum(each.nbytes for each in stored) / keys[..., 0].numel() == expected


def test_pair_range_covers_keys_at_every_position():
    torch.manual_seed(0)
    keys = torch.randn(1, 2, 8, 16)
    covered = pair_range(keys)
    first, second = keys.chunk(2, dim=-1)
    for angle in torch.linspace(0, 6.28, 40):
        turned = torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], dim=-1)
        assert (turned <= covered.high * 1.0001).all() and (turned >= covered.low * 1.0001).all()
    assert covered.high.shape == (2, 1, 16) and torch.equal(covered.low, -covered.high)


def test_static_scales_clamp_what_the_calibration_has_not_met(keys):
    """A wider range does not, and neither do the scales of each token."""
    mean, statistics = keys.mean(dim=2, keepdim=True), channel_range(keys)
    beyond = mean + 3 * (keys - mean)
    static, wide = (dequantised(beyond, CANDIDATES["int8 static"], each) for each in (statistics, widened(statistics, 4)))
    own = dequantised(beyond, CANDIDATES["int8 equalised"], statistics)
    assert (own - beyond).norm() < 0.02 * beyond.norm() < (static - beyond).norm()
    assert (wide - beyond).norm() < 0.02 * beyond.norm()


def test_logits_of_equalised_keys_need_two_sums_per_group(keys):
    """A decode kernel multiplies the query by the static steps once. A group then costs one product and two scalars."""
    candidate, statistics = CANDIDATES["int4 equalised"], channel_range(keys)
    codes, scales = candidate.store(keys, statistics)
    query = torch.randn(2, 3, 1, 64)
    folded = (query * candidate.static_scales(statistics).step.float()).unflatten(-1, (2, 32)).squeeze(2)
    of_codes = (unpack(codes).float().unflatten(-1, (2, 32)) * folded[:, :, None]).sum(-1)
    logits = (of_codes * scales.step.float() + scales.centre.float() * folded.sum(-1)[:, :, None]).sum(-1)
    expected = (query @ candidate.restore(codes, scales, statistics).mT).squeeze(2)
    torch.testing.assert_close(logits.softmax(-1), expected.softmax(-1), rtol=1e-2, atol=1e-5)


def test_channels_of_different_size_need_scales_of_their_own(keys):
    """One scale per token follows the largest channel. Static and block scales do not."""
    small = slice(0, 4)
    errors = {}
    for name in ("int8 token", "int8 static", "int8 block"):
        restored = dequantised(keys, CANDIDATES[name], channel_range(keys))
        errors[name] = (restored - keys)[..., small].norm() / keys[..., small].norm()
    assert errors["int8 token"] > 20 * max(errors["int8 static"], errors["int8 block"])


def test_four_bits_per_token_need_equalised_channels(keys):
    """The scale of a token and group follows the channel with the bias. After a static shift it does not."""
    errors = {}
    for name in ("int4 group", "int4 equalised", "int4 block"):
        restored = dequantised(keys, CANDIDATES[name], channel_range(keys))
        errors[name] = (restored - keys)[..., :32].norm() / keys[..., :5].norm()
    assert errors["int4 group"] > 5 * errors["int4 equalised"]
    assert errors["int4 equalised"] < 2 * errors["int4 block"]


@pytest.mark.parametrize("channels", [None, 32])
@pytest.mark.parametrize("format", [INT8, INT4], ids=["int8", "int4"])
def test_the_schemes_of_the_package_are_candidates(format, channels, keys):
    static = scales_of(channel_range(keys), format, symmetric=False)
    for equalised in (False, True):
        scheme = Scheme(format, channels, equalised)
        expected = scheme.restore(*scheme.store(keys, static), static)
        candidate = Candidate(format, channels=channels, equalised=equalised)
        assert torch.equal(dequantised(keys, candidate, channel_range(keys)), expected)
