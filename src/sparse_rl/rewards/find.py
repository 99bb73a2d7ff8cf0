"""Import a reward function by name. User modules are imported in the workers, or in the trainer if `workers` is 0."""

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import UserError
from ..text import did_you_mean

BUILT_IN = {
    "arithmetic": "functions",
    "exact": "functions",
    "integer_answer": "integers",
    "last_number": "functions",
    "math_answer": "math",  # the only built-in reward that imports sympy
}
"""Built-in reward names and the modules that define them."""
ARGUMENTS = ("prompts", "completions")
"""Keyword arguments of every reward call, besides the columns of the data."""
OBJECT = "python:"
"""Prefix of the stored name of a reward that was passed as a Python object."""
INSIDE = "SPARSE_RL_REWARD_WORKER"
"""Environment variable that is set in reward workers and their child processes, and in the trainer while it imports a
reward."""


class InsideAReward(UserError):
    """Raised if a reward module starts a run when imported. Each run would start workers that import the module again."""


def refuse_inside_a_reward() -> None:
    if INSIDE in os.environ:
        raise InsideAReward(
            "The reward's module starts a run or an evaluation on import, which is not allowed: move that code under "
            'if __name__ == "__main__".'
        )


@contextmanager
def inside_a_reward() -> Iterator[None]:
    os.environ[INSIDE] = "1"
    try:
        yield
    finally:
        del os.environ[INSIDE]


def find(spec: str) -> Callable[..., Any]:
    """Return the function named by `exact`, `my_rewards:graded`, `my_rewards.graded` or `path/to/rewards.py:graded`.

    Raise UserError if the function is not found.
    """
    if spec.startswith(OBJECT):
        raise UserError(
            f"reward.function = {spec} was passed to Trainer as a Python object, which a command cannot find: continue the run "
            "from Python with Trainer(config, reward=…).train(resume=True), or set --reward.function."
        )
    where, _, name = spec.rpartition(":" if ":" in spec else ".")
    if not name or (":" in spec and not where) or spec.endswith(".py"):
        raise UserError(
            f"reward.function = {spec} is not a valid function name: use a form such as my_rewards:graded or "
            "path/to/rewards.py:graded."
        )
    if not where and name not in BUILT_IN:
        raise UserError(
            f"reward.function = {spec} was not found: no {name} in the built-in rewards, {did_you_mean(name, BUILT_IN)}"
        )
    module = imported(where, spec) if where else importlib.import_module(f".{BUILT_IN[name]}", __package__)
    known = sorted(public_functions(module))
    if not hasattr(module, name):
        raise UserError(f"reward.function = {spec} was not found: no {name} in {where}, {did_you_mean(name, known)}")
    function = getattr(module, name)
    if not callable(function):
        raise UserError(
            f"reward.function = {spec} is of type {type(function).__name__}, which is not callable: {did_you_mean(name, known)}"
        )
    if lacks := [argument for argument in ARGUMENTS if not accepts(function, argument)]:
        raise UserError(
            f"reward.function = {spec} does not accept {', '.join(lacks)}: define it as {name}(prompts, completions, **columns)."
        )
    return function


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function accepts the keyword argument `name`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return True
    return any(
        each.kind is each.VAR_KEYWORD or (each.name == name and each.kind is not each.POSITIONAL_ONLY) for each in parameters
    )


def imported(where: str, spec: str) -> ModuleType:
    try:
        if where.endswith(".py"):
            return from_file(Path(where), spec)
        return importlib.import_module(where)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        if error.name and (where == error.name or where.startswith(f"{error.name}.")):
            import pkgutil  # imported here, because every reward worker imports this module

            here = [module.name for module in pkgutil.iter_modules(["."])]
            raise UserError(
                f"reward.function = {spec} was not found: no module {error.name} in the current folder or among the "
                "installed packages, "
                f"{did_you_mean(error.name, here, 'pass the path of its file, such as path/to/rewards.py:graded.')}"
            ) from None
        raise UserError(cannot_import(spec, error)) from error
    except BaseException as error:  # the module may call sys.exit
        traceback.print_exc()
        if refused := underlying_refusal(error):
            raise refused from None
        raise UserError(cannot_import(spec, error)) from error


def from_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        here = sorted(other.name for other in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise UserError(f"reward.function = {spec} was not found: no file {path}, {did_you_mean(path.name, here)}")
    sys.path.append(str(path.parent.resolve()))  # so that the module can import from its own folder
    # the prefix keeps a user's math.py from replacing the standard module
    found = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    assert found and found.loader
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def public_functions(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def underlying_refusal(error: BaseException | None) -> InsideAReward | None:
    """Return the InsideAReward error in this exception's cause chain (e.g. behind a SystemExit), or None."""
    while error:
        if isinstance(error, InsideAReward):
            return error
        error = error.__cause__ or error.__context__
    return None


def cannot_import(spec: str, error: BaseException) -> str:
    return f"reward.function = {spec} cannot be imported ({one_line(error)}): fix the module, or install its dependencies."


def one_line(error: BaseException) -> str:
    """Return the exception as Python prints it, on one line of at most 300 characters."""
    return " ".join(traceback.format_exception_only(error)[-1].split())[:300]
