r"""Answers that break graders, each with the gold it is graded against: not one is right, and none may hang or crash.

`WRONG` get the verdict 0 at once; `ENDLESS` keep sympy busy beyond any limit and get no verdict.
"""

import random

EMBEDDED = "So the answer is $\\boxed{{{}}}$."


def wrong() -> list[tuple[str, str]]:
    """(text, gold) pairs of which each is plainly wrong."""
    draw = random.Random(5)
    contents: list[str] = []
    for base in (2, 7, 9, 10, 99):  # nested exponents
        for height in (3, 4, 6, 9):
            contents.append("^{".join([str(base)] * height) + "}" * (height - 1))
        contents.append(f"\\sqrt{{{base}^{{{base}^{{99}}}}}} + 1")
        contents.append(f"\\frac{{{base}^{{10^{{12}}}}}}{{{base}^{{10^{{11}}}}}}")
        contents.append(f"\\log_{{{base}}}({base}^{{{base}^{{{base}^9}}}})")
        contents.append(f"\\sin({base}^{{10^{{10}}}})")
        contents.append(f"{base}^{{-{base}^{{{base}^9}}}}")
        contents.append(f"{base}^{{10^{{15}}}} \\mod 7")
        contents.append(f"(x+{base})^{{1000000}}")
    for number in (10**4, 10**6, 10**9, 10**18):  # factorials
        contents += [f"{number}!", f"({number}!)!", f"\\binom{{{number}}}{{{number // 2}}}", f"\\frac{{{number}!}}{{2}}"]
    for length in (600, 5_000, 50_000, 500_000):  # kilobytes of LaTeX
        contents.append("\\frac{1}{2}+" * (length // 12) + "1")
        contents.append("\\sqrt{x}" * (length // 8))
        contents.append("\\left(" * (length // 6) + "1")
        contents.append(" " * length)
        contents.append("x" * length)
        contents.append("\\begin{pmatrix}" + "1 & 2 \\\\" * (length // 9) + "\\end{pmatrix}")
        contents.append("1," * (length // 2) + "2")
        contents.append("\\text{" + "and " * (length // 4) + "}")
    for length in (50, 400, 4_000, 5_000, 1_000_000):  # very long digits
        contents += ["9" * length, "-" + "1" * length, "0." + "3" * length, f"1e{'9' * length}", f"10^{{{'9' * length}}}"]
        contents.append("1" * length + "/" + "3" * length)
    for deep in (11, 50, 1_000, 20_000):  # deep nesting
        for left, right in ("()", "[]", "{}", ("\\sqrt{", "}"), ("\\frac{1}{1+", "}"), ("\\sin(", ")"), ("x^{", "}")):
            contents.append(left * deep + "1" + right * deep)
        contents.append("-" * deep + "1")
        contents.append("\\left(" * deep + "1" + "\\right)" * deep)
    contents += [  # work left to the grader
        "\\int_0^1 \\sin(\\sin(x)) e^{x^x} dx",
        "\\int_0^\\infty \\frac{x^7}{e^{x^2}+\\cos x} dx",
        "\\int\\int\\int x^{y^z} dx dy dz",
        "\\sum_{k=1}^{10^{10}} \\frac{1}{k!}",
        "\\sum_{n=1}^{\\infty} \\frac{\\sin n}{n^3}",
        "\\prod_{k=1}^{10^9} k",
        "\\lim_{x \\to 0} \\frac{\\sin(\\tan x) - \\tan(\\sin x)}{x^7}",
        "\\det \\begin{pmatrix} a & b \\\\ c & d \\end{pmatrix}",
    ]
    contents += [  # characters
        "5\0",
        "\0" * 1_000,
        "\0 5 \0",
        "\u0665",  # an Arabic five
        "\uff15",  # a wide one
        "五",
        "⁵",
        "5\u200b",
        "\u202e5",
        "\ufffd",
        "💥" * 100,
        "e\u0301" * 200,
        "\\u0035",
        "\x1b[31m5",
        "\r\n" * 100,
    ]
    contents += [  # code, which is data
        "__import__('os').system('exit 1')",
        "exec('while True: pass')",
        "lambda: 5",
        "\\input{/etc/passwd}",
        "\\def\\x{\\x\\x}\\x",
        "\\newcommand{\\a}{\\a}\\a",
        "\\write18{exit}",
        "%5",
        "$" * 300,
        "\\" * 301,
        "&&&&",
        "\\frac{1}{0}",
        "0^{0^{-1}}",
        "\\infty - \\infty",
        "\\sqrt{-1}",
        "NaN",
        "None",
        "",
    ]
    answers = [(EMBEDDED.format(content), gold) for content in contents for gold in [draw.choice(["5", "\\frac{3\\pi}{7}"])]]
    open_braces = [  # braces that never close, and text without a box
        "\\boxed{5",
        "\\boxed{" * 20_000,
        "\\boxed{{5}" * 3,
        "\\boxed{\\frac{1}{5}",
        "\\boxed{5\\}",
        "\\boxed",
        "{" * 100_000,
        "}" * 100_000,
        "$" * 100_001,
        "\\( " * 3_000,
        "answer is " * 20_000,
        "x=" * 50_000,
        "\\boxed{6} or \\boxed{5}",
        "(" * 5_000 + "6" + ")" * 5_000,
        "\\[ 9^{9^{9^9}} \\]",
        "the final answer is $100000000!$",
        "1" * 100_000,
        "1 " * 100_000 + "6",
        "-" * 100_000,
        "a" * 1_000_000,
    ]
    return answers + [(text, "5") for text in open_braces]


ENDLESS = [
    (EMBEDDED.format(answer), gold)
    for answer, gold in (
        ("".join(f"\\cos(\\frac{{{k}\\pi}}{{31}})" for k in range(1, 16)), "\\frac{1}{32768}"),
        ("".join(f"\\cos(\\frac{{{k}\\pi}}{{37}})" for k in range(1, 19)), "\\frac{1}{262144}"),
        ("\\sin(x y)+\\sqrt{x+y^{5}}=e^{x y}+z^{3}", "y=x"),
        ("\\sin(x y z)+\\sqrt{x+y^{7}}=e^{x y}+z^{5}+\\cos(w x)", "y=x"),
    )
]
"""Equal numbers whose equality sympy cannot show in half a minute, and equations that it cannot solve."""
