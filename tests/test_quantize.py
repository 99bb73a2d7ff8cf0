"""Quantised keys and values as the cache stores them: what is restored, and the gradient that replay needs."""

import pytest
import torch

from sparse_rl.errors import UserError
from sparse_rl.kv.quantize import INT4, INT8, Scales, Scheme, channel_range, encode, group_range, pack, scales_of, unpack
from sparse_rl.kv.storage import KeyScales, Quantiser

DTYPES = [torch.float32, torch.bfloat16]
SCHEMES = {
    "int8 token": Scheme(INT8),
    "int8 equalised": Scheme(INT8, equalised=True),
    "int4 group": Scheme(INT4, channels=32),
    "int4 equalised": Scheme(INT4, channels=32, equalised=True),
}


def uneven_keys():
    """Keys like those of a model without QK-norm: some channels are large, one has a large bias. 70 tokens fill no block."""
    torch.manual_seed(0)
    keys_BHTD = torch.randn(2, 3, 70, 64) * torch.logspace(-1, 1, 64)
    keys_BHTD[..., 5] += 80
    return keys_BHTD


@pytest.fixture
def keys():
    return uneven_keys()


@pytest.fixture
def static(keys):
    """The static scales of the channels of these keys."""
    return scales_of(channel_range(keys), INT8, symmetric=False)


def restored(values, scheme, static):
    return scheme.restore(*scheme.store(values, static), static, values.dtype)


def test_the_schemes_are_those_that_a_cache_stores(keys):
    quantisers = [Quantiser(dtype, KeyScales.of([channel_range(keys)])) for dtype in ("8bit", "4bit")]
    assert {scheme for quantiser in quantisers for scheme in quantiser.schemes} == set(SCHEMES.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_no_value_moves_by_more_than_half_a_step(scheme, dtype, keys, static):
    keys = keys.to(dtype)
    codes, scales = scheme.store(keys, static)
    error = (scheme.restore(codes, scales, static) - keys.float()).abs()
    step = scales.spread(scales.step).abs() * (static.step.float() if scheme.equalised else 1)
    if scheme.format == INT4:  # a value opposite to the largest one is cut off at 7 steps
        step = 2 * step
    assert (error <= step * 0.51 + 1e-5).all()


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_token_is_stored_the_same_whatever_tokens_are_beside_it(scheme, keys, static):
    """So a key is quantised as it enters, and its codes survive compaction as they are."""
    kept = torch.tensor([0, 3, 4, 31, 32, 69])
    whole = restored(keys, scheme, static)
    assert torch.equal(whole[:, :, kept], restored(keys[:, :, kept], scheme, static))
    assert torch.equal(whole[1:, :, 7:8], restored(keys[1:, :, 7:8], scheme, static))


def test_codes_of_int8_are_those_computed_by_hand():
    values = torch.tensor([[[-15.875, 0.0625, 0.07, 0.1875, 15.875, 6.25]]])
    scales = scales_of(group_range(values, 6), INT8, symmetric=True)
    assert scales.step.item() == 0.125
    assert encode(values, scales, INT8).tolist() == [[[-127, 0, 1, 2, 127, 50]]]  # halves go to even codes


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("value", [0.0, 3.0, -250.0])
def test_a_constant_is_restored(scheme, value):
    values = torch.full((1, 2, 40, 64), value)
    static = scales_of(channel_range(values), INT8, symmetric=False)
    torch.testing.assert_close(restored(values, scheme, static), values, rtol=2e-3, atol=1e-5)


def test_packing_is_exact_to_the_bit():
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(4, 1)
    codes[1] = codes[1].flip(0)
    packed = pack(codes)
    assert packed.dtype == torch.uint8 and packed.shape == (4, 8)
    assert packed[0].tolist() == [0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7]  # channel d low, d + 8 high
    assert torch.equal(unpack(packed), codes)
    every_byte = torch.arange(256, dtype=torch.uint8)[:, None]
    assert torch.equal(pack(unpack(every_byte)), every_byte)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_gradients_pass_straight_through(bits, dtype, keys):
    quantiser = Quantiser(bits, KeyScales.of([channel_range(keys)]))
    inputs = [keys.to(dtype, copy=True).requires_grad_() for _ in range(2)]
    outputs = quantiser.restored(0, *inputs)
    grads = [torch.randn_like(each) for each in outputs]
    torch.autograd.backward(outputs, grads)
    assert all(torch.equal(each.grad, grad) for each, grad in zip(inputs, grads, strict=True))
    decoded = quantiser.decode(0, quantiser.encode(0, *inputs), dtype)
    assert all(torch.equal(each, other) for each, other in zip(outputs, decoded, strict=True))


def test_statistics_of_two_batches_are_those_of_both(keys):
    both, joined = channel_range(keys), channel_range(keys[:1]).union(channel_range(keys[1:]))
    assert torch.equal(both.low, joined.low) and torch.equal(both.high, joined.high)


def test_equalised_keys_are_never_clamped(keys, static):
    """Their own scales cover what the calibration has not met."""
    mean = keys.mean(dim=2, keepdim=True)
    beyond = mean + 3 * (keys - mean)
    assert (restored(beyond, SCHEMES["int8 equalised"], static) - beyond).norm() < 0.02 * beyond.norm()


@pytest.mark.parametrize("name", ["int8 equalised", "int4 equalised"])
def test_a_static_centre_of_keys_leaves_attention_unchanged(name, keys, static):
    """A decode kernel may therefore ignore the centre: it adds the same number to all logits of a query."""
    scheme = SCHEMES[name]
    codes, scales = scheme.store(keys, static)
    query = torch.randn(2, 3, 1, 64)
    without_centre = Scales(static.step)
    logits, fewer = (query @ scheme.restore(codes, scales, each).mT for each in (static, without_centre))
    assert not torch.allclose(fewer, logits, rtol=1e-3)
    torch.testing.assert_close(fewer.softmax(-1), logits.softmax(-1), rtol=1e-3, atol=1e-5)


def test_codes_of_an_odd_number_of_channels_are_not_packed():
    with pytest.raises(UserError, match="Use 8 bits"):
        pack(torch.zeros(1, 3, dtype=torch.int8))
