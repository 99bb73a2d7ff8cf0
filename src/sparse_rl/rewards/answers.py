"""Extract the final answer from a text and parse plain numbers. Works on text only: it evaluates nothing and imports no
sympy."""

import re
from fractions import Fraction
from typing import NamedTuple

BOX = re.compile(r"(?<!\\)\\+(?:boxed|fbox)\s*\{")  # some models write two backslashes
BETWEEN_BOXES = re.compile(r"(?:[\s$,;.*]|\\[,;: \\()\[\]]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}|and|or)*", re.IGNORECASE)
"""Text allowed between two boxes that form one answer: `\\(\\boxed{2}\\) and \\(\\boxed{3}\\)`."""
BRACE = re.compile(rf"(?P<box>{BOX.pattern})|\\.|[{{}}]", re.DOTALL)
BLANK_LINE = re.compile(r"\n[ \t\r]*\n")
ANNOUNCED = re.compile(r"(?:####|\banswer\s*(?:is|:|=))", re.IGNORECASE)
THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
THOUGHT_TAG = re.compile(r"</?think>")
MINUS_SIGNS = str.maketrans({"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{NO-BREAK SPACE}": " "})

# TeX commands that do not change the meaning
SPACING = re.compile(r"\\[!,]|(\\[;:> ]|\\q?quad\b|~)|(\{,\}(?=\d))")
STYLE = re.compile(r"\\(?:text|textbf|textit|textrm|mathbf|mathrm|mbox|bm)\s*\{([^{}]*)\}")
MAX_STYLES = 3
"""Maximum nesting depth of style commands."""
MAX_BRACES = 10
"""Maximum number of brace pairs removed around a whole answer."""
MAX_DIGITS = 1000
"""Maximum length of a plain number in characters, and maximum absolute exponent of ten."""

DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
INTEGER = re.compile(
    rf"(?:\\?[$£€¥]\s*)?(?P<sign>[-+]?)\s*(?:\\?[$£€¥])?\s*(?P<digits>{DIGITS})(?:\.0*)?"  # e.g. $-1,234.00
    r"\s*(?:\\?[%°]|\^\s*\{?\s*\\circ\s*\}?)?"
    # a unit such as cm^2 is accepted, a variable such as x is not
    r"(?:\s*(?:\\?[$£€]|(?![abefi-kn-rt-z]\Z|(?:and|or)\b)[A-Za-z°][A-Za-z°'\-/. ]*(?:\^\s*\{?[23]\}?)?))?\s*\.?"
)
DECIMAL = rf"(?:{DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<value>{DECIMAL})"
    rf"(?:\s*(?:[eE]|(?:\\times|\\cdot|\*|\u00d7)\s*10\s*\^)\s*\{{?\s*(?P<power>[-+]?[0-9]{{1,6}})\s*\}}?)?"
    r"\s*(?P<percent>\\?%)?\s*\.?"
)
FRACTION = re.compile(
    r"(?P<sign>[-+]?)\s*(?:\\[dt]?frac\s*(?:\{\s*(?P<a>-?[0-9]+)\s*\}\s*\{\s*(?P<b>[0-9]+)\s*\}|(?P<c>[0-9])\s*(?P<d>[0-9]))"
    r"|(?P<e>[0-9]+)\.?\s*/\s*(?P<f>[0-9]+))"
)


class VisibleText(NamedTuple):
    """Text of a completion outside its `<think>` blocks."""

    text: str
    complete: bool
    """True if the completion ended with a stop token and outside a `<think>` block. Otherwise its last number is not accepted
    as an answer."""


