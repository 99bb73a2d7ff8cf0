"""Kill a training run at every file operation, then run the next command and compare with a run that nobody killed.

    python experiments/faults/kills.py [--every 1] [--seed 0] [--json benchmarks/results/faults-kills.json]

Three situations: a fresh start, `--resume` of half a run, `--overwrite` of another run. An operation is anything that changes
the run folder: open for writing, rename, mkdir, remove, truncate. A process is killed in one of three ways:

- before: by SIGKILL just before operation k.
- empty: in the first write of any file after operation k, before a byte of it is written.
- torn: the same, once a few bytes of it are written. These two also reach the files of safetensors and parquet, which are
  written in C++ and Rust: a limit on file sizes ends the process (SIGXFSZ).

Every run is forked from one process that has imported everything, so a kill costs a second or two.
"""

import argparse
import json
import os
import platform
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import pyarrow.parquet as pq  # noqa: E402
import torch  # noqa: E402

from small_runs import arguments, make_world, metrics, without_clock  # noqa: E402
from sparse_rl.cli import main  # noqa: E402
from sparse_rl.train.run_folder import RunFolder  # noqa: E402

OPERATIONS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
WAYS = ("before", "empty", "torn")
TORN_BYTES = 7
FLAGS = [
    *("--method", "dense", "--reward.workers", "0", "--checkpoint.every", "1", "--checkpoint.keep", "1", "--steps", "2"),
    *("--rollout.prompts-per-step", "1", "--rollout.samples-per-prompt", "2", "--rollout.max-tokens", "4"),
]
HIDDEN = (".replaced", ".partial", ".removed", "lock")
"""Names that only a killed run leaves."""


@dataclass
class Ended:
    """How a forked command ended."""

    status: int
    """The exit code, or minus the signal."""
    output: str
    operations: list[str] = field(default_factory=list)


def forked(
    work: Callable[[], None], watched: Path | None = None, kill_at: int | str | None = None, way: str = "before"
) -> Ended:
    """Run `work` in a child that counts the operations in `watched`, and is killed at the one of this number or name."""
    reader, writer = os.pipe()
    noted, notes = os.pipe()
    child = os.fork()
    if not child:
        _child(work, writer, notes, watched, kill_at, way)
    os.close(writer)
    os.close(notes)
    with os.fdopen(reader, errors="replace") as output, os.fdopen(noted) as names:
        said, seen = output.read(), names.read().split("\n")[:-1]
    _, status = os.waitpid(child, 0)
    return Ended(os.waitstatus_to_exitcode(status), said, seen)


def _child(
    work: Callable[[], None], output: int, notes: int, watched: Path | None, kill_at: int | str | None, way: str
) -> None:
    status = 70
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
        if watched:
            sys.addaudithook(_hook(watched, notes, kill_at, way))
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _hook(watched: Path, notes: int, kill_at: int | str | None, way: str) -> Callable[[str, tuple], None]:
    count = 0
    inside = str(watched)

    def hook(event: str, args: tuple) -> None:
        nonlocal count
        if event == "open":
            path, _, flags = args
            if not (isinstance(path, str) and path.startswith(inside) and flags & WRITES):
                return
        elif event in OPERATIONS:
            path = os.fsdecode(args[0]) if not isinstance(args[0], int) else ""
            if not path.startswith(inside) and (args[-1] == -1 or event == "os.truncate"):  # rmtree names entries by dir_fd
                return
        else:
            return
        name = f"{event.removeprefix('os.')} {os.path.relpath(path, inside) if path.startswith(inside) else path}"
        if kill_at is None:
            os.write(notes, f"{name}\n".encode())
        elif kill_at in (count, name):
            if way == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            size = os.path.getsize(path) if event == "open" and os.path.exists(path) and not args[2] & os.O_TRUNC else 0
            limit = 0 if way == "empty" else size + TORN_BYTES
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        count += 1

    return hook


@dataclass(frozen=True)
class Situation:
    name: str
    flags: tuple[str, ...]
    """Of the command that is killed."""
    before: str | None
    """The reference run whose copy is in the folder, if any."""


