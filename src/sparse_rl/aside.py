"""What `--overwrite` replaces: set aside in its own folder until a successor has begun, and back in place if none could start."""

import shutil
from collections.abc import Collection
from pathlib import Path

NAME = ".replaced"


def set_aside(folder: Path, names: Collection[str] | None = None) -> None:
    """These of the folder's entries, or all. The folder itself stays where it is: it may be a link or a mounted disk."""
    forget(folder)
    for entry in _entries(folder, names):
        (folder / NAME).mkdir(exist_ok=True)
        entry.rename(folder / NAME / entry.name)


def bring_back(folder: Path, names: Collection[str] | None = None) -> None:
    """In place of what has been written since."""
    remove(folder, names)
    if (folder / NAME).exists():
        for entry in (folder / NAME).iterdir():
            entry.rename(folder / entry.name)
        (folder / NAME).rmdir()


def forget(folder: Path) -> None:
    if (folder / NAME).exists():
        shutil.rmtree(folder / NAME)


def remove(folder: Path, names: Collection[str] | None = None) -> None:
    for entry in _entries(folder, names):
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _entries(folder: Path, names: Collection[str] | None) -> list[Path]:
    found = list(folder.iterdir()) if folder.exists() else []
    return [entry for entry in found if entry.name != NAME and (names is None or entry.name in names)]
