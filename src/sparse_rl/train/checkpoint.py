"""Save and load checkpoints atomically: the weights, optimizer state and counters of one step.

Each rank writes its shard of weights and moments with torch.distributed.checkpoint; any number of ranks can read them.
The manifest holds the checksum of every file. A file with a wrong checksum is not read. Loading unpickles nothing.
A run derives all randomness from counters, so restoring the step and the data cursor also restores the randomness.
"""

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..disk import refusal
from ..errors import RankLost, StorageUnavailable, UserError, first_line
from ..format import counted
from ..kv.statistics import Statistics
from ..learner.optimizer import Optimizer
from ..models.actor import Actor
from ..text import listed
from ..world import ALONE, LOST, World, agreed
from . import manifest, metadata
from .checkpoint_folder import STATE, at_step, begun, latest, rename_damaged, step_of, steps_in, unfinished_after
from .manifest import Damaged, Entry, HashingFileSystem
from .run_folder import write_whole
from .storage import Place, names_in, opened, remove, within

STATISTICS = "statistics"
"""Prefix of the tensors of statistics in a checkpoint."""
MOST_STATE_BYTES = 2**20
MOST_COUNT = 2**48
"""Exclusive upper bound for every counter in a checkpoint, such as the step."""
UNVERIFIED = "The checkpoint of step {step} has no checksums, so damage cannot be detected."
STARTS_AGAIN = "The run has no checkpoint and restarts at step 0."
UNFINISHED = "The checkpoint of step {step} is incomplete (no state.json) and is ignored."


