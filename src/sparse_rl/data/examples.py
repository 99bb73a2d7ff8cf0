"""Load training and test problems from a task, a file or the hub.

A malformed row raises an error with its file and line before a model is loaded. If some rows have answers, rows without one
are skipped and counted.
"""

import difflib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..config import PLACEHOLDER, TASKS, DataConfig, HubData, Origin, Split, Task
from ..errors import UserError
from ..format import agreeing, counted
from ..rewards.weighted_sum import ROLLOUT_COLUMNS
from ..text import listed
from .arithmetic import make_problems
from .hub import read_hub
from .rows import SUFFIXES, DataRow, kind_of, read_rows

PROMPT_COLUMNS = ("prompt", "problem", "question")
"""Column names that may hold the problem."""
RESERVED = {"prompts", "completions", *ROLLOUT_COLUMNS}
"""Arguments that sparse-rl passes to every reward function. Data columns must not use these names."""
HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(:(?P<config>[^:]*))?(:(?P<split>[^:]+))?")
INTEGER = re.compile(r"[-+]?[0-9][0-9,]*(\.0*)?")

Prompt = str | list[dict[str, str]]


@dataclass(frozen=True)
class Example:
    prompt: Prompt
    """The problem as it is in the data, without a template."""
    answer: str | None
    columns: dict[str, Any]
    """Columns passed to the reward function besides prompt and completion: the answer, if any, and all other columns."""
    template: str = PLACEHOLDER
    """Template applied to the problem if `data.template` is not set. It contains the task's instruction."""


TASK_PROBLEMS = 4096
"""Number of problems for a task that generates its problems."""


@dataclass(frozen=True)
class LoadedExamples:
    """Problems of a source in their original order. All problems have the same columns."""

    examples: list[Example]
    skipped: int = 0
    """Number of rows skipped because they have no answer."""
    note: str | None = None
    """Message about the skipped rows; None if no row was skipped."""


def load(
    source: str,
    split: Split,
    *,
    n: int,
    seed: int,
    dir: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
) -> LoadedExamples:
    """Return all problems of a task, a file or a data set on the hub.

    A task that generates problems returns `n`, the same for the same seed. `dir` is the folder with the tasks' files; if None,
    they are loaded from the hub. `prompt_column` and `answer_column` apply only to your own data.
    """
    if source not in TASKS:
        return _gather(_own_rows(source, split), source, prompt_column, answer_column)
    task = TASKS[source]
    origin = _origin(task, split)
    if origin.file is None:
        problems = make_problems(n, seed, split=split)
        return LoadedExamples([Example(problem.prompt, problem.answer, {"answer": problem.answer}) for problem in problems])
    if dir is not None:
        return _gather(read_rows(_file_in(dir, origin.file, task)), source, task=task)
    assert origin.hub
    rows = read_hub(origin.hub, f"put {origin.file} into a folder and pass the folder with --data.dir")
    return _gather([_as_task_row(row, origin.hub) for row in rows], source, task=task)


def name_of(source: str) -> str:
    """Return a short name for metrics and tables: the task name, or the file or data set name without folder and suffix."""
    if source in TASKS:
        return source
    if HUB_ID.fullmatch(source) and not os.path.exists(source):
        source = source.partition(":")[0]
    name = source.rpartition("/")[2]
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


# Sources of rows


def check_sources(data: DataConfig, *, evaluates: bool) -> None:
    """Raise if a source of the run is unknown, or if two held-out sets have the same name. Reads no data."""
    _check_source(data.train, "train")
    named: dict[str, str] = {}
    for source in data.held_out if evaluates else ():
        _check_source(source, "test")
        name = name_of(source)
        if name in named:
            raise UserError(
                f"data.test has two sets named {name} ({named[name]} and {source}): list it once, or give one of them a file with another name."
            )
        named[name] = source


def _check_source(source: str, split: Split) -> None:
    if source in TASKS:
        _origin(TASKS[source], split)
    elif not os.path.exists(source):
        _on_the_hub(source, split)


def _own_rows(source: str, split: Split) -> list[DataRow]:
    if os.path.exists(source):
        return read_rows(source)
    return read_hub(_on_the_hub(source, split), "use a local file (for tasks, a folder with --data.dir)")


