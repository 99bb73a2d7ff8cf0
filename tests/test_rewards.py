"""Rewards: whatever a function does, only its own sample loses the verdict, it is counted, and grading goes on."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparse_rl import UserError
from sparse_rl.config import RewardConfig
from sparse_rl.rewards import functions
from sparse_rl.rewards.pool import RewardPool

EXAMPLES = Path(__file__).parents[1] / "examples"
MODULE = '''
import asyncio, ctypes, json, math, os, re, signal, subprocess, sys, threading, time

def length(prompts, completions, **columns):
    return [float(len(completion)) for completion in completions]

def perform(prompts, completions, **columns):
    """Does what the completion says."""
    return ACTS[completions[0]]() if completions[0] in ACTS else [float(len(completions[0]))]

async def later(prompts, completions, **columns):
    await asyncio.sleep(0)
    return length(prompts, completions)

lock = asyncio.Lock()  # belongs to the first loop that waits for it

async def shared(prompts, completions, **columns):
    async with lock:
        waiter = asyncio.create_task(lock.acquire())
        await asyncio.sleep(0)
    await waiter
    lock.release()
    return [1.0]

def echo(prompts, completions, **columns):
    print(json.dumps([prompts, completions, columns]))
    return [0.0]

def surroundings(prompts, completions, **columns):
    print(json.dumps({
        "slow": sorted({"torch", "pydantic"} & sys.modules.keys()),
        "stdin": sys.stdin.read(),
        "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "group": os.getpgrp() == os.getpid(),
        "pid": os.getpid(),
    }))
    return [0.0]

def spin():
    while True:
        pass

def ignore_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1e6)

def leave_a_child_and_hang():
    print(subprocess.Popen(["sleep", "1000"]).pid)
    time.sleep(1e6)

def say_and_sleep():
    print("asleep")
    time.sleep(1e6)

def leave_a_thread():
    threading.Thread(target=time.sleep, args=[1e6]).start()
    print("left")
    return [1.0]

def shout():
    for _ in range(20_000):
        print("x" * 1000)
    return [1.0]

class Number:
    def __init__(self, value):
        self.value = value
    def __float__(self):
        return self.value

ACTS = {
    "spin": spin,
    "sleep": lambda: time.sleep(1e6),
    "ignore SIGTERM": ignore_sigterm,
    "hold the lock": lambda: ctypes.PyDLL(None).sleep(1000),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "await for ever": lambda: asyncio.sleep(1e6, [1.0]),
    "leave a child and hang": leave_a_child_and_hang,
    "say and sleep": say_and_sleep,
    "leave a thread": leave_a_thread,
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "be killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": lambda: 1 / 0,
    "recurse": lambda: ACTS["recurse"](),
    "interrupt": lambda: signal.raise_signal(signal.SIGTERM),
    "nan": lambda: [math.nan],
    "inf": lambda: [-math.inf],
    "two": lambda: [1.0, 2.0],
    "nothing": lambda: [],
    "text": lambda: "1",
    "list of texts": lambda: ["1"],
    "float": lambda: 1.0,
    "dictionary": lambda: {0: 1.0},
    "forget to return": lambda: None,
    "list of lists": lambda: [[1.0]],
    "complex": lambda: [1j],
    "too large": lambda: [10**400],
    "none": lambda: [None],
    "true": lambda: [True],
    "false": lambda: [False],
    "integer": lambda: [2],
    "tuple": lambda: (3.0,),
    "scalar": lambda: [Number(4.0)],
    "shout": shout,
}
not_callable = 3
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the user's module in it."""
    (tmp_path / "my_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    return tmp_path


def grade(pool, completions, prompts=None, **columns):
    return pool.grade(prompts or ["?"] * len(completions), completions, columns)


@contextmanager
def at_most(seconds):
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def test_samples_are_graded_while_others_are_still_to_come(folder):
    with RewardPool("my_rewards:length", workers=2, timeout_s=10) as pool:
        grading = pool.start()
        grading.add(["?"] * 3, ["x", "xx", "xxx"], {})
        with at_most(30):
            while grading.known < 3:
                grading.advance()
        grading.add(["?"], ["xxxx"], {})
        graded = grading.finish()
        assert graded.values == [1.0, 2.0, 3.0, 4.0]
        assert graded.reordered([3, 0, 2, 1]).values == [4.0, 1.0, 3.0, 2.0]


def test_a_grading_that_is_given_up_leaves_the_pool_usable(folder):
    with RewardPool("my_rewards:length", workers=2, timeout_s=10) as pool:
        grading = pool.start()
        grading.add(["?"] * 50, ["x"] * 50, {})
        grading.advance()
        grading.cancel()
        assert grade(pool, ["xx", "xxx"]).values == [2.0, 3.0]


@pytest.mark.parametrize("function", ["my_rewards:length", "my_rewards.length", "my_rewards:later"])
def test_verdicts_come_back_in_order(folder, function):
    with RewardPool(function, workers=2, timeout_s=10) as pool:
        graded = grade(pool, ["x" * size for size in range(50)])
        assert graded.values == [float(size) for size in range(50)]
        assert (graded.no_verdict, graded.timeouts, graded.errors, graded.first_error) == (0, 0, 0, None)
        assert grade(pool, ["abc"]).values == [3.0]
        assert grade(pool, []).values == []


HANGS = ["spin", "sleep", "ignore SIGTERM", "hold the lock", "stop", "await for ever"]


@pytest.mark.parametrize("act", HANGS)
def test_a_hang_costs_its_sample_the_verdict_and_no_other(folder, act):
    with RewardPool("my_rewards:perform", workers=2, timeout_s=0.5) as pool, at_most(5):
        graded = grade(pool, ["abc", act, "ab", "a", ""])
        assert graded.values == [3.0, None, 2.0, 1.0, 0.0]
        assert (graded.no_verdict, graded.timeouts, graded.errors) == (0, 1, 0)
        assert grade(pool, ["abc"] * 4).values == [3.0] * 4


def test_a_batch_of_hangs_ends_in_bounded_time(folder):
    with RewardPool("my_rewards:perform", workers=2, timeout_s=0.3) as pool, at_most(6):
        assert grade(pool, ["spin"] * 6).timeouts == 6


CRASHES = {
    "exit": "exit status 3",
    "segfault": "SIGSEGV",
    "be killed": "SIGKILL",
    "interrupt": "SIGTERM",
    "sys.exit": "SystemExit: 3",
    "raise": "ZeroDivisionError: division by zero",
    "recurse": "RecursionError",
    "nan": "returned nan",
    "inf": "returned -inf",
    "two": "returned 2 values for 1 completion",
    "nothing": "returned 0 values for 1 completion",
    "text": "returned str",
    "list of texts": "a list of str",
    "float": "returned float",
    "dictionary": "returned dict",
    "forget to return": "returned NoneType",
    "list of lists": "TypeError",
    "complex": "TypeError",
    "too large": "OverflowError",
}


def test_an_error_costs_its_sample_the_verdict_and_says_what_it_was(folder):
    with RewardPool("my_rewards:perform", workers=2, timeout_s=10) as pool:
        for act, said in CRASHES.items():
            graded = grade(pool, ["abc", act, "ab", "a"])
            assert graded.values == [3.0, None, 2.0, 1.0], act
            assert (graded.no_verdict, graded.timeouts, graded.errors) == (0, 0, 1), act
            assert said in graded.first_error and "\n" not in graded.first_error, act


def test_the_reasons_for_a_missing_verdict_are_counted_apart(folder):
    with RewardPool("my_rewards:perform", workers=3, timeout_s=0.5) as pool:
        graded = grade(pool, ["none", "raise", "spin", "none", "exit", "none", "abc"])
    assert graded.values == [None] * 6 + [3.0]
    assert (graded.no_verdict, graded.timeouts, graded.errors) == (3, 1, 2)


def test_what_is_a_number_is_taken_as_one(folder):
    with RewardPool("my_rewards:perform", workers=1, timeout_s=10) as pool:
        graded = grade(pool, ["true", "false", "integer", "tuple", "scalar"])
    assert graded.values == [1.0, 0.0, 2.0, 3.0, 4.0] and {type(value) for value in graded.values} == {float}


def test_an_async_reward_keeps_its_loop_from_sample_to_sample(folder):
    with RewardPool("my_rewards:shared", workers=1, timeout_s=5) as pool:
        assert grade(pool, ["a", "b"]).values == [1.0, 1.0]


def test_the_function_gets_lists_of_one_with_its_own_row(folder):
    messages = [{"role": "user", "content": "1+1=\u2028"}]
    with RewardPool("my_rewards:echo", workers=1, timeout_s=10, log=folder / "log") as pool:
        grade(pool, ["2", "3"], ["1+1=", messages], answer=["2", "4"], level=[1, None])
    first, second = map(json.loads, (folder / "log").read_text().splitlines())
    assert first == [["1+1="], ["2"], {"answer": ["2"], "level": [1]}]
    assert second == [[messages], [[{"role": "assistant", "content": "3"}]], {"answer": ["4"], "level": [None]}]


def test_long_texts_pass(folder):
    with RewardPool("my_rewards:length", workers=2, timeout_s=10) as pool:
        assert grade(pool, ["x" * 3_000_000] * 3, answer=["y" * 1_000_000] * 3).values == [3e6] * 3


def test_prints_stay_off_the_terminal(folder, capfd):
    with RewardPool("my_rewards:perform", workers=1, timeout_s=10) as pool:
        assert grade(pool, ["shout", "raise"]).values == [1.0, None]
    with RewardPool("my_rewards:perform", workers=1, timeout_s=0.5, log=folder / "log") as pool:
        grade(pool, ["shout", "raise", "sleep"])
    assert capfd.readouterr() == ("", "")
    log = (folder / "log").read_text()
    assert log.startswith("x" * 1000 + "\n") and "ZeroDivisionError" in log
    assert "my_rewards.py" in log.partition("Timeout")[2], "the log says where it hung"


def test_a_worker_has_no_torch_no_pydantic_no_terminal_and_no_ctrl_c(folder):
    with RewardPool("my_rewards:surroundings", workers=1, timeout_s=10, log=folder / "log") as pool:
        grade(pool, ["a"])
        seen = json.loads((folder / "log").read_text())
        assert seen == {"slow": [], "stdin": "", "sigint": True, "group": True, "pid": seen["pid"]}


def test_neither_settings_nor_pool_import_torch():
    modules = "sparse_rl.rewards.pool, sparse_rl.config"
    subprocess.run([sys.executable, "-c", f"import sys, {modules}; assert 'torch' not in sys.modules"], check=True)


def test_children_of_a_hanging_reward_are_ended_with_it(folder):
    with RewardPool("my_rewards:perform", workers=1, timeout_s=0.5, log=folder / "log") as pool:
        assert grade(pool, ["leave a child and hang"]).timeouts == 1
        assert gone(int((folder / "log").read_text().split()[0]))


def test_closing_ends_the_workers(folder):
    with RewardPool("my_rewards:surroundings", workers=1, timeout_s=10, log=folder / "log") as pool:
        grade(pool, ["a"])
    assert gone(json.loads((folder / "log").read_text())["pid"])


TRAINER = """
import sys
from pathlib import Path
from sparse_rl.rewards.pool import RewardPool
with RewardPool(f"my_rewards:{sys.argv[1]}", workers=1, timeout_s=1.0, log=Path("log")) as pool:
    print(pool._workers[0].process.pid, flush=True)
    pool.grade(["?"], [sys.argv[2]], {})
    print(sys.stdin.read())
"""


@pytest.mark.parametrize("act", ["leave a thread", "say and sleep"])
def test_workers_do_not_outlive_a_killed_trainer(folder, act):
    """An idle one sees the closed socket, and no thread holds it back; a busy one ends at its limit."""
    command = [sys.executable, "-c", TRAINER, "perform", act]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        worker = int(trainer.stdout.readline())
        assert eventually(lambda: (folder / "log").read_text())
        trainer.kill()
    assert gone(worker)


def test_a_worker_leaves_what_was_typed_to_the_trainer(folder):
    command = [sys.executable, "-c", TRAINER, "surroundings", ""]
    trainer = subprocess.run(command, input="typed", stdout=subprocess.PIPE, text=True, check=True)
    assert trainer.stdout.split()[1] == "typed" and json.loads((folder / "log").read_text())["stdin"] == ""


def test_a_worker_that_died_while_idle_is_replaced(folder):
    with RewardPool("my_rewards:length", workers=2, timeout_s=10) as pool:
        for worker in pool._workers:
            os.kill(worker.process.pid, signal.SIGKILL)
            assert select.select([worker.socket], [], [], 5)[0], "its end of the socket is closed"
        assert grade(pool, ["abc"] * 4).values == [3.0] * 4


def test_an_interrupted_batch_leaves_no_answers_to_the_next(folder, monkeypatch):
    with RewardPool("my_rewards:length", workers=2, timeout_s=10) as pool:
        waits = iter([pool._wait, KeyboardInterrupt])

        def interrupted(timeout_s):
            if (wait := next(waits)) is KeyboardInterrupt:
                raise KeyboardInterrupt
            return wait(timeout_s)

        with monkeypatch.context() as patch:
            patch.setattr(pool, "_wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                grade(pool, ["abc"] * 4)
        assert grade(pool, ["a"]).values == [1.0]


def test_a_module_that_breaks_during_the_run_is_an_error_and_not_an_end(folder):
    with RewardPool("my_rewards:perform", workers=2, timeout_s=10) as pool:
        (folder / "my_rewards.py").write_text("import nonsense")
        graded = grade(pool, ["abc", "exit", "exit", "ab", "ab"])
        assert graded.values == [3.0] + [None] * 4 and graded.errors == 4
        assert "No module named 'nonsense'" in grade(pool, ["abc"]).first_error
        (folder / "my_rewards.py").write_text(MODULE)
        assert grade(pool, ["abc"]).values == [3.0]


def gone(pid):
    def ended():
        try:
            return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    return eventually(ended)


def eventually(condition):
    deadline = time.monotonic() + 5
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("my_rewards:lenght", "no lenght in my_rewards, did you mean length?"),
        ("my_rewards:zzz", "use one of"),
        (
            "my_reward:length",
            "no module my_reward in the current folder or among the installed packages, did you mean my_rewards?",
        ),
        ("nowhere.at_all:length", "pass the path of its file, such as path/to/rewards.py:graded."),
        ("my_rewards.py", "is not a valid function name"),
        ("my_rewards:", "is not a valid function name"),
        (":length", "is not a valid function name"),
        ("my_reward.py:length", "no file my_reward.py, did you mean my_rewards.py?"),
        ("my_rewards:not_callable", "type int, which is not callable: "),
        ("narrow:f", "does not accept prompts, completions: define it as f(prompts, completions, **columns)."),
        ("narrow:g", "does not accept prompts, completions: define it as g(prompts, completions, **columns)."),
        ("exat", "no exat in the built-in rewards, did you mean exact?"),
        ("number_in", "no number_in in the built-in rewards"),
        ("raises:f", "cannot be imported (ValueError: two lines)"),
        ("lacks:f", "cannot be imported (ModuleNotFoundError: No module named 'not_installed')"),
        ("typo:f", "cannot be imported (SyntaxError"),
        ("quits:f", "cannot be imported (SystemExit: 1)"),
        ("crashes:f", " exits its process (exit status 4) on import"),
    ],
)
def test_a_function_that_cannot_be_had_is_refused_in_one_sentence(folder, function, sentence):
    (folder / "raises.py").write_text("raise ValueError('two\\nlines')")
    (folder / "lacks.py").write_text("import not_installed")
    (folder / "typo.py").write_text("def f(:")
    (folder / "narrow.py").write_text("def f(texts, answer): pass\ndef g(prompts, completions, /): pass")
    (folder / "quits.py").write_text("import sys; sys.exit(1)")
    (folder / "crashes.py").write_text("import os; os._exit(4)")
    with pytest.raises(UserError) as refused:
        RewardPool(function, workers=2, timeout_s=10)
    assert sentence in str(refused.value) and f"reward.function = {function}" in str(refused.value)
    assert "\n" not in str(refused.value) and str(refused.value)[-1] in ".?"


