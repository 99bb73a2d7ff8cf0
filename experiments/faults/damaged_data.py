"""Damaged data files: sound ones with bytes changed, and whole ones with odd values. The same for the same seed."""

import csv
import datetime as dt
import decimal
import gzip
import io
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Rng = random.Random
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Damaged:
    """One file of the campaign."""

    kind: str
    """Format and mutation, such as `csv.gz: truncated`."""
    suffix: str
    content: bytes
    original: bytes | None = None
    """What a packed file must still hold, or the Parquet file whose checksums must still hold."""


# Sound files, and how they are damaged


def rows(rng: Rng) -> Rows:
    """Two to eight sound rows with text of all kinds."""
    texts = ["1+1=", "Wie groß?", 'a,b\n"c"', "x" * 300, "日本語", "{prompt}", "\\boxed{}", "a\tb", "emoji 😀"]
    answers: list[Any] = ["2", "", None, "1,5", "-3.5", "ja"]
    chat = rng.random() < 0.2
    found = []
    for number in range(rng.randint(2, 8)):
        text = f"{number}: {rng.choice(texts)}"
        prompt: Any = [{"role": "user", "content": text}] if chat else text
        found.append({"prompt": prompt, "answer": rng.choice(answers), "level": number, "source": rng.choice(["a", "b"])})
    found[0]["answer"] = "1"  # at least one can be graded
    return found


def as_json_lines(rng: Rng, table: Rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=rng.random() < 0.5) + "\n" for row in table).encode()


def as_csv(rng: Rng, table: Rows) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, table[0], lineterminator=rng.choice(["\n", "\r\n"]))
    writer.writeheader()
    writer.writerows({**row, "prompt": str(row["prompt"])} for row in table)
    return text.getvalue().encode()


def as_parquet(rng: Rng, table: Rows, checksums: bool = False) -> bytes:
    return packed(
        pa.Table.from_pylist(table), write_page_checksum=checksums, compression=rng.choice(["none", "snappy", "zstd"])
    )


def packed(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


def flip(rng: Rng, content: bytes) -> bytes:
    out = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 3, 20])):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def cut(rng: Rng, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


def drop(rng: Rng, content: bytes) -> bytes:
    start = rng.randrange(len(content))
    return content[:start] + content[start + rng.randint(1, 40) :]


def repeat(rng: Rng, content: bytes) -> bytes:
    start = rng.randrange(len(content))
    part = content[start : start + rng.randint(1, 60)]
    return content[:start] + part + content[start:]


def insert(rng: Rng, content: bytes) -> bytes:
    start = rng.randrange(len(content) + 1)
    return (
        content[:start]
        + rng.choice([rng.randbytes(rng.randint(1, 30)), b"\0", b"\0" * 50, b"\x1b[2J", b"\n", b"\r", b'"', b"{"])
        + content[start:]
    )


def zero(rng: Rng, content: bytes) -> bytes:
    """What a crash leaves: the end of a file is all zeros."""
    start = rng.randrange(len(content))
    return content[:start] + b"\0" * (len(content) - start)


def swap(rng: Rng, content: bytes) -> bytes:
    middle = rng.randrange(len(content))
    return content[middle:] + content[:middle]


def append(rng: Rng, content: bytes) -> bytes:
    return content + rng.choice([rng.randbytes(20), b"\0" * 100, content[:30], b"PAR1", b"<html>"])


def recode(rng: Rng, content: bytes) -> bytes:
    text = content.decode("utf-8", "replace")
    code = rng.choice(
        ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "latin-1", "cp1252", "utf-7", "utf-8-sig", "shift-jis"]
    )
    return text.encode(code, "replace")


BYTES: list[Callable[[Rng, bytes], bytes]] = [flip, flip, cut, drop, repeat, insert, zero, swap, append, recode]


# Files that are whole and odd

