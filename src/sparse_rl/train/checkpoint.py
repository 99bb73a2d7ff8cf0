"""Checkpoints: weights, optimizer and counters of one step, written whole or not at all.

Weights and moments go through torch.distributed.checkpoint, each rank its part, and are read again by any number of ranks.
Everything random in a run is drawn by counter, so the step and the data cursor are all there is to save of randomness.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from ..errors import RankLost, Unanswered, UserError, first_line
from ..learner.optimizer import Optimizer
from ..models.actor import Actor
from ..plan.memory import gib
from ..world import ALONE, LOST, World
from .folder import write_whole
from .storage import Place, answering, names_in, opened, remove, within

STATE = "state.json"


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
    ranks: int = 1
    """Of the run when it was saved."""
    silent_steps: int = 0
    """Steps in a row without any verdict."""


def save(folder: Place, state: State, optimizer: Optimizer, world: World = ALONE) -> Place:
    """`folder`/step-N. state.json comes last and makes it a checkpoint; a write that fails leaves nothing behind."""
    target = within(folder, f"step-{state.step}")
    if world.leads:
        remove(target)
    world.meet()
    try:
        parts = {"weights": optimizer.weights, "moments": optimizer.moments}
        writer = None if isinstance(target, Path) else FsspecWriter(target, sync_files=False)  # which would sync every disk
        with _one_process_is_meant():
            dcp.save(parts, checkpoint_id=target, storage_writer=writer, process_group=world.control, no_dist=world.size == 1)
        world.meet()  # every rank has written its part
        if world.leads:
            _write_last(within(target, STATE), json.dumps(asdict(state), indent=1))
    except (Exception, dcp.api.CheckpointException) as error:  # whatever a disk and the libraries above it raise
        last = None
        with suppress(Exception):
            if world.leads:
                remove(target)
            last = latest(folder)
        if isinstance(error, RankLost):
            raise
        if LOST.search(_reason(error)):
            raise RuntimeError(_reason(error)) from error
        remedy = f"free some space and continue from {last} with --resume" if last else "free some space and start again"
        if not isinstance(target, Path):
            remedy = "see to the storage and what gives access to it, and continue with --resume"
        kind = UserError if isinstance(target, Path) else Unanswered
        raise kind(f"The checkpoint of step {state.step} could not be written ({_reason(error)}): {remedy}.") from error
    world.meet()
    return target


def bytes_of(optimizer: Optimizer) -> int:
    """Of one checkpoint: the master weights, and two moments of each in float32 or in 8 bits."""
    moments = 2 if optimizer.settings.state == "8bit" else 8
    return sum(master.numel() * (master.element_size() + moments) for master in optimizer.masters)


def lack_of_room(folder: Place, each: int, model: int, to_come: int, keep: int) -> str | None:
    """A warning where the disk seems too small for the checkpoints that will be there at once and the model. Storage has no end."""
    if not isinstance(folder, Path):
        return None
    try:
        disk = shutil.disk_usage(folder if folder.exists() else folder.parent)
    except OSError:
        return None
    existing = len(_begun(folder))
    at_once = min(existing + to_come, keep + 2)  # the best besides, and the next while it is written
    more = max(0, at_once - existing) * each + model
    if not to_come or not disk.total or disk.free >= more:
        return None
    return (
        f"The disk of {folder.parent} has {gib(disk.free)} GiB left, and checkpoints of {gib(each)} GiB ({at_once} at once) and the "
        f"model will take {gib(more)} more: free some, lower --checkpoint.keep or raise --checkpoint.every."
    )


def load(checkpoint: Place, actor: Actor, optimizer: Optimizer, world: World = ALONE) -> State:
    try:
        fs, path = opened(checkpoint)
        with answering(checkpoint, "read"):
            text = fs.cat_file(f"{path}/{STATE}")
        state = State(**json.loads(text))
    except UserError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(checkpoint, error) from error
    if optimizer.settings.state == "8bit" and state.ranks != world.size:
        raise UserError(
            f"{checkpoint} was saved by {state.ranks} ranks, and 8-bit moments cannot be cut for {world.size}: resume with "
            f"{state.ranks}."
        )
    _read(checkpoint, {"weights": optimizer.weights, "moments": optimizer.moments}, world)
    state.ranks = world.size
    optimizer.was_loaded()
    actor.sync()
    return state


def load_weights(checkpoint: Place, actor: Actor) -> None:
    """Into the tensors of the learner that are trained, in their dtype."""
    trained = {name: weight.detach() for name, weight in actor.learner.named_parameters() if weight.requires_grad}
    _read(checkpoint, {"weights": trained}, ALONE)
    actor.sync()


def _read(checkpoint: Place, into: dict[str, Any], world: World) -> None:
    """In place."""
    if isinstance(checkpoint, Path) and (checkpoint / "optimizer.pt").exists():
        raise UserError(f"{checkpoint} was written by an older sparse-rl, which has to continue it: start anew with this one.")
    try:
        reader = dcp.FileSystemReader if isinstance(checkpoint, Path) else FsspecReader
        saved = reader(checkpoint).read_metadata().state_dict_metadata
        for name, tensor in into["weights"].items():
            if getattr(saved.get(f"weights.{name}"), "size", None) != tensor.shape:
                raise UserError(f"{checkpoint} does not fit the model of this run: resume with the model it was trained from.")
        with _one_process_is_meant():
            dcp.load(into, checkpoint_id=checkpoint, process_group=world.control, no_dist=world.size == 1)
    except UserError:
        raise
    except (Exception, dcp.api.CheckpointException) as error:  # every library has its own kinds for a damaged file
        if LOST.search(_reason(error)):
            raise RuntimeError(_reason(error)) from error
        raise _unreadable(checkpoint, error) from error


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _unreadable(checkpoint: Place, error: BaseException) -> UserError:
    return UserError(f"{checkpoint} cannot be read ({_reason(error)}): remove it to use the one before.")


def _reason(error: BaseException) -> str:
    """The first line that says something: what torch raises for many ranks is a heading and their errors."""
    causes = list(error.failures.values()) if isinstance(error, dcp.api.CheckpointException) else []
    return first_line(causes[0][0] if causes else error)


def steps_in(folder: Place) -> list[int]:
    """Of whole checkpoints."""
    return [step for step in _begun(folder) if STATE in names_in(within(folder, f"step-{step}"))]


def _begun(folder: Place) -> list[int]:
    names = (name.removeprefix("step-") for name in names_in(folder))
    return sorted(int(name) for name in names if name.isdecimal())


def latest(folder: Place) -> Place | None:
    steps = steps_in(folder)
    return within(folder, f"step-{steps[-1]}") if steps else None


def prune(folder: Place, keep: int, best_step: int) -> None:
    """Keep the last `keep` and the best. What a run left half-written goes, too."""
    whole = steps_in(folder)
    kept = {*whole[-keep:], *({best_step} & set(whole))}
    for step in _begun(folder) if whole else ():
        if step not in kept:
            remove(within(folder, f"step-{step}"))


def _write_last(place: Place, text: str) -> None:
    """Whole or not at all, and not before what was written before it: storage does so by itself."""
    if isinstance(place, Path):
        write_whole(place, text)
        _flush(place.parent)
        _flush(place.parent.parent)
    else:
        fs, path = opened(place)
        fs.pipe_file(path, text.encode())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