def test_a_module_that_never_finishes_importing_is_refused(folder, monkeypatch):
    (folder / "slow.py").write_text("import time; time.sleep(1e6)")
    monkeypatch.setattr("sparse_rl.rewards.process.START_S", 0.3)
    with pytest.raises(UserError, match=" s to import: move slow code into the function"):
        RewardPool("slow:f", workers=1, timeout_s=10)


def test_a_file_elsewhere_can_be_named_and_imports_its_neighbours(folder, monkeypatch):
    (folder / "sub").mkdir()
    (folder / "sub" / "math.py").write_text(
        "import neighbour\ndef three(prompts, completions, **columns): return [neighbour.x]"
    )
    (folder / "sub" / "neighbour.py").write_text("import math; x = math.sqrt(9)")
    with RewardPool("sub/math.py:three", workers=1, timeout_s=10) as pool:
        assert grade(pool, ["a"]).values == [3.0]


def test_built_in_rewards_run_in_the_pool(folder):
    messages = [{"role": "user", "content": "1+1="}]
    for function in ("arithmetic", "exact", "last_number"):
        with RewardPool(function, workers=1, timeout_s=10) as pool:
            assert grade(pool, ["2", "3", "2"], ["1+1=", "1+1=", messages], answer=["2"] * 3).values == [1.0, 0.0, 1.0]
            assert "answer" in grade(pool, ["2"]).first_error, "data without answers"


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("so it is 1,234.50.", "1234.5", 1.0),
        ("18", "#### 18", 1.0),
        ("18 and then 19", "18", 0.0),
        ("18 of $18.00", "18", 1.0),
        ("x = -3", "-3", 1.0),
        ("x = \N{MINUS SIGN}3", "-3", 1.0),
        ("-3", "3", 0.0),
        ("5-3", "3", 1.0),
        (".5", "0.50", 1.0),
        ("2.5e3", "2500", 1.0),
        ("f(1,2)", "2", 1.0),
        ("1,23", "123", 0.0),
        ("0.1", "0.10000000000000000001", 0.0),
        ("no number", "3", 0.0),
        ("", "3", 0.0),
        ("1e99999999999999999999", "3", 0.0),
        ("3", "none at all", None),
    ],
)
def test_the_last_number_counts_however_it_is_spelt(text, answer, reward):
    assert functions.last_number(["?"], [text], answer=[answer]) == [reward]


