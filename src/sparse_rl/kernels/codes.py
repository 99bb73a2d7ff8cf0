"""Codes of keys and values inside kernels: read them as float16 or float32, and encode one token.

Codes are read as words of two bytes. In 8 bits a word has two parts, one code each: the even and the odd channels. In 4 bits it
has four, because the low half of a byte belongs to the first half of the channels and the high half to the second.
"""
# mypy: disable-error-code="assignment"

from __future__ import annotations

from .jit import jit, tl

LARGEST_STEP = 255.0
"""Larger steps are clamped, so that products of codes and steps stay in the range of float16. Values up to 2,000 are stored in 4
bits, up to 32,000 in 8 bits; larger ones saturate."""


def _assembly(bits: int) -> str:
    """Return PTX that converts two words, held by one register, to one pair of float16 per part.

    A code becomes the lowest bits of a float16 between 1,024 and 2,048, whose lowest bit counts 1. Then 1,024 and the code's
    offset are subtracted. The high code of a byte is read as 1,024 + 16 (code + 8), and multiplied by 1/16 in the same
    instruction.
    """
    values = {"low": "0x00ff00ff", "base": "0x64806480", "subtracted": "0x64806480"}  # 1,024 + 128
    if bits == 4:
        values = {"low": "0x000f000f", "base": "0x64006400", "subtracted": "0x64086408"}  # 1,024; 1,024 + 8
        values |= {"high": "0x00f000f0", "factor": "0x2c002c00", "offset": "0xd480d480"}  # 1/16; -1,024 / 16 - 8
    parts = 16 // bits
    lines = [f".reg .b32 bytes, {', '.join(values)};", *(f"mov.b32 {name}, {value};" for name, value in values.items())]
    for byte in range(2):
        lines.append(f"shr.b32 bytes, ${parts}, {8 * byte};")
        lines.append(f"lop3.b32 ${byte}, bytes, low, base, 0x6a;")  # 0x6a: (a & b) ^ c
        lines.append(f"sub.f16x2 ${byte}, ${byte}, subtracted;")
        if bits == 4:
            lines.append(f"lop3.b32 ${byte + 2}, bytes, high, base, 0x6a;")
            lines.append(f"fma.rn.f16x2 ${byte + 2}, ${byte + 2}, factor, offset;")
    return "{ " + " ".join(lines) + " }"


if tl is not None:
    EIGHT_BITS, FOUR_BITS = tl.constexpr(_assembly(8)), tl.constexpr(_assembly(4))
    CLAMP = tl.constexpr(LARGEST_STEP)
    WEIGHT_FACTOR = tl.constexpr(256.0)  # keeps weights times steps of 8 bits, at most 256 * 255, in the range of float16
else:
    WEIGHT_FACTOR = None


@jit
def _parts(words, TYPE: tl.constexpr, PRECISION: tl.constexpr, BITS: tl.constexpr):
    """Return the codes of every part of the words."""
    if TYPE == tl.float32 or PRECISION == "wide":  # "wide": Triton's interpreter runs no assembly
        parts = ()
        for part in tl.static_range(16 // BITS):
            byte = (words.to(tl.int32) >> (part % 2 * 8)) & 255
            if BITS == 8:
                code = (byte ^ 128) - 128
            else:
                code = ((byte >> (part // 2 * 4)) & 15) - 8
            parts = parts + (code.to(tl.float32).to(TYPE),)
        return parts
    elif BITS == 8:
        return tl.inline_asm_elementwise(EIGHT_BITS, "=&r,=&r,r", [words], dtype=(tl.float16,) * 2, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(
            FOUR_BITS, "=&r,=&r,=&r,=&r,r", [words], dtype=(tl.float16,) * 4, is_pure=True, pack=2
        )


@jit
def _channel(w, part: tl.constexpr, DIM: tl.constexpr):
    """Return the channel of a part of each word."""
    return 2 * w + part % 2 + part // 2 * (DIM // 2)


@jit
def _spread(steps, ROWS: tl.constexpr, STEPS_PAD: tl.constexpr, WORDS_PAD: tl.constexpr):
    """Return the step of each word, [ROWS, WORDS_PAD], from those of groups, [ROWS, STEPS_PAD]."""
    wide = tl.broadcast_to(steps[:, :, None], [ROWS, STEPS_PAD, WORDS_PAD // STEPS_PAD])
    return tl.reshape(wide, [ROWS, WORDS_PAD])


# Encode one token


@jit
def _rounded(x):
    """Round to the nearest integer, halves to even, as torch does. The sum has no bits after the point."""
    return (x + 12582912.0) - 12582912.0


@jit
def _step_of_token(largest):
    """Return the 8-bit step of a token, as it is stored, from its largest magnitude."""
    step = tl.minimum(tl.div_rn(largest, 127.0), CLAMP).to(tl.float16).to(tl.float32)
    return tl.where(step == 0.0, 5.9604644775390625e-08, step)


@jit
def _group_steps(x, first: tl.constexpr, STEPS_PAD: tl.constexpr, WORDS_PAD: tl.constexpr):
    """Return the 4-bit steps [STEPS_PAD] of two parts: the value of largest magnitude of each group gets the code -8."""
    high, low = tl.maximum(x[first], x[first + 1]), tl.minimum(x[first], x[first + 1])
    high = tl.max(tl.reshape(high, [STEPS_PAD, WORDS_PAD // STEPS_PAD]), axis=1)
    low = tl.min(tl.reshape(low, [STEPS_PAD, WORDS_PAD // STEPS_PAD]), axis=1)
    step = tl.where(high > -low, high, low) / -8.0
    step = tl.minimum(tl.maximum(step, -CLAMP), CLAMP).to(tl.float16)
    return tl.where(step == 0.0, 5.9604644775390625e-08, step.to(tl.float32))


@jit
def _encode(
    x, codes_ptr, steps_ptr, stores, w,
    WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, STEPS: tl.constexpr, STEPS_PAD: tl.constexpr,
):  # fmt: skip
    """Store the 4-bit codes and steps of one token, whose values are given by part. Return its values as they are stored."""
    stored = ()
    word = tl.zeros([WORDS_PAD], tl.int32)
    g = tl.arange(0, STEPS_PAD)
    for half in tl.static_range(2):
        steps = _group_steps(x, 2 * half, STEPS_PAD, WORDS_PAD)
        step = tl.reshape(_spread(steps[None, :], 1, STEPS_PAD, WORDS_PAD), [WORDS_PAD])
        for byte in tl.static_range(2):
            code = tl.minimum(tl.maximum(_rounded(tl.div_rn(x[2 * half + byte], step)), -8.0), 7.0)
            word |= (code.to(tl.int32) + 8) << (8 * byte + 4 * half)
            stored = stored + (code * step,)
        if stores:
            tl.store(steps_ptr + half * (STEPS // 2) + g, steps.to(tl.float16), mask=g < STEPS // 2)
    if stores:
        tl.store(codes_ptr + w, word.to(tl.int16), mask=w < WORDS)
    return stored
