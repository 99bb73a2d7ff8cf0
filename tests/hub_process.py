"""Run commands of `sparse-rl`, or Python code, with the environment of this process: one per line of stdin, each in a fork.

What a command imports is imported once. A line is JSON: (words, environment, file for stdout, file for stderr).
"""

import json
import os
import sys
import traceback

import datasets  # noqa: F401
import torch  # noqa: F401

import sparse_rl.train.export
import sparse_rl.train.trainer  # noqa: F401
from sparse_rl.cli import main


def run(words: list[str], environment: dict[str, str], files: list[str]) -> int:
    os.environ.update(environment)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    try:
        exec(words[1], {}) if words[0] == "-c" else main(words)
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    for line in sys.stdin:
        words, environment, *files = json.loads(line)
        if (child := os.fork()) == 0:
            os._exit(run(words, environment, files))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