ODD_JSON = [
    "NaN", "-Infinity", "1e999", "-1e999", "1e-999", "9" * 5000, "-" + "9" * 4000, "[" * 3000 + "]" * 3000, '{"a":' * 2000 + "1" + "}" * 2000,
    "null", "true", "[]", "{}", '""', '"\\u0000"', '"\\ud800"', '"\\u001b[2J"', '" \\n"', "3", "-0.0", "0x10", "01", ".5", "1.", "'a'",
    '[{"role":"user"}]', '[{"role":"user","content":null}]', '[{"role":1,"content":"x"}]', '["x"]', "[[]]", '{"role":"user","content":"x"}',
    '"' + "x" * 100_000 + '"', '[{"role":"user","content":"x","content":"y"}]',
]  # fmt: skip
ODD_NAMES = [
    "prompts",
    "completions",
    "",
    " ",
    "\x1b[2J",
    "x" * 70_000,
    "answer",
    "prompt",
    "problem",
    "__class__",
    "\u202e",
    "self",
    "a\0b",
    "a\nb",
]
TEMPORAL = [
    pa.duration("s"), pa.duration("us"), pa.duration("ns"), pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("us", "Mars/Olympus"), pa.timestamp("s", "UTC"),
    pa.timestamp("ms", "+99:99"), pa.date32(), pa.date64(), pa.time32("s"), pa.time64("ns"), pa.month_day_nano_interval(),
]  # fmt: skip


def odd_json_lines(rng: Rng) -> bytes:
    lines = [json.dumps(row) for row in rows(rng)]
    place, name = (
        rng.randrange(len(lines)),
        rng.choice(["prompt", "answer", "level", "new", json.dumps(rng.choice(ODD_NAMES))[1:-1]]),
    )
    row, value = json.loads(lines[place]), rng.choice(ODD_JSON)
    row.pop(name, None)
    lines[place] = rng.choice([
        f'{{"{name}": {value}, {json.dumps(row)[1:]}',
        f'{{{json.dumps(row)[1:-1]}, "{name}": {value}}}',
        f'{{"{name}": {value}}}',
        value,
        lines[place] + lines[place],
        json.dumps(row),
        json.dumps(row, indent=2),
        "  \t ",
    ])  # fmt: skip
    whole = "\n".join(lines)
    return rng.choice([whole, whole, whole, f"[{','.join(lines)}]", json.dumps({"data": lines})]).encode(
        "utf-8", "surrogatepass"
    )


def odd_csv(rng: Rng) -> bytes:
    lines = as_csv(rng, rows(rng)).decode().splitlines(keepends=True)
    place = rng.randrange(len(lines))
    odd = rng.choice(
        [
            ",",
            '"',
            "\0",
            "\x1b[2J,x,y,z\n",
            "\r",
            ",,,,\n",
            '"a"b,c,d,e\n',
            "prompt,answer\n",
            ";",
            "x" * 200_000 + ",1,2,3\n",
            ",".join(ODD_NAMES[3:9]),
        ]
    )
    return "".join([*lines[:place], odd, *lines[place + rng.randint(0, 1) :]]).encode()


def odd_parquet(rng: Rng) -> bytes:
    table = rows(rng)
    count = len(table)
    for row in table:
        row["prompt"] = str(row["prompt"])
    whole = pa.Table.from_pylist(table)
    name = rng.choice(["prompt", "answer", "level", "new", *ODD_NAMES])
    column = rng.choice([temporal, temporal, nested, plain])(rng, count)
    place = whole.column_names.index(name) if name in whole.column_names and rng.random() < 0.9 else None
    try:
        changed = whole.append_column(name, column) if place is None else whole.set_column(place, name, column)
        return packed(
            rng.choice([changed, changed, changed.select([name]) if place is not None else changed, changed.slice(0, 0)])
        )
    except (pa.ArrowException, ValueError):  # Parquet cannot store it
        return packed(whole)


