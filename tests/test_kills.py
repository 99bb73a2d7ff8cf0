"""A kill at any file operation leaves a folder that the next command can use: a slice of experiments/faults/kills.py."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "experiments/faults/kills.py"


@pytest.fixture(scope="module")
def kills():
    spec = importlib.util.spec_from_file_location("kills", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["kills"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def campaign(kills, tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield kills.Campaign(tmp_path_factory.mktemp("kills"))
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("situation", "operation", "way", "left"),
    [
        ("fresh", "open run/.config.toml.partial", "before", "no run"),
        ("fresh", "rename run/.replaced", "before", "the run"),
        ("resume", "open run/metrics.jsonl", "torn", "the run"),
        ("overwrite", "rename run/config.toml", "before", "the old run"),
        ("overwrite", "rename run/.replaced", "before", "the old run"),
    ],
)
def test_the_next_command_goes_on_whatever_a_kill_has_left(kills, campaign, situation, operation, way, left):
    """It ends with the weights and metrics of a run that nobody killed. What --overwrite replaces is whole until its successor
    has begun."""
    (what,) = (each for each in kills.SITUATIONS if each.name == situation)
    assert campaign.kill(what, operation, way) == (left, [])
