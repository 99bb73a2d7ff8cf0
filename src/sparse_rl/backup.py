"""Replace the content of a folder so that a kill loses nothing: the old entries stay whole until the new ones have begun.

All steps happen inside the folder, which may be a link or a mounted disk:

| there is | meaning | the next command |
|---|---|---|
| `.replaced.partial/` | the old entries are being moved out or back | moves them back |
| `.replaced/` | all old entries are in it; the others belong to a successor that has not begun | removes those, moves the old back |
| `.replaced.removed-…/` | the successor has begun | deletes it |

A start in an empty folder does the same; its `.replaced/` is empty.
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
"""The file that locks a folder."""


def move_out(folder: Path, names: Collection[str] | None = None) -> None:
    """Move these entries of the folder, or all, into `.replaced/`. Call `recover` first."""
    if (folder / NAME).exists():  # from a start that was killed and had nothing to replace
        remove(folder, names)
        return
    (folder / MOVING).mkdir(exist_ok=True)
    for entry in _entries(folder, names):
        entry.rename(folder / MOVING / entry.name)
    (folder / MOVING).rename(folder / NAME)


def commit(folder: Path) -> None:
    """Mark the successor as begun, and delete the entries it replaces."""
    if (folder / NAME).exists():
        (folder / NAME).rename(folder / f"{REMOVED}-{uuid.uuid4().hex[:8]}")  # an earlier one may be undeletable
    delete_leftovers(folder)


def restore(folder: Path, names: Collection[str] | None = None) -> None:
    """Move the old entries back, replacing everything written since."""
    if (folder / NAME).exists():
        remove(folder, names)
        (folder / NAME).rename(folder / MOVING)
    if (folder / MOVING).exists():
        for entry in (folder / MOVING).iterdir():
            entry.rename(folder / entry.name)
        (folder / MOVING).rmdir()


def recover(folder: Path, names: Collection[str] | None = None) -> bool:
    """Repair what a kill left; return True if old entries came back. A successor without anything to replace stays."""
    found = needs_recovery(folder)
    if found or (folder / MOVING).exists():
        restore(folder, names)
    delete_leftovers(folder)
    return found


def needs_recovery(folder: Path) -> bool:
    """Return whether old entries are out of place."""
    return any((folder / name).is_dir() and any((folder / name).iterdir()) for name in (NAME, MOVING))


def is_unstarted(folder: Path) -> bool:
    """Return whether the folder holds only a start that has not begun and replaces nothing."""
    return (folder / NAME).is_dir() and not needs_recovery(folder)


def current(folder: Path, name: str) -> Path:
    """Return the path of the entry that `recover` would leave in place."""
    places = (folder / MOVING / name, folder / NAME / name)
    return next((place for place in places if place.exists()), folder / name)


def delete_leftovers(folder: Path) -> None:
    for left in folder.glob(f"{REMOVED}*"):
        delete_or_warn(left)


def is_own(name: str) -> bool:
    """Return whether the entry is the lock or one of the folders in the table above."""
    return name == LOCK or name.startswith(NAME)


def delete_or_warn(path: Path) -> None:
    """Delete a leftover; warn if that fails."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        notice(f"{path} is left over and could not be deleted ({error.strerror or first_line(error)}): delete it yourself.")


def remove(folder: Path, names: Collection[str] | None = None) -> None:
    for entry in _entries(folder, names):
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _entries(folder: Path, names: Collection[str] | None) -> list[Path]:
    found = list(folder.iterdir()) if folder.exists() else []
    return [entry for entry in found if not is_own(entry.name) and (names is None or entry.name in names)]
