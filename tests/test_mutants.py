"""The mutation campaign: every mutant is valid code that differs in one place, and names files and tests that exist."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("mutants", ROOT / "experiments" / "faults" / "mutants.py")
campaign = importlib.util.module_from_spec(spec)
spec.loader.exec_module(campaign)

SOURCE = '''
def most(values, limit=3):
    """The most of them, at least -1."""
    top = -1
    for value in values:
        if value > top and not value == limit:
            top = max(top, value)
    top += 1
    return top - 1
'''


def made(source):
    return dict(campaign.mutate(source, *site) for site in campaign.sites(source))


def test_every_kind_of_change_is_made():
    changes = [description.split(", ")[1].split(":")[0] for description in made(SOURCE)]
    kinds = {"comparison", "operator", "sign", "plus one", "minus one", "condition", "function", "leave out"}
    assert set(changes) == kinds
    assert "line 6.11, comparison: value > top -> value >= top" in made(SOURCE)
    assert not any("The most of them" in description for description in made(SOURCE))
    assert len(made(SOURCE)) == len(campaign.sites(SOURCE)), "two mutants have one name"


def test_a_mutant_differs_and_most_mutants_behave_differently():
    results = []
    for source in made(SOURCE).values():
        assert ast.dump(ast.parse(source)) != ast.dump(ast.parse(SOURCE))
        space = {}
        exec(source, space)
        results.append([space["most"](values) for values in ([], [3], [1, 2, 3], [5, 4], [0, -7])])
    right = [-1, -1, 2, 5, 0]
    assert right in results, "value >= top is an equivalent mutant"
    assert sum(result != right for result in results) > len(results) / 2


@pytest.mark.parametrize("file", campaign.TESTS)
def test_the_campaign_names_files_and_tests_that_exist(file):
    assert (ROOT / "src" / "sparse_rl" / file).is_file()
    assert all((ROOT / "tests" / f"test_{name}.py").is_file() for name in campaign.TESTS[file][0].split())


def test_the_same_seed_gives_the_same_mutants():
    one, again, other = (campaign.chosen(seed, 3, ["losses/"]) for seed in (0, 0, 1))
    assert one == again != other
    for file, _, source in one:
        assert ast.unparse(ast.parse(source)) != ast.unparse(ast.parse((ROOT / "src" / "sparse_rl" / file).read_text()))
