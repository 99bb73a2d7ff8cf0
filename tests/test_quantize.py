"""Quantised keys and values: what is restored, how many bytes it takes, and the gradient that replay needs."""

import pytest
import torch

from sparse_rl.errors import UserError
from sparse_rl.kv import quantize
from sparse_rl.kv.quantize import (
    E4M3,
    INT4,
    INT8,
    Range,
    Scheme,
    channel_range,
    dequantised,
    encode,
    group_range,
    pack,
    pair_range,
    scales_of,
    unpack,
)

DTYPES = [torch.float32, torch.bfloat16]
SCHEMES = {
    "int8 token": Scheme(INT8),
    "int8 token, asymmetric": Scheme(INT8, symmetric=False),
    "int8 block": Scheme(INT8, tokens=32, channels=1),
    "int8 static": Scheme(INT8, tokens=None, channels=1),
    "int8 equalised": Scheme(INT8, equalised=True),
    "e4m3 token": Scheme(E4M3),
    "e4m3 static": Scheme(E4M3, tokens=None, channels=1),
    "int4 group": Scheme(INT4, channels=32, symmetric=False),
    "int4 group, symmetric": Scheme(INT4, channels=32),
    "int4 block": Scheme(INT4, tokens=32, channels=1, symmetric=False),
    "int4 static": Scheme(INT4, tokens=None, channels=1, symmetric=False),
    "int4 equalised": Scheme(INT4, channels=32, symmetric=False, equalised=True),
    "int4 equalised, symmetric": Scheme(INT4, channels=32, equalised=True),
}


@pytest.fixture
def keys():
    """Keys like those of a model without QK-norm: some channels are large, one has a large bias. 70 tokens fill no block."""
    torch.manual_seed(0)
    keys_BHTD = torch.randn(2, 3, 70, 64) * torch.logspace(-1, 1, 64)
    keys_BHTD[..., 5] += 80
    return keys_BHTD


def steps(scheme, scales, keys):
    """The step of every value."""
    step = 1.0 if scales is None else scales.spread(scales.step, keys.shape[-2])
    if scales is None or scheme.equalised:
        step = step * scheme.static_scales(channel_range(keys)).step.float()
    return step.expand(keys.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_no_value_moves_by_more_than_half_a_step(scheme, dtype, keys):
    keys = keys.to(dtype)
    codes, scales = scheme.store(keys, channel_range(keys))
    error = (scheme.restore(codes, scales, channel_range(keys)) - keys.float()).abs()
    bound = steps(scheme, scales, keys).abs() * 0.5
    if scheme.format == INT4 and scheme.symmetric:  # a value opposite to the largest one is cut off at 7 steps
        bound = 2 * bound
    if scheme.format == E4M3:  # 3 bits after the point: half of 1/8 of the value, or half of the smallest number, 2^-9
        bound = torch.maximum(keys.float().abs() / 16, steps(scheme, scales, keys) * 2.0**-10)
    assert (error <= bound * 1.02 + 1e-5).all()


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_restored_values_keep_their_dtype_and_are_the_same_every_time(scheme, keys):
    for dtype in DTYPES:
        first, second = (dequantised(keys.to(dtype), scheme, channel_range(keys)) for _ in range(2))
        assert first.dtype == dtype and torch.equal(first, second)


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.tokens in (1, None)])
def test_a_token_is_stored_the_same_whatever_tokens_are_beside_it(name, keys):
    """So a key is quantised as it enters, and its codes survive compaction as they are."""
    scheme, statistics = SCHEMES[name], channel_range(keys)
    kept = torch.tensor([0, 3, 4, 31, 32, 69])
    whole = dequantised(keys, scheme, statistics)
    assert torch.equal(whole[:, :, kept], dequantised(keys[:, :, kept], scheme, statistics))
    assert torch.equal(whole[1:, :, 7:8], dequantised(keys[1:, :, 7:8], scheme, statistics))


def test_codes_of_int8_are_those_computed_by_hand():
    values = torch.tensor([[[-15.875, 0.0625, 0.07, 0.1875, 15.875, 6.25]]])
    scales = scales_of(group_range(values, 1, 6), INT8, symmetric=True)
    assert scales.step.item() == 0.125
    assert encode(values, scales, INT8).tolist() == [[[-127, 0, 1, 2, 127, 50]]]  # halves go to even codes


def test_values_beyond_static_scales_are_clamped():
    ones = torch.ones(1, 1, 1, 2)
    for format, most in ((INT8, 1.0), (E4M3, 1.0), (INT4, 1.0)):
        scheme = Scheme(format, tokens=None, channels=1)
        restored = dequantised(ones * torch.tensor([1e30, -1e30]), scheme, Range(-ones[0], ones[0]))
        torch.testing.assert_close(restored.abs().amin(), torch.tensor(most), rtol=0.2, atol=0)
        assert restored.isfinite().all() and restored[..., 0] > 0 > restored[..., 1]


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("value", [0.0, 3.0, -250.0])
def test_a_constant_is_restored(scheme, value):
    values = torch.full((1, 2, 40, 64), value)
    torch.testing.assert_close(dequantised(values, scheme, channel_range(values)), values, rtol=2e-3, atol=1e-5)


