r"""Parse answers that name their value: `x = 5`, `m + n = 25`, `f(2) = 5`. Works on text only: evaluates nothing, imports no
sympy.

An equation is correct if at least one side equals the gold and every other side is a name or also equals the gold. An unsolved
equation, such as `2x = 10`, is not correct.
"""

import re

from .answers import MAX_DIGITS, bare, tidy

MAX_SIDES = 5
OTHER_RELATION = re.compile(r"[<>≤≥≠≈≡:]|!=|\\(?:[lg]eq?|neq?|not|[lg]t|approx|equiv|sim|cong)(?![A-Za-z])")
BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
LETTERS = (
    "alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|(?:var)?phi|chi|psi|omega"
    "|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega|ell"
)  # pi is excluded because it is a number
MARKS = (
    "angle|triangle|overline|overrightarrow|vec|hat|bar|left|right|lvert|rvert|mathbb|mathcal|operatorname"
    "|sin|cos|tan|cot|sec|csc|gcd|max|min|deg"
)
TOKEN = re.compile(
    r"(?<=[A-Za-z'}])\s*\((?:[^()]|\([^()]*\))*\)"  # the arguments in f(x) or P(X = 3)
    rf"|(?P<symbol>(?:\\(?:{LETTERS})(?![A-Za-z])|[A-Za-z]+)'*(?:_(?:\{{[^{{}}]*\}}|\w))?'*)"
    r"|(?P<work>[-+*/]|\\(?:cdot|times|[dt]?frac|sqrt)(?![A-Za-z])|[0-9]+(?:\.[0-9]+)?|\^\s*(?:\{\s*[0-9]+\s*\}|[0-9]))"
    rf"|[\s{{}}()\[\]|]|\\(?:{MARKS})(?![A-Za-z])"
)
NO_NAMES = {"and", "or", "not", "no", "if"}


def sides_of(text: str) -> list[str] | None:
    """Return the sides of an equation, or None if the text is not an equation."""
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
    """Return whether a side is only the name of a quantity: a symbol, a function call, a word, or an expression with several
    symbols.

    An expression with one symbol, such as `2x` or `x + 1`, belongs to an unsolved equation and is not a name.
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
    """Return the sides of an equation that are not names. If the text is not an equation, return the text itself."""
    sides = sides_of(text)
    return [text] if sides is None else [side for side in sides if not is_name(side)]
