"""Feed the command line damaged recipes and odd flags, through the real parser.

python experiments/faults/configs.py --count 1500 --json benchmarks/results/faults-configs.json

Each case runs `recipes`, `plan` or `train --dry-run` on a recipe whose bytes or values were changed, in this process; some run
again as a command of their own. A case is refused with exit code 2 and one printable line of at most 1,000 characters. Or it
is accepted: then every key of the recipe is an option, has the value that was written, and every number is finite.
"""

import argparse
import contextlib
import datetime as dt
import io
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from damaged_data import BYTES

from sparse_rl import __version__
from sparse_rl.cli import main as sparse_rl
from sparse_rl.config import Config, recipe_names, recipe_text, to_toml
from sparse_rl.text import LONGEST_MESSAGE

LIMIT_S = 120
"""Of one case; a command that takes longer hangs."""
MAY_BE_INFINITE = ("correction.cap", "correction.high")
Rng = random.Random


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = isinstance(value, dict) and prefix + key != "kv.options"
        found |= flat(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return found


KEYS = sorted(flat(Config().model_dump(by_alias=True)))
ODD_VALUES = [
    "nan", "inf", "-inf", "1e999", "1e39", "-1e39", "1e-320", "9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000, str(2**63), str(2**31), "-1", "0", "1", "2",
    "0.5", "true", "false", '""', '" "', '"a\\u0000b"', '"\\u001b[2J"', '"\\u202e"', f'"{"x" * 70_000}"', '"none"', '"12"', '"1e3"', "[]", "{}", "[1, 2]",
    '["dense"]', '["dense", "dense"]', "[[[[1]]]]", "[" * 3000 + "]" * 3000, "{a = " * 3000 + "1" + "}" * 3000, "1979-05-27", "1979-05-27T07:32:00Z", "07:32:00",
    '{self = 1}', '{mix = nan}', '{"\\u001b[2J" = 1}', "[nan, 0.5]", "[1e999, 2]", '"/dev/zero"', '"../../etc/passwd"', "'''a\nb'''", "0o17", "+1_000", "1__0", "'", "64", "8", "1e-4", '"auto"', '"rkv"', '"dense"', '"tiny"', '"float32"', "0.25",
]  # fmt: skip
ODD_KEYS = [
    "self",
    "cls",
    "__init__",
    "__class__",
    "model_config",
    "section",
    '""',
    '"\\u001b[2J"',
    '"\\u0000"',
    "x" * 70_000,
    "kv.budget.x",
    "extendz",
    "Steps",
    "lambda_",
]
ODD_PARENTS = [
    "/dev/zero",
    "/dev/stdin",
    "/dev/full",
    "pipe",
    ".",
    "/",
    "loop.toml",
    "case.toml",
    "nowhere.toml",
    "quickstrat",
    "",
    "a\\u0000b",
    "binary.toml",
    "huge.toml",
    "x" * 5000,
]


def make(seed: int, number: int) -> tuple[str, bytes, list[str]]:
    """(kind, the recipe, flags)."""
    rng = Rng(f"configs/{seed}/{number}")
    text = rng.choice(
        [recipe_text(rng.choice(recipe_names())), to_toml(Config()), 'extends = "quickstart"\nsteps = 3\n[kv]\nbudget = 60\n']
    )
    which = number % 6
    if which < 2:
        damage = rng.choice(BYTES)
        return f"bytes: {damage.__name__}", damage(rng, text.encode()), []
    if which < 4:
        return "value", set_value(rng, rng.choice(KEYS), rng.choice(ODD_VALUES)), []
    if which == 4:
        kind = rng.choice(["key", "parent"])
        if kind == "parent":
            parents = [f'"{parent}"' for parent in ODD_PARENTS]
            return kind, f"extends = {rng.choice([rng.choice(parents), rng.choice(ODD_VALUES)])}\n".encode(), []
        section, odd = rng.choice(["", *sorted({key.rpartition(".")[0] for key in KEYS})]), rng.choice(ODD_KEYS)
        return kind, f"{f'[{section}]' if section else ''}\n{odd} = {rng.choice(ODD_VALUES[:30])}\n".encode(), []
    key = rng.choice(KEYS)
    value = (
        rng.choice(ODD_VALUES).strip('"')
        if rng.random() < 0.8
        else rng.choice(["\x1b[2J", "\x9b", "é" * 9, "{", "[", ",", "1,2", "[1,", '{"a": NaN}', "\udcff"])
    )
    return "flag", b"", [f"--{key}={value}"]


def set_value(rng: Rng, key: str, value: str) -> bytes:
    section, _, name = key.rpartition(".")
    if section and rng.random() < 0.1:  # a section that is no table
        return f"{section} = {value}\n".encode()
    return (f"[{section}]\n" if section else "").encode() + f"{name} = {value}\n".encode()


def prepare(folder: Path) -> None:
    """What odd parents find."""
    os.mkfifo(folder / "pipe")
    (folder / "loop.toml").write_text('extends = "case.toml"\n')
    (folder / "binary.toml").write_bytes(bytes(range(256)))
    (folder / "huge.toml").write_bytes(b"#" * 2**21)


def command(number: int, path: Path, flags: list[str]) -> list[str]:
    if not flags and number % 10 < 5:
        return ["recipes", str(path)]
    if number % 10 < 9:
        return ["plan", str(path), *flags]
    return ["train", str(path), "--dry-run", "--run-dir", str(path.parent / "run"), "--reward.workers", "0", *flags]


class Hang(BaseException):
    """A case took longer than `LIMIT_S`."""


def ring(*_: object) -> None:
    raise Hang


def run(arguments: list[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            sparse_rl(arguments)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def wrong(arguments: list[str], content: bytes, code: int, out: str, err: str) -> str | None:
    said = err.splitlines()
    if code not in (0, 2):
        return f"exit code {code}: {err[:300]}"
    if not all(line.isprintable() for line in [*said, *out.replace("\t", "").splitlines()]):
        return "a control character on the terminal"
    if code == 2:
        lines = [line for line in said if line.startswith("sparse-rl: ")]
        if len(lines) != 1 or len(lines[0]) > LONGEST_MESSAGE + 20 or lines[0][-1] not in ".?'":
            return f"a refusal of {len(lines)} lines or of {max(map(len, said), default=0)} characters"
        return None
    return wrong_values(content, out) if arguments[0] == "recipes" else None


def wrong_values(content: bytes, shown: str) -> str | None:
    """Compare what was written with what the command says it would use."""
    used, given = flat(tomllib.loads(shown)), flat(tomllib.loads(content.decode()))
    given.pop("extends", None)
    for key, value in given.items():
        if key not in KEYS and value != {}:
            return f"{key[:80]} is no option and was accepted"
        if key in used and not same(value, used[key]):
            return f"{key} = {str(value)[:80]} became {str(used[key])[:80]}"
    infinite = [key for key, value in used.items() if isinstance(value, float) and not math.isfinite(value)]
    return f"{infinite} are not finite" if set(infinite) - set(MAY_BE_INFINITE) else None


def same(given: Any, used: Any) -> bool:
    """Up to the conversions of the schema: "12" is 12, 1 is 1.0, "true" is true."""
    if given == used or str(given).lower() == str(used).lower():
        return True
    with contextlib.suppress(TypeError, ValueError):
        return float(given) == float(used)
    return isinstance(used, bool)


def campaign(seed: int, count: int, folder: Path, *, start: int = 0, processes: int = 0) -> dict[str, Any]:
    """How the cases from `start` on ended, and every one that ended wrongly; some of them again as a command of their own."""
    prepare(folder)
    path, ends, failures, slowest = folder / "case.toml", {}, [], 0.0
    before = signal.signal(signal.SIGALRM, ring)
    numbers = range(start, start + count)
    own = set(Rng(f"own/{seed}/{start}").sample(numbers, min(processes, count)))
    try:
        for number in numbers:
            kind, content, flags = make(seed, number)
            path.write_bytes(content)
            arguments = command(number, path, flags)
            started = time.perf_counter()
            signal.alarm(LIMIT_S)
            try:
                code, out, err = run(arguments)
                fault = wrong(arguments, content, code, out, err)
                if number in own and not any("\udcff" in each or "\0" in each for each in arguments):
                    done = subprocess.run(
                        [sys.executable, "-m", "sparse_rl", *arguments],
                        capture_output=True,
                        text=True,
                        timeout=LIMIT_S,
                        check=False,
                        stdin=subprocess.DEVNULL,
                    )
                    if done.returncode != code or "Traceback" in done.stderr:
                        fault = fault or f"as a command: exit code {done.returncode}, {done.stderr[-300:]}"
            except Hang:
                code, fault = -1, f"took more than {LIMIT_S} s"
            except Exception as error:
                code, fault = -1, f"raised {repr(error)[:200]}"
            finally:
                signal.alarm(0)
            slowest = max(slowest, time.perf_counter() - started)
            end = {0: "accepted", 2: "refused"}.get(code, "failed")
            ends.setdefault(f"{arguments[0]}, {kind}", Counter())[end] += 1
            if fault:
                failures.append({"number": number, "kind": kind, "command": arguments[0], "wrong": fault})
    finally:
        signal.signal(signal.SIGALRM, before)
    total = sum(ends.values(), Counter())
    return {
        "cases": count,
        "also_as_processes": len(own),
        "refused": total["refused"],
        "accepted": total["accepted"],
        "failures": failures,
        "slowest_s": round(slowest, 2),
        "by_kind": {kind: dict(found) for kind, found in sorted(ends.items())},
    }


def part(seed: int, start: int, count: int, processes: int) -> dict[str, Any]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import sparse_rl.train.trainer  # noqa: F401  here, so that the first case does not pay for torch

    with tempfile.TemporaryDirectory() as folder:
        return campaign(seed, count, Path(folder), start=start, processes=processes)


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    by_kind: dict[str, Counter[str]] = {}
    for kind, found in (pair for each in parts for pair in each["by_kind"].items()):
        by_kind.setdefault(kind, Counter()).update(found)
    added = {key: sum(each[key] for each in parts) for key in ("cases", "also_as_processes", "refused", "accepted")}
    failures = [failure for each in parts for failure in each["failures"]]
    slowest = max(each["slowest_s"] for each in parts)
    return added | {
        "failures": failures,
        "slowest_s": slowest,
        "by_kind": {kind: dict(by_kind[kind]) for kind in sorted(by_kind)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--processes", type=int, default=30, help="cases that also run as a command of their own")
    parser.add_argument("--jobs", type=int, default=2, help="parts that run at the same time")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    edges = [args.count * job // args.jobs for job in range(args.jobs + 1)]
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        tasks = [
            pool.submit(part, args.seed, start, stop - start, args.processes // args.jobs) for start, stop in pairwise(edges)
        ]
        found = merged([task.result() for task in tasks])
    found = {"seed": args.seed, "date": dt.date.today().isoformat(), "versions": {"sparse-rl": __version__}} | found
    for failure in found["failures"][:40]:
        print(failure)
    print(
        f"{found['cases']:,} cases: {found['refused']:,} refused, {found['accepted']:,} accepted, {len(found['failures'])} wrong"
    )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
