"""Read the rows of a JSON Lines, Parquet or CSV file, with or without gzip. Each row keeps its location.

This module does not interpret prompts or answers. An unreadable row raises an error with its file and line.
"""

import codecs
import csv
import gzip
import io
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import UserError, first_line
from ..format import counted
from ..reading import read_file
from ..text import listed, printable

if TYPE_CHECKING:
    from pyarrow import ChunkedArray

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".csv", ".csv.gz")
LONGEST_CELL = 2**27
"""Maximum characters in a CSV cell. Python's default limit is 2**17."""


@dataclass(frozen=True)
class DataRow:
    place: str
    """Location in the source, e.g. `data.jsonl:3`, or `data.parquet, row 3` for a format without lines."""
    values: dict[str, Any]

    def refuse(self, sentence: str) -> NoReturn:
        refuse(self.place, sentence)


def refuse(place: str, sentence: str) -> NoReturn:
    raise UserError(f"{place}: {sentence}")


def read_rows(source: str) -> list[DataRow]:
    """Return all rows of a file in order. A file that is neither .csv, .tsv nor .parquet is read as JSON Lines."""
    try:
        content = read_file(source)
    except OSError as error:
        raise UserError(f"{source} cannot be read ({error.strerror}): {ACCEPTED}") from error
    name = source.lower()
    if name.endswith((".tsv", ".tsv.gz")):
        raise UserError(f"{source} holds tab-separated values, which are not supported: save it as .csv.")
    if name.endswith(".parquet"):
        return list(_parquet(source, content))
    if name.endswith(".gz"):
        content = _unpacked(source, content)
    content = content.removeprefix(codecs.BOM_UTF8)
    return list(_csv(source, content) if name.removesuffix(".gz").endswith(".csv") else _json_lines(source, content))


ACCEPTED = f"pass a task or the path of a file that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}."


def _unpacked(source: str, content: bytes) -> bytes:
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{source} is an incomplete or damaged gzip file ({first_line(error)}): copy or compress it again."
        ) from error


def _json_lines(source: str, content: bytes) -> Iterator[DataRow]:
    # Split only at \n: JSON strings may contain other separators at which str.splitlines would split.
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            place = f"{source}:{number}"
            yield DataRow(place, _json_object(place, line))


def _json_object(place: str, line: bytes) -> dict[str, Any]:
    try:
        text = line.decode()
        row = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_without_duplicate_keys)
    except UnicodeDecodeError:
        refuse(place, "the line is not UTF-8 text: decompress the file, or convert it to UTF-8.")
    except json.JSONDecodeError as error:
        refuse(place, f"the line is not valid JSON ({error.msg}, column {error.colno}): write one object per line.")
    except (ValueError, RecursionError) as error:  # NaN, a repeated key, or thousands of digits or brackets
        refuse(place, f"the JSON cannot be parsed ({first_line(error)}): fix the line.")
    if not isinstance(row, dict):
        refuse(place, f'the line is {kind_of(row)}: write one object per line, such as {{"prompt": "1+1=", "answer": "2"}}.')
    if "\\u" in text and not _encodable(row):
        refuse(place, "a \\u escape is an unpaired surrogate: write both halves of the pair, or the character itself.")
    return row


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not valid in JSON")


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{printable(digits, 40)} is too large for a 64-bit float")
    return number


def _without_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(
            f"an object has duplicate keys {listed(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)}"
        )
    return found


def _encodable(row: dict[str, Any]) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _csv(source: str, content: bytes) -> Iterator[DataRow]:
    """Yield the rows of a CSV file. The first line holds the column names. An empty cell is None; all other cells are
    strings."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        refuse(f"{source}:{line}", "the file is not UTF-8 text: convert it to UTF-8.")
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        refuse(f"{source}:{line}", "the file contains a NUL character: save it as UTF-8 text.")
    before = csv.field_size_limit(LONGEST_CELL)
    reader, first = csv.reader(io.StringIO(text, newline=""), strict=True), 1
    names: list[str] | None = None
    try:
        for cells in reader:
            place, first = f"{source}:{first}", reader.line_num + 1  # a cell may span several lines
            if not cells:
                continue
            if names is None:
                names = cells
                _check_names(place, names)
            elif len(cells) != len(names):
                counts = f"{counted(len(cells), 'cell')}, but the header has {counted(len(names), 'column')}"
                refuse(place, f"the row has {counts}: quote cells that contain a comma.")
            else:
                yield DataRow(place, {name: cell or None for name, cell in zip(names, cells, strict=True)})
    except csv.Error as error:
        refuse(
            f"{source}:{first}",
            f"the row is not valid CSV ({error}): quote cells that contain a comma, a quote or a line break.",
        )
    finally:
        csv.field_size_limit(before)


def _check_names(place: str, names: list[str], where: str = " in the first line") -> None:
    if len(set(names)) < len(names) or not all(name.strip() for name in names):
        refuse(place, f"the column names are {listed(names)}: each column needs a unique name{where}.")


def _parquet(source: str, content: bytes) -> Iterator[DataRow]:
    import pyarrow as pa  # imported here because most files do not need it
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True).read()
        table.validate(full=True)
    except Exception as error:  # pyarrow raises many exception types for a damaged file
        raise UserError(
            f"{source} is an incomplete or damaged Parquet file ({first_line(error)}): copy or write it again."
        ) from error
    _check_names(source, table.column_names, "")
    columns = [_python_values(source, name, column) for name, column in zip(table.column_names, table.columns, strict=True)]
    for number, cells in enumerate(zip(*columns, strict=True), 1):
        yield DataRow(f"{source}, row {number}", dict(zip(table.column_names, cells, strict=True)))


def _python_values(source: str, name: str, column: "ChunkedArray") -> list[Any]:
    try:
        return column.to_pylist()
    except Exception:  # Python has no type for some value, e.g. a duration of 10^15 days
        for number, value in enumerate(column, 1):
            try:
                value.as_py()
            except Exception as error:
                sentence = (
                    f"{printable(name, 80)} is a {value.type} that cannot be read ({first_line(error)}): store it as text."
                )
                refuse(f"{source}, row {number}", sentence)
        raise


def kind_of(value: Any) -> str:
    """Return the type of a value in plain words, e.g. "a list"."""
    kinds = {str: "a text", bool: "true or false", list: "a list", dict: "an object", type(None): "null"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else f"of type {type(value).__name__}")
