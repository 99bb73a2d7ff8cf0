"""Read the flags of `trl grpo` with TRL's own parser: names, types and defaults are those of the installed version."""

import argparse
import json
from contextlib import redirect_stderr
from dataclasses import MISSING, Field, fields
from io import StringIO
from typing import Any

from ..errors import UserError, first_line
from ..text import did_you_mean, printable, quoted
from .trl_flags import COUNTERPARTS, reason

SILENT = ("do_train", "do_predict")
"""Flags that are ignored."""


class Flags:
    """Values of the flags: those given, else TRL's defaults. Records which were read, and notes about those that were not."""

    def __init__(self, given: dict[str, Any], defaults: dict[str, Any]):
        self.given, self.defaults = given, defaults
        self.carried: set[str] = set()
        self.notes: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.carried.add(name)
        return self.given.get(name, self.defaults[name])

    def note(self, name: str, why: str) -> None:
        """Add a note why a flag is not converted exactly. The flag may have TRL's default."""
        origin = "" if name in self.given else " (TRL's default)"
        self.notes.append(f"--{name} {printable(_shown(self[name]), 80)}{origin}: {why}.")

    def finish(self) -> None:
        """Add a note for every flag that was given and not read."""
        plain = []
        for name in self.given:
            if name in self.carried or name in SILENT:
                continue
            if self.given[name] == self.defaults.get(name):
                plain.append(f"--{name}")
            else:
                idle = f"no effect in TRL with these flags; here it is {COUNTERPARTS[name]}" if name in COUNTERPARTS else None
                self.note(name, idle or f"not carried over, {reason(name) or 'sparse-rl has no such option'}")
        if plain:
            self.notes.append(f"{', '.join(plain)}: TRL's default, nothing to carry over.")


def parsed(arguments: list[str], version: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (the flags given on the command line or in the YAML file, the defaults of all flags).

    `arguments` may begin with the program: `trl grpo`, `python train.py` or `accelerate launch`.
    """
    from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, TrlParser
    from trl.scripts.grpo import GRPOScriptArguments

    kinds = (GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig)
    defaults = {field.name: _default(field) for kind in kinds for field in fields(kind) if field.init} | {"num_processes": 1}
    parser = TrlParser(kinds, allow_abbrev=False)
    parser.add_argument("--num_processes", type=int)
    for action in parser._actions:
        action.default, action.required = argparse.SUPPRESS, False
    words = _after_program(arguments)
    nulls: dict[str, None] = {}
    if "--config" in words:
        place = words.index("--config")
        path = words[place + 1] if place + 1 < len(words) else ""
        in_file, nulls = _from_yaml(path)
        words = [*in_file, *words[:place], *words[place + 2 :]]  # the last value of a flag counts
    stderr = StringIO()
    try:
        with redirect_stderr(stderr):
            namespace, rest = parser.parse_known_args(words)
    except SystemExit as error:
        why = (stderr.getvalue().strip().splitlines() or [""])[-1].rpartition("error: ")[2]
        raise UserError(f"TRL {version} does not accept these flags ({printable(why, 200)}): correct the flag.") from error
    given = nulls | vars(namespace)
    unknown = [word for word in rest if word.startswith("--")] + [f"--{name}" for name in given if name not in defaults]
    if unknown or rest:
        name = (unknown or rest)[0].split("=")[0]
        fix = did_you_mean(name, [f"--{each}" for each in defaults], "remove it.")
        if option := COUNTERPARTS.get(name.lstrip("-").replace("-", "_")):  # of another version
            fix = f"remove it, and set {option} in the recipe."
        raise UserError(f"{quoted(name)} is not a flag of trl grpo in TRL {version}: {fix}")
    return given, defaults


def _after_program(arguments: list[str]) -> list[str]:
    """Return the flags without the program: `trl grpo`, `python train.py` or `accelerate launch`."""
    words = list(arguments)
    while words and not words[0].startswith("-") and not words[0].endswith((".yaml", ".yml")):
        words.pop(0)
    if words and words[0].endswith((".yaml", ".yml")):
        words = ["--config", *words]
    return [word for word in words if not word.endswith(".py")]  # accelerate launch --num_processes 2 train.py --…


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default is MISSING and field.default_factory is not MISSING else field.default


def _from_yaml(path: str) -> tuple[list[str], dict[str, None]]:
    """Return (the flags of a YAML file as words of a command line, the flags that are null)."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"The config {quoted(path)} cannot be read ({first_line(error)}): pass a YAML file of TRL.") from error
    if not isinstance(values, dict):
        raise UserError(f"The config {quoted(path)} is not a mapping of flags: pass a YAML file of TRL.")
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(_word, value)]
        elif value is not None and name != "env":
            words.append(f"--{name}={_word(value)}")
    return words, {str(name): None for name, value in values.items() if value is None}


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(getattr(value, "value", value))
