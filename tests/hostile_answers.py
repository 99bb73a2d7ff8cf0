r"""Answers by seed that are known to be right or wrong by construction, to count what a grader takes and refuses wrongly.

Each kind is a function that draws one answer to a gold. Wrong ones never have the gold's value, whatever their form.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

RAN = "hostile-answer-ran"
"""The file that injected code would leave in the current folder."""


class Gold(NamedTuple):
    text: str
    same: list[str]
    """Other spellings of its value."""
    near: list[str]
    """Other values."""
    grader: str


@dataclass(frozen=True)
class Answer:
    kind: str
    text: str
    gold: str
    grader: str
    right: bool
    finish: str = "stop"
    in_thought: bool = False
    endless: bool = False
    """Wrong, and may also run out of time."""


def answers(count: int, seed: int) -> Iterator[Answer]:
    """Yield `count` answers, of each kind as many; `ENDLESS` are a few at the end."""
    for number in range(count - len(ENDLESS)):
        kind = KINDS[number % len(KINDS)]
        draw = random.Random(f"{seed}/{number}")
        yield kind(draw, a_gold(draw))
    for text, gold in ENDLESS:
        yield Answer("endless", box(text), gold, "math_answer", False, endless=True)


# Golds


def a_gold(draw: random.Random) -> Gold:
    return draw.choice([an_integer, an_integer, a_fraction, a_root])(draw)


def an_integer(draw: random.Random) -> Gold:
    value = draw.choice([draw.randint(2, 99), draw.randint(100, 999_999), -draw.randint(2, 999), 0, 1])
    same = [
        f"{value}.0",
        f" {value} ",
        f"{value:,}",
        f"\\mathbf{{{value}}}",
        f"${value}$",
        f"\\text{{{value}}}",
        f"{value}\\,",
    ]
    near = [str(value + 1), str(value - 1), f"{value}5", f"{value}.5", f"{value}/7" if value else "1/7"]
    near += [str(-value), str(10 * value), f"{value}^2", f"{value}x"] if value not in (0, 1, -1) else []
    return Gold(str(value), same, near, draw.choice(["integer_answer", "math_answer"]))


def a_fraction(draw: random.Random) -> Gold:
    value = Fraction(draw.randint(1, 40), draw.choice([3, 7, 9, 11, 13]))
    while value.denominator == 1:
        value += Fraction(1, 3)
    a, b = value.numerator, value.denominator
    same = [f"\\dfrac{{{a}}}{{{b}}}", f"{a}/{b}", f"\\frac{{{2 * a}}}{{{2 * b}}}", f"\\left(\\frac{{{a}}}{{{b}}}\\right)"]
    near = [
        f"\\frac{{{a + 1}}}{{{b}}}",
        f"\\frac{{{b}}}{{{a}}}",
        f"-\\frac{{{a}}}{{{b}}}",
        f"{a}/{b + 1}",
        f"{float(value):.2f}",
    ]
    return Gold(f"\\frac{{{a}}}{{{b}}}", same, near, "math_answer")


def a_root(draw: random.Random) -> Gold:
    a, b = draw.randint(2, 20), draw.choice([2, 3, 5, 6, 7, 10])
    same = [f"\\sqrt{{{a * a * b}}}", f"{a}{{\\sqrt{{{b}}}}}", f"{a} \\cdot \\sqrt{{{b}}}", f"\\sqrt{{{b}}} \\times {a}"]
    near = [f"{a + 1}\\sqrt{{{b}}}", f"{a}\\sqrt{{{b + 1}}}", f"\\sqrt{{{a * b}}}", f"-{a}\\sqrt{{{b}}}", f"{a}+\\sqrt{{{b}}}"]
    return Gold(f"{a}\\sqrt{{{b}}}", same, near, "math_answer")


# Kinds


def box(content: str) -> str:
    return f"So the answer is $\\boxed{{{content}}}$."


def either(draw: random.Random, gold: Gold) -> tuple[str, bool]:
    """A content, and whether it is right."""
    right = draw.random() < 0.5
    return draw.choice([gold.text, *gold.same] if right else gold.near), right


def boxed_value(draw: random.Random, gold: Gold) -> Answer:
    content, right = either(draw, gold)
    frame = draw.choice(
        ["So the answer is $\\boxed{%s}$.", "\\[ \\boxed{%s} \\]", "**\\boxed{%s}**", "\\fbox{%s}", "{ \\boxed {%s}"]
    )
    return Answer("value", frame % content, gold.text, gold.grader, right)


def unboxed_value(draw: random.Random, gold: Gold) -> Answer:
    right = draw.random() < 0.5
    content = gold.text if right else draw.choice(gold.near[:2])
    frame = draw.choice(
        ["The final answer is $%s$.", "We get $7 \\cdot 3$. The answer is: $%s$", "Therefore the answer is $%s$"]
    )
    return Answer("unboxed", frame % content, gold.text, gold.grader, right)


def cut_off(draw: random.Random, gold: Gold) -> Answer:
    gold = an_integer(draw)
    text, boxed = draw.choice(
        [
            (f"First we compute 6*3 = {gold.text}. Then we subtract", False),
            (f"The answer is {gold.text}", False),
            (f"#### {gold.text}", False),
            (gold.text, False),
            (f"so \\boxed{{{gold.text}", False),
            (f"so \\boxed{{{gold.text}}}. To check", True),
        ]
    )
    finish = draw.choice(["length", "repetition"])
    grader = "math_answer" if boxed else draw.choice(["integer_answer", "math_answer", "last_number"])
    return Answer("cut off", text, gold.text, grader, boxed, finish)


def finished(draw: random.Random, gold: Gold) -> Answer:
    gold = an_integer(draw)
    right = draw.random() < 0.5
    frame = draw.choice(["We subtract and have %s.", "#### %s", "The answer is %s", "<think>It is 3.</think>\nIt is %s"])
    content = gold.text if right else str(int(gold.text) + draw.choice([1, -1, 100]))
    return Answer("finished", frame % content, gold.text, draw.choice(["integer_answer", "last_number"]), right)


def thought(draw: random.Random, gold: Gold) -> Answer:
    good, bad = box(gold.text), box(draw.choice(gold.near))
    text, in_thought, right = draw.choice(
        [
            (f"<think>Let us see. {good} Wait", False, False),
            (f"<think>{good}", False, False),
            (f"Let us see. {good} Wait", True, False),
            (f"{good}</think>", draw.random() < 0.5, False),
            (f"{good}</think>{bad}", draw.random() < 0.5, False),
            (f"<think>{good}</think>{bad}", False, False),
            (f"<think>{bad}</think>{bad} <think>{good}", False, False),
            (f"<think>a <think>b {good}", False, False),
            (f"<think>{bad}</think>{good}", False, True),
            (f"{bad}</think>\n\n{good}", draw.random() < 0.5, True),
            (f"<think>a <think>{bad}</think>{good}", True, True),
            (f"{good} <think>{bad}", False, True),
        ]
    )
    return Answer("thought", text, gold.text, gold.grader, right, draw.choice(["stop", "length"]), in_thought)


def nested_boxes(draw: random.Random, gold: Gold) -> Answer:
    deep, more = draw.randint(2, 4), draw.randint(1, 1000)
    content, right = draw.choice(
        [
            ("\\boxed{" * deep + gold.text + "}" * deep, True),
            (f"x = \\boxed{{{gold.text}}}", True),
            (f"\\boxed{{{gold.text}}}+{more}", False),
            (f"{more + 1}\\cdot\\boxed{{{gold.text}}}+{more}", False),
            (f"\\boxed{{{gold.text}}}, \\boxed{{{draw.choice(gold.near[:2])}}}", False),
            (f"\\boxed{{{gold.text}}}" * 2 + " 1", False),
        ]
    )
    return Answer("nested boxes", box(content), gold.text, gold.grader, right)


def several_boxes(draw: random.Random, gold: Gold) -> Answer:
    good, bad = f"\\boxed{{{gold.text}}}", f"\\boxed{{{draw.choice(gold.near)}}}"
    text, right = draw.choice(
        [
            (f"First {bad}. But that is too much, so {good}.", True),
            (f"{good}, so {good}.", True),
            (f"{bad} no " * 50 + good, True),
            (f"First {good}. But that is too much, so {bad}.", False),
            (f"{good} or {bad}", False),
            (f"{bad} and {good}", False),
            (bad + good * 30, False),
            (f"{good} no \\boxed{{}}", False),
        ]
    )
    return Answer("several boxes", text, gold.text, gold.grader, right)


def open_boxes(draw: random.Random, gold: Gold) -> Answer:
    text, right = draw.choice(
        [
            (f"\\boxed{{{gold.text}", False),
            (f"\\boxed{{{gold.text}\\}}", False),
            (f"\\boxed{{{{{gold.text}}}", False),
            (f"\\boxed{{{gold.text}}} so \\boxed{{7", False),
            (f"\\boxed{{{gold.text}}} so \\boxed{{", False),
            (f"\\boxed{{\\boxed{{{gold.text}}}+{draw.randint(1, 9)}", False),
            ("\\boxed{" * draw.randint(2, 5000) + gold.text + "}", False),
            ("\\boxed{}", False),
            (f"}}}} if x {{ \\boxed{{{gold.text}}} }}}}", True),
            (f"\\boxed{{\\frac{{1}}{{2}}\n\nAgain: \\boxed{{{gold.text}}}", True),
        ]
    )
    return Answer("open boxes", text, gold.text, gold.grader, right)


NAMES = (
    "x",
    "m+n",
    "100m + n",
    "f(2)",
    "\\text{Area}",
    "a_{10}",
    "P(X = 3)",
    "\\angle ABC",
    "\\frac{m}{n}",
    "AB",
    "\\theta",
    "x_1'",
)


def equation(draw: random.Random, gold: Gold) -> Answer:
    name, near = draw.choice(NAMES), draw.choice(gold.near)
    content, right = draw.choice(
        [
            (f"{name} = {gold.text}", True),
            (f"{gold.text} = {name}", True),
            (f"{name} = {draw.choice(NAMES)} = {gold.text}", True),
            (f"{name} = {near}", False),
            (f"{near} = {gold.text}", False),
            (f"{name} = {near} = {gold.text}", False),
            (f"{name} = {gold.text} = {near}", False),
            (f"{name} = {gold.text}, y = {near}", False),
            (f"{name} = {gold.text} \\text{{ or }} {name} = {near}", False),
            (f"{name} = {gold.text}, {near}", False),
            (f"{draw.choice(['2x', 'x+1', 'x^2', '-x', 'x/3'])} = {gold.text}", False),
            (
                f"x {draw.choice(['<', '>', '≤', '!=', '<=', chr(92) + 'neq', chr(92) + 'le', chr(92) + 'geq'])} {gold.text}",
                False,
            ),
            (f"x = {gold.text}x + 1", False),
        ]
    )
    return Answer("equation", box(content), gold.text, gold.grader, right)


def collection(draw: random.Random, gold: Gold) -> Answer:
    near = draw.choice(gold.near[:2])
    content = draw.choice(
        [
            f"{gold.text}, {near}",
            f"{near}; {gold.text}",
            f"{gold.text} \\text{{ or }} {near}",
            f"\\{{{gold.text}, {near}\\}}",
            f"({gold.text}, {near})",
            f"[{gold.text}, {near}]",
            f"\\pm {gold.text}" if gold.text != "0" else "\\pm 1",
            f"\\begin{{pmatrix}}{gold.text}\\\\{near}\\end{{pmatrix}}",
        ]
    )
    return Answer("collection", box(content), gold.text, gold.grader, False)


def deep(draw: random.Random, gold: Gold) -> Answer:
    left, right = draw.choice(
        [*map(tuple, ("()", "[]", "{}")), ("\\sqrt{", "}"), ("\\frac{1}{1+", "}"), ("\\sin(", ")"), ("x^{", "}")]
    )
    count = draw.choice([11, 40, 300, 5000])
    closed = draw.choice([count, count - 1, 0])
    return Answer("deep", box(left * count + draw.choice(gold.near) + right * closed), gold.text, gold.grader, False)


def tower(draw: random.Random, gold: Gold) -> Answer:
    base, height = draw.choice([2, 7, 9, 99]), draw.randint(3, 8)
    huge = "^{".join([str(base)] * height) + "}" * (height - 1)
    number = 10**height
    content = draw.choice(
        [
            huge,
            f"\\gcd({huge},5)",
            f"\\operatorname{{lcm}}({huge},5)",
            f"\\binom{{{huge}}}{{5}}",
            f"({huge})!",
            f"\\frac{{{huge}}}{{3}}",
            f"\\sqrt{{{huge}}}",
            f"\\log({huge})",
            f"1e{number}",
            f"{number}!",
            f"(x+1)^{{{number}}}",
            "9" * min(number, 10**6),
        ]
    )
    return Answer("tower", box(content), gold.text, gold.grader, False, endless=True)


ZEROS = (0x660, 0x966, 0xFF10, 0x1D7CE)
"""Of Arabic, Devanagari, full-width and bold digits."""


def digits(draw: random.Random, gold: Gold) -> Answer:
    gold = an_integer(draw)
    zero, other = draw.choice(ZEROS), abs(int(gold.text)) + draw.randint(1, 99)
    other = "".join(chr(zero + int(digit)) for digit in str(other))
    text = draw.choice([box(other), f"The answer is {other}", f"{other}"])
    return Answer("digits", text, gold.text, gold.grader, False)


def macros(draw: random.Random, gold: Gold) -> Answer:
    near = draw.choice(gold.near[:2])
    text = draw.choice(
        [
            f"\\def\\boxed#1{{{gold.text}}} \\boxed{{{near}}}",
            f"\\renewcommand{{\\boxed}}[1]{{{gold.text}}} \\boxed{{{near}}}",
            f"\\newcommand{{\\x}}{{{gold.text}}} \\boxed{{\\x}}",
            box("\\input{/etc/passwd}"),
            box("\\def\\x{\\x\\x}\\x"),
            box(f"{near} \\text{{ and not the answer }}"),
            box(f"\\text{{the gold}} \\ne {gold.text}"),
            box("\\write18{touch " + RAN + "}"),
            box(f"\\csname boxed\\endcsname{{{gold.text}}}, {near}"),
            f"\\begin{{comment}} {box(gold.text)} \\end{{comment}} {box(near)}",
        ]
    )
    return Answer("macros", text, gold.text, gold.grader, False)


def code(draw: random.Random, gold: Gold) -> Answer:
    content = draw.choice(
        [
            f"__import__('os').system('touch {RAN}')",
            f"exec(\"open('{RAN}', 'w')\")",
            f"eval('open(\\'{RAN}\\', \\'w\\')')",
            f"().__class__.__base__.__subclasses__().pop()('{RAN}')",
            f"(lambda: open('{RAN}', 'w'))()",
            f"$(touch {RAN})",
            f"`touch {RAN}`",
            "while True: pass",
            "{{a*a}}",
            "{x.__class__}",
            "%s%s%n",
        ]
    )
    return Answer("code", draw.choice([box(content), content]), gold.text, gold.grader, False)


def long_text(draw: random.Random, gold: Gold) -> Answer:
    content, right = either(draw, gold)
    filler = draw.choice(
        [
            "Let us see. ",
            "1 ",
            "x=",
            "answer is ",
            "{",
            "}",
            "$ ",
            "\\( ",
            "<think></think>",
            "\\",
            "\\boxed{",
            "1,111",
            "-",
            "\\text{a}",
            "\n",
        ]
    )
    length = draw.choice([1_000, 30_000, 300_000])
    if draw.random() < 0.2:  # within the box it is no answer
        return Answer("long", box(filler * (length // len(filler)) + "y" + gold.near[0]), gold.text, gold.grader, False)
    return Answer("long", filler * (length // len(filler)) + "\n\n" + box(content), gold.text, gold.grader, right)


def control(draw: random.Random, gold: Gold) -> Answer:
    content, right = either(draw, gold)
    noise = "".join(draw.choice("\0\a\b\x1b\x7f\u200b\u202e\ufeff\ufffd\ud7ff\x85\u2028") for _ in range(draw.randint(1, 20)))
    if not right and draw.random() < 0.5:
        content += noise
    return Answer("control", noise + box(content) + noise, gold.text, gold.grader, right)


KINDS: list[Callable[[random.Random, Gold], Answer]] = [
    boxed_value,
    unboxed_value,
    cut_off,
    finished,
    thought,
    nested_boxes,
    several_boxes,
    open_boxes,
    equation,
    collection,
    deep,
    tower,
    digits,
    macros,
    code,
    long_text,
    control,
]
ENDLESS = [
    ("".join(f"\\cos(\\frac{{{k}\\pi}}{{31}})" for k in range(1, 16)), "\\frac{1}{32768}"),
    ("\\gcd(9^{(1+8)^{9}},5)", "5"),
    ("\\sin(x y)+\\sqrt{x+y^{5}}=e^{x y}+z^{3}", "y=x"),
]
