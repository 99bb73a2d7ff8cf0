"""Break the core on purpose, one small change at a time, and record which changes the tests do not notice.

python experiments/faults/mutants.py --seed 0 --count 8 --json benchmarks/results/faults-mutants.json

A mutant is one file of `src/sparse_rl` with one change of its syntax tree: a comparison, an operator, a constant, a condition,
a minimum or maximum, or a statement that is left out. Each runs in a copy of the repository, with the quick test files that
should notice it, until the first failure. torch and transformers are imported once; every mutant is a fork.
"""

import argparse
import ast
import compileall
import contextlib
import gc
import importlib
import json
import os
import platform
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPU_LIMIT_S = 90
"""Processor seconds after which a mutant counts as noticed: it runs in circles. The tests of a file take half of that."""

FEW = "not load_no_torch and not llama and not mistral and not qwen3"
"""Leaves out tests that start processes of their own, and all but one of the model families."""
ENGINE = ("batching engine exact", FEW)
LOSSES = ("losses", FEW)
TESTS: dict[str, tuple[str, str]] = {
    "kernels/attention.py": (
        "packed_attention exact",
        "packed_causal or what_its_rollouts_saw or differentiable or plain or qwen2",
    ),
    "kernels/choose.py": ("kernels", "who_stays and (9-8-12 or 50-4-20-3-ties)"),
    "kernels/counter_rng.py": ("sampling kernels", "seed or uniform or number or draws or a_draw_is_the_references"),
    "kernels/draw.py": ("kernels", "(draw and (7 or ties or peaked)) or not_numbers"),
    "kernels/gather.py": ("kernels", "moves_to_the_front"),
    "kernels/importance.py": ("golden kernels", "rkv or snapkv or (importance and (6-2-8 or 2-2-3 or large))"),
    "kernels/nucleus.py": ("kernels", "ties_at_the_cut or what_stays_is or not_numbers_ends"),
    "kernels/redundancy.py": ("golden kernels", "rkv or (redundancy and 20-16)"),
    "kernels/shadow.py": ("packed_attention", "not compil"),
    "kernels/slot_attention.py": ("kernels", "share_rows or (step_of_attention and (4-4-24 or 40-2))"),
    "kv/cache.py": ENGINE,
    "kv/prompt_store.py": ("prompt_store", FEW),
    "kv/trace.py": ENGINE,
    "kv/policies/base.py": ("golden policies", FEW),
    "kv/policies/rkv.py": ("golden policies", FEW),
    "kv/policies/snapkv.py": ("golden policies", FEW),
    "learner/advantages.py": ("advantages", FEW),
    "learner/correction.py": ("correction losses", FEW),
    "learner/logprobs.py": ("logprobs", FEW),
    "learner/losses/base.py": LOSSES,
    "learner/losses/cispo.py": LOSSES,
    "learner/losses/dapo.py": LOSSES,
    "learner/losses/dr_grpo.py": LOSSES,
    "learner/losses/grpo.py": LOSSES,
    "learner/losses/gspo.py": LOSSES,
    "learner/losses/regularizers.py": LOSSES,
    "learner/optimizer.py": ("update", FEW),
    "learner/replay.py": ("exact packed_attention", "not llama and not mistral and not qwen3 and not compil and not flex"),
    "learner/update.py": ("update", FEW),
    "rollout/generation.py": ENGINE,
    "rollout/repetition.py": ("engine", "repetition"),
    "rollout/prefill.py": ENGINE,
    "rollout/long_prefill.py": ("long_prefill", FEW),
    "rollout/sampling.py": ("sampling", FEW),
    "rollout/scheduler.py": ENGINE,
}
"""(test files, the quickest first; which of their tests) that should notice a change of a file."""

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
FUNCTIONS = {"min": "max", "minimum": "maximum", "amin": "amax", "argmin": "argmax", "any": "all", "kthvalue": "topk"}
FUNCTIONS |= {there: here for here, there in FUNCTIONS.items()}
METHODS = FUNCTIONS | {"sum": "mean", "mean": "sum", "cumsum": "cumprod", "ceil": "floor"}
WORDS = ("annotation", "returns", "type_comment", "decorator_list", "exc", "msg")
"""Fields of the syntax tree that hold types, or sentences for users."""
TUNING = ("num_warps", "num_stages", "stacklevel", "description")
"""Arguments that change how fast a kernel runs, or what a user reads, and no number."""


