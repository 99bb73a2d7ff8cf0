"""Reward of mathematics: compare the boxed answer with the gold by math-verify, without the matches it makes too easily.

Run it where it can be killed: math-verify's own limits are off, because they are signals that sympy may swallow. Text that
cannot be an answer (kilobytes, towers of powers, an integral left to the grader) is wrong before sympy sees it.
docs/train-your-own.md defines which answers are right.
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
"""Maximum characters of an answer, or three times the gold if that is more. The longest gold of the benchmarks has 210."""
MAX_DEPTH = 10
"""Maximum nesting of brackets, for which the parser takes a second. The deepest gold has 4."""
TAIL_CHARS = 300
"""Characters at the end of a text without a box that are searched for an answer."""
MAX_BITS = 4096
"""Maximum bits of a number that an answer leaves to be computed."""
MAX_POWER = 64
"""Maximum power of an expression with variables, which might be multiplied out."""
MAX_NODES = 400
TOLERANCE = Fraction(1, 10**6)
"""Relative tolerance if one of two numbers is a decimal."""

ROUNDING = 1e-13
"""Absolute rounding error of a sum or a sine that is 0."""

UNDONE = (Derivative, Integral, Limit, Product, Sum)
"""Operations that an answer leaves to the grader. They are right only if the gold leaves them too."""
UNDONE_TEXT = re.compile(r"\\(?:i*int|oint|sum|prod|lim|bigcup|bigcap|det)(?![a-z])|binom\W*\d{5,}")  # binomials too large
AT_ONCE = re.compile(r"gcd|lcm|binom")  # the parser evaluates these
HUGE = re.compile(r"\^[\s{(]*\w+\s*\^|\^[\s{(]*\d{5}|\d{5}[\s)]*!")
IGNORED = re.compile(r"\\(?:left|right)(?![a-z])|(?<!\d)\s+|\s+(?!\d)")  # a space between figures counts: 1 1/2 is not 11/2
DISPLAY_FRACTION = re.compile(r"\\[dt]frac")
DEGREES = re.compile(r"\s*(?:°|\\degree(?![a-z]))")
BARE_UNIT = re.compile(r"(?<=[\d}])\s*[cdkm]m\s*\^\s*\{?\s*[23]\s*\}?\s*\.?$")  # math-verify handles those in \text
WORD = re.compile(r"[A-Za-z]{4,}")  # math-verify reads a word as the product of its letters, so that seat equals east
BASE = re.compile(r"(?<=\d)\s*_\s*\{?\s*(\d+)\s*\}?\s*$")
POWER_OF_TEN = re.compile(r"(?<=\d)[eE]([-+]?\d+)(?![\d.])")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off


def math_answer(
    prompts: list,
    completions: list,
    answer: list[str],
    finish: list[str] | None = None,
    in_thought: list[bool] | None = None,
    **columns: Any,
) -> list[float | None]:
    r"""Grade each completion: 1 if the last `\boxed{…}` equals the data's answer, else 0.

    Without a box, the answer that math-verify finds at the end of the text counts. A text that was cut off needs a box. No
    verdict if the data's answer is empty.
    """
    return [
        None if not right.strip() else float(is_right(visible, right))
        for visible, right in zip(visible_texts(completions, finish, in_thought), answer, strict=True)
    ]


math_answer.memory_bytes = 2 << 30  # type: ignore[attr-defined]  # per worker: sympy must not take the machine's memory


def is_right(visible: VisibleText, right: str) -> bool:
    gold, text = gold_of(right), visible.text
    content = boxed(text)
    if content is not None:
        return bool(content) and equals(gold, content)
    if not visible.complete:
        return False
    if len(text) <= MAX_CHARS and compact(text) == compact(gold.text):  # the text is only the answer
        return True
    tail = text[-TAIL_CHARS:]
    if depth(tail) > MAX_DEPTH or leaves_work(tail, gold):
        return False
    found = parse(tail, parsing_timeout=None)
    return bool(found) and compares(gold, found[-1] if isinstance(found[-1], str) else "", values_of(found))


class Gold(NamedTuple):
    text: str
    number: Plain | None


def gold_of(right: str) -> Gold:
    right = BARE_UNIT.sub("", boxed(right) or right)
    return Gold(right, plain(right))


@lru_cache(maxsize=256)  # the samples of a group have one gold
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
    if leaves_work(answer, gold):
        return False
    return compares(gold, answer, values_of(parsed(answer)))


def compares(gold: Gold, answer: str, values: tuple[Any, ...]) -> bool:
    """Compare by meaning. If one of the two has none, only the same text is equal."""
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
    """Return whether the gold has no symbol, so that `x = 5` only names it."""
    values = gold_values(gold.text)
    symbols = [each for each in values if not isinstance(each, Expr) or each.free_symbols]
    return gold.number is not None or ("=" not in gold.text and bool(values) and not symbols)


def other_base(gold: str, answer: str) -> bool:
    """Return whether the two name different bases, as 101_2 and 101_3 do. math-verify drops bases."""
    bases = BASE.search(tidy(gold)), BASE.search(tidy(answer))
    return all(bases) and len({base[1] for base in bases if base}) > 1


def right_side(answer: Any, gold: Any) -> Any:
    """Return the right side of `y = 2x + 3` or `f(x) = 2x + 3` if the gold is an expression of x. Else return the answer
    unchanged."""
    if not isinstance(answer, Eq) or not isinstance(gold, Expr) or gold.is_Symbol or not gold.free_symbols:
        return answer
    name = answer.lhs
    names = isinstance(name, AppliedUndef) or (isinstance(name, Symbol) and name not in answer.rhs.free_symbols)
    return answer.rhs if names else answer


def is_range(answer: Any) -> bool:
    """Return whether the answer only bounds one variable by numbers, as `1 < x < 3`. sympy turns that into an interval at
    once."""
    parts = answer.args if isinstance(answer, And) else [answer]
    return (
        all(isinstance(part, Relational) and {part.lhs.is_Symbol, part.rhs.is_Symbol} == {True, False} for part in parts)
        and len(answer.free_symbols) == 1
    )


def parsed(content: str) -> list[Any]:
    """Parse the content of a box. Powers of ten are written out, because in TeX 4.5e33 is a product with Euler's number."""
    content = POWER_OF_TEN.sub(r" \\times 10^{\1}", DEGREES.sub(r"^\\circ", tidy_outside(content)))
    return parse(f"\\boxed{{{content}}}", parsing_timeout=None)


