"""The folder of an evaluation. Chunks of problems are written atomically, so that a killed evaluation can continue.

The folder holds the settings of the evaluation (asked.json), every graded sample (samples.jsonl), the cost of each chunk of
problems (chunks.jsonl) and log xi of all tokens (log_xi/).
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from .. import backup
from ..disk import refusal
from ..errors import UserError, notice
from .benchmark import Cost, EvalChunk, EvalSample

FILES = ("asked.json", "samples.jsonl", "chunks.jsonl", "log_xi", "results.json", "sparse_rl.statistics")
PARTIAL = ".asked.json.partial"
GROWS = ("benchmarks", "settings")
"""Keys of asked.json that a later run may extend. All other keys must stay the same."""


def stores_prompts(settings: dict[str, Any]) -> bool:
    """Return whether a cache with these settings of asked.json stores prompts once."""
    return bool(settings.get("protect_prompt")) and settings.get("policy") != "full"


@dataclass
class FinishedPart:
    """The finished problems of one benchmark with one cache."""

    samples: list[EvalSample] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)
    log_xi: list[Path] = field(default_factory=list)

    @property
    def problems(self) -> set[int]:
        return {sample.problem for sample in self.samples}


class Work:
    def __init__(self, path: Path):
        self.path = path
        self.asked, self.samples, self.chunks = (path / name for name in FILES[:3])
        self.done: dict[tuple[str, str], FinishedPart] = {}
        self.written = 0

    @contextmanager
    def opened(self, asked: dict[str, Any], *, overwrite: bool) -> Iterator[None]:
        """Lock the folder for this process. Raise UserError if it holds other files or an evaluation with other settings."""
        if self.path.exists() and not (self.path.is_dir() and (self._is_evaluation() or self._is_empty())):
            raise UserError(f"{self.path} exists and is not an evaluation folder: set another --out.")
        was_there = self.path.exists()
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("w")
        with lock:
            self._lock(lock)
            with self.writing():
                if backup.recover(self.path, FILES):
                    notice(
                        "A previous --overwrite was killed before it finished a problem: the earlier evaluation is "
                        f"restored in {self.path}."
                    )
                if overwrite:
                    backup.move_out(self.path, FILES)
            try:
                with self.writing():
                    self.ask(asked)
                    self._read()
                yield
            finally:
                if not self.written and not was_there:  # remove the new folder after a failed start
                    shutil.rmtree(self.path, ignore_errors=True)
                elif overwrite and not self.written:
                    backup.restore(self.path, FILES)

    def of(self, benchmark: str, setting: str) -> FinishedPart:
        return self.done.setdefault((benchmark, setting), FinishedPart())

    def add(self, benchmark: str, setting: str, chunk: EvalChunk, log_xi: np.ndarray | None) -> None:
        done, file = self.of(benchmark, setting), None
        with self.writing():
            if log_xi is not None:
                file = f"log_xi/{self.written}.npy"
                (self.path / "log_xi").mkdir(exist_ok=True)
                np.save(self.path / file, log_xi)
            with self.samples.open("a") as out:
                for sample in chunk.samples:
                    row = {"benchmark": benchmark, "setting": setting, **asdict(sample)}
                    out.write(
                        json.dumps({key: value for key, value in row.items() if value is not None or key == "reward"}) + "\n"
                    )
            line = {
                "benchmark": benchmark,
                "setting": setting,
                "samples": len(chunk.samples),
                "cost": asdict(chunk.cost),
                "log_xi": file,
                "samples_end": self.samples.stat().st_size,
            }
            with self.chunks.open("a") as out:  # written last: this line marks the chunk as complete
                out.write(json.dumps(line) + "\n")
            backup.commit(self.path)
        self.written += 1
        done.samples += chunk.samples
        done.cost += chunk.cost
        done.log_xi += [self.path / file] if file else []

    @contextmanager
    def writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason, remedy = refusal(error, self.path)
            raise UserError(
                f"The folder {self.path} cannot be written ({reason}): {remedy} and run the same command again, or set "
                "another --out."
            ) from error

    def _lock(self, file: TextIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"Another evaluation is running in {self.path}: wait for it, or set another --out.") from None

    def _is_empty(self) -> bool:
        """Return whether the folder is empty or holds only files of a start that was killed before writing asked.json."""
        names = {file.name for file in self.path.iterdir()}
        return all(backup.is_own(name) or name == PARTIAL for name in names)

    def _is_evaluation(self) -> bool:
        return backup.current(self.path, self.asked.name).is_file()

    def ask(self, asked: dict[str, Any]) -> None:
        """Add these settings to asked.json. Raise UserError if they contradict it."""
        before = json.loads(self.asked.read_text()) if self.asked.exists() else {}
        asked = json.loads(json.dumps(asked))  # convert to the types that JSON returns, for the comparison
        for key in (asked.keys() | before.keys()) - set(GROWS) if before else ():
            if key == "format" and not any(stores_prompts(values) for values in before["settings"].values()):
                continue  # the format of stored prompts
            self._refuse_if_changed(key, before.get(key), asked.get(key))
        for group in GROWS:
            for name, values in asked[group].items():
                for key, value in values.items() if name in before.get(group, {}) else ():
                    self._refuse_if_changed(f"{key} of {name}", before[group][name].get(key), value)
        grown = {group: before.get(group, {}) | asked[group] for group in GROWS}
        partial = self.asked.with_name(PARTIAL)
        partial.write_text(json.dumps(asked | grown, indent=1) + "\n")
        os.replace(partial, self.asked)

    def _refuse_if_changed(self, key: str, before: Any, now: Any) -> None:
        if before != now:
            raise UserError(
                f"{key} is {now} now but was {before} in {self.path}: use the same value, set another --out, or start over "
                "with --overwrite."
            )

    def _read(self) -> None:
        """Read the complete chunks. Truncate incomplete lines that a killed run left."""
        with self.chunks.open("ab+") as file:  # truncate in place: a kill during a rewrite would lose all chunks
            file.seek(0)
            lines = [line for line in file.readlines() if line.endswith(b"\n")]
            file.truncate(sum(map(len, lines)))
        rows = [json.loads(line) for line in lines]
        end = rows[-1]["samples_end"] if rows else 0
        if end and (not self.samples.exists() or self.samples.stat().st_size < end):
            raise UserError(f"{self.samples} lacks samples that {self.chunks} lists: start over with --overwrite.")
        with self.samples.open("a+") as file:
            file.truncate(end)
            file.seek(0)
            samples = iter(file.read().splitlines())
        for row in rows:
            done = self.of(row["benchmark"], row["setting"])
            for _ in range(row["samples"]):
                values = json.loads(next(samples))
                done.samples.append(EvalSample(**{key: values[key] for key in values if key not in ("benchmark", "setting")}))
            done.cost += Cost(**row["cost"])
            done.log_xi += [self.path / row["log_xi"]] if row["log_xi"] else []
        self.written = len(rows)
