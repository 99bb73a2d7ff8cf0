"""List, name, rename and remove the checkpoints in a run's folder. It reads no checkpoint."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from ..errors import UserError, first_line, notice
from ..format import gib
from . import storage
from .manifest import Damaged
from .storage import Place, names_in, remove, within

STATE = "state.json"
"""A checkpoint's last file: without it the checkpoint is incomplete."""


def steps_in(folder: Place) -> list[int]:
    """Return the steps of the complete checkpoints in `folder`, in ascending order."""
    return [step for step in begun(folder) if STATE in names_in(at_step(folder, step))]


def unfinished_after(folder: Place, step: int) -> list[int]:
    """Return the steps after `step` whose checkpoint has no state.json, e.g. because its write was interrupted."""
    return sorted(set(begun(folder)) - set(steps_in(folder)) - set(range(step + 1)))


def begun(folder: Place) -> list[int]:
    """Return the steps of all checkpoints in `folder`, also of incomplete ones, in ascending order."""
    names = (name.removeprefix("step-") for name in names_in(folder))
    return sorted(int(name) for name in names if name.isdecimal())


def at_step(folder: Place, step: int) -> Place:
    return within(folder, f"step-{step}")


def step_of(checkpoint: Place) -> int:
    return int(str(checkpoint).rstrip("/").rpartition("step-")[2])


def rename_damaged(damaged: Iterable[Damaged]) -> None:
    """Rename damaged checkpoints from step-N to damaged-step-N, so that later starts ignore them."""
    for each in damaged:
        folder, _, name = str(each.checkpoint).rpartition("/")
        storage.move(each.checkpoint, storage.place(f"{folder}/damaged-{name}"))


def latest(folder: Place) -> Place | None:
    steps = steps_in(folder)
    return at_step(folder, steps[-1]) if steps else None


def prune(folder: Place, keep: int, best_step: int, warn: Callable[[str], None] = notice) -> None:
    """Remove all checkpoints except the last `keep` and the best. Also remove incomplete ones. Warn if a removal fails."""
    whole = steps_in(folder)
    kept = {*whole[-keep:], *({best_step} & set(whole))}
    for step in begun(folder) if whole else ():
        if step not in kept:
            try:
                remove(at_step(folder, step))
            except (OSError, UserError) as error:
                warn(f"The old checkpoint {at_step(folder, step)} could not be removed ({first_line(error)}).")


def disk_warning(folder: Place, checkpoint_bytes: int, model_bytes: int, to_come: int, keep: int) -> str | None:
    """Return a warning if the free disk space is too small for the checkpoints kept at one time and the final model.

    `to_come` is the number of checkpoints that the run will write. Shared storage counts as unlimited.
    """
    if not isinstance(folder, Path):
        return None
    try:
        disk = shutil.disk_usage(folder if folder.exists() else folder.parent)
    except OSError:
        return None
    existing = len(begun(folder))
    at_once = min(existing + to_come, keep + 2)  # + 2: the best checkpoint, and the next one while it is written
    needed = max(0, at_once - existing) * checkpoint_bytes + model_bytes
    if not to_come or not disk.total or disk.free >= needed:
        return None
    return (
        f"The disk of {folder.parent} has {gib(disk.free)} GiB free, but checkpoints of {gib(checkpoint_bytes)} GiB ({at_once} at "
        f"once) and the model need {gib(needed)} GiB more: free disk space, lower --checkpoint.keep or raise "
        "--checkpoint.every."
    )