def visible_text(text: str, finish: str = "stop", in_thought: bool = False) -> VisibleText:
    """Remove `<think>` blocks from a text, including an unclosed one.

    `in_thought=True` means that the prompt already opened a `<think>` block. A text whose first tag is `</think>` is treated
    in the same way.
    """
    tag = THOUGHT_TAG.search(text)
    if in_thought or (tag and tag.group() == "</think>"):
        text = "<think>" + text
    is_open = any(not thought.endswith("</think>") for thought in THOUGHT.findall(text))
    parts = [part for part in THOUGHT.split(text) if part.strip()]
    # the tags separate boxes before and after a thought
    return VisibleText("<think></think>".join(parts), finish == "stop" and not is_open)


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`: an empty string if the box is not closed, None if there is no box.

    Adjacent boxes, as in `\boxed{2} and \boxed{3}`, form one answer with several parts. A nested box is part of the outer box:
    `\boxed{\boxed{5}+1000}` is 1005.
    """
    boxes = outer_boxes(text)
    if boxes is None:
        return None
    found: list[str] = []
    after = 0
    for box in reversed(boxes):
        if found and not BETWEEN_BOXES.fullmatch(text, box.end + 1, after):
            break
        found.append(bare(text[box.content : box.end]))
        after = box.start
    return ", ".join(dict.fromkeys(reversed(found)))  # a repeated answer counts once


class Box(NamedTuple):
    """Indices of a box in a text: start of the command, start of the content, and closing brace."""

    start: int
    content: int
    end: int


def outer_boxes(text: str) -> list[Box] | None:
    """Return the outermost boxes, or None if the text has no box. Boxes before the last unclosed box are ignored.

    An unclosed box ends at a blank line, as in TeX. Boxes after the blank line are read as usual.
    """
    if not BOX.search(text):
        return None
    boxes: list[Box] = []
    opened: list[tuple[int, int, bool]] = []
    for brace in BRACE.finditer(text):
        if brace["box"] or brace.group() == "{":
            opened.append((brace.start(), brace.end(), bool(brace["box"])))
        elif brace.group() == "}" and opened:
            start, content, is_box = opened.pop()
            if is_box:
                boxes.append(Box(start, content, brace.start()))
    never_closed = [start for start, _, is_box in opened if is_box]
    if never_closed:
        blank = BLANK_LINE.search(text, never_closed[-1])
        boxes = [box for box in boxes if blank and box.start > blank.start()]
    outer: list[Box] = []
    for box in boxes:  # sorted by closing brace: an outer box follows its nested boxes
        while outer and outer[-1].start > box.start:
            outer.pop()
        outer.append(box)
    return outer


def bare(content: str) -> str:
    """Remove box commands, and braces that enclose the whole content."""
    content = BOX.sub("{", content).strip()
    for _ in range(MAX_BRACES):
        if content.startswith("{") and closing(content, 1) == len(content) - 1:
            content = content[1:-1].strip()
    return content


def closing(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the brace before `start`, or None."""
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.start()
    return None


def depth(text: str) -> int:
    """Return the maximum nesting depth of brackets of any kind."""
    deepest = level = 0
    for character in text:
        level += (character in "{[(") - (character in "}])")
        deepest = max(deepest, level)
    return deepest


def tidy(text: str) -> str:
    """Remove enclosing dollar signs, spacing commands and styles: `$\\mathbf{1{,}234}$` becomes `1,234`."""
    text = text.translate(MINUS_SIGNS).strip()
    for opening, end in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > 2 * len(opening) and text.startswith(opening) and text.endswith(end):
            text = text[len(opening) : -len(end)].strip()
    text = SPACING.sub(lambda space: " " if space[1] else "," if space[2] else "", text)
    for _ in range(MAX_STYLES):
        text = STYLE.sub(r"\1", text)
    return text.strip()


def integer(text: str) -> str | None:
    """Return the digits of a text that is a single integer, optionally with a unit; otherwise None.

    The result is a string, so that very long integers stay cheap.
    """
    match = INTEGER.fullmatch(tidy(text))
    if not match:
        return None
    digits = match["digits"].replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if match["sign"] == "-" and digits != "0" else digits


class Plain(NamedTuple):
    """Value of a number written in digits."""

    value: Fraction
    exact: bool
    """True if the number has no decimal point. Two exact numbers must be equal to match."""
    percent: bool


def plain(text: str) -> Plain | None:
    """Parse a number written in digits: an integer, decimal, fraction of integers, power of ten or percentage. Return None for
    other text."""
    text = tidy(text)
    if len(text) > MAX_DIGITS:
        return None
    if match := FRACTION.fullmatch(text):
        top, bottom = next((match[a], match[b]) for a, b in ("ab", "cd", "ef") if match[a])
        if int(bottom) == 0:
            return None
        value = Fraction(int(top), int(bottom))
        return Plain(-value if match["sign"] == "-" else value, exact=True, percent=False)
    if not (match := NUMBER.fullmatch(text)) or abs(power := int(match["power"] or 0)) > MAX_DIGITS:
        return None
    value = Fraction(match["value"].replace(",", "")) * Fraction(10) ** power
    exact = "." not in match["value"] and power >= 0
    return Plain(-value if match["sign"] == "-" else value, exact, bool(match["percent"]))


def same(gold: Plain, answer: Plain, tolerance: Fraction) -> bool:
    """Return whether two numbers are equal.

    The relative `tolerance` applies only if one of them is a decimal and the gold is not an integer. 9 % equals both 9 and
    0.09.
    """
    golds, answers = values(gold), values(answer)
    if gold.percent and answer.percent:
        golds, answers = golds[:1], answers[:1]
    if any(one == other for one in golds for other in answers):
        return True
    if (gold.exact and answer.exact) or gold.value.denominator == 1:
        return False
    return any(abs(one - other) <= tolerance * max(abs(one), abs(other)) for one in golds for other in answers)


def values(number: Plain) -> list[Fraction]:
    return [number.value, number.value / 100] if number.percent else [number.value]
