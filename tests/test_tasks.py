"""Tasks and formats: every row of a task's file loads, a table says the same in any format, mistakes end in one sentence."""

import csv
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from small_runs import arguments, refused, train
from sparse_rl import UserError
from sparse_rl.config import PLACEHOLDER, TASKS, DataConfig
from sparse_rl.data.examples import Example, load, name_of

DATA = Path(__file__).parent / "data"
GOLDS = json.loads(gzip.decompress((DATA / "golds.json.gz").read_bytes()))
"""The answers of every row of the tasks' files; `tasks/` holds a few whole rows of each. See data/README.md."""

COUNTS = {
    ("simplerl-zoo-hard", "train"): (8523, 2),
    ("gsm8k", "train"): (7473, 0),
    ("gsm8k", "test"): (1319, 0),
    ("math500", "test"): (500, 0),
    ("gaokao2023en", "test"): (385, 2),
    ("minerva", "test"): (272, 0),
    ("olympiadbench", "test"): (675, 0),
    ("aime24", "test"): (30, 0),
    ("amc23", "test"): (40, 0),
}
"""Rows of each file, and those of them without an answer."""


def sentence_of(refused):
    text = str(refused.value)
    assert "\n" not in text and text[-1] in ".?"
    return text


# The tasks


def test_every_split_of_every_task_is_counted_here():
    splits = {(task.name, split) for task in TASKS.values() for split in ("train", "test") if task.origin(split)}
    assert splits == {*COUNTS, ("arithmetic", "train"), ("arithmetic", "test")}
    assert all(name == task.name for name, task in TASKS.items())


def file_name(name, split):
    return TASKS[name].origin(split).file.removesuffix(".jsonl.gz")


