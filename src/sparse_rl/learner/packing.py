"""Pack rollouts into passes, and the rollouts of a pass into one row of tokens.

Adjacent rollouts with the same prompt share it: its tokens are in the row once. Prompts are not shared in a sparse view, because
each rollout evicts different keys. They are not shared by long responses either: attention over whole sequences is then faster.
"""

# N packed tokens, n response tokens

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels.prefix_attention import Segment
from ..rollout.rollout import Rollout
from ..sizes import KEYS_PER_TOKEN, worth_sharing


def packs(rollouts: Sequence[Rollout], tokens_per_pass: int, *, share_prompts: bool) -> Iterator[list[int]]:
    """Yield the indices of the rollouts of each pass, in order: at least one rollout, up to `tokens_per_pass` tokens, and
    `KEYS_PER_TOKEN` times as many keys."""
    pack: list[int] = []
    tokens = keys = 0
    for index, rollout in enumerate(rollouts):
        whole = len(rollout.prompt) + len(rollout.response)
        follows = share_prompts and bool(pack) and shares_prompt(rollouts[pack[-1]], rollout)
        length = len(rollout.response) if follows else whole
        if pack and (tokens + length > tokens_per_pass or keys + whole > KEYS_PER_TOKEN * tokens_per_pass):
            yield pack
            pack, tokens, keys, length = [], 0, 0, whole
        pack.append(index)
        tokens, keys = tokens + length, keys + whole
    if pack:
        yield pack


def shares_prompt(before: Rollout, rollout: Rollout) -> bool:
    """Return whether the rollout shares the prompt of the one before it."""
    return worth_sharing(len(rollout.prompt), len(rollout.response)) and before.prompt == rollout.prompt


@dataclass
class PackedRow:
    """Tokens of one pass. The last token of a response was sampled but never fed, so it is not among them."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    predicting: list[int] = field(default_factory=list)
    """Index of the token that predicts each response token, rollout by rollout."""
    segments: list[Segment] = field(default_factory=list)
    choices: list[Tensor] = field(default_factory=list)
    """Experts that the sampler chose for the tokens, [tokens, routers, experts per token] each; empty if not recorded."""
    shared: bool = False
    """True if a prompt is shared. Its tokens and those of each response are then separate segments."""

    def append(self, tokens: list[int], prefix_start: int = 0, prefix_stop: int = 0) -> None:
        """Append a segment, which may be empty."""
        start, first = len(self.tokens), prefix_stop - prefix_start
        self.tokens += tokens
        self.positions += range(first, first + len(tokens))
        if tokens:
            self.segments.append(Segment(start, len(self.tokens), prefix_start, prefix_stop))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens [1, N], positions [1, N] and the predicting tokens [n]."""
        return torch.tensor([self.tokens]), torch.tensor([self.positions]), torch.tensor(self.predicting)


def pack_tokens(pack: Sequence[Rollout], *, share_prompts: bool) -> PackedRow:
    """Return the row of these rollouts. Adjacent rollouts share their prompt if `share_prompts` is set."""
    row = PackedRow()
    for start, stop in _groups(pack) if share_prompts else [(index, index + 1) for index in range(len(pack))]:
        group, prompt_start = pack[start:stop], len(row.tokens)
        prompt_stop = prompt_start + len(group[0].prompt)
        if len(group) == 1:
            row.append(group[0].prompt + group[0].response[:-1])
            if group[0].routing is not None:
                row.choices += [group[0].routing.prompt_TRK, group[0].routing.response_TRK]
            row.predicting += range(prompt_stop - 1, len(row.tokens))
            continue
        row.shared = True
        row.append(group[0].prompt)
        if group[0].routing is not None:
            row.choices.append(group[0].routing.prompt_TRK)
        for rollout in group:
            if rollout.routing is not None:
                row.choices.append(rollout.routing.response_TRK)
            row.predicting += [prompt_stop - 1, *range(len(row.tokens), len(row.tokens) + len(rollout.response) - 1)]
            row.append(rollout.response[:-1], prompt_start, prompt_stop)
    return row


def _groups(pack: Sequence[Rollout]) -> list[tuple[int, int]]:
    """Return the bounds of the runs of rollouts that share a prompt."""
    starts = [index for index in range(len(pack)) if index == 0 or not shares_prompt(pack[index - 1], pack[index])]
    return list(zip(starts, [*starts[1:], len(pack)], strict=True))
