r"""Read answers that name their value: `x = 5`, `m + n = 25`, `f(2) = 5`. Text alone: nothing is evaluated, no sympy.

An equation is right if each side is a name or the gold, and one is the gold. An equation that has yet to be solved, such as
`2x = 10`, names nothing.
"""

import re

from .answers import MAX_DIGITS, bare, tidy

MAX_SIDES = 5
OTHER_RELATION = re.compile(r"[<>≤≥≠≈≡:]|!=|\\(?:[lg]eq?|neq?|not|[lg]t|approx|equiv|sim|cong)(?![A-Za-z])")
BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
LETTERS = (
    "alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|(?:var)?phi|chi|psi|omega"
    "|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega|ell"
)  # not pi, which is a number
MARKS = (
    "angle|triangle|overline|overrightarrow|vec|hat|bar|left|right|lvert|rvert|mathbb|mathcal|operatorname"
    "|sin|cos|tan|cot|sec|csc|gcd|max|min|deg"
)
TOKEN = re.compile(
    r"(?<=[A-Za-z'}])\s*\((?:[^()]|\([^()]*\))*\)"  # the arguments of f(x) or P(X = 3)
    rf"|(?P<symbol>(?:\\(?:{LETTERS})(?![A-Za-z])|[A-Za-z]+)'*(?:_(?:\{{[^{{}}]*\}}|\w))?'*)"
    r"|(?P<work>[-+*/]|\\(?:cdot|times|[dt]?frac|sqrt)(?![A-Za-z])|[0-9]+(?:\.[0-9]+)?|\^\s*(?:\{\s*[0-9]+\s*\}|[0-9]))"
    rf"|[\s{{}}()\[\]|]|\\(?:{MARKS})(?![A-Za-z])"
)
NO_NAMES = {"and", "or", "not", "no", "if"}


def sides_of(text: str) -> list[str] | None:
    """Return the sides of an equation; None for any other text."""
    text = tidy(text)
    if "=" not in text or len(text) > MAX_DIGITS or OTHER_RELATION.search(text):
        return None
    sides, depth = [""], 0
    for character in text:
        depth += BRACKETS.get(character, 0)
        if character == "=" and depth == 0:
            sides.append("")
        else:
            sides[-1] += character
    sides = [bare(side) for side in sides]
    return sides if 1 < len(sides) <= MAX_SIDES and all(sides) else None


def is_name(side: str) -> bool:
    """Return whether a side only names a quantity: a symbol, a function's value, a word, or an expression of several
    symbols.

    An expression of one symbol, such as `2x` or `x + 1`, is a side of an equation to be solved.
    """
    symbols, works, place = set(), False, 0
    while place < len(side):
        token = TOKEN.match(side, place)
        if not token:
            return False
        if token["symbol"]:
            symbols.add(token["symbol"])
        works = works or bool(token["work"])
        place = token.end()
    return bool(symbols) and not symbols & NO_NAMES and (len(symbols) > 1 or not works)


def values_in(text: str) -> list[str]:
    """Return the sides of an equation that are no names, or the text itself if it is no equation."""
    sides = sides_of(text)
    return [text] if sides is None else [side for side in sides if not is_name(side)]
