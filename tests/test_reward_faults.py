"""Rewards that misbehave: what they start ends, what they write is no verdict, and what hangs costs only its own sample."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparse_rl.cli import main
from sparse_rl.rewards import log
from sparse_rl.rewards.find import INSIDE
from sparse_rl.rewards.pool import RewardPool

MODULE = '''
import asyncio, os, socket, stat, subprocess, sys, time

async def later(prompts, completions, **columns):
    """Does what the completion says, and takes 0.5 s for the others."""
    text = completions[0]
    if text == "await":
        start_a_daemon()
        await asyncio.sleep(1e6)
    if text == "block":
        time.sleep(1e6)
    if text == "block a little":
        time.sleep(0.2)
        return [1.0]
    if text == "refuse to be cancelled":
        while True:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                pass
    if text == "time out by itself":
        await asyncio.wait_for(asyncio.sleep(1e6), 0.01)
    if text == "exit":
        os._exit(3)
    if text == "sys.exit":
        sys.exit(3)
    await asyncio.sleep(float(text[1:]) if text.startswith("s") else 0.5)
    return [float(len(text))]

def plain(prompts, completions, **columns):
    text = completions[0]
    if text == "daemon and hang":
        start_a_daemon()
        time.sleep(1e6)
    if text == "daemon":
        start_a_daemon()
    if text == "write to every socket":
        for fd in sockets():
            os.write(fd, b'{"value": 7.0}\\n[]\\n{"number": 1, "value": 7.0}\\n' + b"[" * 5000 + b'\\n{"number": "half a line')
    if text == "fork" and os.fork() == 0:
        return [7.0]
    if text == "huge":
        return [1e308]
    return [float(len(text))]

def tiny_weight(prompts, completions, **columns):
    return [1e308 for _ in completions]

def sockets():
    return [int(fd) for fd in os.listdir("/proc/self/fd") if fd != "0" and is_socket(int(fd))]

def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False

def start_a_daemon():
    """In a session of its own, and no child of ours."""
    script = "import os, time; print(os.getpid(), flush=True) if os.fork() == 0 else os._exit(0); time.sleep(1e6)"
    subprocess.run([sys.executable, "-c", script], start_new_session=True)
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "faulty.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def grade(pool, completions, **columns):
    return pool.grade(["?"] * len(completions), completions, columns)


@contextmanager
def at_most(seconds):
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def daemon_in(log):
    """The process whose number stands first in the log, once it does."""
    deadline = time.monotonic() + 10
    while not (log.exists() and "\n" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return int(log.read_text().split()[0])


def gone(pid):
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_a_worker_has_several_samples_of_an_async_reward_in_flight(folder):
    with RewardPool("faulty:later", workers=2, timeout_s=10) as pool, at_most(2):
        assert grade(pool, ["abc"] * 16).values == [3.0] * 16  # one after the other: 4 s


def test_an_async_reward_answers_in_any_order_and_verdicts_stay_with_their_samples(folder):
    texts = [f"s0.{number % 7}" + "x" * 0 for number in range(60)]
    texts = [text + "0" * (number % 5) for number, text in enumerate(texts)]
    with RewardPool("faulty:later", workers=2, timeout_s=10) as pool:
        assert grade(pool, texts).values == [float(len(text)) for text in texts]


@pytest.mark.parametrize("act", ["await", "block", "refuse to be cancelled"])
def test_an_async_hang_costs_its_sample_the_verdict_and_no_other(folder, act):
    with RewardPool("faulty:later", workers=2, timeout_s=1, log=folder / "log") as pool, at_most(12):
        graded = grade(pool, ["s0", act, *["s0.3"] * 10])
        assert graded.values == [2.0, None, *[4.0] * 10]
        assert (graded.no_verdict, graded.timeouts, graded.errors) == (0, 1, 0)
        assert grade(pool, ["s0"] * 3).values == [2.0] * 3
        if act == "await":
            assert gone(daemon_in(folder / "log")), "what it had started ends with its worker"


@pytest.mark.parametrize(
    ("act", "said"), [("exit", "exit status 3"), ("sys.exit", "SystemExit: 3"), ("time out by itself", "TimeoutError")]
)
def test_an_async_error_costs_its_sample_the_verdict_and_no_other(folder, act, said):
    with RewardPool("faulty:later", workers=1, timeout_s=5) as pool:
        graded = grade(pool, ["s0", act, *["s0.2"] * 4])
    assert graded.values == [2.0, None, *[4.0] * 4]
    assert (graded.timeouts, graded.errors) == (0, 1) and said in graded.first_error


def test_the_clock_of_an_async_sample_stands_while_another_blocks_the_loop(folder):
    """Six that take 0.2 s each without ever awaiting: none is late, though the last is done after 1.2 s."""
    with RewardPool("faulty:later", workers=1, timeout_s=0.8) as pool:
        graded = grade(pool, ["block a little"] * 6)
        assert (graded.values, graded.timeouts) == ([1.0] * 6, 0)


def test_what_a_reward_writes_to_the_channel_is_no_verdict(folder):
    with RewardPool("faulty:plain", workers=1, timeout_s=10) as pool:
        graded = grade(pool, ["a", "write to every socket", "abc", "ab"])
        assert graded.values == [1.0, 21.0, 3.0, 2.0]
        assert graded.errors == graded.timeouts == 0 and graded.strays == 5
        assert grade(pool, ["abcd", "a"]).values == [4.0, 1.0] and grade(pool, ["a"]).strays == 0


def test_a_fork_that_a_reward_leaves_behind_answers_nothing(folder):
    with RewardPool("faulty:plain", workers=1, timeout_s=10) as pool:
        for _ in range(3):
            assert grade(pool, ["fork", "abc", "ab"]).values == [4.0, 3.0, 2.0]


@pytest.mark.parametrize("act", ["daemon and hang", "daemon"])
def test_a_daemon_of_a_reward_ends_with_its_worker(folder, act):
    with RewardPool("faulty:plain", workers=1, timeout_s=1, log=folder / "log") as pool:
        assert grade(pool, [act]).timeouts == (act == "daemon and hang")
        daemon = daemon_in(folder / "log")
        if act == "daemon":
            assert not (Path(f"/proc/{daemon}/status").read_text().count("State:\tZ")), "a later sample may use it"
    assert gone(daemon)


TRAINER = """
import sys
from pathlib import Path
from sparse_rl.rewards.pool import RewardPool
with RewardPool("faulty:plain", workers=1, timeout_s=30, log=Path("log")) as pool:
    pool.grade(["?"], [sys.argv[1]], {})
    print("graded", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("act", ["daemon and hang", "daemon"])
def test_a_daemon_of_a_reward_does_not_outlive_a_killed_trainer(folder, act):
    with subprocess.Popen([sys.executable, "-c", TRAINER, act], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        daemon = daemon_in(folder / "log")
        if act == "daemon":
            trainer.stdout.readline()
        os.kill(trainer.pid, signal.SIGKILL)
    assert gone(daemon)


UNGUARDED = """
from sparse_rl.cli import main
def reward(prompts, completions, **columns):
    return [1.0 for _ in completions]
open("started", "a").write("x")
START
"""
STARTS = {
    "pool": "from sparse_rl.rewards.pool import RewardPool\nRewardPool('script.py:reward', workers=WORKERS)",
    "command": "main(['train', '--dry-run', '--reward.function', 'script.py:reward', '--reward.workers', 'WORKERS'])",
}


@pytest.mark.parametrize(("start", "workers"), [("pool", 1), ("pool", 0), ("command", 1)])
def test_a_script_whose_reward_lives_in_itself_is_refused(folder, start, workers):
    """Without a guard its worker would import it, train, and start a worker that imports it."""
    (folder / "script.py").write_text(UNGUARDED.replace("START", STARTS[start].replace("WORKERS", str(workers))))
    ended = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=60)
    assert ended.returncode and "The reward's module starts a run" in ended.stderr
    assert len((folder / "started").read_text()) == 2, "the script and one import"


@pytest.mark.parametrize(
    "command", [["train"], ["train", "--ray.workers", "2"], ["eval", "tiny", "--benchmarks", "arithmetic"]]
)
def test_no_command_runs_in_a_reward_or_what_it_starts(folder, monkeypatch, capsys, command):
    monkeypatch.setenv(INSIDE, "1")
    with pytest.raises(SystemExit) as end:
        main(command)
    assert (
        end.value.code == 2
        and 'move that code under if __name__ == "__main__"' in capsys.readouterr().err
        and not (folder / "runs").exists()
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_rewards_beyond_any_measure_are_errors(folder, workers):
    """A sum or a mean of them would not be finite, also where the sum's weight makes it small."""
    for function in ("faulty:tiny_weight", "1e-308 * faulty:tiny_weight + 0 * faulty:plain"):
        with RewardPool(function, workers=workers, timeout_s=10) as pool:
            graded = grade(pool, ["a"])
            assert graded.values == [None] and "1e+308, beyond ±1e+09" in graded.first_error


def test_sys_exit_in_the_trainer_is_an_error_and_not_the_end(folder):
    (folder / "quits.py").write_text("import sys\ndef f(prompts, completions, **columns): sys.exit(0)")
    with RewardPool("quits:f", workers=0, log=folder / "log") as pool:
        graded = grade(pool, ["a", "b"])
    assert (graded.values, graded.errors, graded.first_error) == ([None, None], 2, "SystemExit: 0")


def test_the_log_keeps_its_beginning_and_its_end_and_stays_small(folder, monkeypatch):
    monkeypatch.setattr(log, "MAX_BYTES", 40_000)
    monkeypatch.setattr(log, "HEAD_BYTES", 10_000)
    monkeypatch.setattr(log, "TAIL_BYTES", 10_000)
    (folder / "loud.py").write_text("def f(prompts, completions, **columns): print(completions[0] * 1000); return [1.0]")
    with RewardPool("loud:f", workers=1, timeout_s=10, log=folder / "log") as pool:
        grade(pool, ["first", *["x"] * 100, "last"])
        grade(pool, ["end"])
    text = (folder / "log").read_text()
    assert len(text) < 40_000 + 4_000 and text.startswith("firstfirst") and "last" in text and text.endswith("end\n")
    assert "left out" in text


def test_functions_that_do_not_ask_for_the_rollout_are_called_without_it(folder):
    (folder / "mine.py").write_text(
        "def old(prompts, completions, answer): return [float(answer == ['2'])]\n"
        "def new(prompts, completions, finish, completion_ids, **columns):\n"
        "    return [float(finish == ['length']) + len(completion_ids[0])]\n"
    )
    for function, value in (("mine:old", 1.0), ("mine:new", 4.0), ("mine:old + mine:new", 5.0)):
        with RewardPool(function, workers=1, timeout_s=10) as pool:
            graded = grade(pool, ["a"], answer=["2"], finish=["length"], completion_ids=[[7, 8, 9]])
            assert graded.values == [value], graded.first_error


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("truncated", "values"), [("zero", [3.0, 0.0, 0.0]), ("none", [3.0, None, None]), ("grade", [3.0] * 3)]
)
def test_what_a_cut_off_answer_earns_can_be_chosen(folder, workers, truncated, values):
    (folder / "mine.py").write_text(
        "def f(prompts, completions, **columns): return [float(len(each)) for each in completions]"
    )
    with RewardPool("mine:f + 0 * mine:f", workers=workers, timeout_s=10, truncated=truncated) as pool:
        graded = grade(pool, ["abc"] * 3, finish=["stop", "length", "repetition"])
    assert graded.values == values and (graded.no_verdict, graded.errors) == (0, 0)
    assert graded.truncated == (0 if truncated == "grade" else 2)
    assert graded.parts["f"] == ([3.0] * 3 if truncated == "grade" else [3.0, None, None])


@pytest.mark.parametrize(("timeout", "value"), [("zero", 0.0), ("none", None)])
def test_what_an_answer_earns_that_takes_too_long_can_be_chosen(folder, timeout, value):
    with RewardPool("faulty:plain", workers=2, timeout_s=0.3, timeout=timeout) as pool:
        graded = grade(pool, ["abc", "daemon and hang"])
    assert graded.values == [3.0, value] and graded.timeouts == 1


def test_a_worker_that_stands_still_is_ended_at_its_limit(folder):
    """It says nothing and cannot end itself: the pool must not wait for it any longer."""
    (folder / "stands.py").write_text(
        "import os, signal\ndef f(prompts, completions, **columns): os.kill(os.getpid(), signal.SIGSTOP)"
    )
    with RewardPool("stands:f", workers=1, timeout_s=3) as pool, at_most(5.5):
        assert grade(pool, ["a"]).timeouts == 1


def test_a_request_number_is_never_told_twice(folder):
    """So an answer that comes late is taken for no other."""
    with RewardPool("faulty:plain", workers=1, timeout_s=10) as pool:
        (worker,) = pool._workers
        seen = set()
        ask = worker.ask
        worker.ask = lambda *args, **more: (ask(*args, **more), seen.update(worker.in_flight))[0]
        grade(pool, ["a"] * 50)
    assert len(seen) == 50 and json.dumps(sorted(seen))


def test_a_late_sample_that_blocks_its_loop_is_asked_again_once(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import asyncio, time\n"
        "async def graded(prompts, completions, **columns):\n"
        "    while True:\n"
        "        time.sleep(0.15)\n"
        "        await asyncio.sleep(0)\n"
    )
    started = time.monotonic()
    with RewardPool(f"{tmp_path / 'slow.py'}:graded", workers=1, timeout_s=0.5) as pool:
        graded = pool.grade(["p"], ["c"], {})
    assert graded.timeouts == 1 and time.monotonic() - started < 15