@pytest.mark.parametrize(("name", "split"), COUNTS)
def test_every_row_of_a_tasks_file_loads(name, split, tmp_path):
    file = file_name(name, split)
    rows = [json.loads(line) for line in (DATA / "tasks" / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()]
    write(tmp_path / f"{file}.jsonl.gz", rows)
    loaded = load(name, split, n=1, seed=0, dir=str(tmp_path))
    graded = [row for row in rows if row["answer"]]
    assert loaded.skipped == len(rows) - len(graded) == COUNTS[name, split][1] - (name == "gaokao2023en")
    assert [example.prompt for example in loaded.examples] == [row["problem"] for row in graded]
    assert [example.answer for example in loaded.examples] == [row["answer"] for row in graded]
    for example, row in zip(loaded.examples, graded, strict=True):
        assert example.columns == {name: row.get(name) for name in example.columns}
        assert row.keys() - {"problem"} <= example.columns.keys()
        assert example.template == PLACEHOLDER + TASKS[name].instruction


@pytest.mark.parametrize(("name", "split"), COUNTS)
def test_every_answer_of_a_task_is_read_as_it_is_written(name, split, tmp_path):
    """All rows of the real files, with an own problem each; the answers of an integer task are integers already."""
    golds = GOLDS[file_name(name, split)]
    write(tmp_path / f"{file_name(name, split)}.jsonl.gz", [{"problem": "?", "answer": gold} for gold in golds])
    loaded = load(name, split, n=1, seed=0, dir=str(tmp_path))
    assert (len(golds), loaded.skipped) == COUNTS[name, split]
    answers = [example.answer for example in loaded.examples]
    assert answers == [gold for gold in golds if gold]
    if TASKS[name].kind == "integer":
        assert answers == [str(int(answer)) for answer in answers]


def test_the_contests_and_gsm8k_are_graded_as_integers():
    assert {name for name, task in TASKS.items() if task.kind == "integer"} == {"gsm8k", "aime24", "amc23"}


def test_the_papers_evaluate_contests_longer_and_32_times():
    settings = {task.name: (task.max_tokens, task.samples) for task in TASKS.values() if task.name != "arithmetic"}
    assert settings.pop("aime24") == settings.pop("amc23") == (16384, 32)
    assert set(settings.values()) == {(8192, 1)}


def test_the_page_of_data_lists_every_task_as_it_is():
    page = (
        (Path(__file__).parents[1] / "docs" / "train-your-own.md")
        .read_text()
        .partition("### Tasks\n")[2]
        .partition("\n## ")[0]
    )
    rows = [line.strip("| ").split(" | ") for line in page.replace("| |", "|  |").splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [f"`{name}`" for name in TASKS]
    for row, task in zip(rows, TASKS.values(), strict=True):
        origins = [origin for origin in (task.train, task.test) if origin and origin.file]
        assert all(f"`{origin.file}`" in row[5] and origin.hub.id in row[6] for origin in origins)
        assert all(part in row[6] for origin in origins for part in (origin.hub.config, origin.hub.file) if part)
        for column, split in ((1, "train"), (2, "test")):
            if task.origin(split) in origins:
                assert row[column].strip() == f"{COUNTS[task.name, split][0]:,}"
        settings = f"{task.max_tokens:,} tokens, {task.samples} sample{'s' if task.samples > 1 else ''}"
        assert row[4] == (settings if task.test else "training only")
        assert row[3] == {"math": "mathematics", "integer": "integers", "arithmetic": "digits"}[task.kind]


def test_a_benchmark_is_not_trained_on_and_a_training_set_not_tested_on(tmp_path):
    with pytest.raises(UserError, match="math500 is a benchmark and has no training problems: use one of ") as refused:
        load("math500", "train", n=1, seed=0, dir=str(tmp_path))
    assert "simplerl-zoo-hard, gsm8k" in sentence_of(refused)
    with pytest.raises(UserError, match="simplerl-zoo-hard has no test problems: use one of"):
        load("simplerl-zoo-hard", "test", n=1, seed=0, dir=str(tmp_path))


def test_a_tasks_file_may_be_of_any_format_and_must_be_there(tmp_path):
    with pytest.raises(
        UserError,
        match="gsm8k is not in data.dir = .*: put gsm8k-test.jsonl.gz there, or omit --data.dir to load it from the hub.",
    ):
        load("gsm8k", "test", n=1, seed=0, dir=str(tmp_path))
    (tmp_path / "gsm8k-test.csv").write_text('problem,answer\n1+1?,2\n"1,2 or 3?","1,234.0"\nWhy?,because\n')
    loaded = load("gsm8k", "test", n=1, seed=0, dir=str(tmp_path))
    assert [example.answer for example in loaded.examples] == ["2", "1234"]
    assert loaded.skipped == 1, "an integer task cannot be graded by a word"
    with pytest.raises(
        UserError, match="data.dir = nowhere is not a folder: pass the folder that contains gsm8k-test.jsonl.gz"
    ):
        load("gsm8k", "test", n=1, seed=0, dir="nowhere")


def test_names_and_settings_import_neither_torch_nor_datasets():
    code = "import sys, sparse_rl.config; "
    code += "assert not {'torch', 'datasets', 'pyarrow', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("gsm8k", "gsm8k"),
        ("a/b.c/test.jsonl", "test"),
        ("test.v2.jsonl.gz", "test.v2"),
        ("x.parquet", "x"),
        ("openai/gsm8k:main:test", "gsm8k"),
        ("some/where/odd", "odd"),
        ("", ""),
    ],
)
def test_a_source_has_a_short_name(source, name):
    assert name_of(source) == name


# Formats

ROWS = [
    {"prompt": '1, 2\nor "3"?', "answer": "2", "hint": "ünï — \u2028 \N{GRINNING FACE}"},
    {"prompt": " spaced ", "answer": "\\frac{1}{2}", "hint": None},
    {"prompt": "?", "answer": None, "hint": "no gold"},
    {"prompt": "last", "answer": "x,y", "hint": "z"},
]
EXAMPLES = [
    Example(row["prompt"], row["answer"], {"answer": row["answer"], "hint": row["hint"]}) for row in ROWS if row["answer"]
]


def write(path, rows):
    name = path.name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    opened = gzip.open if name.endswith(".gz") else open
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        if ".csv" in name:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet", ".csv", ".csv.gz", ".CSV", ".txt"])
def test_a_table_says_the_same_in_every_format(tmp_path, suffix):
    path = write(tmp_path / f"data{suffix.replace('.CSV', '.csv')}", ROWS)
    path = path.rename(tmp_path / f"data{suffix}")
    loaded = load(str(path), "train", n=1, seed=0)
    assert loaded.examples == EXAMPLES and loaded.skipped == 1
    assert str(path) in loaded.note


