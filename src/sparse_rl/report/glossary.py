"""How to read each metric, in the words of docs/metrics.md: the page is the one place where they stand."""

import functools
import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    """A row of the page."""

    keys: tuple[str, ...]
    meaning: str
    healthy: str
    otherwise: str

    @property
    def sentence(self) -> str:
        parts = [self.meaning]
        if self.healthy:
            parts.append(f"Healthy: {self.healthy}")
        if self.otherwise:
            parts.append(f"Otherwise: {'see ' if self.otherwise.startswith('docs/') else ''}{self.otherwise}")
        return " ".join(f"{part[0].upper()}{part[1:].rstrip('.')}." for part in parts)


class Section(NamedTuple):
    title: str
    entries: list[Entry]


ANY_BENCHMARK = re.compile(r"^eval/.+/(pass@1|no_verdict)")
OTHER = "Other"
"""Where keys stand that the page does not know: of another version, or of a logger of your own."""


@functools.cache
def sections() -> list[Section]:
    return parse(_page().read_text(encoding="utf-8"))


def _page():
    """In the wheel the page lies beside this file; in a checkout it is the one in docs/."""
    shipped = files(__package__) / "metrics.md"
    return shipped if shipped.is_file() else Path(__file__).parents[3] / "docs" / "metrics.md"


def parse(page: str) -> list[Section]:
    found: list[Section] = []
    for line in page.splitlines():
        if line.startswith("## "):
            found.append(Section(line.removeprefix("## ").strip(), []))
        elif line.startswith("| `") and found:
            keys, *cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            texts = [plain(cell) for cell in cells] + [""] * 3
            found[-1].entries.append(Entry(tuple(re.findall(r"`([^`]+)`", keys)), *texts[:3]))
        elif line.startswith("On a GPU a line also has") and found:
            keys = tuple(re.findall(r"`(memory/[^`]+)`", page))
            found[-1].entries.append(Entry(keys, MEMORY, "peak and prediction within a tenth", "a growing peak is a leak"))
    return [section for section in found if section.entries]


MEMORY = "most GiB that torch has had allocated since the run began, and what the plan expected"


def plain(cell: str) -> str:
    """Markdown as text: links to other pages keep their name."""
    text = re.sub(r"\[([^\]]+)\]\(([^)]*)\)", lambda match: _link(*match.groups()), cell)
    return text.replace("`", "").replace("**", "").replace("\\|", "|").strip()


def _link(name: str, target: str) -> str:
    return f"docs/{target}" if name.endswith(".md") else name


def placed(keys: Iterable[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title of a section, (key, sentence) of each key in it), in the page's order; unknown keys come last."""
    left = sorted(keys)
    titled: list[tuple[str, list[tuple[str, str]]]] = []
    for section in sections():
        rows: list[tuple[str, str]] = []
        for entry in section.entries:
            here = [key for known in entry.keys for key in left if _general(key) == known]
            rows += [(key, entry.sentence) for key in here]
            left = [key for key in left if key not in here]
        if rows:
            titled.append((section.title, rows))
    if left:
        note = "Not among the metrics of this version: written by another one, or by code of your own."
        titled.append((OTHER, [(key, note) for key in left]))
    return titled


def _general(key: str) -> str:
    return re.sub(r"^eval/.+/", "eval/<benchmark>/", key) if ANY_BENCHMARK.match(key) else key
