"""Train from Python: `sparse_rl.train(config)`, or `Trainer(config, reward=f, dataset=rows).train()`.

The command line parses flags into the same configuration and calls the same function, `run.train`.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import backup
from ..config import Config, merged_tables, recipe
from ..errors import UserError
from ..rewards.find import OBJECT
from .result import TrainResult
from .run_folder import RunFolder
from .storage import is_address

Rows = Iterable[Mapping[str, Any]]
Callback = Callable[[int, dict[str, float]], Any]


@dataclass(frozen=True)
class PythonObjects:
    """Python objects that a configuration cannot hold."""

    reward: Callable[..., Any] | None = None
    callback: Callback | None = None


class Trainer:
    """A training run with Python objects in place of names.

    `config` is a `Config`, the name or path of a recipe, or a dict of recipe keys, which may have `extends`. `dataset` and
    `test` are lists of dicts or `datasets.Dataset`s with a prompt (text or messages), an answer and any other columns. They are
    written to JSON Lines files next to the run folder. `callback(step, metrics)` is called after each step; the run stops with
    a checkpoint if it returns True.

    `reward` is a function in TRL's convention, also a closure or a lambda. It runs in `reward.workers` threads of this process,
    one sample per call, and can share state with the caller. A call beyond `reward.timeout_s` counts as a timeout, but its
    thread runs on. A reward passed by name runs in processes instead, which are killed after that time.
    """

    def __init__(
        self,
        config: "Config | str | Path | Mapping[str, Any]" = "quickstart",
        *,
        reward: Callable[..., Any] | str | None = None,
        dataset: Rows | None = None,
        test: Rows | None = None,
        callback: Callback | None = None,
    ):
        if reward is not None and not isinstance(reward, str) and not callable(reward):
            raise UserError(
                f"reward is a {type(reward).__name__}, which is not callable: pass a function, or a name such as 'math_answer'."
            )
        self.dataset, self.test = _rows(dataset, "train"), _rows(test, "test")
        self.objects = PythonObjects(None if isinstance(reward, str) else reward, callback)
        values = _values(config)
        if reward is not None:
            values = merged_tables(values, {"reward": {"function": _name(reward)}})
        self.config = Config(**values)
        if self.config.compare:
            raise UserError(
                f"compare = {list(self.config.compare)} trains several runs: pass one method, as in "
                f'{{"extends": "quickstart", "method": "{self.config.compare[-1]}"}}.'
            )

    def train(self, *, resume: bool = False, overwrite: bool = False) -> TrainResult:
        """Train to the last step and return its result.

        `resume` continues the run in `run_dir`, and `overwrite` replaces it. After Ctrl-C, or an interrupted notebook cell, the
        run finishes its step, saves a checkpoint and is returned with `finished=False`.
        """
        if resume and overwrite:
            raise UserError("resume continues a run and overwrite deletes it: choose one.")
        if self.config.ray.workers:
            named = ", and name the reward, such as --reward.function my_rewards.py:f" if self.objects.reward else ""
            raise UserError(
                f"ray.workers starts processes, which only the command line does: use sparse-rl train --ray.workers N{named}."
            )
        given = {"train": self.dataset, "test": self.test}
        from .distributed import launch
        from .run import refuse_folders, train

        run_dir = self.config.run_dir
        resume = resume or RunFolder(run_dir, writes=False).launched_by(launch())  # a restart after a lost rank
        if not is_address(run_dir):  # on every rank, before it replaces the rows of an earlier run
            refuse_folders([self.config], run_dir, resume=resume, overwrite=overwrite)
        with _rows_of_a_restored_run(run_dir, [split for split, rows in given.items() if rows is not None]):
            files = {split: _stored(rows, split, run_dir, resume=resume) for split, rows in given.items() if rows is not None}
            config = Config(**merged_tables(self.config.model_dump(by_alias=True), {"data": files}))
            (run,) = train(config, resume=resume, overwrite=overwrite, objects=self.objects)
        return run


def train(
    config: "Config | str | Path | Mapping[str, Any]", *, resume: bool = False, overwrite: bool = False, **objects: Any
) -> TrainResult:
    """Train a run and return its result. `objects` are the arguments of `Trainer`: reward, dataset, test and callback."""
    return Trainer(config, **objects).train(resume=resume, overwrite=overwrite)


def _values(config: "Config | str | Path | Mapping[str, Any]") -> dict[str, Any]:
    if isinstance(config, Config):
        return config.model_dump(by_alias=True)
    if isinstance(config, str | Path):
        return recipe(str(config))
    if not isinstance(config, Mapping):
        raise UserError(f"config is a {type(config).__name__}: pass a Config, the name or path of a recipe, or a dict.")
    own = dict(config)
    base = recipe(own.pop("extends")) if "extends" in own else {}
    if "method" in own and "compare" not in own:  # a method alone overrides the recipe's comparison, as on the command line
        base.pop("compare", None)
    return merged_tables(base, own)


def _name(reward: Callable[..., Any] | str) -> str:
    """Return the name under which a reward is stored in config.toml."""
    if isinstance(reward, str):
        return reward
    name = getattr(reward, "__name__", type(reward).__name__)
    return OBJECT + (re.sub(r"\W+", "_", name).strip("_") or "reward")


def _rows(rows: Rows | None, split: str) -> list[Mapping[str, Any]] | None:
    if isinstance(rows, str | Path | Mapping):
        raise UserError(
            f"{split} is a {type(rows).__name__}, not rows: pass a list of dicts or a Dataset; name files in data.{split}."
        )
    return None if rows is None else list(rows)


@contextmanager
def _rows_of_a_restored_run(run_dir: str, splits: list[str]) -> Iterator[None]:
    """Restore the rows of an earlier run if the block fails and the run folder still holds that run."""
    earlier = {path: path.read_bytes() for split in splits if (path := _rows_file(split, run_dir)).exists()}
    config = _config_stamp(run_dir)
    try:
        yield
    except BaseException:
        if config is not None and config == _config_stamp(run_dir):
            for path, content in earlier.items():
                path.write_bytes(content)
        raise


def _config_stamp(run_dir: str) -> tuple[int, int] | None:
    """Return the time and inode of a run's config.toml, which identify the run; None without a run on disk."""
    try:
        info = backup.current(Path(run_dir), "config.toml").stat()
    except OSError:
        return None
    return info.st_mtime_ns, info.st_ino


def _rows_file(split: str, run_dir: str) -> Path:
    if not is_address(run_dir):
        return Path(f"{run_dir.rstrip('/')}.{split}.jsonl")
    name = re.sub(r"[^a-zA-Z0-9]+", "-", run_dir)
    return Path(tempfile.gettempdir()) / f"sparse-rl-{os.getuid()}" / f"{name}.{split}.jsonl"


def _stored(rows: list[Mapping[str, Any]], split: str, run_dir: str, *, resume: bool) -> str:
    """Write the rows to a JSON Lines file next to the run folder and return its path. A resumed run and `sparse-rl eval` read it
    again."""
    path, lines = _rows_file(split, run_dir), []
    for number, row in enumerate(rows, 1):
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"Row {number} of the {split} rows cannot be written as JSON ({error}): keep columns of text, numbers and lists."
            ) from None
    text = "".join(f"{line}\n" for line in lines)
    if resume and path.exists() and path.read_text(encoding="utf-8") != text:
        raise UserError(f"The {split} rows are not those of the run in {run_dir}: pass the same rows to resume it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")  # every rank writes the same file
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
    return str(path)
