"""Every family of docs/models.md in float32 and bfloat16, beyond its windows and over many compactions: the sampler against
replay, and a dense cache against `generate` in transformers."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
import families
from exactness import ROUNDING, measure
from make_models import PAGE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WINDOWS_ALONE = ["Mistral with windows"]
"""Families of which nothing is evicted."""


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # bfloat16 on a CPU that has none
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", families.RUNS)
def test_sampler_replay_and_transformers_agree(name, dtype):
    found = measure(families.RUNS[name], DTYPES[dtype])
    for what, gap in {**found.replayed, "generate": found.dense, **found.states}.items():
        assert gap.ours <= found.bound(gap), what
    if name not in WINDOWS_ALONE:
        assert found.compactions >= 5
        assert found.without_evictions > 3 * found.of_replay  # else the replay proves nothing


@pytest.mark.parametrize("name", families.RUNS)
def test_the_page_prints_differences_within_the_bounds(name):
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |")]
    printed = [float(cell) for cell in line.split("|")[-3:-1]]
    assert all(0 < gap <= bound for gap, bound in zip(printed, ROUNDING.values(), strict=True))
