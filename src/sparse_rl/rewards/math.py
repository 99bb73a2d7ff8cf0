"""Mathematics reward: compare the boxed answer with the gold by math-verify, and reject its false matches.

Run it in a killable process: math-verify's timeouts are disabled, because they use signals that sympy may swallow. A text that
cannot be an answer (kilobytes long, nested powers, an unevaluated integral) is graded wrong before sympy parses it.
docs/train-your-own.md defines which answers are correct.
"""

import logging
import re
from cmath import isfinite
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from latex2sympy2_extended.logic import And
from math_verify import parse, verify
from sympy import (
    Add,
    Basic,
    Derivative,
    Eq,
    Expr,
    Float,
    Function,
    Integer,
    Integral,
    Interval,
    Limit,
    MatrixBase,
    Pow,
    Product,
    Set,
    Sum,
    Symbol,
    Tuple,
    UnevaluatedExpr,
    binomial,
    factorial,
    preorder_traversal,
)
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from .answers import Plain, VisibleText, boxed, depth, plain, same, tidy
from .equations import sides_of, values_in
from .functions import visible_texts

__all__ = ["math_answer"]

MAX_CHARS = 500
"""Maximum answer length in characters, or three times the gold's length if that is more. The longest gold in the benchmarks
has 210."""
MAX_DEPTH = 10
"""Maximum nesting depth of brackets; the parser takes about a second at this depth. The deepest gold has depth 4."""
TAIL_CHARS = 300
"""Number of final characters that are searched for an answer if the text has no box."""
MAX_BITS = 4096
"""Maximum bits of an unevaluated number in an answer."""
MAX_POWER = 64
"""Maximum exponent of an expression with variables, because sympy may expand the expression."""
MAX_NODES = 400
TOLERANCE = Fraction(1, 10**6)
"""Relative tolerance if either number is a decimal."""

ROUNDING = 1e-13
"""Absolute rounding error of a sum or sine whose exact value is 0."""

UNEVALUATED = (Derivative, Integral, Limit, Product, Sum)
"""Unevaluated operations. An answer may contain one only if the gold contains it too."""
# the last part matches binomials that are too large
UNEVALUATED_TEXT = re.compile(r"\\(?:i*int|oint|sum|prod|lim|bigcup|bigcap|det)(?![a-z])|binom\W*\d{5,}")
EAGER = re.compile(r"gcd|lcm|binom")  # the parser evaluates these immediately
HUGE = re.compile(r"\^[\s{(]*\w+\s*\^|\^[\s{(]*\d{5}|\d{5}[\s)]*!")
# whitespace between digits is significant: 1 1/2 is not 11/2
IGNORED = re.compile(r"\\(?:left|right)(?![a-z])|(?<!\d)\s+|\s+(?!\d)")
DISPLAY_FRACTION = re.compile(r"\\[dt]frac")
DEGREES = re.compile(r"\s*(?:°|\\degree(?![a-z]))")
BARE_UNIT = re.compile(r"(?<=[\d}])\s*[cdkm]m\s*\^\s*\{?\s*[23]\s*\}?\s*\.?$")  # math-verify handles units inside \text
WORD = re.compile(r"[A-Za-z]{4,}")  # math-verify reads a word as the product of its letters: seat would equal east
BASE = re.compile(r"(?<=\d)\s*_\s*\{?\s*(\d+)\s*\}?\s*$")
POWER_OF_TEN = re.compile(r"(?<=\d)[eE]([-+]?\d+)(?![\d.])")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # math-verify warns that its timeouts are disabled


def math_answer(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float | None]:
    r"""Return 1 for each completion whose last `\boxed{…}` equals the answer, else 0.

    Without a box, the answer that math-verify finds at the end of the text counts. A truncated completion needs a box. The
    verdict is None if the data's answer is empty.
    """
    return [
        None if not right.strip() else float(is_right(visible, right))
        for visible, right in zip(visible_texts(completions, columns), answer, strict=True)
    ]


math_answer.memory_bytes = 2 << 30  # type: ignore[attr-defined]  # per worker: sympy must not take the machine's memory


