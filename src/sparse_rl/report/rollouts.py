"""Pack stored rollouts for the browser: one compressed chunk per step, which the page opens on request.

A gzip-compressed chunk holds the header length (4 bytes, little endian), the header as JSON, and the arrays. For each rollout,
the header locates its arrays as [type, byte offset after the header, number of items].
"""

import gzip
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import first_line
from ..format import counted
from ..text import printable
from .pieces import Pieces

PER_NAT = 1000
"""Units per nat. Log-probs are stored as int16 in thousandths of a nat."""
UNKNOWN = -(2**15)
"""Value that represents a missing or NaN log-prob."""
LONGEST_TEXT = 20_000
"""Maximum number of characters of a prompt, an answer or a token in a page. The page marks truncated texts."""
LEVEL = 4
"""Compression level of gzip. Higher levels save 2 % of the bytes and take twice the time."""
BUDGET_BYTES = 48 * 2**20
"""Maximum compressed bytes of rollouts in one page. If they exceed it, the page has only some steps, spread over the run."""


class RolloutChunk(NamedTuple):
    data: bytes
    rollouts: int
    rejected: int
    traced: int
    note: str = ""
    """Error message if the file could not be read; the chunk is then empty."""


class Packer:
    """Packs the rollout files of one run. Repeated calls reuse the chunks of unchanged files."""

    def __init__(self, pieces: Pieces | None, veto: float):
        self.pieces, self.veto = pieces, veto
        self._packed: dict[Path, tuple[tuple[int, int], RolloutChunk]] = {}

    def chunk(self, file: Path) -> RolloutChunk:
        try:
            status = file.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if file not in self._packed or self._packed[file][0] != stamp:
                self._packed[file] = stamp, pack(file, self.pieces, self.veto)
            return self._packed[file][1]
        except Exception as error:  # pyarrow errors or unexpected columns: skip only this file
            return RolloutChunk(b"", 0, 0, 0, f"{file.name} cannot be read ({printable(first_line(error), 120)})")

    def all(self, files: dict[int, Path], budget_bytes: int = BUDGET_BYTES) -> tuple[dict[int, RolloutChunk], list[str]]:
        """Return (chunks by step, notes about omitted steps).

        If the chunks exceed `budget_bytes`, return only some steps, spread over the run.
        """
        taken: dict[int, RolloutChunk] = {}
        bad: list[str] = []
        room = budget_bytes
        steps = list(files)
        for place, step in enumerate(spread(steps)):
            chunk = self.chunk(files[step])
            if chunk.note:
                bad.append(chunk.note)
                continue
            room -= len(chunk.data)
            if room < 0 and taken:
                left = len(steps) - place
                bad.append(
                    f"The page omits the rollouts of {left} of {counted(len(steps), 'step')} to stay small: use --serve to read them"
                )
                break
            taken[step] = chunk
        shown = {files[step] for step in taken}  # drop cached chunks of steps that are no longer shown
        self._packed = {file: packed for file, packed in self._packed.items() if file in shown}
        return dict(sorted(taken.items())), [f"{note}." for note in sorted(bad)[:5]]


def spread(steps: Sequence[int]) -> Iterable[int]:
    """Return all steps, ordered so that any prefix is spread over the run: last, first, then the middles of the gaps."""
    if len(steps) < 3:
        return reversed(steps)
    gaps = [(0, len(steps) - 1)]
    order = [len(steps) - 1, 0]
    for low, high in gaps:  # breadth first: the loop appends to `gaps`
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return (steps[place] for place in order)


# One file


def pack(file: Path, pieces: Pieces | None, veto: float) -> RolloutChunk:
    rows = read_rows(file)
    arrays = _Arrays()
    tokens = [np.concatenate([row["prompt_tokens"], row["tokens"]]) for row in rows]
    used, places = np.unique(np.concatenate([*tokens, np.zeros(0, np.int64)]), return_inverse=True)
    kind = np.uint16 if len(used) < 2**16 else np.uint32
    ends = np.cumsum([len(each) for each in tokens], dtype=np.int64)
    split = np.split(places, ends[:-1]) if rows else []
    prompts: dict[bytes, int] = {}
    entries: list[dict[str, Any]] = []
    for row, indices in zip(rows, split, strict=True):
        log_xi = row["dense_logprobs"] - row["sampler_logprobs"]
        entry = {key: row[key] for key in ("reward", "advantage", "rejected")}
        entry |= {key: _cut(row[key], LONGEST_TEXT) for key in ("finish", "answer")}
        entry |= {
            "prompt": prompts.setdefault(row["prompt_tokens"].tobytes(), len(prompts)),
            "start": _cut(row["prompt"], 200),
            "prompt_tokens": len(row["prompt_tokens"]),
            "cause": cause(log_xi, veto) if row["rejected"] else None,
            "lowest": float(np.exp(np.nanmin(log_xi))) if np.isfinite(log_xi).any() else None,
            "tokens": arrays.add(indices.astype(kind)),
            "log_xi": arrays.add(_fixed(log_xi)),
            "sampler": arrays.add(_fixed(row["sampler_logprobs"])),
            "text": None if pieces else _cut(row["text"], LONGEST_TEXT),
            **_trace(row, arrays),
        }
        entries.append(entry)
    header = {
        "ids": used.tolist(),
        "pieces": [_cut(piece, LONGEST_TEXT) for piece in pieces.of(used.tolist())] if pieces else None,
        "rollouts": entries,
    }
    head = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    data = gzip.compress(len(head).to_bytes(4, "little") + head + b"".join(arrays.parts), compresslevel=LEVEL, mtime=0)
    traced = sum("evicted" in entry for entry in entries)
    return RolloutChunk(data, len(rows), sum(bool(row["rejected"]) for row in rows), traced)


