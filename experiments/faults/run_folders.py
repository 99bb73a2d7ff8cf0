"""Damage run folders in every way that disks, people and attackers do, and see what resume, export, report and eval make of it.

python experiments/faults/run_folders.py [--seed 0] [--count N] [--only TEXT] [--json benchmarks/results/faults-run_folders.json]

A command must refuse in one sentence, or go on with a warning, or end in what an undamaged run ends in. A traceback, a file that
a pickle has made, a hang, and a result that differs without a word are failures; any failure ends the campaign with status 1.
"""

import argparse
import json
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

Damage = Callable[[Path], object]
STEP = "checkpoints/step-3"
FILES = (".metadata", "__0_0.distcp", "state.json", "manifest.json")
FLAGS = ["--method", "dense", "--rollout.max-tokens", "8", "--reward.workers", "0"]
FLAGS += ["--checkpoint.every", "1", "--checkpoint.keep", "3", "--steps", "3"]
LIMIT_S = 240
NOBODY = 65534


@dataclass(frozen=True)
class Case:
    name: str
    damage: Damage
    """Of a copy of the run; a pickle makes the file `ran` beside it."""
    commands: tuple[str, ...]
    seen: bool = False
    """Whether nothing but a refusal or a warning will do."""
    unprivileged: bool = False


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def payload(run: Path) -> bytes:
    return pickle.dumps(Payload(run.parent / "ran"))


# Damage to any file


def damages(rng: random.Random) -> dict[str, Callable[[Path, Path], object]]:
    """By name; each is called with the run and the file."""

    def flip(_: Path, file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)

    def becomes(make: Callable[[Path], object]) -> Callable[[Path, Path], object]:
        return lambda _, file: (file.unlink(), make(file))

    return {
        "bit": flip,
        "another bit": flip,
        "cut": lambda _, file: os.truncate(file, rng.randrange(1, file.stat().st_size)),
        "empty": lambda _, file: file.write_bytes(b""),
        "noise": lambda _, file: file.write_bytes(rng.randbytes(file.stat().st_size)),
        "longer": lambda _, file: file.write_bytes(file.read_bytes() + rng.randbytes(100)),
        "pickle": lambda run, file: file.write_bytes(payload(run)),
        "deleted": lambda _, file: file.unlink(),
        "folder": becomes(Path.mkdir),
        "loop": becomes(lambda file: file.symlink_to(file.name)),
        "device": becomes(lambda file: file.symlink_to("/dev/zero")),
        "pipe": becomes(os.mkfifo),
        "huge": lambda _, file: os.truncate(file, 2**41),
    }


def without_checksums(step: Path) -> None:
    """As a checkpoint was before it had a manifest."""
    state = json.loads((step / "state.json").read_text())
    state.pop("manifest")
    (step / "state.json").write_text(json.dumps(state))
    (step / "manifest.json").unlink()


def signed(step: Path) -> None:
    """A manifest that fits the files as they are, which only a person makes."""
    from sparse_rl.train import manifest

    files = {name: manifest.entry_of((step / name).read_bytes()) for name in FILES[:-1]}
    (step / "manifest.json").write_text(json.dumps({"step": 3, "files": files}))


def with_state(folder: Path, values: dict[str, object]) -> None:
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | values))


def with_index(step: Path, change: Callable[[object], object]) -> None:
    index = pickle.loads((step / ".metadata").read_bytes())  # our own
    change(index)
    (step / ".metadata").write_bytes(pickle.dumps(index))


