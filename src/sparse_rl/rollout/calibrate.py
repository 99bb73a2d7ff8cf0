"""Gather statistics: run a few prompts through the model, at positions up to the longest that a rollout reaches."""

# N packed tokens, Q query heads, H kv heads, D head dimension

from collections.abc import Collection, Sequence

import torch
from transformers import PreTrainedModel

from ..kernels.attention import packed_causal_attention
from ..kernels.form import PLAIN
from ..kv.statistics import Collector
from ..models.attention import eval_mode
from ..models.head import decoder_output
from ..models.recurrent import Mixer, run_packed
from ..models.support import prepare
from ..world import ALONE, World

PROMPTS = 16
"""Largest number of prompts of a calibration, evenly spaced among all."""
PROMPT_TOKENS = 512
"""Largest number of tokens used of each text: its last ones, so that a response counts even after a long prompt."""
ENOUGH_TOKENS = 256
"""Number of tokens from which statistics are final. Fewer, as in a warm-up call, do not cover the range of all channels."""
PLACES = 8
"""Positions at which the prompts are placed. Only the rotation of keys and queries differs between them."""

REFRESH_STEPS = 32
"""Largest number of training steps between two calibrations."""


def is_due(step: int) -> bool:
    """Return whether a run gathers its statistics again after `step`: after 1, 2, 4, … steps, then every `REFRESH_STEPS`.

    Weights change most at the start of a run, and the first responses are known after step 1. The schedule depends only on the
    step, so a resumed run has the same statistics.
    """
    return step > 0 and (step & (step - 1) == 0 or step % REFRESH_STEPS == 0)


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    longest: int,
    collectors: Sequence[Collector],
    world: World = ALONE,
) -> None:
    """Run some of these prompts through the model and pass the inputs of its attention to the collectors.

    All ranks of `world` pass the same prompts. Each rank runs a part of them, and gets the sums of all ranks.

    `longest` is the length of the longest sequence in tokens; 0 places the prompts only at the first positions. The passes do
    not depend on the order of the prompts.
    """
    limits = prepare(model)
    distinct = sorted({tuple(prompt[-PROMPT_TOKENS:]) for prompt in prompts})
    chosen = distinct[:: -(-len(distinct) // PROMPTS)]
    most = max(map(len, chosen))
    last = max(0, min(longest, limits.context or longest) - most)
    if mine := chosen[world.rank :: world.size]:
        _run_prompts(model, mine, most, last, collectors)
    if world.size > 1:
        parts = world.gather([collector.gathered() for collector in collectors])
        for place, collector in enumerate(collectors):
            collector.combine([part[place] for part in parts])


def _run_prompts(
    model: PreTrainedModel, chosen: Sequence[Sequence[int]], most: int, last: int, collectors: Sequence[Collector]
) -> None:
    """Run prompts of at most `most` tokens, packed, at positions from 0 to `last`."""
    device = model.device
    tokens_1N = torch.tensor([[token for prompt in chosen for token in prompt]], device=device)
    places_1N = torch.tensor([[place for prompt in chosen for place in range(len(prompt))]], device=device)
    bounds = torch.tensor([0, *map(len, chosen)], device=device).cumsum(0, dtype=torch.int32)
    with eval_mode(model):
        for offset in sorted({last * number // max(1, PLACES - 1) for number in range(PLACES)}):
            view = _Collecting(collectors, prepare(model).shape.full_layers, places_1N + offset, bounds, most)
            decoder_output(model, tokens_1N, places_1N + offset, view)


class _Collecting:
    """View of packed prompts, each attending only to itself, that passes the inputs of these layers to collectors."""

    def __init__(
        self,
        collectors: Sequence[Collector],
        layers: Collection[int],
        positions_1N: torch.Tensor,
        bounds: torch.Tensor,
        longest: int,
    ):
        self.layers = layers
        self.collectors, self.positions_1N, self.bounds, self.longest = collectors, positions_1N, bounds, longest

    def attend(self, layer, queries_1QND, keys_1HND, values_1HND, scale, mask, form=PLAIN):
        for collector in self.collectors if layer in self.layers else ():
            collector.add(layer, queries_1QND, keys_1HND, values_1HND, self.positions_1N)
        return packed_causal_attention(queries_1QND, keys_1HND, values_1HND, self.bounds, self.longest, scale, form)

    def recur(self, layer: int, mixer: Mixer, hidden_1ND: torch.Tensor) -> torch.Tensor:
        return run_packed(mixer, hidden_1ND, self.bounds.tolist())