def cause(log_xi: np.ndarray, veto: float) -> int | None:
    """Return the index of the token that caused the rejection: the first with xi below `veto`. None if there is none."""
    if veto <= 0:
        return None
    below = np.flatnonzero(log_xi < math.log(veto))
    return int(below[0]) if below.size else None


def _trace(row: dict[str, Any], arrays: "_Arrays") -> dict[str, Any]:
    """Return the eviction times as indices into a list of distinct times. The list is short: only compactions evict.

    Return an empty dict if the rollout has no valid trace.
    """
    evicted, shape = row["evicted_at"], row["evicted_at_shape"]
    tokens = len(row["prompt_tokens"]) + len(row["tokens"])
    if evicted is None or shape is None or len(shape) != 3 or int(np.prod(shape)) != len(evicted) or shape[2] != tokens:
        return {}
    places = np.where((evicted < 0) | (evicted > tokens), tokens + 1, evicted)  # evicted never or after the end
    times = np.flatnonzero(np.bincount(places, minlength=tokens + 2))
    kind = np.uint8 if len(times) < 2**8 else np.uint16 if len(times) < 2**16 else np.uint32
    codes = np.zeros(tokens + 2, kind)
    codes[times] = np.arange(len(times))
    shown = [None if time > tokens else time for time in times.tolist()]
    return {"evicted": arrays.add(codes[places]), "times": shown, "layers": int(shape[0]), "heads": int(shape[1])}


def _fixed(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        whole = np.clip(np.round(values * PER_NAT), UNKNOWN + 1, 2**15 - 1)
    return np.where(np.isnan(whole), UNKNOWN, whole).astype(np.int16)


def _cut(text: Any, most: int) -> str | list[int] | None:
    """Return the text, cut to `most` characters. Return None and the bytes of a token unchanged."""
    if text is None or isinstance(text, list):
        return text
    text = str(text)
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


class _Arrays:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.bytes = 0

    def add(self, values: np.ndarray) -> list:
        """Append an array. Return its location: [type, byte offset, number of items]."""
        start, data = self.bytes, np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).tobytes()
        self.parts.append(data)
        self.bytes += len(data)
        return [values.dtype.name, start, len(values)]


# Reading


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a rollout file. Columns that the file does not have are None or empty."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as opened:
        table = opened.read(use_threads=False)
    rows: list[dict[str, Any]] = [{} for _ in range(table.num_rows)]
    for name in ("prompt", "text", "reward", "advantage", "rejected", "finish", "answer", "evicted_at_shape"):
        values = table.column(name).to_pylist() if name in table.column_names else [None] * table.num_rows
        for row, value in zip(rows, values, strict=True):
            row[name] = None if isinstance(value, float) and not math.isfinite(value) else value
    for name in ("prompt_tokens", "tokens", "evicted_at", "sampler_logprobs", "dense_logprobs"):
        _add_lists(rows, table, name, np.float32 if name.endswith("logprobs") else np.int64)
    for row in rows:
        row["rejected"] = bool(row["rejected"])
        for name in ("prompt_tokens", "tokens"):
            row[name] = np.zeros(0, np.int64) if row[name] is None else row[name]
        for name in ("sampler_logprobs", "dense_logprobs"):
            row[name] = _of_length(row[name], len(row["tokens"]))
    return rows


def _add_lists(rows: list[dict[str, Any]], table: Any, name: str, kind: type) -> None:
    column = table.column(name) if name in table.column_names else None
    for place, row in enumerate(rows):
        values = None if column is None else column[place].values
        row[name] = None if values is None else values.to_numpy(zero_copy_only=False).astype(kind)


def _of_length(values: np.ndarray | None, length: int) -> np.ndarray:
    full = np.full(length, np.nan, np.float32)
    if values is not None:
        full[: len(values)] = values[:length]
    return full