def temporal(rng: Rng, count: int) -> pa.Array:
    kind = rng.choice(TEMPORAL)
    if kind == pa.month_day_nano_interval():
        return pa.array([(1, 2, 3)] * count, kind)
    wide = kind.bit_width == 64
    most = 2**63 - 1 if wide else 2**31 - 1
    numbers = [rng.choice([0, 1, most, -most, most // 1000, rng.randint(-most, most)]) for _ in range(count)]
    array = pa.array(numbers, pa.int64() if wide else pa.int32()).view(kind)
    return rng.choice([array, pa.array([[value] for value in range(count)], pa.list_(pa.int64())), listed_once(array)])


def listed_once(array: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(range(len(array) + 1), pa.int32()), array)


def nested(rng: Rng, count: int) -> pa.Array:
    deep: Any = 1
    for _ in range(rng.choice([1, 3, 30])):
        deep = rng.choice([{"a": deep}, [deep]])
    value = rng.choice([deep, [{"role": "user", "content": "x"}], [("a", 1)], {"role": None}, [None], []])
    kind = pa.map_(pa.string(), pa.int64()) if value == [("a", 1)] else None
    return pa.array([value] * count, kind)


def plain(rng: Rng, count: int) -> pa.Array:
    inf, nan = float("inf"), float("nan")
    choices: list[tuple[list[Any], Any]] = [
        ([b"\xff\x00"], pa.binary()), ([b"x"], pa.binary(1)), ([True], None), ([inf, nan, -inf], None), ([nan], None), ([None], pa.null()),
        ([2**63 - 1, -(2**63)], pa.int64()), ([2**64 - 1], pa.uint64()), ([decimal.Decimal("1.50")], pa.decimal128(38, 2)),
        ([decimal.Decimal(10) ** 60], pa.decimal256(76, 2)), ([dt.date(1, 1, 1)], None), (["\x1b[2J", "", " "], None), (["a\0b"], None),
        (["x" * 300_000], None), (["a", None], pa.dictionary(pa.int8(), pa.string())), ([1.5], pa.float32()),
    ]  # fmt: skip
    values, kind = rng.choice(choices)
    array = pa.array([rng.choice(values) for _ in range(count)], kind)
    if pa.types.is_string(array.type) and rng.random() < 0.3:  # text that is not UTF-8
        return pa.array([b"\xff\xfe"] * count, pa.binary()).view(pa.string())
    return array


# One after the other


def files(seed: int, count: int) -> Iterator[Damaged]:
    """The same files for the same seed; the number of a file decides its own, so that any slice can be run alone."""
    for number in range(count):
        yield make(Rng(f"data/{seed}/{number}"), number % 10)


def make(rng: Rng, which: int) -> Damaged:
    damage = rng.choice(BYTES)
    name = damage.__name__
    if which < 2:
        return Damaged(f"jsonl: {name}", rng.choice([".jsonl", ".json", ".txt"]), damage(rng, as_json_lines(rng, rows(rng))))
    if which == 2:
        return Damaged("jsonl: odd values", ".jsonl", odd_json_lines(rng))
    if which == 3:
        return Damaged(f"csv: {name}", ".csv", damage(rng, as_csv(rng, rows(rng))))
    if which == 4:
        return Damaged("csv: odd cells", ".csv", odd_csv(rng))
    if which == 5:
        whole, suffix = rng.choice([(as_json_lines, ".jsonl.gz"), (as_csv, ".csv.gz")])
        content = whole(rng, rows(rng))
        return Damaged(
            f"{suffix[1:]}: {name}",
            suffix,
            damage(rng, gzip.compress(content, mtime=0)) if damage is not recode else recode(rng, content),
            content,
        )
    if which in (6, 7):
        checksums = which == 6
        content = as_parquet(rng, rows(rng), checksums)
        damaged = damage(rng, content) if damage is not recode else flip(rng, content)
        return Damaged(
            f"parquet{' with checksums' if checksums else ''}: {name}", ".parquet", damaged, content if checksums else None
        )
    return Damaged("parquet: odd columns", ".parquet", odd_parquet(rng))