def sites(source: str) -> list[tuple[int, str]]:
    """(number of the node, change) of every mutant of a file."""
    return [(number, change) for number, node in enumerate(_code(ast.parse(source))) for change in _changes(node)]


def mutate(source: str, number: int, change: str) -> tuple[str, str]:
    """(what changed, the changed source) of one mutant."""
    tree = ast.parse(source)
    node = list(_code(tree))[number]
    left_out = isinstance(node, ast.stmt) and change == "leave out"
    place, before = f"line {node.lineno}.{node.col_offset}", ast.unparse(node)
    _changes(node)[change]()
    after = "(left out)" if left_out else ast.unparse(node)
    return f"{place}, {change}: {_short(before, after)}", ast.unparse(ast.fix_missing_locations(tree))


def _short(before: str, after: str) -> str:
    """Both, from shortly before the first difference."""
    start = next((i for i, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), 0)
    start = 0 if start < 60 else start - 40
    before, after = (" ".join(text[start : start + 100].split()) for text in (before, after))
    return f"{before} -> {after}"


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run, without docstrings, annotations, sentences for users and what is only read by type checkers."""
    for field, value in ast.iter_fields(tree):
        if field in WORDS or (isinstance(tree, ast.keyword) and tree.arg in TUNING):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_text(child):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            yield child
            yield from _code(child)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _changes(node: ast.AST) -> dict:
    """The ways to change this node, each a function that does it in place."""
    found = {}
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        found["comparison"] = lambda: node.ops.__setitem__(0, COMPARISONS[type(node.ops[0])]())
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        found["operator"] = lambda: setattr(node, "op", OPERATORS[type(node.op)]())
    if isinstance(node, ast.BoolOp):
        found["operator"] = lambda: setattr(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
        found["sign"] = lambda: setattr(node, "op", ast.UAdd()) if isinstance(node.op, ast.USub) else _drop_unary(node)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        found["plus one"] = lambda: setattr(node, "value", node.value + 1)
        found["minus one"] = lambda: setattr(node, "value", node.value - 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        found["truth"] = lambda: setattr(node, "value", not node.value)
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        found["condition"] = lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        found["function"] = lambda: setattr(node.func, "attr", METHODS[node.func.attr])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        found["function"] = lambda: setattr(node.func, "id", FUNCTIONS[node.func.id])
    if isinstance(node, (ast.Expr, ast.AugAssign)) or (isinstance(node, ast.Assign) and _writes_again(node)):
        found["leave out"] = lambda: _leave_out(node)
    return found


def _writes_again(node: ast.Assign) -> bool:
    """Whether it changes a thing that exists: without a first assignment any test would fail, and would say nothing."""
    target, read = node.targets[0], {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    return isinstance(target, (ast.Attribute, ast.Subscript)) or (isinstance(target, ast.Name) and target.id in read)


def _leave_out(node: ast.stmt) -> None:
    """The statement becomes one that does nothing; a name that it would define stays undefined."""
    for field in node._fields:
        delattr(node, field)
    node.__class__ = ast.Pass
    node._fields = ()


def _drop_unary(node: ast.UnaryOp) -> None:
    """not x becomes not not x: the operand itself, as a truth."""
    node.operand = ast.UnaryOp(node.op, node.operand)


def chosen(seed: int, count: int, only: Sequence[str] = ("",)) -> list[tuple[str, str, str]]:
    """(file, change, source) of `count` mutants of each file, the same for the same seed."""
    found = []
    for file in dict.fromkeys(file for text in only for file in TESTS if text in file):
        source = (ROOT / "src" / "sparse_rl" / file).read_text(encoding="utf-8")
        every = sites(source)
        picked = random.Random(f"{seed} {file}").sample(range(len(every)), min(count, len(every)))
        found += [(file, *mutate(source, *every[index])) for index in sorted(picked)]
    return found


def run(tree: Path, file: str, source: str) -> tuple[str, str]:
    """(killed, survived or timeout; the test that noticed it) of one mutant, in a fork of this process."""
    target = tree / "src" / "sparse_rl" / file
    original, times = target.read_bytes(), target.stat()
    target.write_text(source, encoding="utf-8")  # newer than what is compiled of it
    log = tree / "log.txt"
    child = os.fork()
    if child == 0:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(tree)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
        gc.disable()
        import pytest

        names, which = TESTS[file]
        how = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-k", which]
        os._exit(int(pytest.main([*how, *(f"tests/test_{name}.py" for name in names.split())])))
    try:
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXCPU):
            return "timeout", ""
        code = os.waitstatus_to_exitcode(status)
        text = log.read_text(encoding="utf-8", errors="replace")
        failed = next((line.split()[1] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))), "")
        return ("survived" if code == 0 else "killed"), failed.removeprefix("tests/") or ("" if code == 0 else f"exit {code}")
    finally:
        target.write_bytes(original)
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))


def warm_up(tree: Path, names: list[str]) -> None:
    """Compile the code and the tests, and import whatever they need from elsewhere, once for all forks."""
    compileall.compile_dir(tree / "src", quiet=1)
    needed = tree / "needed.txt"
    child = os.fork()
    if child == 0:
        os.chdir(tree)
        import pytest

        before = set(sys.modules)
        code = pytest.main(["-q", "--collect-only", *(f"tests/test_{name}.py" for name in names)])
        new = [name for name in sys.modules if name not in before and not _of_this_repository(name, tree)]
        needed.write_text("\n".join(new), encoding="utf-8")
        os._exit(int(code))
    assert os.waitpid(child, 0)[1] == 0, "the tests cannot be collected"
    for name in needed.read_text(encoding="utf-8").split():
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    assert not any(_of_this_repository(name, tree) for name in sys.modules)
    gc.collect()
    gc.freeze()  # forks share these objects


def _of_this_repository(name: str, tree: Path) -> bool:
    path = getattr(sys.modules.get(name), "__file__", None) or ""
    return name.split(".")[0] == "sparse_rl" or path.startswith(str(tree))


def copy_of_repository(to: Path) -> Path:
    tree = to / "sparse-rl"
    shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs", "test-artifacts", ".*_cache")
    )
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=6, help="mutants of each file")
    parser.add_argument("--only", nargs="*", default=[""], help="files whose path holds one of these texts")
    parser.add_argument("--match", default="", help="mutants whose description holds this text")
    parser.add_argument("--json", type=Path, help="write the result here; a result that is there is continued")
    options = parser.parse_args()

    os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_repository(Path(folder))
        sys.path[:0] = [str(tree / "src"), str(tree / "tests")]
        os.environ["PYTHONPATH"] = str(tree / "src")
        import torch
        import transformers

        torch.set_num_threads(1)
        results = json.loads(options.json.read_text())["mutants"] if options.json and options.json.exists() else []
        known = {(each["file"], each["change"]) for each in results}
        wanted = [each for each in chosen(options.seed, options.count, options.only) if each[:2] not in known]
        wanted = [each for each in wanted if options.match in each[1]]
        warm_up(tree, sorted({name for file, _, _ in wanted for name in TESTS[file][0].split()}))
        sys.dont_write_bytecode = True  # from here on: nothing compiled of a mutant may stay
        for file, change, source in wanted:
            started = time.monotonic()
            verdict, test = run(tree, file, source)
            results.append({"file": file, "change": change, "verdict": verdict, "test": test})
            print(f"{time.monotonic() - started:6.1f} s  {verdict:8}  {file} {change}  {test}", flush=True)
            if options.json:
                write(options.json, results, options.seed, torch.__version__, transformers.__version__)
    print(dict(Counter(each["verdict"] for each in results)))


def write(path: Path, results: list[dict], seed: int, torch: str, transformers: str) -> None:
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "seed": seed,
        "python": platform.python_version(),
        "torch": torch,
        "transformers": transformers,
        "counts": dict(Counter(each["verdict"] for each in results)),
        "mutants": sorted(results, key=lambda each: (each["file"], each["change"])),
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