def everything_is_bytes(run: Path) -> None:
    """torch unpickles whatever an index says is no tensor."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    step = run / STEP

    def change(index) -> None:
        index.state_dict_metadata = dict.fromkeys(index.state_dict_metadata, BytesStorageMetadata())
        for place in index.storage_data.values():
            place.offset, place.length = 0, len(payload(run))

    with_index(step, change)
    (step / "__0_0.distcp").write_bytes(payload(run))
    signed(step)


def index_leads_elsewhere(run: Path) -> None:
    def change(index) -> None:
        for place in index.storage_data.values():
            place.relative_path = "../step-2/__0_0.distcp"

    with_index(run / STEP, change)
    signed(run / STEP)


# The cases


def cases(seed: int) -> Iterator[Case]:
    rng = random.Random(seed)
    kinds = damages(rng)
    both, shown = ("resume", "export"), ("resume", "report")

    def to(file: str, kind: str) -> Damage:
        return lambda run: kinds[kind](run, run / file)

    for file in FILES:
        for kind in kinds:
            yield Case(f"{file}: {kind}", to(f"{STEP}/{file}", kind), both, seen=True)
        yield Case(
            f"{file}: swapped", lambda run, file=file: shutil.copy(run / "checkpoints/step-2" / file, run / STEP), both, True
        )
    for file in FILES[:-1]:
        for kind in ("bit", "cut", "empty", "pickle", "deleted", "folder"):

            def old(run: Path, file: str = file, kind: str = kind) -> None:
                without_checksums(run / STEP)
                kinds[kind](run, run / STEP / file)

            yield Case(f"without checksums, {file}: {kind}", old, both, seen=True)
    odd: list[dict[str, object]] = [
        {"cursor": -1},
        {"cursor": "4"},
        {"cursor": 1e300},
        {"cursor": 10**30},
        {"cursor": None},
        {"step": 2},
        {"step": -3},
        {"best_value": float("nan")},
        {"best_step": 99},
        {"ranks": 0},
        {"ranks": [1]},
        {"problems": 7},
        {"problems": {"count": "many"}},
        {"scored_by": {"reward.function": 3}},
        {"config": []},
        {"unknown": 1},
    ]
    for values in odd:

        def strange(run: Path, values=values) -> None:
            with_state(run / STEP, values)
            signed(run / STEP)

        yield Case(f"state.json has {values}, and its checksum", strange, both, seen=True)
    yield Case("index: everything is bytes", everything_is_bytes, both, seen=True)
    yield Case("index: leads elsewhere", index_leads_elsewhere, both, seen=True)
    yield Case(
        "all of step 2 as step 3",
        lambda run: shutil.copytree(run / "checkpoints/step-2", run / STEP, dirs_exist_ok=True),
        both,
        True,
    )

    def every_step(run: Path) -> None:
        for step in (1, 2, 3):
            kinds["bit"](run, run / f"checkpoints/step-{step}/__0_0.distcp")

    yield Case("every checkpoint: bit", every_step, both, seen=True)
    for name in ("checkpoints", STEP):

        def a_file(run: Path, name: str = name) -> None:
            shutil.rmtree(run / name)
            (run / name).write_bytes(payload(run))

        def a_loop(run: Path, name: str = name) -> None:
            shutil.rmtree(run / name)
            (run / name).symlink_to(Path(name).name)

        yield Case(f"{name}: a file", a_file, both)
        yield Case(f"{name}: a loop", a_loop, both)
        yield Case(f"{name}: gone", lambda run, name=name: shutil.rmtree(run / name), both)
    yield Case(
        "checkpoints: odd names",
        lambda run: [(run / f"checkpoints/step-{name}").mkdir() for name in ("x", "-1", "٣", "9" * 200)],
        both,
    )

    for kind in kinds:
        yield Case(f"config.toml: {kind}", to("config.toml", kind), ("resume", "export", "report"))
        yield Case(f"metrics.jsonl: {kind}", to("metrics.jsonl", kind), shown)
    for kind in ("bit", "noise", "deleted", "folder", "pipe", "huge"):
        yield Case(f"xi.jsonl: {kind}", to("xi.jsonl", kind), shown)
    for kind in kinds:
        yield Case(f"rollouts: {kind}", to("rollouts/step-2.parquet", kind), shown)
    for text in (
        "self = 1\n",
        "steps = nan\n",
        "a = " + "[" * 5000,
        "seed = " + "9" * 6000,
        "[optimizer]\nweight_decay = 0.5\n",
        "lr = 1\n",
        "\0",
    ):

        def config(run: Path, text: str = text) -> None:
            (run / "config.toml").write_text(text + (run / "config.toml").read_text())

        yield Case(f"config.toml starts {text[:24]!r}", config, ("resume", "export", "report"))
    yield Case(
        "config.toml: another weight decay",
        lambda run: (run / "config.toml").write_text(
            (run / "config.toml").read_text().replace("weight_decay = 0.1", "weight_decay = 0.5")
        ),
        ("resume",),
        seen=True,
    )
    for row in ('{"step": 1}', '{"step": NaN}', '{"step": "1"}', '{"step": 1e400}', f'{{"step": {"9" * 400}}}', '{"step": 2, "reward/mean": "x"}',
                '{"step": 2, "reward/mean": NaN}', '{"step": 2, "reward/mean": [1]}', "[]", "null", "[" * 5000, "\ufffe\x00\x1b[31m", '{"step": 99}', '{"step": -1}'):  # fmt: skip

        def line(run: Path, row: str = row) -> None:
            lines = (run / "metrics.jsonl").read_text().splitlines()
            (run / "metrics.jsonl").write_text("\n".join([*lines[:2], row, *lines[2:]]) + "\n")

        yield Case(f"metrics.jsonl has {row[:32]!r}", line, shown)
    for kind in ("noise", "pickle", "empty", "folder", "loop", "cut"):
        for file in ("sparse_rl.json", "model.safetensors", "config.json"):
            yield Case(f"model/{file}: {kind}", to(f"model/{file}", kind), ("eval",))
    for file in (
        "config.toml",
        "metrics.jsonl",
        f"{STEP}/state.json",
        f"{STEP}/__0_0.distcp",
        f"{STEP}/manifest.json",
        STEP,
        "checkpoints",
    ):
        yield Case(
            f"{file}: no permission",
            lambda run, file=file: (run / file).chmod(0),
            ("resume", "export", "report"),
            unprivileged=True,
        )


# Commands


def words(command: str, run: Path) -> list[str]:
    return {
        "resume": ["train", "--resume", "--run-dir", str(run), "--steps", "4"],
        "export": ["export", str(run), str(run.parent / "out")],
        "report": ["report", str(run), "--out", str(run.parent / "report.html")],
        "eval": ["eval", str(run / "model"), "--benchmarks", str(run.parents[1] / "world/problems.jsonl"), "--problems", "2",
                 "--max-tokens", "4", "--reward.function", "exact", "--reward.workers", "1", "--out", str(run.parent / "eval")],
    }[command]  # fmt: skip


def child(words: list[str], output: Path, *, unprivileged: bool = False, limit_s: int = LIMIT_S) -> int:
    """The exit status of a command in a process of its own, minus the signal where one ended it."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(descriptor, stream)
            os.setpgid(0, 0)
            if unprivileged:
                os.setegid(NOBODY)
                os.seteuid(NOBODY)
            import torch

            from sparse_rl.cli import main

            torch.set_num_threads(1)
            main(words)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    ends = time.monotonic() + limit_s
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > ends:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -signal.SIGKILL
        time.sleep(0.02)


