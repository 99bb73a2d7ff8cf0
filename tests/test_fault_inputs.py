"""Damaged files and configurations end in one printable sentence, and nothing on the terminal is a command to it.

Quick slices of the campaigns in experiments/faults, which are run in full there.
"""

import json
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from small_runs import arguments, refused
from sparse_rl import UserError
from sparse_rl.cli import main
from sparse_rl.data.examples import load
from sparse_rl.terminal import Terminal

sys.path.append(str(Path(__file__).parents[1] / "experiments" / "faults"))


def test_damaged_data_files_are_refused_or_sound(tmp_path):
    from data_files import campaign

    found = campaign(seed=1, count=200, folder=tmp_path)
    assert not found["failures"]
    assert found["refused"] > 120 and found["accepted"] > 20


def test_damaged_recipes_and_odd_flags_are_refused_or_mean_what_they_say(tmp_path):
    from configs import campaign

    found = campaign(seed=1, count=24, folder=tmp_path)
    assert not found["failures"]
    assert found["refused"] > 15 and found["accepted"] > 0


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        (pa.array([1, 2**63 - 1], pa.int64()).view(pa.duration("s")), ", row 2: when is a duration[s] that cannot be read ("),
        (pa.array([0, 2**62], pa.int64()).view(pa.timestamp("us")), ", row 2: when is a timestamp[us] that cannot be read ("),
        (pa.array([2**31 - 1, 0], pa.int32()).view(pa.date32()), ", row 1: when is a date32[day] that cannot be read ("),
    ],
    ids=["duration", "timestamp", "date"],
)
def test_a_value_of_a_table_that_python_cannot_hold_is_named(tmp_path, column, sentence):
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"prompt": ["1+1=", "1+2="], "answer": ["2", "3"], "when": column}), path)
    with pytest.raises(UserError) as error:
        load(str(path), "train", n=1, seed=0)
    assert f"{path}{sentence}" in str(error.value) and str(error.value).endswith("): store it as text.")


def test_a_table_whose_pages_do_not_fit_their_checksums_is_refused(tmp_path):
    path = tmp_path / "data.parquet"
    pq.write_table(
        pa.table({"prompt": ["1+1="] * 9}), path, write_page_checksum=True, compression="none", use_dictionary=False
    )
    path.write_bytes(path.read_bytes().replace(b"1+1=\x04", b"1+7=\x04", 1))
    with pytest.raises(UserError, match="is an incomplete or damaged Parquet file"):
        load(str(path), "train", n=1, seed=0)


def test_a_table_that_names_a_column_twice_is_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "data.parquet")
    with pytest.raises(UserError, match="the column names are prompt, prompt: each column needs a unique name"):
        load(str(tmp_path / "data.parquet"), "train", n=1, seed=0)


def test_an_answer_that_is_not_finite_is_refused(tmp_path):
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": [1.0, float("inf")]}), tmp_path / "data.parquet")
    with pytest.raises(UserError, match="data.parquet, row 2: answer is inf: it must be a finite number, or text."):
        load(str(tmp_path / "data.parquet"), "train", n=1, seed=0)


@pytest.mark.parametrize("name", ["/dev/zero", "pipe.jsonl"])
def test_data_that_never_end_or_never_begin_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.jsonl")
    with pytest.raises(UserError, match=r"cannot be read \(it is a device or a pipe\)"):
        load(name, "train", n=1, seed=0)


# The terminal

HOSTILE = "\x1b[2J\x9b2J\u202e\x7f"
SAFE = "\\x1b[2J\\x9b2J\\u202e\\x7f"


def is_tame(text):
    return all(line.isprintable() for line in text.replace("\t", "").splitlines())


def test_a_console_shows_control_characters_and_obeys_none(capsys):
    from rich.table import Table
    from rich.text import Text

    console = Terminal(highlight=False, width=200)
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(Text(HOSTILE))
    for each in (HOSTILE, Text(HOSTILE), table):
        console.print(each, markup=False, soft_wrap=True)
    out = capsys.readouterr().out
    assert is_tame(out) and out.count(SAFE) == 3 and out.count(SAFE[:4]) == 5


def test_a_dry_run_shows_prompts_columns_and_rewards_without_obeying_them(world, tmp_path, capsys):
    rows = [{"prompt": f"1+1={HOSTILE}", "answer": f"2{HOSTILE}"}]
    (tmp_path / "data.jsonl").write_text(json.dumps(rows[0], ensure_ascii=False).replace("\x1b", "\\u001b") + "\n")
    (tmp_path / "rewards.py").write_text(
        f"def raises(prompts, completions, **columns):\n    raise RuntimeError({HOSTILE!r})\n"
    )
    flags = ["--dry-run", "--data.train", f"{tmp_path}/data.jsonl", "--kv.options", json.dumps({HOSTILE: 1})]
    flags += ["--reward.function", f"{tmp_path}/rewards.py:raises", "--method", "dense"]
    with pytest.raises(SystemExit) as end:
        main(arguments(world, tmp_path / "run", *flags))
    out, err = capsys.readouterr()
    assert end.value.code == 2 and is_tame(out) and is_tame(err)
    assert (
        "first prompt" in out
        and "\\x9b2J" in out
        and "The reward fails on the first reference answer (RuntimeError: \\x1b[2J" in err
    )


def test_a_refusal_shows_the_names_of_columns_without_obeying_them(world, tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text(json.dumps({HOSTILE: "?", **{f"column {n} {'x' * 900}": 1 for n in range(90)}}))
    sentence = refused(capsys, *arguments(world, tmp_path / "run", "--data.train", f"{tmp_path}/data.jsonl"))
    assert is_tame(sentence) and SAFE in sentence and len(sentence) <= 1000
    assert sentence.endswith("set --data.prompt-column.")