SITUATIONS = (
    Situation("fresh", (), None),
    Situation("resume", ("--resume",), "half"),
    Situation("overwrite", ("--overwrite",), "old"),
)


class Campaign:
    def __init__(self, folder: Path):
        """Make what runs are compared with: `new` and `old` are whole runs of other seeds, `half` is the first step of `new`."""
        self.folder = folder
        self.world = make_world(folder)
        self.done(self.train("new"))
        self.done(self.train("old", "--seed", "1"))
        self.done(self.train("half", "--steps", "1"))

    def import_all(self) -> None:
        """In this process, what a run imports: its children need not."""
        names, place = self.folder / "modules", self.placed(SITUATIONS[0])

        def warm() -> None:
            main(self.arguments(place / "run"))
            names.write_text("\n".join(sys.modules))

        self.done(forked(warm))
        for name in names.read_text().split("\n"):
            if name.startswith(("torch", "transformers.", "sparse_rl", "pyarrow", "pandas")):
                try:
                    __import__(name)
                except Exception:  # a module that only its package may import
                    continue

    def arguments(self, run: Path, *flags: str) -> list[str]:
        return arguments(self.world, run, *FLAGS, *flags)

    def train(self, name: str, *flags: str) -> Ended:
        return forked(lambda: main(self.arguments(self.folder / name, *flags)))

    def done(self, ended: Ended) -> None:
        assert ended.status == 0, ended.output

    def placed(self, situation: Situation) -> Path:
        """An empty place with the run that is there before."""
        place = Path(tempfile.mkdtemp(dir=self.folder, prefix=f"{situation.name}-"))
        if situation.before:
            shutil.copytree(self.folder / situation.before, place / "run")
        return place

    def operations(self, situation: Situation) -> list[str]:
        """What the command does to the run folder when nobody kills it."""
        place = self.placed(situation)
        ended = forked(lambda: main(self.arguments(place / "run", *situation.flags)), place)
        self.done(ended)
        assert not (wrong := self.differences(place / "run", self.folder / "new")), wrong
        shutil.rmtree(place)
        return ended.operations

    def kill(self, situation: Situation, at: int | str, way: str, *, again: bool = False) -> tuple[str, list[str]]:
        """(what the kill left, what is wrong after the next command). `again` repeats the killed command; else the next command
        is --resume where there is a run, as a requeued job does."""
        place = self.placed(situation)
        run = place / "run"
        killed = forked(lambda: main(self.arguments(run, *situation.flags)), place, at, way)
        if killed.status not in (-signal.SIGKILL, -signal.SIGXFSZ):
            shutil.rmtree(place)
            return "not killed", [] if killed.status == 0 else [f"it ended with {killed.status}: {killed.output[-500:]}"]
        wrong, left = self.next_command(situation, run, again)
        shutil.rmtree(place)
        return left, wrong

    def next_command(self, situation: Situation, run: Path, again: bool) -> tuple[list[str], str]:
        folder = RunFolder(run, writes=False)
        exists = folder.exists
        seed = folder.stored_config().get("seed", 0) if exists else None
        left = "no run" if not exists else "the old run" if seed == 1 else "the run"
        if not exists and situation.before:
            return ["lost: there is no run"], left
        lost = self.lost(run) if seed == 1 else []
        if again and situation.name != "resume":
            flags, should = (situation.flags, "new") if exists != (situation.name == "fresh") else (("--overwrite",), "new")
            ended = forked(lambda: main(self.arguments(run, *flags)))
        elif exists:
            should = "old" if seed == 1 else "new"
            ended = forked(lambda: main(["train", "--resume", "--run-dir", str(run), "--steps", "2"]))
        else:
            should = "new"
            ended = forked(lambda: main(self.arguments(run)))
        if ended.status:
            return [*lost, f"stuck: {ended.output[-500:]}"], left
        return [*lost, *self.differences(run, self.folder / should)], left

    def lost(self, run: Path) -> list[str]:
        """What is not as it was in the run that was not replaced, once a command that only reads has looked at it."""
        copy = run.with_name("copy")
        shutil.copytree(run, copy)
        ended = forked(lambda: RunFolder(copy, writes=False).recover_if_abandoned())
        before, now = (_contents(each) for each in (self.folder / "old", copy))
        gone = [
            name for name in before if before[name] != now.get(name) and not name.startswith(("report.html", "reward.log"))
        ]
        shutil.rmtree(copy)
        return [f"lost: {', '.join(gone)}"] * bool(gone) + [f"not brought back: {ended.output}"] * bool(ended.status)

    def differences(self, run: Path, whole: Path) -> list[str]:
        return [*_differences(run, whole)]


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def _differences(run: Path, whole: Path) -> Iterator[str]:
    if without_clock(metrics(run)) != without_clock(metrics(whole)):
        yield f"other metrics: steps {[row['step'] for row in metrics(run)]}"
    for name in ("xi.jsonl", "model/model.safetensors"):
        if (run / name).read_bytes() != (whole / name).read_bytes():
            yield f"another {name}"
    for name in ("checkpoints/*", "rollouts/*", "model/*"):
        mine, theirs = (sorted(file.name for file in each.glob(name)) for each in (run, whole))
        if mine != theirs:
            yield f"other {name}: {mine}"
    for file in whole.glob("rollouts/*.parquet"):
        if not pq.read_table(run / "rollouts" / file.name).equals(pq.read_table(file)):
            yield f"other {file.name}"
    for file in whole.glob("checkpoints/*/*.distcp"):
        if (run / file.relative_to(whole)).read_bytes() != file.read_bytes():
            yield f"another {file.relative_to(whole)}"
    if left := [str(file.relative_to(run)) for file in run.rglob("*") if any(mark in file.name for mark in HIDDEN)]:
        yield f"left over: {left}"


