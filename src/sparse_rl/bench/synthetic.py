"""A training run on random weights, with synthetic prompts, lengths from a stated distribution and a reward without
meaning."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from ..config import Config, merged_tables
from ..data.examples import Example
from ..errors import UserError
from ..models.load import DTYPES, load_model, load_tokenizer, place
from ..models.shapes import SHAPES, random_model
from ..models.support import set_head_dtype
from ..plan.dimensions import HUB_SHAPES
from ..plan.output import parse_size
from ..rewards.pool import pool_for
from ..train.inputs import RunInputs
from ..train.run_folder import RunFolder
from ..train.terminal import RunTerminal
from ..train.trainer import TrainingRun
from .lengths import drawn_lengths

BASE: dict[str, Any] = {"rollout": {"prompts_per_step": 32, "samples_per_prompt": 8, "max_tokens": 4096}}
"""Defaults: 256 rollouts of up to 4,096 tokens. A recipe or flags override them."""
FIXED: dict[str, Any] = {
    "reward": {"function": "sparse_rl.bench.reward:parity", "truncated": "grade"},  # every rollout ends at its maximum length
    "data": {"train": "arithmetic"},
    "eval": {"problems": 0},
    "log": {"rollouts_per_step": 0, "traces_per_step": 0},
}


def synthetic_config(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe, completed with the defaults and fixed settings of a synthetic run."""
    return merged_tables(merged_tables(BASE, values), FIXED)


class AnyIds:
    """Tokenizer of the embedded model for any vocabulary: each id is taken modulo the tokenizer's size."""

    def __init__(self) -> None:
        self.tokenizer = load_tokenizer("tiny")

    def batch_decode(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        size = len(self.tokenizer)
        return self.tokenizer.batch_decode(
            [[int(token) % size for token in row] for row in rows], skip_special_tokens=skip_special_tokens
        )


def synthetic_inputs(config: Config, prompt_tokens: int, *, uniform_lengths: bool) -> RunInputs:
    dtype, device = place(config.model.dtype, config.model.device)
    path = HUB_SHAPES.get(config.model.path, config.model.path)
    if path in SHAPES:
        model = random_model(path, dtype=DTYPES[dtype], device=device, seed=config.seed, base=config.model.lora.base)
        # random weights were trained for no context, so the shape's does not limit a benchmark
        longest_sequence = prompt_tokens + config.rollout.max_tokens
        model.config.max_position_embeddings = max(model.config.max_position_embeddings, longest_sequence)
    else:
        model = load_model(
            path, dtype=dtype, device=device, trust_remote_code=config.model.trust_remote_code, base=config.model.lora.base
        )
    set_head_dtype(model, config.model.head_dtype)
    # every rollout runs to its maximum length
    model.generation_config.eos_token_id = model.config.get_text_config().eos_token_id = None
    count = config.rollout.prompts_per_step
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(vocab, (count, prompt_tokens), generator=torch.Generator().manual_seed(config.seed)).tolist()
    longest = config.rollout.max_tokens
    return RunInputs(
        model,
        AnyIds(),
        [Example(str(number), None, {}) for number in range(count)],
        ids,
        (lambda seeds: drawn_lengths(seeds, longest)) if uniform_lengths else None,
    )


@contextmanager
def synthetic_trainer(config: Config, console: Console, prompt_tokens: int, *, uniform_lengths: bool) -> Iterator[TrainingRun]:
    """Yield the trainer of a run whose folder is deleted afterwards."""
    with TemporaryDirectory() as folder, RunTerminal(config, console) as view:
        run = RunFolder(Path(folder) / "run")
        workers = min(config.reward.workers, os.cpu_count() or 1)
        function = config.reward.function_for(config.data.train)
        with (
            pool_for(config.reward, function, workers=workers) as pool,
            run.opening(config, resume=False, overwrite=False),
        ):
            yield TrainingRun(
                config, run, view, pool, inputs=synthetic_inputs(config, prompt_tokens, uniform_lengths=uniform_lengths)
            )


def cap_memory(size: str | None) -> None:
    """Limit this process to `size` of GPU memory."""
    if size is None:
        return
    if not torch.cuda.is_available():
        raise UserError("--memory-cap needs a GPU: remove the option.")
    _, total = torch.cuda.mem_get_info()
    wanted = parse_size(size)
    if wanted > total:
        raise UserError(f"--memory-cap {size} exceeds the GPU's memory of {total / 2**30:.1f} GiB: lower or remove it.")
    torch.cuda.set_per_process_memory_fraction(wanted / total)
