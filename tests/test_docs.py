"""What the README and the guides tell a user to type runs as it stands."""

import re
import shlex
from pathlib import Path

import pytest

from sparse_rl.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_first_python_example_runs_and_is_exact(capsys):
    exec(compile(blocks("python")[0], "README.md", "exec"), {})
    text, numbers, *distances = capsys.readouterr().out.strip().splitlines()
    assert text.startswith("132+29")
    assert int(numbers.split()[0]) <= 130
    sparse, dense = map(float, distances)
    assert sparse < 1e-4 < dense


@pytest.mark.parametrize(
    "line", [line for block in blocks("bash") for line in block.splitlines() if line.startswith("sparse-rl")]
)
def test_the_shell_examples_run(line, capsys):
    main(shlex.split(line)[1:])
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/rollouts.md", "docs/policies.md"])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text()):
        assert target.startswith("http") or ((ROOT / page).parent / target).exists(), target