@dataclass
class State:
    """Counters and settings that a checkpoint stores in state.json, in addition to weights and moments."""

    step: int = 0
    """Number of finished steps."""
    cursor: int = 0
    """Number of prompts sampled so far."""
    best_step: int = -1
    best_value: float = float("-inf")
    skipped_updates: int = 0
    skipped_in_a_row: int = 0
    quiet_steps: int = 0
    """Number of consecutive steps, up to the last one, in which no group had a signal."""
    ranks: int = 1
    """Number of ranks that saved the checkpoint."""
    silent_steps: int = 0
    """Number of consecutive steps, up to the last one, in which the reward graded no rollout."""
    problems: dict[str, Any] = field(default_factory=dict)
    """Number and digest of the training problems; see `resume.problem_digest`."""
    scored_by: dict[str, str] = field(default_factory=dict)
    """Settings that `best_value` depends on; see `resume.scored_by`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Options by their dotted keys, such as `kv.budget`; see `resume.kept_options`."""
    budget: dict[str, Any] = field(default_factory=dict)
    """State and changes of `kv.budget = auto`; see `AutoBudget.stored`. Empty for a fixed budget."""
    mean_tokens: dict[str, float] = field(default_factory=dict)
    """Mean response tokens per problem; see `RolloutSampler.mean_tokens`.

    Several ranks divide the groups by these lengths. A checkpoint stores them because the division decides which rollouts
    share a batch, and the batch affects rounding.
    """

    def check(self, step: int) -> None:
        """Raise ValueError if a value is invalid for a checkpoint of `step`."""
        lowest = {"best_step": -1, "ranks": 1}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type is int and (type(value) is not int or not lowest.get(each.name, 0) <= value < MOST_COUNT):
                raise ValueError(f"{each.name} is {value!r:.40}")
        if type(self.best_value) not in (int, float) or math.isnan(self.best_value) or self.best_value == math.inf:
            raise ValueError(f"best_value is {self.best_value!r:.40}")
        if not isinstance(self.problems, dict) or not set(self.problems) <= {"count", "prompts"}:
            raise ValueError("problems is not a digest")
        if type(self.problems.get("count", 0)) is not int:
            raise ValueError("problems has no count")
        for name in ("config", "budget"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(f"{name} is not a table")
        if not isinstance(self.scored_by, dict) or not all(isinstance(each, str) for each in self.scored_by.values()):
            raise ValueError("scored_by is not a table of texts")
        if not isinstance(self.mean_tokens, dict) or not all(
            type(each) in (int, float) and 0 <= each < MOST_COUNT for each in self.mean_tokens.values()
        ):
            raise ValueError("mean_tokens is not a table of lengths")
        if self.step != step or self.best_step > step:
            raise ValueError(f"it belongs to step {self.step}")


def save(
    folder: Place, state: State, optimizer: Optimizer, world: World = ALONE, statistics: Statistics | None = None
) -> Place:
    """Write the checkpoint `folder`/step-N and return its path or address. All ranks have the same statistics.

    state.json is written last: a checkpoint without it is incomplete. After a failed write, the partial checkpoint is removed.
    """
    target = at_step(folder, state.step)
    try:
        if world.is_main:
            remove(target)
        world.barrier()
        parts: dict[str, Any] = {"weights": optimizer.weights, "moments": optimizer.moments}
        parts |= {STATISTICS: statistics} if statistics else {}
        writer = dcp.FileSystemWriter(target) if isinstance(target, Path) else FsspecWriter(target, sync_files=False)
        writer.fs = written = HashingFileSystem(writer.fs)  # type: ignore[assignment]
        with _quiet_dcp():
            dcp.save(parts, checkpoint_id=target, storage_writer=writer, process_group=world.control, no_dist=world.size == 1)
        # `gather` returns after every rank has written its files.
        files = {name: each for part in world.gather(written.written) for name, each in part.items()}
        if world.is_main:
            text = json.dumps(asdict(state) | {"manifest": True}, indent=1)
            files[STATE] = manifest.entry_of(text.encode())
            _write_last(within(target, manifest.FILE), json.dumps({"step": state.step, "files": files}, indent=1))
            _write_last(within(target, STATE), text)
    except (Exception, dcp.api.CheckpointException) as error:  # the disk or a storage library may raise any type
        refused = refusal(error, target) if isinstance(target, Path) else None  # tests the disk before space is freed
        last = None
        with suppress(Exception):
            if world.is_main:
                remove(target)
            last = latest(folder)
        if isinstance(error, RankLost):
            raise
        if LOST.search(_reason(error)):
            raise RuntimeError(_reason(error)) from error
        raise _write_failure(error, state.step, last, refused) from error
    world.barrier()
    return target


def _write_failure(error: BaseException, step: int, last: Place | None, refused: tuple[str, str] | None) -> UserError:
    """Return the error of a checkpoint that was not written. `last` is the last complete checkpoint; `refused` is the (reason,
    remedy) of a local disk, or None for shared storage."""
    failed = f"The checkpoint of step {step} could not be written"
    if refused is None:
        return StorageUnavailable(
            f"{failed} ({_reason(error)}): check the storage and its credentials, and continue with --resume."
        )
    reason, remedy = refused
    then = f"continue from {last} with --resume" if last else "start again"
    return UserError(f"{failed} ({reason}): {remedy} and {then}.")


def bytes_of(optimizer: Optimizer) -> int:
    """Return the size of one checkpoint in bytes: the master weights, and two moments per weight in float32 or 8 bits."""
    moments = 2 if optimizer.settings.state == "8bit" else 8
    return sum(master.numel() * (master.element_size() + moments) for master in optimizer.masters)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The checkpoint that a run continues from."""

    state: State
    statistics: Statistics
    """Statistics that the cache or the policy needs; empty if the checkpoint has none."""
    damaged: list[Damaged]
    """Later checkpoints that are damaged."""
    unfinished: list[int]
    """Steps of later checkpoints that were never completed."""
    verified: bool
    """True if all files matched the manifest; False if the checkpoint has no manifest."""


def load_last(
    folder: Place, actor: Actor, optimizer: Optimizer, world: World = ALONE, reached: float = 0
) -> LoadedCheckpoint | None:
    """Load the last undamaged checkpoint into the model and the optimizer. Return None if there is no checkpoint yet.

    `reached` is the last step that the run is known to have finished.
    """
    damaged: list[Damaged] = []
    for step in reversed(world.gather(agreed(world, lambda: steps_in(folder)))[0]):  # ranks may see a shared disk differently
        checkpoint = at_step(folder, step)
        try:
            state, statistics, verified = load(checkpoint, actor, optimizer, world)
        except Damaged as error:
            damaged.append(error)
        else:
            return LoadedCheckpoint(state, statistics, damaged, unfinished_after(folder, step), verified)
    if damaged:
        raise UserError(f"{damaged[0]} No other checkpoint is intact: start over with --overwrite, or use another --run-dir.")
    agreed(world, lambda: _remove_incomplete(folder, reached) if world.is_main else None)
    return None


def _remove_incomplete(folder: Place, reached: float) -> None:
    """Remove the incomplete checkpoints of a folder in which no checkpoint has a state.json.

    A killed run leaves at most one incomplete checkpoint, at its last step. A checkpoint of an earlier step was complete and
    has lost its state.json: raise UserError.
    """
    if lost := [f"step-{step}" for step in begun(folder) if step < reached]:
        raise UserError(
            f"{folder} has no checkpoint to continue from: {listed(lost, most=3)} lost state.json. Restore it from a backup, "
            "or start over with --overwrite or another --run-dir."
        )

    for step in begun(folder):
        left = at_step(folder, step)
        if manifest.FILE in names_in(left):  # only state.json is missing
            rename_damaged([Damaged(left, f"it has no {STATE}")])
        else:
            remove(left)


def load(checkpoint: Place, actor: Actor, optimizer: Optimizer, world: World = ALONE) -> tuple[State, Statistics, bool]:
    """Load weights and moments in place. Return (state, statistics, True if every file was verified against the manifest)."""
    state, files = checked_state(checkpoint, world)
    if optimizer.settings.state == "8bit" and state.ranks != world.size:
        raise UserError(
            f"{checkpoint} was saved by {counted(state.ranks, 'rank')}, and 8-bit moments cannot be resharded for "
            f"{counted(world.size, 'rank')}: resume with {counted(state.ranks, 'rank')}."
        )
    parts = {"weights": optimizer.weights, "moments": optimizer.moments}
    statistics = _read(checkpoint, parts, files, world)
    state.ranks = world.size
    optimizer.after_load()
    actor.sync()
    return state, statistics, files is not None


def load_last_weights(
    folder: Place, steps: Sequence[int], actor: Actor, warn: Callable[[str], None]
) -> tuple[int, Statistics]:
    """Load the weights of the last undamaged checkpoint among `steps`. Return its step and its statistics.

    The weights are copied into the model's trainable parameters and cast to their dtype.
    """
    trained = {name: weight.detach() for name, weight in actor.learner.named_parameters() if weight.requires_grad}
    damaged: list[Damaged] = []
    for step in reversed(steps):
        checkpoint = at_step(folder, step)
        try:
            _, files = checked_state(checkpoint)
            statistics = _read(checkpoint, {"weights": trained}, files, ALONE)
        except Damaged as error:
            damaged.append(error)
            continue
        for each in damaged:
            warn(f"warning: {each} The checkpoint of step {step} is used.")
        if len(steps) > 1:
            for late in unfinished_after(folder, step):
                warn(f"warning: {UNFINISHED.format(step=late)}")
        if files is None:
            warn(f"warning: {UNVERIFIED.format(step=step)}")
        actor.sync()
        return step, statistics
    others = sorted({*steps_in(folder)} - {*steps})
    raise UserError(f"{damaged[0]} {f'Choose another step, such as {others[-1]}' if others else 'No other one is intact'}.")


def read_state(checkpoint: Place) -> tuple[State, dict[str, Entry] | None]:
    """Return (validated state, manifest entries by file name). The entries are None if the checkpoint has no manifest."""
    step = step_of(checkpoint)
    content = manifest.read_small(checkpoint, STATE, MOST_STATE_BYTES)
    try:
        values = json.loads(content)
        if not isinstance(values, dict):
            raise ValueError("it is not a table")
        files = manifest.read_manifest(checkpoint, step) if values.pop("manifest", False) is True else None
        state = State(**values)
        state.check(step)
    except Damaged:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise Damaged(checkpoint, f"{STATE} cannot be used ({first_line(error):.120})") from error
    if files is not None and files.pop(STATE, None) != manifest.entry_of(content):
        raise Damaged(checkpoint, f"{STATE} is damaged (checksum mismatch)")
    return state, files


def checked_state(checkpoint: Place, world: World = ALONE) -> tuple[State, dict[str, Entry] | None]:
    """Return (state, manifest entries) after verifying the checksums. Rank 0 reads the state; ranks share the verification."""
    if isinstance(checkpoint, Path) and (checkpoint / "optimizer.pt").exists():
        raise UserError(f"{checkpoint} was written by an older version: resume with that version, or start a new run.")
    found = world.gather(agreed(world, lambda: read_state(checkpoint) if world.is_main else None))[0]
    assert found is not None
    state, files = found
    mine = {name: files[name] for name in sorted(files)[world.rank :: world.size]} if files else {}
    agreed(world, lambda: manifest.verify(checkpoint, mine))
    return state, files


def _read(checkpoint: Place, into: dict[str, Any], files: dict[str, Entry] | None, world: World) -> Statistics:
    """Load the tensors of a checkpoint in place, into the tensors of `into`. Return the statistics in the checkpoint."""
    index = agreed(world, lambda: read_index(checkpoint, files))
    for name, tensor in into["weights"].items():
        if getattr(index.state_dict_metadata.get(f"weights.{name}"), "size", None) != tensor.shape:
            raise UserError(
                f"{checkpoint} does not match the model of this run: resume with the model that the checkpoint was trained "
                "from."
            )
    statistics = {
        name.removeprefix(f"{STATISTICS}."): torch.zeros(each.size, dtype=each.properties.dtype)
        for name, each in index.state_dict_metadata.items()
        if name.startswith(f"{STATISTICS}.") and isinstance(each, TensorStorageMetadata)
    }
    into = into | ({STATISTICS: statistics} if statistics else {})
    reader = dcp.FileSystemReader(checkpoint) if isinstance(checkpoint, Path) else FsspecReader(checkpoint)
    reader.read_metadata = lambda: index  # type: ignore[method-assign, misc]  # torch's read_metadata would unpickle the file
    try:
        with _quiet_dcp():
            dcp.load(into, storage_reader=reader, process_group=world.control, no_dist=world.size == 1)
    except (Exception, dcp.api.CheckpointException) as error:  # storage libraries raise different types for a damaged file
        if LOST.search(_reason(error)):
            raise RuntimeError(_reason(error)) from error
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        if files is None:  # without checksums this is the only sign of damage
            raise Damaged(checkpoint, f"it cannot be read ({_reason(error)})") from error
        raise UserError(
            f"{checkpoint} cannot be read ({_reason(error)}): remove it to use the previous checkpoint."
        ) from error
    return statistics


def read_index(checkpoint: Place, files: dict[str, Entry] | None) -> Metadata:
    try:
        index = metadata.read_index(manifest.read_small(checkpoint, metadata.FILE))
    except Damaged:
        raise
    except ValueError as error:
        raise Damaged(checkpoint, f"{metadata.FILE} cannot be used: {first_line(error)}") from error
    named = {place.relative_path for place in index.storage_data.values()}
    if files is not None and not named | {metadata.FILE} <= files.keys():
        raise Damaged(checkpoint, f"{manifest.FILE} does not list all files of the checkpoint")
    return index


@contextmanager
def _quiet_dcp() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", "Detected pickle protocol")  # warned for files that torch did not write
        yield


def _reason(error: BaseException) -> str:
    """Return the first informative line of an error. With several ranks, use the error of the first failed rank."""
    causes = list(error.failures.values()) if isinstance(error, dcp.api.CheckpointException) else []
    return first_line(causes[0][0] if causes else error)


def best_step(folder: Place) -> int:
    """Return the step of the best checkpoint, as recorded in the last undamaged checkpoint."""
    for step in reversed(steps_in(folder)):
        with suppress(Damaged):
            best = read_state(at_step(folder, step))[0].best_step
            if best >= 0:
                return best
            break
    raise UserError(f"{folder} has no checkpoint with a score yet: choose a step with --step N.")


def _write_last(place: Place, text: str) -> None:
    """Write a file atomically, after flushing earlier writes to disk. Shared storage needs no flush."""
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