def _on_the_hub(source: str, split: Split) -> HubData:
    in_a_folder = "/" in source and os.path.exists(os.path.dirname(source))
    hub_id = HUB_ID.fullmatch(source)
    if hub_id and not in_a_folder and not source.lower().endswith(SUFFIXES):
        return HubData(hub_id["id"], hub_id["config"] or None, hub_id["split"] or split)
    folder = f" in {os.getcwd()}" if "/" in source and not os.path.isabs(source) else ""
    raise UserError(f"No task or file is named {source}{folder}: {_nearest(Path(source))}")


def _nearest(path: Path) -> str:
    names = {other.name: str(other) for other in path.parent.glob("*")} | {task: task for task in TASKS}
    if close := difflib.get_close_matches(path.name, names, n=1):
        return f"did you mean {names[close[0]]}?"
    return (
        f"pass a task ({', '.join(TASKS)}), the path of a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file, or a hub "
        "dataset such as openai/gsm8k:main."
    )


def _origin(task: Task, split: Split) -> Origin:
    if origin := task.origin(split):
        return origin
    others = ", ".join(other.name for other in TASKS.values() if other.origin(split))
    if split == "train":
        raise UserError(f"{task.name} is a benchmark and has no training problems: use one of {others}, or a file.")
    raise UserError(f"{task.name} has no test problems: use one of {others}, or a file.")


def _file_in(dir: str, name: str, task: Task) -> str:
    if not os.path.isdir(dir):
        raise UserError(f"data.dir = {dir} is not a folder: pass the folder that contains {name}.")
    for suffix in (".jsonl.gz", *SUFFIXES):
        if os.path.exists(path := os.path.join(dir, name.removesuffix(".jsonl.gz") + suffix)):
            return path
    raise UserError(f"{task.name} is not in data.dir = {dir}: put {name} there, or omit --data.dir to load it from the hub.")


def _as_task_row(row: DataRow, data: HubData) -> DataRow:
    """Convert a hub row to the format of the task's file: problem, answer and all other columns."""
    columns = {"problem": data.prompt_column, "answer": data.answer_column}
    for name in columns.values():
        if name not in row.values:
            row.refuse(
                f"column {name} is missing (found {listed(row.values)}): the hub dataset has changed. Use local files with "
                "--data.dir."
            )
    others = {name: value for name, value in row.values.items() if name not in (*columns.values(), *PROMPT_COLUMNS)}
    answer = row.values[data.answer_column]
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, str):
        answer = re.sub(r"(?<!\\)\$", "", answer.rpartition(data.answer_after)[2] if data.answer_after else answer).strip()
    return DataRow(row.place, others | {"problem": row.values[data.prompt_column], "answer": answer})


# From rows to examples


def _gather(
    rows: list[DataRow],
    source: str,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    task: Task | None = None,
) -> LoadedExamples:
    if not rows:
        raise UserError(f"{source} has no rows: write one row per problem, with a prompt and an answer.")
    names = dict.fromkeys(name for row in rows for name in row.values)
    prompt_column = prompt_column or _prompt_column(rows[0])
    answer_column = answer_column or "answer"
    if answer_column != "answer" and answer_column not in names:
        rows[0].refuse(f"column {answer_column} is missing (found {listed(names)}): set --data.answer-column.")
    if reserved := sorted(RESERVED & set(names)):
        place = next(row for row in rows if reserved[0] in row.values)
        place.refuse(f"column {reserved[0]} has the name of an argument that every reward receives: rename the column.")
    others = [name for name in names if name not in (prompt_column, answer_column, "answer")]
    template = PLACEHOLDER + task.instruction if task else PLACEHOLDER
    examples, skipped = [], []
    for row in rows:
        prompt = _prompt(row, prompt_column)
        columns = {name: row.values.get(name) for name in others}
        if answer_column not in names:
            examples.append(Example(prompt, None, columns, template))
            continue
        answer = _answer(row, answer_column)
        if task and task.kind == "integer" and answer is not None:
            answer = _integer(answer)
        if answer is None:
            skipped.append(row)
        else:
            examples.append(Example(prompt, answer, {"answer": answer} | columns, template))
    if not examples:
        every = agreeing(len(rows), "its only row", f"all {len(rows)} rows")
        raise UserError(
            f"{source} has no problem that can be graded: {answer_column} is empty in {every}. Fill in "
            "answers, or remove the column."
        )
    return LoadedExamples(examples, len(skipped), _note(source, len(rows), skipped, answer_column) if skipped else None)


