"""Find the final answer in a text and read plain numbers. Text alone: nothing is evaluated, no sympy."""

import re
from fractions import Fraction
from typing import NamedTuple

BOX = re.compile(r"(?<!\\)\\+(?:boxed|fbox)\s*\{")  # some models write two backslashes
BETWEEN_BOXES = re.compile(r"(?:[\s$,;.*]|\\[,;: \\()\[\]]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}|and|or)*", re.IGNORECASE)
"""Text allowed between two boxes that are one answer: `\\(\\boxed{2}\\) and \\(\\boxed{3}\\)`."""
BRACE = re.compile(rf"(?P<box>{BOX.pattern})|\\.|[{{}}]", re.DOTALL)
BLANK_LINE = re.compile(r"\n[ \t\r]*\n")
ANNOUNCED = re.compile(r"(?:####|\banswer\s*(?:is|:|=))", re.IGNORECASE)
THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
THOUGHT_TAG = re.compile(r"</?think>")
MINUS_SIGNS = str.maketrans({"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{NO-BREAK SPACE}": " "})

# TeX without meaning
SPACING = re.compile(r"\\[!,]|(\\[;:> ]|\\q?quad\b|~)|(\{,\}(?=\d))")
STYLE = re.compile(r"\\(?:text|textbf|textit|textrm|mathbf|mathrm|mbox|bm)\s*\{([^{}]*)\}")
MAX_STYLES = 3
"""Maximum nesting of style commands."""
MAX_BRACES = 10
"""Maximum pairs of braces around a whole answer."""
MAX_DIGITS = 1000
"""Maximum characters of a plain number, and maximum absolute power of ten."""

DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
INTEGER = re.compile(
    rf"(?:\\?[$£€¥]\s*)?(?P<sign>[-+]?)\s*(?:\\?[$£€¥])?\s*(?P<digits>{DIGITS})(?:\.0*)?"  # $-1,234.00
    r"\s*(?:\\?[%°]|\^\s*\{?\s*\\circ\s*\}?)?"
    r"(?:\s*(?:\\?[$£€]|(?![abefi-kn-rt-z]\Z|(?:and|or)\b)[A-Za-z°][A-Za-z°'\-/. ]*(?:\^\s*\{?[23]\}?)?))?\s*\.?"  # cm^2, not x
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
    """Text of a completion outside of its thoughts."""

    text: str
    complete: bool
    """True if the text ended by itself and not in a thought. Only then its last number is an answer."""


def visible_text(text: str, finish: str = "stop", in_thought: bool = False) -> VisibleText:
    """Remove the thoughts of a text, including one that is still open.

    `in_thought` says that the prompt opened a thought. A text whose first tag is `</think>` shows the same.
    """
    tag = THOUGHT_TAG.search(text)
    if in_thought or (tag and tag.group() == "</think>"):
        text = "<think>" + text
    is_open = any(not thought.endswith("</think>") for thought in THOUGHT.findall(text))
    parts = [part for part in THOUGHT.split(text) if part.strip()]
    return VisibleText("<think></think>".join(parts), finish == "stop" and not is_open)  # the tags keep two boxes apart


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`, empty if it never closes; None if there is no box.

    Boxes side by side, as in `\boxed{2} and \boxed{3}`, are one answer of several parts. A box within another is a part of it:
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
    return ", ".join(dict.fromkeys(reversed(found)))  # repeated answers count once


class Box(NamedTuple):
    """Indices of a box: the start of its command, the start of its content, and its closing brace."""

    start: int
    content: int
    end: int


def outer_boxes(text: str) -> list[Box] | None:
    """Return the boxes that are in no other, without those before the last one that never closes; None if there is no box.

    An open box ends at a blank line, as in TeX: boxes below it are read as usual.
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
    for box in boxes:  # in closing order: an outer box after those within it
        while outer and outer[-1].start > box.start:
            outer.pop()
        outer.append(box)
    return outer


def bare(content: str) -> str:
    """Drop the commands of boxes, and braces around the whole."""
    content = BOX.sub("{", content).strip()
    for _ in range(MAX_BRACES):
        if content.startswith("{") and closing(content, 1) == len(content) - 1:
            content = content[1:-1].strip()
    return content


def closing(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the one before `start`."""
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
    """Remove dollars around the text, spacing commands and styles: `$\\mathbf{1{,}234}$` is `1,234`."""
    text = text.translate(MINUS_SIGNS).strip()
    for opening, end in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > 2 * len(opening) and text.startswith(opening) and text.endswith(end):
            text = text[len(opening) : -len(end)].strip()
    text = SPACING.sub(lambda space: " " if space[1] else "," if space[2] else "", text)
    for _ in range(MAX_STYLES):
        text = STYLE.sub(r"\1", text)
    return text.strip()


def integer(text: str) -> str | None:
    """Return the digits of a text that is one integer, possibly with a unit, else None. They stay text, so that no length
    is slow."""
    match = INTEGER.fullmatch(tidy(text))
    if not match:
        return None
    digits = match["digits"].replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if match["sign"] == "-" and digits != "0" else digits


class Plain(NamedTuple):
    """A number as it is written in figures."""

    value: Fraction
    exact: bool
    """True if it has no decimal point, so that only the same number equals it."""
    percent: bool


def plain(text: str) -> Plain | None:
    """Read a number written in figures: an integer, a decimal, a fraction of integers, a power of ten, a percentage."""
    text = tidy(text)
    if len(text) > MAX_DIGITS:
        return None
    if match := FRACTION.fullmatch(text):
        top, bottom = next((match[a], match[b]) for a, b in ("ab", "cd", "ef") if match[a])
        if int(bottom) == 0:
            return None
        value = Fraction(int(top), int(bottom))
        return Plain(-value if match["sign"] == "-" else value, True, False)
    if not (match := NUMBER.fullmatch(text)) or abs(power := int(match["power"] or 0)) > MAX_DIGITS:
        return None
    value = Fraction(match["value"].replace(",", "")) * Fraction(10) ** power
    exact = "." not in match["value"] and power >= 0
    return Plain(-value if match["sign"] == "-" else value, exact, bool(match["percent"]))


def same(gold: Plain, answer: Plain, tolerance: Fraction) -> bool:
    """Return whether two numbers are equal, within the relative `tolerance` if one is a decimal and the gold is no integer.
    9 % is 9 or 0.09."""
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
