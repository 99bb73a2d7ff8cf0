"""Build the report's document: a dict of plain values with everything that the page shows."""

import datetime
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import AlertsConfig
from ..format import counted
from ..monitor.alerts import check
from ..monitor.ratios import BINS, HIGH, LOW
from ..text import printable
from . import pieces
from .glossary import placed
from .held_out import clear_change, scores
from .rollouts import BUDGET_BYTES, Packer, RolloutChunk
from .runs import Run, find, grouped, names, read
from .verdict import LABELS, verdict

PHASES = [
    ("prefill", "perf/prefill_s"),
    ("decode", "perf/decode_s"),
    ("compaction", "perf/compaction_s"),
    ("grading", "perf/grade_s"),
    ("old log-probs", "perf/old_logprobs_s"),
    ("updates", "perf/update_s"),
]
"""Phases of a step, in order, as (label, metric). The rest of `perf/step_s` is host time."""
MOST_NAMED = 6
"""Maximum number of runs named in the summary."""
LONGEST_VALUE = 400
"""Maximum number of characters shown for one configuration value."""


class ReportSource:
    """Reads run folders into a document. Repeated calls reuse the packed rollouts of unchanged files."""

    def __init__(self, paths: Sequence[Path], pieces: "pieces.Pieces | None" = None, budget_bytes: int = BUDGET_BYTES):
        self.paths, self.own_pieces, self.budget_bytes = list(paths), pieces, budget_bytes
        self._packers: dict[Path, Packer] = {}

    def runs(self) -> tuple[list[Run], list[str]]:
        paths, notes = find(self.paths)
        return [read(path, name) for path, name in zip(paths, names(paths), strict=True)], notes

    def packer(self, run: Run) -> Packer:
        if run.path not in self._packers:
            model = run.config.get("model.path")
            found = self.own_pieces or pieces.find(run.path, model if isinstance(model, str) else None)
            self._packers[run.path] = Packer(found, run.veto)
        packer = self._packers[run.path]
        if packer.pieces is None and run.rollout_files:
            run.notes.append("The tokenizer is not on this disk: rollouts are shown as token ids above their full text.")
        return packer

    def document(self, *, live: bool = False) -> tuple[dict[str, Any], list[dict[int, RolloutChunk]]]:
        """Return (the document, the rollout chunks of each run by step)."""
        runs, notes = self.runs()
        chunks: list[dict[int, RolloutChunk]] = []
        for run in runs:
            taken, left_out = self.packer(run).all(run.rollout_files, self.budget_bytes // len(runs))
            run.notes += left_out
            chunks.append(taken)
        groups = grouped(runs)
        keys = {key for run in runs for row in run.rows for key in row} - {"step"}
        document = {
            "version": __version__,
            "made": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "live": live,
            "title": ", ".join(name for name, _ in groups),
            "notes": notes,
            "summary": summary(runs),
            "sections": [{"title": title, "metrics": rows} for title, rows in placed(map(shown_key, keys))],
            "groups": [{"name": name, "runs": places} for name, places in groups],
            "runs": [_run(run, taken) for run, taken in zip(runs, chunks, strict=True)],
            "differs": differing(runs),
            "phases": PHASES,
            "xi_bins": {"low": LOW, "high": HIGH, "bins": BINS},
        }
        return document, chunks


def _run(run: Run, chunks: dict[int, RolloutChunk]) -> dict[str, Any]:
    judged = verdict(run)
    keys = sorted({key for row in run.rows for key in row} - {"step"})
    return {
        "name": run.name,
        "path": printable(str(run.path)),
        "method": printable(run.method, 40),
        "seed": run.seed if isinstance(run.seed, int) else None,
        "last": run.last_step,
        "notes": run.notes,
        "state": judged.state,
        "label": judged.label,
        "sentences": judged.sentences,
        "alerts": alerts(run),
        "steps": [int(row["step"]) for row in run.rows],
        "columns": {shown_key(key): [_short(row.get(key)) for row in run.rows] for key in keys},
        "scores": [
            {
                "key": shown_key(key),
                "before": str(found[0]),
                "after": str(found[-1]) if len(found) > 1 else "",
                "best": str(max(found, key=lambda score: score.mean)),
                "steps": [found[0].step, found[-1].step, max(found, key=lambda score: score.mean).step],
                "apart": clear_change(found[0], found[-1]),
            }
            for key, found in scores(run).items()
        ],
        "xi": {"steps": [step for step, _ in run.xi], "counts": [counts for _, counts in run.xi]},
        "veto": run.veto,
        "budgets": [each | {"reason": printable(each["reason"], LONGEST_VALUE)} for each in run.budgets],
        "target": run.target_rejected,
        "judged": [run.correction.judged_metric, run.correction.judged],
        "config": {printable(key, 80): printable(_text(value), LONGEST_VALUE) for key, value in run.config.items()},
        "rollouts": [[step, chunk.rollouts, chunk.rejected, chunk.traced] for step, chunk in chunks.items()],
    }


def shown_key(key: str) -> str:
    return printable(key, 120)


def _short(value: float | None) -> float | None:
    """Return the value rounded to six significant digits, to keep the page small."""
    return None if value is None else float(f"{value:.6g}")


def _text(value: Any) -> str:
    return ("false", "true")[value] if isinstance(value, bool) else str(value)


def summary(runs: Sequence[Run]) -> str:
    """Return one sentence per run, collapsed runs first: its name, its verdict and the most important sign of failure."""
    order = list(LABELS.values())
    judged = sorted(((run.name, verdict(run)) for run in runs), key=lambda pair: order.index(pair[1].label))
    sentences = [f"{name}: {', '.join([each.label, *each.signs[:1]])}." for name, each in judged]
    more = f" The list below has {counted(len(sentences) - MOST_NAMED, 'more run')}." if len(sentences) > MOST_NAMED else ""
    return " ".join(sentences[:MOST_NAMED]) + more


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the options whose values differ between runs. Runs without a configuration are ignored."""
    known = [run.config for run in runs if run.config]
    keys = dict.fromkeys(key for config in known for key in config)
    return [printable(key, 80) for key in keys if len({str(config.get(key)) for config in known}) > 1]


def alerts(run: Run) -> list[dict[str, Any]]:
    settings = run.settings.limits if run.settings else AlertsConfig()
    return [asdict(each) for each in check(run.rows, settings, run.kv)]
