"""Feed the data loader thousands of damaged files: JSON lines, CSV and Parquet, packed or not.

python experiments/faults/data_files.py --count 16000 --json benchmarks/results/faults-data_files.json

Every file ends in one of two ways. It is refused in one printable sentence of at most 1,000 characters that names the file.
Or it is accepted, and then a second, simpler reader agrees that nothing in it is malformed and that no row is missing.
A flipped letter in a text is no damage that a reader can know, unless the format has checksums (gzip, Parquet where they
were written): there the rows must be the original ones.
"""

import argparse
import csv
import datetime as dt
import gzip
import io
import json
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from damaged_data import Damaged, Rows, files

from sparse_rl.data.examples import PROMPT_COLUMNS, load
from sparse_rl.errors import UserError
from sparse_rl.text import LONGEST_MESSAGE, message

LIMIT_S = 20
"""Of one small file; a loader that takes longer hangs."""


def judge(file: Damaged, path: Path) -> tuple[str, str | None]:
    """(how it ended, what is wrong about that)."""
    path.write_bytes(file.content)
    try:
        loaded = load(str(path), "train", n=1, seed=0)
    except UserError as error:
        return "refused", wrong_sentence(message(str(error)), path)
    for example in loaded.examples:
        if not example.prompt or (example.answer is not None and not example.answer.strip()):
            return "accepted", "an empty prompt or answer"
    return "accepted", wrong_acceptance(
        file, len(loaded.examples) + loaded.skipped, [example.prompt for example in loaded.examples]
    )


def wrong_sentence(sentence: str, path: Path) -> str | None:
    if len(sentence) > LONGEST_MESSAGE or not sentence.isprintable():
        return "a refusal that is long or not printable"
    if str(path) not in sentence:
        return "a refusal that does not name the file"
    known = ("is an incomplete or damaged", "has no rows", "has no problem", "column names", "cannot be read")
    if not any(f"{path}{mark}" in sentence for mark in (":", ", row ")) and not any(each in sentence for each in known):
        return "a refusal that names no row"
    return None if sentence[-1] in ".?" else "a refusal without an end"


def wrong_acceptance(file: Damaged, count: int, prompts: list[Any]) -> str | None:
    """Compare with what a plain reader finds in the file."""
    content = file.content
    if file.suffix.endswith(".gz"):
        assert file.original is not None
        if gzip.decompress(content) != file.original:
            return "a damaged gzip file was accepted"
        content = file.original
    if file.suffix == ".parquet":
        return wrong_parquet(file, prompts) if file.original is not None else None
    reader = plain_csv if ".csv" in file.suffix else plain_json_lines
    try:
        expected = reader(content.removeprefix(b"\xef\xbb\xbf").decode())
    except (ValueError, csv.Error) as error:
        return f"damage was accepted ({error})"
    if len(expected) != count:
        return f"{count} rows were read of {len(expected)}"
    column = next(name for name in PROMPT_COLUMNS if name in expected[0])
    texts = [row[column] for row in expected]
    return None if all(prompt in texts for prompt in prompts) else "a prompt is not as in the file"


def wrong_parquet(file: Damaged, prompts: list[Any]) -> str | None:
    """With checksums on its pages, texts are the original ones; the footer, which names the columns, has none."""
    original = pq.read_table(pa.BufferReader(file.original)).to_pylist()
    texts = [value for row in original for value in row.values()]
    return None if all(prompt in texts for prompt in prompts) else "a prompt is not as it was written"


def plain_json_lines(text: str) -> Rows:
    found = [json.loads(line, object_pairs_hook=once) for line in text.split("\n") if line.strip()]
    for row in found:
        json.dumps(row, allow_nan=False, ensure_ascii=False).encode()
    return found


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)


def plain_csv(text: str) -> Rows:
    if "\0" in text:
        raise ValueError("NUL")
    head, *body = [cells for cells in csv.reader(io.StringIO(text, newline=""), strict=True) if cells]
    if any(len(cells) != len(head) for cells in body) or len(set(head)) < len(head):
        raise ValueError("cells and columns differ")
    return [dict(zip(head, cells, strict=True)) for cells in body]


class Hang(BaseException):
    """A file took longer than `LIMIT_S`."""


def ring(*_: object) -> None:
    raise Hang


def campaign(seed: int, count: int, folder: Path) -> dict[str, Any]:
    """How the files ended, and every one that ended wrongly."""
    ends: dict[str, Counter[str]] = {}
    failures, slowest, longest = [], 0.0, 0
    before, cell = signal.signal(signal.SIGALRM, ring), csv.field_size_limit(2**27)
    try:
        for number, file in enumerate(files(seed, count)):
            path = folder / f"data{file.suffix}"
            started = time.perf_counter()
            signal.alarm(LIMIT_S)
            try:
                end, wrong = judge(file, path)
            except Hang:
                end, wrong = "failed", f"took more than {LIMIT_S} s"
            except Exception as error:
                end, wrong = "failed", f"raised {message(repr(error))[:200]}"
            finally:
                signal.alarm(0)
            slowest = max(slowest, time.perf_counter() - started)
            longest = max(longest, len(file.content))
            ends.setdefault(file.kind, Counter())[end] += 1
            if wrong:
                failures.append({"number": number, "kind": file.kind, "end": end, "wrong": wrong})
    finally:
        signal.signal(signal.SIGALRM, before)
        csv.field_size_limit(cell)
    total = sum(ends.values(), Counter())
    return {
        "files": count,
        "refused": total["refused"],
        "accepted": total["accepted"],
        "failures": failures,
        "slowest_s": round(slowest, 2),
        "largest_bytes": longest,
        "by_kind": {kind: dict(found) for kind, found in sorted(ends.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=16_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(args.seed, args.count, Path(folder))
    found = {"seed": args.seed, "date": dt.date.today().isoformat(), "versions": {"pyarrow": pa.__version__}} | found
    for failure in found["failures"][:40]:
        print(failure)
    print(
        f"{found['files']:,} files: {found['refused']:,} refused, {found['accepted']:,} accepted, {len(found['failures'])} wrong"
    )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
