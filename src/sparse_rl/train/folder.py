"""A run is a folder: config.toml, metrics.jsonl, rollouts/, checkpoints/, model/."""

import json
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

from ..config import to_toml
from ..errors import UserError
from .settings import Config

MAY_CHANGE = ("steps", "run_dir", "compare", "checkpoint", "log", "eval", "reward")
"""What a resumed run may have otherwise than the run it continues."""


class RunFolder:
    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"

    @property
    def exists(self) -> bool:
        return (self.path / "config.toml").exists()

    def stored_config(self) -> dict[str, Any]:
        try:
            return tomllib.loads((self.path / "config.toml").read_text())
        except FileNotFoundError as error:
            raise UserError(f"{self.path} is not a run: it has no config.toml.") from error

    def refuse_if_taken(self, *, resume: bool, overwrite: bool) -> None:
        """An existing run is neither mixed into nor lost by accident."""
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        if not self.exists:
            raise UserError(f"{self.path} exists and is not a run: name another folder with --run-dir.")
        if not (resume or overwrite):
            raise UserError(f"{self.path} is a run already: use --resume, --overwrite or another --run-dir.")

    def open(self, config: Config, *, resume: bool, overwrite: bool) -> None:
        """Make the folder ready, or say why not."""
        self.refuse_if_taken(resume=resume, overwrite=overwrite)
        try:
            if self.exists and resume:
                self._refuse_another_config(config)
            elif self.exists:
                shutil.rmtree(self.path)
            self.rollouts.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            write_whole(self.path / "config.toml", to_toml(config))
        except OSError as error:
            raise UserError(
                f"The run folder {self.path} cannot be written ({error.strerror}): name another with --run-dir."
            ) from error

    def _refuse_another_config(self, config: Config) -> None:
        before, now = (_flat(values) for values in (self.stored_config(), tomllib.loads(to_toml(config))))
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key) and not key.startswith(MAY_CHANGE):
                raise UserError(
                    f"{key} is {now.get(key, 'not set')} now and was {before.get(key, 'not set')} in {self.path}: resume with the "
                    "same, or start anew with another --run-dir."
                )

    def forget_after(self, step: int) -> None:
        """Drop what was logged after the checkpoint that a run continues from."""
        if self.metrics.exists():
            lines = [line for line in self.metrics.read_text().splitlines() if _is_json(line)]  # the last may be torn
            kept = [line for line in lines if json.loads(line)["step"] <= step]
            write_whole(self.metrics, "".join(line + "\n" for line in kept))
        for file in self.rollouts.glob("step-*.parquet"):
            if int(file.stem.removeprefix("step-")) > step:
                file.unlink()

    def append_metrics(self, step: int, metrics: dict[str, float]) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def read_metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in self.metrics.read_text().splitlines() if _is_json(line)]


def write_whole(path: Path, text: str) -> None:
    """The file is the old one or the new one, never half of it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    return True