MESSAGES = [{"role": "system", "content": ""}, {"role": "user", "content": "1+1=", "name": "me"}]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_messages_survive_a_table_that_fills_in_missing_keys(tmp_path, suffix):
    path = write(tmp_path / f"data{suffix}", [{"prompt": MESSAGES}, {"prompt": MESSAGES[1:]}])
    assert [example.prompt for example in load(str(path), "train", n=1, seed=0).examples] == [MESSAGES, MESSAGES[1:]]


def test_columns_may_be_named(tmp_path):
    path = str(write(tmp_path / "data.jsonl", [{"input": "1+1=", "problem": "p", "target": 2, "answer": "old", "level": 1}]))
    [example] = load(path, "train", n=1, seed=0, prompt_column="input", answer_column="target").examples
    assert example == Example("1+1=", "2", {"answer": "2", "problem": "p", "level": 1})
    for columns, sentence in [
        ({"prompt_column": "inptu"}, "column inptu is missing (found input, problem, target, answer, level): "),
        (
            {"answer_column": "gold"},
            "column gold is missing (found input, problem, target, answer, level): set --data.answer-column.",
        ),
    ]:
        with pytest.raises(UserError) as refused:
            load(path, "train", n=1, seed=0, **columns)
        assert sentence_of(refused).startswith(f"{path}:1: {sentence}")


def test_named_columns_are_those_of_ones_own_data_not_of_a_task(tmp_path):
    write(tmp_path / "math500.jsonl.gz", [{"problem": "1+1=", "answer": "2"}])
    data = DataConfig(test="math500", dir=str(tmp_path), prompt_column="input", answer_column="target")
    [example] = load(data.test, "test", n=1, seed=0, **data.reading).examples
    assert (example.prompt, example.answer) == ("1+1=", "2")


def test_answers_of_a_table_may_be_numbers(tmp_path):
    table = pa.table({"prompt": ["a", "b", "c"], "answer": pa.array([1.5, float("nan"), None])})
    pq.write_table(table, tmp_path / "data.parquet")
    loaded = load(str(tmp_path / "data.parquet"), "train", n=1, seed=0)
    assert [example.answer for example in loaded.examples] == ["1.5"] and loaded.skipped == 2


# What cannot be read


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.csv", b'prompt,answer\nx,1\n\n"y\nz",2\nw,3,4\n', "a.csv:6: the row has 3 cells, but the header has 2 columns"),
        ("a.csv", b"prompt,answer\nx\n", "a.csv:2: the row has 1 cell, but the header has 2 columns"),
        ("a.csv", b'prompt,answer\nx,1\n"y,2\n', "a.csv:3: the row is not valid CSV"),
        ("a.csv", b"prompt,prompt\nx,1\n", "a.csv:1: the column names are prompt, prompt"),
        (
            "a.csv",
            b"prompt,answer\nx,1\n\xff,2\n",
            "a.csv:3: the file is not UTF-8 text",
        ),
        ("a.csv", b"text,answer\nx,1\n", "a.csv:2: no column is named prompt, problem or question (found text, answer)"),
        ("a.csv", b"prompt,answer\nx,1\n,2\n", "a.csv:3: prompt is empty"),
        ("a.csv", b"prompt,answer\n", "a.csv has no rows: write one row per problem, with a prompt and an answer."),
        ("a.tsv", b"prompt\tanswer\nx\t1\n", "a.tsv holds tab-separated values, which are not supported: save it as .csv."),
        ("a.TSV.gz", b"", "a.TSV.gz holds tab-separated values, which are not supported: save it as .csv."),
        ("a.csv", b"", "a.csv has no rows: write one row per problem, with a prompt and an answer."),
        ("a.parquet", b"PAR1 nonsense", "a.parquet is an incomplete or damaged Parquet file"),
        ("a.jsonl.gz", b"not gzip", "a.jsonl.gz is an incomplete or damaged gzip file"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"prompt": "x"}' * 99, mtime=0)[:-9],
            "a.jsonl.gz is an incomplete or damaged gzip file",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b"x" * 99, mtime=0)[:10] + b"\xff" * 30,
            "a.jsonl.gz is an incomplete or damaged gzip file",
        ),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "x"}\n{"prompt": ', mtime=0), "a.jsonl.gz:2: the line is not valid JSON"),
        ("a.jsonl", gzip.compress(b'{"prompt": "x"}', mtime=0), "a.jsonl:1: the line is not UTF-8 text: decompress"),
    ],
)
def test_a_broken_file_is_refused_by_its_name_and_line(tmp_path, monkeypatch, name, content, sentence):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        load(name, "train", n=1, seed=0)
    assert sentence_of(refused).startswith(sentence)