def filter_by_length(source: str, prompts: Sequence[Sequence[int]], limit: int | None) -> tuple[list[int], str | None]:
    """Return the indices of the prompts with at most `limit` tokens, and a message about the others (None if there are
    none)."""
    places = [place for place, prompt in enumerate(prompts) if limit is None or len(prompt) <= limit]
    if not places:
        raise UserError(
            f"Every prompt of {source} has more than data.max_prompt_tokens = {limit} tokens (the shortest has "
            f"{min(map(len, prompts))}): raise --data.max-prompt-tokens."
        )
    if len(places) == len(prompts):
        return places, None
    skipped = len(prompts) - len(places)
    left_out = f"{skipped:,} of {counted(len(prompts), 'problem')} of {source} {agreeing(skipped, 'is', 'are')} skipped"
    return places, f"{left_out}: a prompt may have at most data.max_prompt_tokens = {limit} tokens."


def too_few_note(source: str, problems: int, prompts_per_step: int) -> str | None:
    """Return a message if a step must sample some problems more than once, else None."""
    if problems >= prompts_per_step:
        return None
    return (
        f"{source} has {counted(problems, 'problem')}, fewer than rollout.prompts_per_step = {prompts_per_step:,}: a step "
        f"samples some problems more than once. Lower --rollout.prompts-per-step to at most {problems:,}, or add problems."
    )


def _note(source: str, total: int, skipped: list[DataRow], answer_column: str) -> str:
    places = ", ".join(row.place for row in skipped[:3]) + (", …" if len(skipped) > 3 else "")
    verbs = agreeing(len(skipped), f"has no {answer_column} and is", f"have no {answer_column} and are")
    return f"{len(skipped):,} of {counted(total, 'row')} of {source} {verbs} skipped ({places})."


def _prompt_column(row: DataRow) -> str:
    given = [name for name in PROMPT_COLUMNS if name in row.values]
    if len(given) == 1:
        return given[0]
    if given:
        row.refuse(
            f"several columns may hold the problem ({' and '.join(given)}): choose one, such as --data.prompt-column "
            f"{given[0]}."
        )
    row.refuse(
        f"no column is named {', '.join(PROMPT_COLUMNS[:-1])} or {PROMPT_COLUMNS[-1]} (found "
        f"{listed(row.values) or 'none'}): set --data.prompt-column."
    )


def _prompt(row: DataRow, name: str) -> Prompt:
    if name not in row.values:
        row.refuse(
            f"column {name} is missing (found {listed(row.values) or 'none'}): every row must have its problem in the same "
            "column."
        )
    prompt = row.values[name]
    if isinstance(prompt, list):
        return _messages(row, name, prompt)
    if not isinstance(prompt, str | None):
        row.refuse(f"{name} is {kind_of(prompt)}: it must be text, or a list of messages.")
    if prompt is None or not prompt.strip():
        row.refuse(f"{name} is empty: write the problem, or delete the row.")
    return prompt


def _messages(row: DataRow, name: str, messages: list[Any]) -> list[dict[str, str]]:
    checked = []
    for index, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            row.refuse(f'message {index} is {kind_of(message)}: write {{"role": "user", "content": "…"}}.')
        for key in ("role", "content"):
            if key not in message:
                row.refuse(f'message {index} has no {key}: write {{"role": "user", "content": "…"}}.')
        # tables give every message the keys of all messages
        kept = {key: value for key, value in message.items() if value is not None or key in ("role", "content")}
        for key, value in kept.items():
            if not isinstance(value, str):
                row.refuse(f"{key} of message {index} is {kind_of(value)}: it must be text.")
        checked.append(kept)
    if not any(message["content"].strip() for message in checked):
        row.refuse(f"{name} is empty: write the problem, or delete the row.")
    return checked


def _answer(row: DataRow, name: str) -> str | None:
    """Return the answer as a string, or None if the row has no answer."""
    answer = row.values.get(name)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal | None):
        row.refuse(f"{name} is {kind_of(answer)}: it must be text or a number. Fix it, or remove the column.")
    if answer is None or answer != answer:  # tables use NaN for a missing value
        return None
    if isinstance(answer, float | Decimal) and not math.isfinite(answer):
        row.refuse(f"{name} is {answer}: it must be a finite number, or text.")
    return str(answer) if str(answer).strip() else None


def _integer(answer: str) -> str | None:
    """Return an integer in canonical form: `1,234`, `27.0` and `025` become 1234, 27 and 25. Return None for text that is not
    an integer or has 1000 characters or more."""
    whole = len(answer) < 1000 and INTEGER.fullmatch(answer.strip())
    return str(int(answer.partition(".")[0].replace(",", ""))) if whole else None