def is_right(visible: VisibleText, right: str) -> bool:
    gold, text = gold_of(right), visible.text
    content = boxed(text)
    if content is not None:
        return bool(content) and equals(gold, content)
    if not visible.complete:
        return False
    if len(text) <= MAX_CHARS and compact(text) == compact(gold.text):  # the whole text is the answer
        return True
    tail = text[-TAIL_CHARS:]
    if depth(tail) > MAX_DEPTH or is_unevaluated(tail, gold):
        return False
    found = parse(tail, parsing_timeout=None)
    return bool(found) and compares(gold, found[-1] if isinstance(found[-1], str) else "", values_of(found))


class Gold(NamedTuple):
    text: str
    number: Plain | None


def gold_of(right: str) -> Gold:
    right = BARE_UNIT.sub("", boxed(right) or right)
    return Gold(right, plain(right))


@lru_cache(maxsize=256)  # all samples of a group share one gold
def gold_values(text: str) -> tuple[Any, ...]:
    return values_of(parsed(text))


def equals(gold: Gold, answer: str) -> bool:
    """Return whether the content of a box equals the gold."""
    if compact(answer) == compact(gold.text):
        return True
    if "\0" in answer or len(answer) > max(MAX_CHARS, 3 * len(gold.text)) or depth(answer) > MAX_DEPTH:
        return False
    answer = BARE_UNIT.sub("", answer)
    if gold.number and (number := plain(answer)):
        return same(gold.number, number, TOLERANCE)
    if is_unevaluated(answer, gold):
        return False
    return compares(gold, answer, values_of(parsed(answer)))


def compares(gold: Gold, answer: str, values: tuple[Any, ...]) -> bool:
    """Compare two answers by value. If either cannot be parsed, they are equal only if their texts are equal."""
    wanted, written = compact(gold.text), compact(answer)
    if WORD.fullmatch(wanted) and WORD.fullmatch(written):
        return wanted.casefold() == written.casefold()
    golds = gold_values(gold.text)
    if is_number(gold) and sides_of(answer):
        sides = values_in(answer)
        return bool(sides) and all(equals(gold, side) for side in sides)
    if not golds or not values:
        return wanted == written
    if other_base(gold.text, answer):
        return False
    return any(
        fits(one, other, gold.text, answer)
        and is_cheap(other, one)
        and not far_apart(one, other)
        and verify(one, other, timeout_seconds=None, allow_set_relation_comp=is_range(other))
        for one in golds
        for other in (right_side(value, one) for value in values)
    )


def is_number(gold: Gold) -> bool:
    """Return whether the gold is a number. An answer such as `x = 5` then only names the value."""
    values = gold_values(gold.text)
    symbols = [each for each in values if not isinstance(each, Expr) or each.free_symbols]
    return gold.number is not None or ("=" not in gold.text and bool(values) and not symbols)


def other_base(gold: str, answer: str) -> bool:
    """Return whether the two texts name different number bases, e.g. 101_2 and 101_3. math-verify ignores bases."""
    bases = BASE.search(tidy(gold)), BASE.search(tidy(answer))
    return all(bases) and len({base[1] for base in bases if base}) > 1


def right_side(answer: Any, gold: Any) -> Any:
    """Return the right-hand side of `y = 2x + 3` or `f(x) = 2x + 3` if the gold is an expression with variables.

    Otherwise return the answer unchanged.
    """
    if not isinstance(answer, Eq) or not isinstance(gold, Expr) or gold.is_Symbol or not gold.free_symbols:
        return answer
    name = answer.lhs
    names = isinstance(name, AppliedUndef) or (isinstance(name, Symbol) and name not in answer.rhs.free_symbols)
    return answer.rhs if names else answer


def is_range(answer: Any) -> bool:
    """Return whether the answer bounds one variable by numbers, e.g. `1 < x < 3`. sympy converts such a range to an interval
    quickly."""
    parts = answer.args if isinstance(answer, And) else [answer]
    return (
        all(isinstance(part, Relational) and {part.lhs.is_Symbol, part.rhs.is_Symbol} == {True, False} for part in parts)
        and len(answer.free_symbols) == 1
    )


def parsed(content: str) -> list[Any]:
    """Parse the content of a box. `4.5e33` becomes a power of ten first, because TeX parsing reads e as Euler's number."""
    content = POWER_OF_TEN.sub(r" \\times 10^{\1}", DEGREES.sub(r"^\\circ", tidy_outside(content)))
    return parse(f"\\boxed{{{content}}}", parsing_timeout=None)


def tidy_outside(content: str) -> str:
    content = content.strip()
    return tidy(content) if content.startswith(("$", "\\(", "\\[")) else content