def test_a_row_of_a_table_is_named_by_its_number(tmp_path):
    path = write(tmp_path / "a.parquet", [{"prompt": "x"}, {"prompt": " "}])
    with pytest.raises(UserError) as refused:
        load(str(path), "train", n=1, seed=0)
    assert sentence_of(refused) == f"{path}, row 2: prompt is empty: write the problem, or delete the row."


def test_a_long_cell_is_read(tmp_path):
    path = write(tmp_path / "a.csv", [{"prompt": "x" * 200_000}])
    assert len(load(str(path), "train", n=1, seed=0).examples[0].prompt) == 200_000
    assert csv.field_size_limit() == 131_072


# The command


def test_train_and_its_dry_run_say_how_many_rows_they_leave_out(world, tmp_path, capsys):
    rows = [{"prompt": f"{number}:4{number}+85=", "answer": "1" if number else ""} for number in range(4)]
    problems, held_out = write(tmp_path / "mine.csv", rows), write(tmp_path / "test.jsonl.gz", rows[:3])
    flags = ["--data.train", str(problems), "--data.test", str(held_out), "--eval.problems", "4", "--steps", "1"]
    train(world, tmp_path / "run", *flags, "--dry-run")
    note = "rows of {} has no answer and is skipped ({}:{})."
    assert "1 of 4 " + note.format(problems, problems, 2) in capsys.readouterr().out
    train(world, tmp_path / "run", *flags, "--method", "dense")
    out = capsys.readouterr().out
    assert "1 of 4 " + note.format(problems, problems, 2) in out
    assert "1 of 3 " + note.format(held_out, held_out, 1) in out
    assert "eval/test/pass@1" in out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--data.train", "gsm8"], "No task or file is named gsm8: did you mean gsm8k?"),
        (["--data.train", "no/such.jsonl"], f"No task or file is named no/such.jsonl in {os.getcwd()}: pass a task"),
        (["--data.train", "gsm8k", "--data.dir", "{tmp}"], "gsm8k is not in data.dir = {tmp}: put gsm8k-train.jsonl.gz there"),
        (
            ["--data.train", "{tmp}/a.csv"],
            "{tmp}/a.csv:2: no column is named prompt, problem or question (found text, answer): ",
        ),
        (["--data.train", "minerva"], "minerva is a benchmark and has no training problems: use one of "),
    ],
)
def test_a_run_without_data_ends_in_one_sentence(world, tmp_path, capsys, flags, sentence):
    write(tmp_path / "a.csv", [{"text": "x", "answer": "1"}])
    flags = [flag.format(tmp=tmp_path) for flag in flags]
    assert refused(capsys, *arguments(world, tmp_path / "run", *flags)).startswith(sentence.format(tmp=tmp_path))
    assert not (tmp_path / "run").exists()


# The hub


@pytest.fixture
def hub(monkeypatch):
    """A hub that holds what the test puts in: {(id, configuration, split, file): rows}; nothing leaves the machine."""
    held = {}

    def load_dataset(id, config, *, split, data_files=None):
        return datasets.Dataset.from_list(held[id, config, split, data_files[split] if data_files else None])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, id, timeout: None)
    return held