@pytest.mark.parametrize(("text", "reward"), [("two", 1.0), ("  two\n", 1.0), ("two.", 0.0), ("Two", 0.0), ("", 0.0)])
def test_exact_forgives_only_space_around_the_text(text, reward):
    assert functions.exact(["?"], [text], answer=["two"]) == [reward]


def test_a_task_has_its_own_reward_and_a_file_has_none():
    assert RewardConfig().function_for("arithmetic") == "arithmetic"
    assert RewardConfig(function="exact").function_for("arithmetic") == "exact"
    with pytest.raises(
        UserError,
        match="data.jsonl has no default reward function: set --reward.function, such as math_answer, exact or my_rewards:graded.",
    ):
        RewardConfig().function_for("data.jsonl")


@pytest.mark.parametrize(
    "values", [{"timeout_s": 0}, {"timeout_s": "inf"}, {"timeout_s": "nan"}, {"workers": -1}, {"worker": 1}]
)
def test_settings_out_of_bounds_are_refused(values):
    with pytest.raises(UserError, match=r"reward\."):
        RewardConfig(**values)


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        ("my_rewards:length + my_rewards:later", [4.0, 2.0]),
        ("my_rewards:length + 0.5 * my_rewards.py:later", [3.0, 1.5]),
        ("2*my_rewards:length + -1e-1 * my_rewards:length", [3.8, 1.9]),
        ("exact + 3 * my_rewards:length", [7.0, 3.0]),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_several_rewards_are_summed_with_their_weights(folder, spec, values, workers):
    with RewardPool(spec, workers=workers, timeout_s=10) as pool:
        assert grade(pool, ["ab", "a"], answer=["ab", "x"]).values == pytest.approx(values)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_part_without_a_verdict_is_left_out_of_the_sum(folder, workers):
    """As in TRL: rows of one task may be graded by one of several rewards."""
    with RewardPool("last_number + 0.5 * last_number", workers=workers, timeout_s=10) as pool:
        graded = grade(pool, ["2", "2"], answer=["2", "none"])
        assert graded.values == [1.5, None] and graded.no_verdict == 1
        assert all(len(values) == 2 for values in graded.parts.values()) and len(graded.parts) == 2
    with RewardPool("last_number + my_rewards:length", workers=workers, timeout_s=10) as pool:
        assert grade(pool, ["2"], answer=["none"]).values == [1.0]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_each_part_of_a_sum_gave_is_told(folder, workers):
    spec = "exact + 0.5 * my_rewards:length + my_rewards:length"
    with RewardPool(spec, workers=workers, timeout_s=10) as pool:
        graded = grade(pool, ["22", "3"], answer=["22", "4"])
        assert graded.values == [4.0, 1.5]
        assert graded.parts == {"exact": [1.0, 0.0], "length": [2.0, 1.0], "length_3": [2.0, 1.0]}
    with RewardPool("exact", workers=workers, timeout_s=10) as pool:
        assert grade(pool, ["22"], answer=["22"]).parts == {}