def test_packing_is_exact_to_the_bit():
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(4, 1)
    codes[1] = codes[1].flip(0)
    packed = pack(codes)
    assert packed.dtype == torch.uint8 and packed.shape == (4, 8)
    assert packed[0].tolist() == [0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7]  # channel d low, d + 8 high
    assert torch.equal(unpack(packed), codes)
    every_byte = torch.arange(256, dtype=torch.uint8)[:, None]
    assert torch.equal(pack(unpack(every_byte)), every_byte)


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
    scheme, keys = SCHEMES[name], keys[:, :, :64]  # two whole blocks
    assert scheme.bytes_per_token(64) == expected
    codes, scales = scheme.store(keys, channel_range(keys))
    stored = [codes] if scales is None else [codes, scales.step, *([] if scales.centre is None else [scales.centre])]
    assert sum(each.nbytes for each in stored) / keys[..., 0].numel() == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_gradients_pass_straight_through(scheme, dtype, keys):
    values = keys.to(dtype).requires_grad_()
    restored = dequantised(values, scheme, channel_range(keys))
    grad = torch.randn_like(restored)
    restored.backward(grad)
    assert torch.equal(values.grad, grad)
    codes, scales = scheme.store(values, channel_range(keys))
    assert torch.equal(restored, scheme.restore(codes, scales, channel_range(keys), dtype))


def test_pair_range_covers_keys_at_every_position():
    torch.manual_seed(0)
    keys = torch.randn(1, 2, 8, 16)
    covered = pair_range(keys)
    first, second = keys.chunk(2, dim=-1)
    for angle in torch.linspace(0, 6.28, 40):
        turned = torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], dim=-1)
        assert (turned <= covered.high * 1.0001).all() and (turned >= covered.low * 1.0001).all()
    assert covered.high.shape == (2, 1, 16) and torch.equal(covered.low, -covered.high)


def test_statistics_of_two_batches_are_those_of_both(keys):
    both, joined = channel_range(keys), channel_range(keys[:1]).union(channel_range(keys[1:]))
    assert torch.equal(both.low, joined.low) and torch.equal(both.high, joined.high)


def test_equalised_keys_are_never_clamped(keys):
    """Their own scales cover what the calibration has not met. Static scales alone cut it off."""
    mean, statistics = keys.mean(dim=2, keepdim=True), channel_range(keys)
    beyond = mean + 3 * (keys - mean)
    static, widened = (dequantised(beyond, SCHEMES["int8 static"], each) for each in (statistics, statistics.widened(4)))
    own = dequantised(beyond, Scheme(INT8, equalised=True), statistics)
    assert (own - beyond).norm() < 0.02 * beyond.norm() < (static - beyond).norm()
    assert (widened - beyond).norm() < 0.02 * beyond.norm()


def test_a_static_centre_of_keys_leaves_attention_unchanged(keys):
    """A decode kernel may therefore ignore the centre: it adds the same number to all logits of a query."""
    scheme = Scheme(INT8, tokens=None, channels=1, symmetric=False)
    codes, _ = scheme.store(keys, channel_range(keys))
    query = torch.randn(2, 3, 1, 64)
    logits = query @ scheme.restore(codes, None, channel_range(keys)).mT
    without_centre = (query * scheme.static_scales(channel_range(keys)).step.float()) @ codes.float().mT
    torch.testing.assert_close(without_centre.softmax(-1), logits.softmax(-1), rtol=1e-3, atol=1e-5)


def test_logits_of_equalised_keys_need_two_sums_per_group(keys):
    """A decode kernel multiplies the query by the static steps once. A group then costs one product and two scalars."""
    scheme, statistics = SCHEMES["int4 equalised"], channel_range(keys)
    codes, scales = scheme.store(keys, statistics)
    query = torch.randn(2, 3, 1, 64)
    folded = (query * scheme.static_scales(statistics).step.float()).unflatten(-1, (2, 32)).squeeze(2)
    of_codes = (unpack(codes).float().unflatten(-1, (2, 32)) * folded[:, :, None]).sum(-1)
    logits = (of_codes * scales.step.float() + scales.centre.float() * folded.sum(-1)[:, :, None]).sum(-1)
    expected = (query @ scheme.restore(codes, scales, statistics).mT).squeeze(2)
    torch.testing.assert_close(logits.softmax(-1), expected.softmax(-1), rtol=1e-2, atol=1e-5)


def test_channels_of_different_size_need_scales_of_their_own(keys):
    """One scale per token follows the largest channel. Static and block scales do not."""
    small = slice(0, 4)
    errors = {}
    for name in ("int8 token", "int8 static", "int8 block"):
        restored = dequantised(keys, SCHEMES[name], channel_range(keys))
        errors[name] = (restored - keys)[..., small].norm() / keys[..., small].norm()
    assert errors["int8 token"] > 20 * max(errors["int8 static"], errors["int8 block"])


def test_four_bits_per_token_need_equalised_channels(keys):
    """The scale of a token and group follows the channel with the bias. After a static shift it does not."""
    errors = {}
    for name in ("int4 group", "int4 equalised", "int4 block"):
        restored = dequantised(keys, SCHEMES[name], channel_range(keys))
        errors[name] = (restored - keys)[..., :32].norm() / keys[..., :5].norm()
    assert errors["int4 group"] > 5 * errors["int4 equalised"]
    assert errors["int4 equalised"] < 2 * errors["int4 block"]


def test_what_cannot_be_stored_is_refused(keys, monkeypatch):
    with pytest.raises(UserError, match="calibrate first"):
        dequantised(keys, SCHEMES["int8 static"])
    with pytest.raises(UserError, match="must divide the head dimension 64"):
        dequantised(keys, Scheme(INT4, channels=48))
    with pytest.raises(UserError, match="Use 8 bits"):
        pack(torch.zeros(1, 3, dtype=torch.int8))
    monkeypatch.delattr(quantize.torch, "float8_e4m3fn")
    with pytest.raises(UserError, match="use int8"):
        dequantised(keys, SCHEMES["e4m3 token"])
