"""Checkpoints: weights, optimizer and counters of one step, written whole or not at all.

Everything random in a run is drawn by counter, so the step and the data cursor are all there is to save of randomness.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..errors import UserError
from ..learner.optimizer import Optimizer
from ..models.actor import Actor


@dataclass
class State:
    """Where a run stands, besides weights and moments."""

    step: int = 0
    """Steps done."""
    cursor: int = 0
    """Prompts drawn so far."""
    best_step: int = -1
    best_value: float = float("-inf")
    skipped_updates: int = 0
    skipped_in_a_row: int = 0
    quiet_steps: int = 0
    """Steps in a row without any signal."""
    silent_steps: int = 0
    """Steps in a row without any verdict."""


def save(folder: Path, state: State, actor: Actor, optimizer: Optimizer) -> Path:
    """`folder`/step-N. It appears when it is complete; a write that fails leaves nothing behind."""
    target, partial = folder / f"step-{state.step}", folder / f".step-{state.step}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        actor.save(partial / "weights")
        torch.save(optimizer.state_dict(), partial / "optimizer.pt")
        (partial / "state.json").write_text(json.dumps(asdict(state), indent=1))
        for file in partial.rglob("*"):
            _flush(file)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        _flush(folder)
    except Exception as error:  # torch and safetensors raise their own kinds for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        last = latest(folder)
        remedy = f"free some space and continue from {last} with --resume" if last else "free some space and start again"
        raise UserError(f"The checkpoint of step {state.step} could not be written ({error}): {remedy}.") from error
    return target


def load(checkpoint: Path, actor: Actor, optimizer: Optimizer) -> State:
    with _reading(checkpoint):
        state = State(**json.loads((checkpoint / "state.json").read_text()))
        actor.load(checkpoint / "weights")
        optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True))
    return state


def load_weights(checkpoint: Path, actor: Actor) -> None:
    with _reading(checkpoint):
        actor.load(checkpoint / "weights")


@contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # every library has its own kinds for a damaged file
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{checkpoint} cannot be read ({reason}): remove it to use the one before.") from error


def steps_in(folder: Path) -> list[int]:
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*") if path.is_dir())
    return sorted(int(name) for name in names if name.isdecimal())


def latest(folder: Path) -> Path | None:
    steps = steps_in(folder)
    return folder / f"step-{steps[-1]}" if steps else None


def prune(folder: Path, keep: int, best_step: int) -> None:
    """Keep the last `keep` and the best."""
    for step in steps_in(folder)[:-keep]:
        if step != best_step:
            shutil.rmtree(folder / f"step-{step}")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