def test_a_list_of_rewards_is_told_how_to_write_a_sum():
    for spec in ('["a.py:f", "a.py:g"]', "a.py:f, a.py:g"):
        with pytest.raises(UserError, match="looks like a list: combine rewards with "):
            RewardPool(spec, workers=1, timeout_s=10)


@pytest.mark.parametrize("spec", ["exact + ", "* exact", "much * exact", "nan * exact", "exact + inf * exact", " + exact"])
def test_a_sum_that_cannot_be_read_is_refused(spec):
    with pytest.raises(UserError, match=r" is not a valid weighted sum. Example: math_answer \+ 0.2 \* my_rewards.py:brief."):
        RewardPool(spec, workers=1, timeout_s=10)


def test_a_part_that_does_not_import_is_named(folder):
    for workers in (0, 2):
        with pytest.raises(UserError, match="reward.function = my_reward:length was not found: no module my_reward"):
            RewardPool("exact + 0.1 * my_reward:length", workers=workers, timeout_s=10)


def test_without_workers_the_reward_is_called_here_with_the_whole_batch(folder):
    (folder / "batched.py").write_text(
        "import os\n"
        "def process(prompts, completions, level, **columns):\n"
        "    return [os.getpid() if level == [1, 2, 3] else None] * len(completions)\n"
        "async def later(prompts, completions, **columns): return [None, 1.0, 2.0]\n"
        "def fails(prompts, completions, **columns): return [1.0]\n"
        "def odd(prompts, completions, **columns): return [1.0, float('nan'), None]\n"
    )
    with RewardPool("batched:process", workers=0) as pool:
        assert grade(pool, ["a", "b", "c"], level=[1, 2, 3]).values == [os.getpid()] * 3
        assert grade(pool, []).values == []
    with RewardPool("batched:later", workers=0) as pool:
        graded = grade(pool, ["a", "b", "c"])
        assert (graded.values, graded.no_verdict, graded.errors) == ([None, 1.0, 2.0], 1, 0)
    with RewardPool("batched:fails", workers=0, log=folder / "log") as pool:
        graded = grade(pool, ["a", "b", "c"])
        assert (graded.values, graded.errors) == ([None] * 3, 3) and "1 value for 3 completions" in graded.first_error
        assert "Traceback" in (folder / "log").read_text()
    with RewardPool("batched:odd", workers=0) as pool:  # as of a worker: it costs its own sample a verdict, and no other
        graded = grade(pool, ["a", "b", "c"])
        assert (graded.values, graded.no_verdict, graded.errors) == ([1.0, None, None], 1, 1)
        assert graded.first_error == "the reward returned nan"