def weights(folder: Path) -> bytes | None:
    file = folder / "model.safetensors"
    return file.read_bytes() if file.is_file() else None


def outcome(case: Case, command: str, code: int, said: str, ran: bool, same: bool | None) -> str:
    """In a word; failures start with FAILED."""
    last = said.strip().splitlines()[-1:] or [""]
    if ran:
        return "FAILED: code was run"
    if "Traceback" in said:
        return "FAILED: traceback"
    if code == 2:
        return "refused" if re.match(r"sparse-rl\b.*: ", last[0]) else "FAILED: no sentence"
    if code:
        return f"FAILED: status {code}"
    warned = "warning:" in said
    if command == "report":
        return "shown"
    if same is False and not warned:
        return "FAILED: another result without a word"
    if case.seen and not warned:
        return "FAILED: damage was not seen"
    return ("warned, same result" if same else "warned, another result") if warned else "same result"


def preload() -> None:
    """What every command needs is imported once, before processes are forked."""
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import small_runs  # noqa: F401
    import sparse_rl.evaluate.evaluation
    import sparse_rl.report.write
    import sparse_rl.train.trainer  # noqa: F401


def base_run(root: Path) -> None:
    """A run of three steps, what its fourth step gives, and its last export."""
    from small_runs import arguments, make_world

    (root / "world").mkdir()
    make_world(root / "world")
    (root / "base").mkdir()
    run = root / "base/run"
    for command in (arguments(root / "world", run, *FLAGS), words("export", run)):
        assert child(command, root / "log") == 0, (root / "log").read_text()
    (root / "longer").mkdir()
    shutil.copytree(run, root / "longer/run")
    assert child(words("resume", root / "longer/run"), root / "log") == 0, (root / "log").read_text()


