"""docs/models.md states what is measured: each row is checked again, on shorter rollouts. `test_families.py` measures the
differences in its last two cells."""

import sys
from pathlib import Path

import pytest
from transformers import Gemma3Config, MixtralConfig

from sparse_rl import UserError
from sparse_rl.config import LoraConfig
from sparse_rl.models.actor import Actor, linear_names
from sparse_rl.models.compile import decoder_layers

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(DOCS))
import families  # noqa: E402
import make_models  # noqa: E402

LINES = make_models.PAGE.read_text().splitlines()


@pytest.mark.parametrize("name", families.RUNS)
def test_a_family_does_what_its_row_says(name, monkeypatch):
    monkeypatch.setattr(make_models, "TOKENS", 12)  # beyond the windows, with compactions of the prompt and the response
    (line,) = [line for line in LINES if line.startswith(f"| {name} |")]
    assert line.startswith(make_models.line(make_models.row(name).cells))


@pytest.mark.parametrize("name", families.REFUSED)
def test_a_refused_family_gives_the_reason_in_its_row(name):
    assert f"| {name} | {make_models.refusal(name)} |" in LINES


def test_the_page_has_every_family_once():
    named = [
        line.split(" | ")[0].removeprefix("| ") for line in LINES[: LINES.index("## Decode speed")] if line.startswith("| ")
    ]
    assert [name for name in named if name != "family"] == [*families.RUNS, *families.REFUSED]
    assert make_models.HEAD.splitlines() == LINES[: len(make_models.HEAD.splitlines())]
    assert make_models.LEGEND in "\n".join(LINES)
    assert "\n".join(LINES).endswith("\n".join([make_models.SPEED, "## Notes\n", make_models.NOTES]).rstrip())


def test_adapters_of_experts_are_refused_in_a_sentence():
    """peft turns the names of separate experts into those of a weight for all experts, which has no layer to merge into."""
    model = families.build(MixtralConfig(**families.SIZE, **families.LOCAL))
    with pytest.raises(UserError, match="adapts the experts of MixtralForCausalLM.*set model.lora.targets = q_proj,k_proj"):
        Actor(model, LoraConfig(rank=2, targets="q_proj,w1,w2,w3"))


def test_layers_for_images_are_neither_adapted_nor_taken_for_the_decoder():
    """They are never run. Here there are as many as the decoder has."""
    images = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = families.RUNS["Gemma 3"].to_dict()
    model = families.build(Gemma3Config(text_config=text, vision_config=images | {"image_size": 28, "patch_size": 14}))
    assert {type(layer).__name__ for layer in decoder_layers(model)} == {"Gemma3DecoderLayer"}
    counted = linear_names(model)
    adapted = [path for path, module in Actor(model, LoraConfig(rank=2)).learner.named_modules() if hasattr(module, "lora_A")]
    assert adapted == counted and len(adapted) == 2 * 7 and all("language_model" in path for path in adapted)
