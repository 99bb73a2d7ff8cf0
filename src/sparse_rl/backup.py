"""Replace the content of a folder without losing data if the process is killed.

The old entries are deleted only after the new run has started. All steps happen inside the folder, because it may be a
symbolic link or a mount point. The next command continues from the state of the folder:

| found in the folder | meaning | the next command |
|---|---|---|
| `.replaced.partial/` | the old entries are being moved out or back | moves the old entries back |
| `.replaced/` | contains all old entries; the new run has not started | deletes the new entries, moves the old ones back |
| `.replaced.removed-…/` | the new run has started | deletes this folder |

A run that starts in an empty folder follows the same steps with an empty `.replaced/`.
"""

import shutil
import uuid
from collections.abc import Collection
from pathlib import Path

from .errors import first_line, notice

NAME = ".replaced"
MOVING = f"{NAME}.partial"
REMOVED = f"{NAME}.removed"
LOCK = "lock"
"""Name of the lock file in a folder."""


def move_out(folder: Path, names: Collection[str] | None = None) -> None:
    """Move the given entries of the folder, or all if `names` is None, into `.replaced/`. Call `recover` first."""
    if (folder / NAME).exists():  # left by a killed start that replaced nothing
        remove(folder, names)
        return
    (folder / MOVING).mkdir(exist_ok=True)
    for entry in _entries(folder, names):
        entry.rename(folder / MOVING / entry.name)
    (folder / MOVING).rename(folder / NAME)


def commit(folder: Path) -> None:
    """Mark the new run as started and delete the entries that it replaces."""
    if (folder / NAME).exists():
        # unique: an older `.replaced.removed-…` may still exist
        (folder / NAME).rename(folder / f"{REMOVED}-{uuid.uuid4().hex[:8]}")
    delete_leftovers(folder)


def restore(folder: Path, names: Collection[str] | None = None) -> None:
    """Delete the entries written since `move_out` and move the old entries back."""
    if (folder / NAME).exists():
        remove(folder, names)
        (folder / NAME).rename(folder / MOVING)
    if (folder / MOVING).exists():
        for entry in (folder / MOVING).iterdir():
            entry.rename(folder / entry.name)
        (folder / MOVING).rmdir()


def recover(folder: Path, names: Collection[str] | None = None) -> bool:
    """Finish or undo a replacement that was interrupted by a kill. Return True if old entries were moved back.

    The entries of a new run that replaced nothing are kept.
    """
    found = needs_recovery(folder)
    if found or (folder / MOVING).exists():
        restore(folder, names)
    delete_leftovers(folder)
    return found


def needs_recovery(folder: Path) -> bool:
    """Return whether old entries are still in `.replaced/` or `.replaced.partial/`."""
    return any((folder / name).is_dir() and any((folder / name).iterdir()) for name in (NAME, MOVING))


def is_unstarted(folder: Path) -> bool:
    """Return whether the folder holds only a run that has not started and that replaces nothing."""
    return (folder / NAME).is_dir() and not needs_recovery(folder)


def current(folder: Path, name: str) -> Path:
    """Return the current path of the entry that would be at `folder / name` after `recover`."""
    places = (folder / MOVING / name, folder / NAME / name)
    return next((place for place in places if place.exists()), folder / name)


def delete_leftovers(folder: Path) -> None:
    for left in folder.glob(f"{REMOVED}*"):
        delete_or_warn(left)


def is_own(name: str) -> bool:
    """Return whether `name` is the lock file or one of the folders in the table above."""
    return name == LOCK or name.startswith(NAME)


def delete_or_warn(path: Path) -> None:
    """Delete a file or folder. Print a warning if deletion fails."""
    try:
        _delete(path)
    except OSError as error:
        notice(
            f"{path} is no longer needed but could not be deleted ({error.strerror or first_line(error)}): delete it manually."
        )


def remove(folder: Path, names: Collection[str] | None = None) -> None:
    for entry in _entries(folder, names):
        _delete(entry)


def _delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def _entries(folder: Path, names: Collection[str] | None) -> list[Path]:
    found = list(folder.iterdir()) if folder.exists() else []
    return [entry for entry in found if not is_own(entry.name) and (names is None or entry.name in names)]