def tidy_outside(content: str) -> str:
    content = content.strip()
    return tidy(content) if content.startswith(("$", "\\(", "\\[")) else content


def values_of(found: list[Any]) -> tuple[Any, ...]:
    return tuple(value for value in found if isinstance(value, Basic | MatrixBase))


def compact(text: str) -> str:
    """Return the text for comparison, without spacing, styles and a final full stop."""
    return IGNORED.sub("", DISPLAY_FRACTION.sub(r"\\frac", tidy(text))).rstrip(".")


def leaves_work(answer: str, gold: Gold) -> bool:
    if AT_ONCE.search(answer) and HUGE.search(answer) and not HUGE.search(gold.text):
        return True
    return bool(UNDONE_TEXT.search(answer)) and not UNDONE_TEXT.search(gold.text)


def fits(gold: Any, answer: Any, gold_text: str, text: str) -> bool:
    """Return whether the answer is of the gold's kind. math-verify takes `x = 5`, `\\{5\\}` and `[5, 5]` for 5, and a set
    for a pair."""
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
    """Return whether evaluating the answer is cheap enough for a grader."""
    if isinstance(answer, MatrixBase):
        return all(is_cheap(entry, gold) for entry in answer.flat())
    allowed = tuple(kind for kind in UNDONE if isinstance(gold, Basic) and gold.has(kind))
    for count, node in enumerate(preorder_traversal(answer)):
        if count > MAX_NODES or (isinstance(node, UNDONE) and not isinstance(node, allowed)):
            return False
        if isinstance(node, Pow) and node.base.free_symbols and bits(node.exp) > MAX_POWER.bit_length():
            return False
        if isinstance(node, Pow | factorial | binomial) and bits(node) > MAX_BITS:
            return False
    return True


def bits(node: Any) -> float:
    """Return an upper estimate of log2 of the absolute value of a number without evaluating it; 0 if there are variables."""
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
    """Return whether two expressions differ at a point. sympy then need not try for seconds to transform one into the
    other.

    It also distinguishes 0 from 1e-8, which math-verify does not: it rounds decimals to six places.
    """
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)) or gold.is_Symbol or answer.is_Symbol:
        return False  # a word is a symbol, or the product of its letters
    if gold.has(UnevaluatedExpr) or answer.has(UnevaluatedExpr):
        return False  # a percentage, which equals two numbers
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    point = {symbol: Float(0.37 + 0.61 * (place * 0.618 % 1)) for place, symbol in enumerate(symbols, 1)}
    try:
        one, other = complex(gold.evalf(subs=point)), complex(answer.evalf(subs=point))
    except Exception:  # not a number at this point
        return False
    cancels = gold.atoms(Add, Function) or answer.atoms(Add, Function)  # products do not cancel: 1e-24 is not 1e-28
    rounding = ROUNDING if cancels else 0.0
    return isfinite(one) and isfinite(other) and abs(one - other) > max(1e-4 * max(abs(one), abs(other)), rounding)
