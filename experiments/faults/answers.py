"""Hostile answers by seed through the real pool of graders: what is taken or refused wrongly, and how long verdicts take.

Every answer is right or wrong by construction (tests/hostile_answers.py). python experiments/faults/answers.py --json FILE
"""

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections import Counter
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from hostile_answers import RAN, answers
from sparse_rl.rewards.pool import RewardPool

GRADERS = ("integer_answer", "math_answer", "last_number")
GRACE_S = 1.0
"""Beyond the limit: a worker that does not end itself is killed half a second later."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--timeout-s", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kinds: dict[str, Counter] = {}
    failures, times, started = [], [], time.perf_counter()
    with ExitStack() as stack:
        pools = {name: stack.enter_context(RewardPool(name, workers=1, timeout_s=args.timeout_s)) for name in GRADERS}
        for number, answer in enumerate(answers(args.count, args.seed)):
            prompt = "?" if number % 10 else [{"role": "user", "content": "?"}]
            columns = {"answer": [answer.gold], "finish": [answer.finish], "in_thought": [answer.in_thought]}
            asked = time.perf_counter()
            graded = pools[answer.grader].grade([prompt], [answer.text], columns)
            took = time.perf_counter() - asked
            outcome = outcome_of(answer, graded)
            kinds.setdefault(answer.kind, Counter()).update([outcome])
            if outcome != "timeout":  # the next worker's start follows one
                times.append(took)
            if took > args.timeout_s + GRACE_S and outcome != "timeout":
                kinds[answer.kind]["late"] += 1
            if outcome not in ("right", "wrong") and not (outcome == "timeout" and answer.endless):
                failures.append([outcome, answer.kind, answer.grader, answer.gold, answer.text[:200], graded.first_error])
                print(*map(repr, failures[-1]), flush=True)
    times.sort()
    total = sum(kinds.values(), Counter())
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()}
        | {name: version(name) for name in ("math-verify", "latex2sympy2_extended", "sympy")},
        "seed": args.seed,
        "count": args.count,
        "timeout_s": args.timeout_s,
        "total": dict(total),
        "code_ran": Path(RAN).exists(),
        "verdict_s": {
            name: round(times[place], 4)
            for name, place in (("median", len(times) // 2), ("p99", len(times) * 99 // 100), ("max", -1))
        },
        "seconds": round(time.perf_counter() - started, 1),
        "kinds": {name: dict(counts) for name, counts in kinds.items()},
        "failures": failures,
    }
    print(json.dumps({key: value for key, value in report.items() if key != "failures"}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    sys.exit(bool(failures) or report["code_ran"])


def outcome_of(answer, graded):
    if graded.errors:
        return "error"
    if graded.timeouts:
        return "timeout"
    if graded.values[0] not in (0.0, 1.0):
        return "no verdict"
    if graded.values[0]:
        return "right" if answer.right else "false accept"
    return "false reject" if answer.right else "wrong"


if __name__ == "__main__":
    main()