def test_the_example_of_constraints_grades_by_the_share_met():
    constraints = [{"kind": "max_words", "value": 3}, {"kind": "ends_with", "value": "."}]
    with RewardPool(f"{EXAMPLES / 'constraints_reward.py'}:share_met", workers=1, timeout_s=10) as pool:
        graded = grade(pool, ["Two words.", "Four words and more.", "no"], constraints=[constraints, constraints, []])
    assert graded.values == [1.0, 0.5, None]
    constraints = [{"kind": "min_words", "value": 8}, {"kind": "ends_with", "value": "."}]
    with RewardPool(f"{EXAMPLES / 'constraints_reward.py'}:share_met_at_length", workers=1, timeout_s=10) as pool:
        texts = ["Brief.", "So so so so so so so so.", "A cat sat on the mat by itself.", "Brief."]
        graded = grade(pool, texts, constraints=[constraints] * 3 + [constraints[1:]])
    assert graded.values == [0.5 / 8, 1 / 8, 1.0, 1.0]  # of "so" one counts


def test_the_example_of_a_reward_model_scores_with_any_classifier(tmp_path, monkeypatch):
    """In batches, the same as one at a time, in the trainer and in a worker."""
    sys.path.append(str(EXAMPLES))
    try:
        import reward_model
    finally:
        sys.path.remove(str(EXAMPLES))
    reward_model.save_random_classifier(tmp_path)
    monkeypatch.setenv("REWARD_MODEL", str(tmp_path))
    spec, texts = (
        f"{EXAMPLES / 'reward_model.py'}:score",
        ["It is 2.", "It is 3.", "No.", "A much longer text than the others."],
    )
    with RewardPool(spec, workers=0) as here, RewardPool(spec, workers=1, timeout_s=60) as pool:
        batched, single = grade(here, texts), grade(pool, texts)
    assert single.errors == batched.errors == 0, single.first_error
    assert len(set(batched.values)) == 4
    assert single.values == pytest.approx(batched.values, abs=1e-5)
    assert reward_model.score(["?"], [[{"role": "assistant", "content": texts[0]}]]) == pytest.approx(
        batched.values[:1], abs=1e-5
    )


def test_grading_adds_little_to_a_step(folder):
    with RewardPool("my_rewards:length", workers=2, timeout_s=10) as pool, at_most(0.2):
        assert grade(pool, ["x" * 1000] * 64).errors == 0
