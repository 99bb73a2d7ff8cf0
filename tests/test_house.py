"""The shape of the code: imports run downwards, retired names stay away, files stay short, public names are documented."""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest

import sparse_rl

ROOT = Path(sparse_rl.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py"))
MOST_LINES = 450

LAYERS = [
    {"cli", "__main__", "testing"},
    {"integrations"},
    {"commands"},
    {"train", "evaluate", "report", "plan", "bench"},
    {"monitor", "learner", "rollout", "rewards", "data", "world", "scores"},
    {"models"},
    {"kv"},
    {"kernels"},
    {"config", "sizes"},
    {
        "errors",
        "format",
        "text",
        "terminal",
        "reading",
        "hub",
        "disk",
        "exit_codes",
        "backup",
        "gpu_memory",
        "host_memory",
        "__init__",
    },
]
"""Top to bottom. A module imports from its own layer and from those below."""

EXCEPTIONS = {
    ("commands", "integrations"),  # `train --ray.workers` starts Ray, imported when it runs
    ("models", "data"),  # make_tiny.py, the script that made the embedded model
}

RETIRED = {
    "Dealer", "Drawn", "Steps", "Done", "InFlight", "Given", "Seen", "Tried", "teaches", "takes_part", "leads", "meet", "aside",
    "made_up", "unborn", "taker", "lives", "_worth", "headed_like", "at_rest", "refuse_if_it_lacks", "what_is_busy",
    "refuse_what_does_not_divide", "right_or_wrong", "HOPEFUL_SLOTS", "SURELY", "TOLD", "UNTIL", "STAYS", "MADE_UP",
    "telling", "heard", "answering", "looks", "apart_n", "modest", "Said", "spoken", "speech", "_hear", "_deal", "_Here",
    "StopAsked", "_told", "told_if_absent", "tell_end", "torchruns", "flags_given", "ABOUT_THE_ROLLOUT", "the_one", "stays_b",
    "rehearse", "rehearsal", "keeper", "hang_up", "print_closing", "more_than_dense", "set_aside", "bring_back", "forget_after",
    "no_bar", "short_enough", "travelling", "was_loaded", "_go_on_from", "end_if_broken", "end_if_silent",
    "problems_of", "answers_of", "examined", "refusal_behind", "takers", "_picture",
}  # fmt: skip
"""Identifiers that readers of other trainers could not guess. Write RolloutSampler, has_signal, is_main, …"""


def part_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def level(part):
    return next(number for number, layer in enumerate(LAYERS) if part in layer)


def imported_parts(path):
    """Yield the parts of the package that a module imports, also inside functions."""
    depth = len(path.relative_to(ROOT).parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            yield from [(node.module or "").split(".")[0]] if node.module else [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sparse_rl."):
            yield node.module.split(".")[1]


def test_imports_run_downwards():
    upward = [
        (str(path.relative_to(ROOT)), part)
        for path in FILES
        for part in imported_parts(path)
        if path.name != "__init__.py" or path.parent != ROOT
        if part.isidentifier() and part != "__version__" and level(part) < level(part_of(path))
        if (part_of(path), part) not in EXCEPTIONS
    ]
    assert upward == []


def names_in(path):
    source = path.read_text(encoding="utf-8")
    return {token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.NAME}


@pytest.mark.parametrize("folder", ["src", "tests", "experiments", "benchmarks"])
def test_retired_names_do_not_come_back(folder):
    files = [path for path in (Path(__file__).parents[1] / folder).rglob("*.py") if path != Path(__file__)]
    assert {str(path): found for path in files if (found := names_in(path) & RETIRED)} == {}


def test_every_class_has_a_name_of_its_own():
    found = Counter(
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in found.items() if count > 1] == []


def test_files_stay_short():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}


def test_every_module_says_what_it_does():
    assert [str(path) for path in FILES if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))] == []


def test_every_public_name_is_documented():
    for name in sparse_rl.__all__:
        value = getattr(sparse_rl, name)
        assert isinstance(value, str | int) or (value.__doc__ or "").strip(), name
