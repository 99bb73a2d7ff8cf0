"""The rows of a file, each with the place it stands at: JSON lines, Parquet or CSV, packed with gzip or not.

Knows nothing of prompts and answers. What cannot be read is refused by file and line.
"""

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import UserError, first_line

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".csv", ".csv.gz")
LONGEST_CELL = 2**27
"""Characters of one cell of a CSV; Python's own limit is 2**17."""


@dataclass(frozen=True)
class Row:
    place: str
    """Such as `data.jsonl:3`; a row of what has no lines is `data.parquet, row 3`."""
    values: dict[str, Any]

    def refuse(self, sentence: str) -> NoReturn:
        refuse(self.place, sentence)


def refuse(place: str, sentence: str) -> NoReturn:
    raise UserError(f"{place}: {sentence}")


def read_rows(source: str) -> list[Row]:
    """All rows of a file, in its order; a file whose name ends in neither .csv nor .parquet is JSON lines."""
    try:
        content = Path(source).read_bytes()
    except OSError as error:
        raise UserError(f"{source} cannot be read ({error.strerror}): {WHAT_TO_GIVE}") from error
    name = source.lower()
    if name.endswith(".parquet"):
        return list(_parquet(source, content))
    if name.endswith(".gz"):
        content = _unpacked(source, content)
    content = content.removeprefix(codecs.BOM_UTF8)
    return list(_csv(source, content) if name.removesuffix(".gz").endswith(".csv") else _json_lines(source, content))


WHAT_TO_GIVE = f"give a task or the path of a file that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}."


def _unpacked(source: str, content: bytes) -> bytes:
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{source} is not a whole gzip file ({first_line(error)}): copy or pack it again.") from error


def _json_lines(source: str, content: bytes) -> Iterator[Row]:
    # only \n ends a line: JSON may hold the separators at which str.splitlines would break it
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            place = f"{source}:{number}"
            yield Row(place, _json_object(place, line))


def _json_object(place: str, line: bytes) -> dict[str, Any]:
    try:
        text = line.decode()
        row = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        refuse(place, "this is not UTF-8 text: unpack or convert the file.")
    except json.JSONDecodeError as error:
        refuse(place, f"this is not JSON ({error.msg}, column {error.colno}): write one object per line.")
    except (ValueError, RecursionError) as error:  # NaN, an integer of thousands of digits, thousands of brackets
        refuse(place, f"this JSON cannot be read ({error}): write it in another way.")
    if not isinstance(row, dict):
        refuse(place, f'this is {kind_of(row)}: write an object such as {{"prompt": "1+1=", "answer": "2"}}.')
    if "\\u" in text and not _encodable(row):
        refuse(place, "a \\u escape is half of a character: write both halves, or the character itself.")
    return row


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")


def _encodable(row: dict[str, Any]) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _csv(source: str, content: bytes) -> Iterator[Row]:
    """The first line names the columns; an empty cell is None, everything else text."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        refuse(f"{source}:{line}", "this is not UTF-8 text: convert the file.")
    before = csv.field_size_limit(LONGEST_CELL)
    reader, first = csv.reader(io.StringIO(text, newline=""), strict=True), 1
    names: list[str] | None = None
    try:
        for cells in reader:
            place, first = f"{source}:{first}", reader.line_num + 1  # a cell may span lines
            if not cells:
                continue
            if names is None:
                names = cells
                _check_names(place, names)
            elif len(cells) != len(names):
                refuse(place, f"there are {len(cells)} cells, but {len(names)} columns: quote cells that hold a comma.")
            else:
                yield Row(place, {name: cell or None for name, cell in zip(names, cells, strict=True)})
    except csv.Error as error:
        refuse(f"{source}:{first}", f"this is not CSV ({error}): quote cells that hold a comma, a quote or a line end.")
    finally:
        csv.field_size_limit(before)


def _check_names(place: str, names: list[str]) -> None:
    if len(set(names)) < len(names) or not all(name.strip() for name in names):
        refuse(place, f"the columns are {', '.join(names)}: give each a name of its own in the first line.")


def _parquet(source: str, content: bytes) -> Iterator[Row]:
    import pyarrow as pa  # here, because most files need no tables
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(pa.BufferReader(content)).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{source} is not a whole Parquet file ({first_line(error)}): write it again.") from error
    for number, values in enumerate(rows, 1):
        yield Row(f"{source}, row {number}", values)


def kind_of(value: Any) -> str:
    """A value's type as a user calls it."""
    kinds = {str: "a text", bool: "true or false", list: "a list", dict: "an object", type(None): "null"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else f"of type {type(value).__name__}")
