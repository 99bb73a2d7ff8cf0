"""The suite needs nothing but this repository: it reads nothing beside it, and it tests this checkout's code."""

import ast
import re
from pathlib import Path

import pytest

import sparse_rl

TESTS = Path(__file__).parent
MACHINE = {"home", "root", "work", "mnt", "data", "opt", "srv", "Users"}
"""Folders of one machine. Paths such as /dev/null and /tmp are everywhere."""


def levels_up(node):
    """How many folders an expression such as `Path(__file__).resolve().parents[1]` climbs; None: it is no such path."""
    if isinstance(node, ast.Name) and node.id == "__file__":
        return 0
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "parents":
        below = levels_up(node.value.value)
        return None if below is None else below + 1 + ast.literal_eval(node.slice)
    if isinstance(node, ast.Attribute):
        below = levels_up(node.value)
        return None if below is None else below + (node.attr == "parent")
    if isinstance(node, ast.Call):
        below = [levels_up(part) for part in (node.func, *node.args)]
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        return next((level + (name == "dirname") for level in below if level is not None), None)
    return None


def leaves_the_repository(source):
    """The lines of a test file that name something outside of the repository."""
    found = []
    for node in ast.walk(ast.parse(source)):
        climbs = (levels_up(node) or 0) > 2  # the folder of the tests, then the repository
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        above = text == ".." or text.startswith(("../", "~/"))
        machine = text.startswith("/") and text.count("/") > 1 and text.split("/")[1] in MACHINE
        if climbs or above or machine:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.name)
def test_no_test_looks_outside_of_the_repository(path):
    if path != Path(__file__):
        assert leaves_the_repository(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('Path(__file__).resolve().parents[1].parent / "x"', 1),
        ("Path(__file__).parent.parent.parent", 1),
        ("os.path.dirname(os.path.dirname(os.path.dirname(__file__)))", 1),
        ('Path(__file__).parents[1] / ".." / "x"', 1),
        ('open("../x")', 1),
        ('open("/home/me/x")', 1),
        ('client.get("/data")', 0),
        ('Path("~/x").expanduser()', 1),
        ('Path(__file__).parents[1] / "docs"', 0),
        ('Path(__file__).parent / "data"', 0),
        ("EVIDENCE[0].parent.parent.parent", 0),
        ('open("/dev/null")', 0),
    ],
)
def test_the_scan_finds_paths_that_leave(source, lines):
    assert len(leaves_the_repository(source)) == lines


def test_tests_are_skipped_only_for_what_a_machine_may_lack():
    skips = re.compile(r"pytest\.(?:mark\.skip|mark\.xfail|skip\(|importorskip).*")
    for path in set(TESTS.rglob("*.py")) - {Path(__file__)}:
        for line in skips.findall(path.read_text(encoding="utf-8")):
            assert "needs a CUDA device" in line or "needs root" in line, f"{path.name}: {line}"


def test_the_code_under_test_is_that_of_this_repository():
    assert Path(sparse_rl.__file__).is_relative_to(TESTS.parent / "src")