def campaign(folder: Path, every: int, seed: int, tell: Callable[[str], None]) -> dict:
    torch.set_num_threads(1)
    rng, what = random.Random(seed), Campaign(folder)
    what.import_all()
    found: dict[str, dict] = {}
    for situation in SITUATIONS:
        operations = what.operations(situation)
        kills = [(at, way) for at in range(len(operations)) for way in WAYS]
        chosen = [kill for kill in kills if kill[1] == "before" or every == 1 or rng.randrange(every) == 0]
        counts: Counter[str] = Counter()
        failures: list[str] = []
        started = time.monotonic()
        for number, (at, way) in enumerate(chosen):
            left, wrong = what.kill(situation, at, way, again=number % 3 == 2)
            counts[left] += 1
            failures += [f"{situation.name}, {way} {at} ({operations[at]}): {each}" for each in wrong]
            for each in failures[len(failures) - len(wrong) :]:
                tell(each)
        killed = len(chosen) - counts["not killed"]
        found[situation.name] = {
            "operations": len(operations),
            "kills": killed,
            "left": dict(sorted(counts.items())),
            "stuck": sum("stuck" in each for each in failures),
            "lost": sum("lost" in each for each in failures),
            "wrong": len(failures),
            "failures": failures[:20],
        }
        tell(f"{situation.name}: {json.dumps(found[situation.name])} in {time.monotonic() - started:.0f} s")
    return found


def command() -> None:
    parser = argparse.ArgumentParser(description="Kill a run at every file operation.")
    parser.add_argument("--every", type=int, default=1, help="of the kills inside a write, take about one in so many [1]")
    parser.add_argument("--seed", type=int, default=0, help="of that choice [0]")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(Path(folder), args.every, args.seed, lambda line: print(line, flush=True))
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    values = {"date": str(date.today()), "seed": args.seed, "every": args.every, "versions": versions, "situations": found}
    if args.json:
        args.json.write_text(json.dumps(values, indent=1) + "\n")
    sys.exit(any(each["wrong"] for each in found.values()))


if __name__ == "__main__":
    command()