def try_case(root: Path, case: Case) -> dict[str, tuple[str, str]]:
    """(outcome, last line) of every command."""
    found: dict[str, tuple[str, str]] = {}
    if case.unprivileged and os.geteuid() != 0 and os.geteuid() == NOBODY:
        return found
    for command in case.commands:
        place = root / "case"
        place.mkdir()
        run = place / "run"
        shutil.copytree(root / "base/run", run)
        if case.unprivileged and os.geteuid() == 0:
            for path in (place, *place.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        case.damage(run)
        (root / "log").unlink(missing_ok=True)
        code = child(words(command, run), root / "log", unprivileged=case.unprivileged and os.geteuid() == 0)
        said = (root / "log").read_text(errors="replace")
        same = None
        if code == 0 and command == "resume":
            same = weights(run / "model") == weights(root / "longer/run/model")
        if code == 0 and command == "export":
            same = weights(place / "out") == weights(root / "base/out")
        last = (said.strip().splitlines() or [""])[-1]
        found[command] = (outcome(case, command, code, said, (place / "ran").exists(), same), last.replace(str(root), "…"))
        for path in place.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(place)
    return found


def part(chosen: list[Case]) -> list[tuple[str, str, str, str]]:
    """(case, command, outcome, last line) of these, in a folder of their own."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        base_run(root)
        for case in chosen:
            for command, (what, last) in try_case(root, case).items():
                found.append((case.name, command, what, last))
                print(f"{case.name:60.60} {command:8} {what:24} {last[:150]}", flush=True)
    return found


def in_processes(chosen: list[Case], jobs: int) -> list[tuple[str, str, str, str]]:
    """The same, by so many processes at a time."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for job in range(jobs):
            pid = os.fork()
            if pid == 0:
                (Path(folder) / str(job)).write_text(json.dumps(part(chosen[job::jobs])))
                os._exit(0)
            pids.append(pid)
        for job, pid in enumerate(pids):
            os.waitpid(pid, 0)
            found += json.loads((Path(folder) / str(job)).read_text())
    return [(case, command, what, last) for case, command, what, last in found]


def campaign(seed: int, count: int | None = None, only: str = "", jobs: int = 1) -> dict:
    chosen = [case for case in cases(seed) if only in case.name]
    if count is not None:
        chosen = random.Random(seed).sample(chosen, min(count, len(chosen)))
    preload()
    found = in_processes(chosen, jobs)
    results: dict[str, Counter[str]] = {}
    for _, command, what, _ in found:
        results.setdefault(command, Counter())[what] += 1
    return {
        "folders": len(chosen),
        "commands": len(found),
        "outcomes": {command: dict(sorted(each.items())) for command, each in sorted(results.items())},
        "failed": [f"{case}, {command}: {what}" for case, command, what, last in found if what.startswith("FAILED")],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="cases, drawn at random [all]")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = campaign(args.seed, args.count, args.only, args.jobs)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    if args.json:
        import torch

        from sparse_rl.bench.record import environment

        record = {**environment("faults-run_folders", torch.device("cpu")), "seed": args.seed, **found}
        args.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    sys.exit(bool(found["failed"]))


if __name__ == "__main__":
    main()
