"""docs/models.md states what is measured: each row is measured again, on shorter rollouts."""

import sys
from pathlib import Path

import pytest
from transformers import MixtralConfig

from sparse_rl import UserError
from sparse_rl.config import LoraConfig
from sparse_rl.models.actor import Actor

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(DOCS))
import families  # noqa: E402
import make_models  # noqa: E402

LINES = make_models.PAGE.read_text().splitlines()


@pytest.mark.parametrize("name", families.RUNS)
def test_a_family_does_what_its_row_says(name, monkeypatch):
    monkeypatch.setattr(make_models, "TOKENS", 12)  # beyond the windows, with compactions of the prompt and the response
    assert make_models.row(name).line in LINES


@pytest.mark.parametrize("name", families.REFUSED)
def test_a_refused_family_gives_the_reason_in_its_row(name):
    assert f"| {name} | {make_models.refusal(name)} |" in LINES


def test_the_page_has_every_family_once():
    named = [
        line.split(" | ")[0].removeprefix("| ") for line in LINES[: LINES.index("## Decode speed")] if line.startswith("| ")
    ]
    assert [name for name in named if name != "family"] == [*families.RUNS, *families.REFUSED]
    assert make_models.HEAD.splitlines() == LINES[: len(make_models.HEAD.splitlines())]
    assert "\n".join(LINES).endswith("\n".join([make_models.SPEED, "## Notes\n", make_models.NOTES]).rstrip())


def test_adapters_of_experts_are_refused_in_a_sentence():
    """peft turns the names of separate experts into those of a weight for all experts, which has no layer to merge into."""
    model = families.build(MixtralConfig(**families.SIZE, **families.LOCAL))
    with pytest.raises(UserError, match="adapts the experts of MixtralForCausalLM.*set model.lora.targets = q_proj,k_proj"):
        Actor(model, LoraConfig(rank=2, targets="q_proj,w1,w2,w3"))