def test_a_task_comes_from_the_hub_in_the_form_of_its_file(hub):
    hub["openai/gsm8k", "main", "test", None] = [
        {"question": "How many?", "answer": "She has 2*617=<<2*617=1234>>1234.\n#### 1,234"},
        {"question": "How much?", "answer": "Nobody knows.\n#### much"},
    ]
    loaded = load("gsm8k", "test", n=1, seed=0)
    assert loaded.examples == [Example("How many?", "1234", {"answer": "1234"}, PLACEHOLDER + TASKS["gsm8k"].instruction)]
    assert loaded.skipped == 1 and "openai/gsm8k main test, row 2" in loaded.note
    hub["Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train", None] = [
        {"id": 1606, "question": "Find n.", "final_answer": ["$2n-2$"], "unit": None, "error": None},
        {"id": 1607, "question": "Pay!", "final_answer": ["\\$5"], "unit": "cm", "error": None},
    ]
    first, second = load("olympiadbench", "test", n=1, seed=0).examples
    assert first.columns == {"answer": "2n-2", "id": 1606, "unit": None, "error": None}
    assert (second.answer, second.columns["unit"]) == ("\\$5", "cm")
    file = "simplelr_qwen_level3to5/train.parquet"
    hub["hkust-nlp/SimpleRL-Zoo-Data", None, "train", file] = [
        {"prompt": [{"role": "user", "content": "…"}], "question": "Why?", "gt_answer": "x", "answer": "x", "level": 3}
    ]
    [example] = load("simplerl-zoo-hard", "train", n=1, seed=0).examples
    assert (example.prompt, example.columns) == ("Why?", {"answer": "x", "level": 3})


def test_a_data_set_of_the_hub_is_read_like_a_file(hub):
    hub["me/mine", None, "train", None] = [{"prompt": MESSAGES, "answer": 3, "extra": [1]}]
    hub["me/mine", "big", "validation", None] = [{"question": "x", "answer": "3"}]
    assert load("me/mine", "train", n=1, seed=0).examples == [Example(MESSAGES, "3", {"answer": "3", "extra": [1]})]
    assert load("me/mine:big:validation", "test", n=1, seed=0).examples == [Example("x", "3", {"answer": "3"})]


def test_a_split_that_is_not_there_is_refused(hub, monkeypatch):
    def load_dataset(*args, **options):
        raise ValueError("Unknown split \"test\". Should be one of ['train'].")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError) as refused:
        load("me/mine", "test", n=1, seed=0)
    assert "Should be one of ['train']): choose another configuration or split as me/mine:conf" in sentence_of(refused)


def test_a_task_whose_columns_have_changed_says_what_there_is(hub):
    hub["HuggingFaceH4/MATH-500", None, "test", None] = [{"text": "?", "answer": "1"}]
    with pytest.raises(UserError) as refused:
        load("math500", "test", n=1, seed=0)
    assert "row 1: column problem is missing (found text, answer): " in sentence_of(refused) and "--data.dir" in sentence_of(
        refused
    )


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ("gsm8k", "put gsm8k-test.jsonl.gz into a folder and pass the folder with --data.dir."),
        ("me/mine", "use a local file (for tasks, a folder with --data.dir)."),
    ],
)
def test_a_hub_that_cannot_be_reached_says_what_to_do_at_once(monkeypatch, tmp_path, source, remedy):
    def dataset_info(self, id, timeout):
        raise ConnectionError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError) as refused:
        load(source, "test", n=1, seed=0)
    assert sentence_of(refused).startswith("The hub cannot be reached for ")
    assert f"(Name or service not known): check the network connection, or {remedy}" in str(refused.value).replace(
        "[Errno -2] ", ""
    )
    assert datasets.config.HF_HUB_OFFLINE is False, "the next data set is looked for on the hub again"


def test_a_data_set_the_hub_does_not_have_is_refused(hub, monkeypatch):
    def load_dataset(*args, **options):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'me/mine' doesn't exist on the Hub or cannot be accessed.")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError) as refused:
        load("me/mine", "train", n=1, seed=0)
    assert sentence_of(refused).startswith(
        "Hub dataset me/mine does not exist or is private: check its name, or log in with `hf auth login`."
    )