def values_of(found: list[Any]) -> tuple[Any, ...]:
    return tuple(value for value in found if isinstance(value, Basic | MatrixBase))


def compact(text: str) -> str:
    """Return the text without spacing, styles and a final period, for comparison."""
    return IGNORED.sub("", DISPLAY_FRACTION.sub(r"\\frac", tidy(text))).rstrip(".")


def is_unevaluated(answer: str, gold: Gold) -> bool:
    """Return whether the answer contains an operation to evaluate that the gold does not contain."""
    if EAGER.search(answer) and HUGE.search(answer) and not HUGE.search(gold.text):
        return True
    return bool(UNEVALUATED_TEXT.search(answer)) and not UNEVALUATED_TEXT.search(gold.text)


def fits(gold: Any, answer: Any, gold_text: str, text: str) -> bool:
    """Return whether the answer has the same type as the gold. Without this check, math-verify accepts `x = 5`, `\\{5\\}` and
    `[5, 5]` for 5, and a set for a pair."""
    if isinstance(gold, Relational | And):
        return True
    if not isinstance(gold, Set | Tuple | MatrixBase):
        return not isinstance(answer, Relational | And | Set | Tuple | MatrixBase)
    if ordered(gold, gold_text) or ordered(answer, text):
        return "\\{" not in gold_text + text
    return True


def ordered(value: Any, text: str) -> bool:
    return isinstance(value, Tuple | Interval) and "\\{" not in text


def is_cheap(answer: Any, gold: Any) -> bool:
    """Return whether the answer is cheap enough to evaluate."""
    if isinstance(answer, MatrixBase):
        return all(is_cheap(entry, gold) for entry in answer.flat())
    allowed = tuple(kind for kind in UNEVALUATED if isinstance(gold, Basic) and gold.has(kind))
    for count, node in enumerate(preorder_traversal(answer)):
        if count > MAX_NODES or (isinstance(node, UNEVALUATED) and not isinstance(node, allowed)):
            return False
        if isinstance(node, Pow) and node.base.free_symbols and bits(node.exp) > MAX_POWER.bit_length():
            return False
        if isinstance(node, Pow | factorial | binomial) and bits(node) > MAX_BITS:
            return False
    return True


def bits(node: Any) -> float:
    """Return an upper estimate of log2 of the number's absolute value, without evaluating the number. Return 0 if it has
    variables."""
    if node.free_symbols:
        return 0.0
    if isinstance(node, Integer):
        return float(abs(int(node)).bit_length())
    if node.is_Rational:
        return float(max(int(node.p).bit_length(), int(node.q).bit_length()))
    if isinstance(node, Float):
        return float(abs(node._mpf_[2] + node._mpf_[3])) + 1
    inner = [min(bits(each), 1e6) for each in node.args]
    if isinstance(node, Pow):
        base, power = inner
        return max(base, 1.0) * 2.0 ** min(power, 60)
    if isinstance(node, factorial | binomial):
        return 2.0 ** min(inner[0], 60) * (inner[0] if isinstance(node, factorial) else 1)
    if node.is_Add:
        return max(inner) + len(inner)
    return sum(inner) if node.is_Mul else max(inner, default=2.0)


def far_apart(gold: Any, answer: Any) -> bool:
    """Return whether two expressions have different values at a test point.

    If they do, sympy need not spend seconds trying to transform one into the other. The test also separates 0 from 1e-8;
    math-verify does not, because it rounds decimals to six places.
    """
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)) or gold.is_Symbol or answer.is_Symbol:
        return False  # sympy reads a word as a symbol or a product of letters
    if gold.has(UnevaluatedExpr) or answer.has(UnevaluatedExpr):
        return False  # a percentage equals two numbers
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    point = {symbol: Float(0.37 + 0.61 * (place * 0.618 % 1)) for place, symbol in enumerate(symbols, 1)}
    try:
        one, other = complex(gold.evalf(subs=point)), complex(answer.evalf(subs=point))
    except Exception:  # the expression has no numeric value at this point
        return False
    cancels = gold.atoms(Add, Function) or answer.atoms(Add, Function)  # products do not cancel: 1e-24 differs from 1e-28
    rounding = ROUNDING if cancels else 0.0
    return isfinite(one) and isfinite(other) and abs(one - other) > max(1e-4 * max(abs(one), abs(other)), rounding)
