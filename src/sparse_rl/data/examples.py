"""Problems to train and to test on, from a task that makes them or from a JSONL file, and their token ids.

A malformed row is refused by file and line before anything is loaded or trained.
"""

import codecs
import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import UserError
from .arithmetic import Split, make_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASKS = ("arithmetic",)
PLACE = "{prompt}"
"""Stands for the problem in a template."""
RESERVED = {"prompts", "completions"}
"""What a reward function is given under these names is ours."""

Prompt = str | list[dict[str, str]]


@dataclass(frozen=True)
class Example:
    prompt: Prompt
    """The problem as the data has it, without a template."""
    answer: str | None
    columns: dict[str, Any]
    """What the reward function is given beside prompt and completion: the answer, if there is one, and all other columns."""


def load(source: str, split: Split, *, n: int, seed: int) -> list[Example]:
    """`n` problems of a task, or all rows of a file, in its order."""
    if source in TASKS:
        problems = make_problems(n, seed, split=split)
        return [Example(problem.prompt, problem.answer, {"answer": problem.answer}) for problem in problems]
    return read_jsonl(source)


def read_jsonl(source: str) -> list[Example]:
    path = Path(source)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"There is no task or file {source}: {_nearest(path)}") from None
    except OSError as error:
        raise UserError(f"{source} cannot be read ({error.strerror}): give a task or the path of a .jsonl file.") from error
    examples: list[Example] = []
    first: tuple[int, set[str]] | None = None
    # only \n ends a line: JSON may hold the separators at which str.splitlines would break it
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not line.strip():
            continue
        row = _Row(f"{source}:{number}", line)
        first = first or (number, row.columns)
        row.check_same_columns(*first)
        examples.append(row.example())
    if not examples:
        raise UserError(f"{source} holds no problems: write one JSON object per line, with a prompt and an answer.")
    return examples


def _nearest(path: Path) -> str:
    names = {other.name: str(other) for other in path.parent.glob("*")} | {task: task for task in TASKS}
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {names[close[0]]}?" if close else f"give a task ({', '.join(TASKS)}) or the path of a .jsonl file."


class _Row:
    """One line of a file; every refusal says which."""

    def __init__(self, place: str, line: bytes):
        self.place = place
        try:
            text = line.decode()
            self.row = json.loads(text, parse_constant=_refuse_constant)
        except UnicodeDecodeError:
            self.refuse("this is not UTF-8 text: unpack or convert the file.")
        except json.JSONDecodeError as error:
            self.refuse(f"this is not JSON ({error.msg}, column {error.colno}): write one object per line.")
        except (ValueError, RecursionError) as error:  # NaN, an integer of thousands of digits, thousands of brackets
            self.refuse(f"this JSON cannot be read ({error}): write it in another way.")
        if not isinstance(self.row, dict):
            self.refuse(f'this is {_kind(self.row)}: write an object such as {{"prompt": "1+1=", "answer": "2"}}.')
        if "\\u" in text and not _encodable(self.row):
            self.refuse("a \\u escape is half of a character: write both halves, or the character itself.")
        self.columns = set(self.row)

    def refuse(self, sentence: str) -> NoReturn:
        raise UserError(f"{self.place}: {sentence}")

    def check_same_columns(self, number: int, columns: set[str]) -> None:
        if missing := sorted(columns - self.columns):
            self.refuse(
                f"there is no {missing[0]}, which line {number} has: give all rows the same columns, null for nothing."
            )
        if extra := sorted(self.columns - columns):
            self.refuse(
                f"there is a column {extra[0]}, which line {number} has not: give all rows the same columns, null for nothing."
            )

    def example(self) -> Example:
        if reserved := sorted(RESERVED & self.columns):
            self.refuse(f"the column {reserved[0]} is named like an argument of every reward: rename it.")
        answer = self._answer()
        columns = {name: value for name, value in self.row.items() if name not in ("prompt", "problem")}
        if answer is not None:
            columns["answer"] = answer
        return Example(self._prompt(), answer, columns)

    def _answer(self) -> str | None:
        if "answer" not in self.row:
            return None
        answer = self.row["answer"]
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            self.refuse(f"answer is {_kind(answer)}: write a text or a number, or leave the column out of all rows.")
        return str(answer)

    def _prompt(self) -> Prompt:
        given = [name for name in ("prompt", "problem") if name in self.row]
        if len(given) != 1:
            has = (
                "both prompt and problem" if given else f"neither prompt nor problem, only {', '.join(self.row) or 'nothing'}"
            )
            self.refuse(f"there is {has}: give the problem in one column, prompt or problem.")
        name, prompt = given[0], self.row[given[0]]
        if isinstance(prompt, list) and name == "prompt":
            self._check_messages(prompt)
        elif not isinstance(prompt, str):
            self.refuse(f"{name} is {_kind(prompt)}: write a text{', or a list of messages' if name == 'prompt' else ''}.")
        elif not prompt.strip():
            self.refuse(f"{name} is empty: write the problem, or delete the line.")
        return prompt

    def _check_messages(self, messages: list[Any]) -> None:
        for index, message in enumerate(messages, 1):
            if not isinstance(message, dict):
                self.refuse(f'message {index} is {_kind(message)}: write {{"role": "user", "content": "…"}}.')
            for key in ("role", "content"):
                if key not in message:
                    self.refuse(f'message {index} has no {key}: write {{"role": "user", "content": "…"}}.')
            for key, value in message.items():
                if not isinstance(value, str):
                    self.refuse(f"{key} of message {index} is {_kind(value)}: write a text.")
        if not any(message["content"].strip() for message in messages):
            self.refuse("prompt is empty: write the problem, or delete the line.")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")


def _kind(value: Any) -> str:
    kinds = {str: "a text", bool: "true or false", list: "a list", dict: "an object", type(None): "null"}
    return kinds.get(type(value), "a number")


def _encodable(row: dict[str, Any]) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def encode(tokenizer: "PreTrainedTokenizerBase", example: Example, template: str = PLACE, raw: bool = False) -> list[int]:
    """Token ids of a prompt: in the tokenizer's chat template where it has one, as a message of a user unless it is messages.

    The template goes around the text, or around the content of the last message.
    """
    chat = bool(tokenizer.chat_template) and not raw
    if isinstance(example.prompt, str):
        text = template.replace(PLACE, example.prompt)
        if not chat:
            return list(tokenizer(text).input_ids)
        messages = [{"role": "user", "content": text}]
    elif chat:
        *before, last = example.prompt
        messages = [*before, last | {"content": template.replace(PLACE, last["content"])}]
    else:
        why = "data.raw is set" if raw else "the tokenizer has no chat template"
        raise UserError(f"A prompt is a list of messages, but {why}: write prompts as texts, or name another model.")
    from jinja2 import TemplateError  # here, because tasks and files need no templates

    try:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    except TemplateError as error:
        raise UserError(
            f"The model's chat template refuses a prompt ({error}): change its messages, or write texts and set --data.raw."
        ) from error
