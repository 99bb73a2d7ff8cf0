"""The report says what a run folder holds, shows what it can of a broken one, and shows hostile text as text."""

import base64
import gzip
import html.parser
import http.client
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

import small_runs
from report_runs import HOSTILE, NEVER, big_run, curve, other_seed, rollout, write_rollouts, write_run
from sparse_rl.cli import main
from sparse_rl.monitor.ratios import BINS, HIGH, LOW
from sparse_rl.report import live, page
from sparse_rl.report.curve import Curve
from sparse_rl.report.document import ReportSource
from sparse_rl.report.figures import quantile
from sparse_rl.report.glossary import OTHER, SECTIONS
from sparse_rl.report.pieces import Pieces, byte_alphabet
from sparse_rl.report.rollouts import Packer, spread
from sparse_rl.report.runs import read
from sparse_rl.report.serve import make_server
from sparse_rl.report.verdict import verdict
from sparse_rl.text import printable


class Parsed(html.parser.HTMLParser):
    """What a browser would find in a page: its elements, and the data block."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.blocks, self.title = [], [], {}, ""
        self._inside = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *each) for each in attributes]
        self._inside = tag, dict(attributes).get("id")

    def handle_data(self, text):
        if self._inside == ("title", None):
            self.title += text
        elif self._inside and self._inside[0] == "script" and self._inside[1]:
            self.blocks[self._inside[1]] = self.blocks.get(self._inside[1], "") + text

    def handle_endtag(self, tag):
        self._inside = None

    @property
    def data(self):
        return json.loads(self.blocks["data"])


def parsed(file):
    return Parsed(file.read_text(encoding="utf-8"))


def document(*paths):
    return ReportSource([Path(path) for path in paths]).document()[0]


# A real run


def test_train_leaves_a_page_that_needs_nothing_else(looked_at):
    for file in (looked_at / "report.html", looked_at / "dense/report.html", looked_at / "sparse_rl/report.html"):
        found = parsed(file)
        loaded = [
            each
            for each in found.attributes
            if each[1] in ("src", "href", "action") and not each[2].startswith(("#", "data:"))
        ]
        assert not loaded and "iframe" not in found.tags
        policy = next(value for tag, name, value in found.attributes if tag == "meta" and name == "content")
        assert policy.startswith("default-src 'none'") and "connect-src" not in policy
    both = parsed(looked_at / "report.html").data
    assert [run["method"] for run in both["runs"]] == ["dense", "sparse_rl"]
    assert "method" in both["differs"] and "steps" not in both["differs"]


def test_every_metric_of_a_real_run_is_shown_with_a_sentence(looked_at):
    shown = document(looked_at)
    titles = [section["title"] for section in shown["sections"]]
    assert titles == list(SECTIONS)[: len(titles)] and OTHER not in titles
    sentences = {key: text for section in shown["sections"] for key, text in section["metrics"]}
    written = {key for name in ("dense", "sparse_rl") for row in small_runs.metrics(looked_at / name) for key in row} - {
        "step"
    }
    assert sentences.keys() == written
    assert sentences["sparse/ess"] == SECTIONS["Are sampler and learner close?"]["sparse/ess"]
    for run, name in zip(shown["runs"], ("dense", "sparse_rl"), strict=True):
        for row in small_runs.metrics(looked_at / name):
            place = run["steps"].index(row["step"])
            for key in row.keys() - {"step"}:
                assert run["columns"][key][place] == pytest.approx(row[key], rel=1e-5)


def test_captions_are_sentences_for_each_metric_of_the_page():
    captions = [sentence for sentences in SECTIONS.values() for sentence in sentences.values()]
    assert all(re.fullmatch(r"[A-Z0-9].+\.", sentence) for sentence in captions)
    parts = (Path(__file__).parents[1] / "docs/metrics.md").read_text().split("\n## ")[1:]
    listed = {
        part.partition("\n")[0]: [
            key for row in part.splitlines() if row.startswith("| `") for key in re.findall(r"`([^`]+)`", row.split(" | ")[0])
        ]
        for part in parts
    }
    assert listed == {title: [key for key in keys if not key.startswith("memory/")] for title, keys in SECTIONS.items()}


def test_a_chunk_holds_what_was_stored(looked_at):
    run = read(looked_at / "sparse_rl", "run")
    source = ReportSource([run.path])
    step, file = next(iter(run.rollout_files.items()))
    chunk = source.packer(run).all(run.rollout_files)[0][step]
    raw = gzip.decompress(chunk.data)
    length = int.from_bytes(raw[:4], "little")
    head, body = json.loads(raw[4 : 4 + length]), raw[4 + length :]

    def array(place):
        kind, start, count = place
        return np.frombuffer(body, np.dtype(kind).newbyteorder("<"), count, start)

    import pyarrow.parquet as pq

    rows = pq.read_table(file).to_pylist()
    assert chunk.rollouts == len(rows) and chunk.rejected == sum(row["rejected"] for row in rows) > 0
    assert chunk.traced == sum(row["evicted_at"] is not None for row in rows) == 2
    for row, entry in zip(rows, head["rollouts"], strict=True):
        ids = np.array(head["ids"])[array(entry["tokens"])]
        assert ids.tolist() == row["prompt_tokens"] + row["tokens"]
        assert "".join(head["pieces"][place] for place in array(entry["tokens"])).startswith(f"<bos>{row['prompt']}")
        log_xi = np.array(row["dense_logprobs"]) - np.array(row["sampler_logprobs"])
        assert array(entry["log_xi"]) / 1000 == pytest.approx(log_xi, abs=1e-3)
        below = row["rejected"] and log_xi.min() < np.log(1e-4)
        assert entry["cause"] == (int((log_xi < np.log(1e-4)).argmax()) if below else None)
        if row["evicted_at"] is not None:
            times = [NEVER if time is None else time for time in entry["times"]]
            last = len(ids)
            expected = [time if time <= last else NEVER for time in row["evicted_at"]]
            assert np.array(times)[array(entry["evicted"])].tolist() == expected
    assert any(entry["cause"] is not None for entry in head["rollouts"])


def test_a_report_that_fails_never_fails_the_run(world, tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(page, "write", full)
    small_runs.train(world, tmp_path / "run")
    assert (tmp_path / "run/model/model.safetensors").is_file()
    warnings = [line for line in capsys.readouterr().out.splitlines() if "report could not" in line]
    assert len(warnings) == 1 and "No space left" in warnings[0]


def test_two_writers_of_one_page_do_not_disturb_each_other(tmp_path, monkeypatch):
    run, replace = write_run(tmp_path / "run", curve([0.5])), page.os.replace

    def late(partial, file):
        monkeypatch.setattr(page.os, "replace", replace)
        page.write(ReportSource([run]), file)  # the other one, from beginning to end
        replace(partial, file)

    monkeypatch.setattr(page.os, "replace", late)
    page.write(ReportSource([run]), tmp_path / "page.html")
    assert {file.name for file in tmp_path.iterdir()} == {"run", "page.html"}


def test_refreshing_takes_little_of_a_runs_time(tmp_path, monkeypatch):
    clock, written = [0.0], []
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])

    def slow(*args):
        clock[0] += 10
        written.append(clock[0])

    monkeypatch.setattr(page, "write", slow)
    report = live.LiveReport(tmp_path, None, print)
    for _ in range(2000):
        clock[0] += 1
        report.refresh()
    assert len(written) >= 2 and len(written) * 10 <= 0.03 * clock[0]


def test_reading_runs_loads_no_torch(looked_at, tmp_path):
    arguments = ["report", str(looked_at), "--out", str(tmp_path / "page.html")]
    code = f"import sys; from sparse_rl.cli import main; main({arguments!r}); assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert (tmp_path / "page.html").stat().st_size > 50_000


# In words


@pytest.mark.parametrize(
    ("rows", "state", "words"),
    [
        (curve(np.linspace(0.1, 0.8, 20)), "learned", ["Collapse: no", "0.137 in the first 3 steps, 0.763 in the last 3"]),
        (
            curve(
                [*np.linspace(0.1, 0.8, 12), *[0.05] * 8], sparse__mismatch_k3=np.geomspace(1e-3, 2, 20), sparse__xi_p05=0.5
            ),
            "collapsed",
            ["Collapse: yes", "around step 11 to 0.05", "drifted apart", "Mismatch of sampler and learner: k3 "],
        ),
        (
            curve([0.4] * 20, policy__entropy=np.geomspace(1, 0.01, 20)),
            "collapsed",
            ["Collapse: yes, of the entropy", "nearly identical"],
        ),
        (
            curve([0.31, 0.29, 0.3, 0.3] * 5, reward__zero_std_groups=1),
            "flat",
            ["No clear gain", "100% of the groups gave no signal because their rewards were equal"],
        ),
        (curve([0.3, 0.2] * 10, sparse__rejection_rate=0.6), "flat", ["60% of rollouts were rejected", "Rejection: 60.0%"]),
        (
            curve(np.linspace(0.2, 0.99, 20), policy__entropy=np.geomspace(1, 0.01, 20)),
            "learned",  # it is solved: nothing is left to try
            ["Collapse: no", "while the entropy fell from"],
        ),
        (
            curve(np.linspace(0.1, 0.8, 20), response__mean_tokens=np.linspace(240, 20, 20), response__truncated=0.0),
            "learned",
            ["Signs: answers shrank (234 → 32 tokens)."],
        ),
        (
            curve(
                np.linspace(0.1, 0.8, 20), kv__token_savings=0.2, kv__peak_bytes=3 * 2**20, kv__dense_bytes=[2 * 2**20] * 20
            ),
            "learned",
            [
                "3.0 MiB were allocated; a dense cache would have held 2.0 MiB. No memory was saved. Saving memory needs a smaller kv.budget, fewer rollout.slots, or longer answers."
            ],
        ),
        (
            curve(
                [0.3] * 20, kv__token_savings=0, kv__peak_bytes=2**20, kv__dense_bytes=[3 * 2**20] * 20
            ),  # all keys in 4 bits
            "flat",
            [
                "Savings: bytes, but no tokens. Every token stayed in the cache. 1.0 MiB were allocated; a dense cache would have held 3.0 MiB."
            ],
        ),
        (
            curve([0.3] * 20, kv__token_savings=0, kv__peak_bytes=3 * 2**20, kv__dense_bytes=[3 * 2**20] * 20),
            "flat",
            ["Savings: none. Every token stayed in the cache. 3.0 MiB were allocated"],
        ),
        (curve([0.1, 0.2]), "early", ["Too early to judge"]),
        ([], "empty", ["No metrics yet: metrics.jsonl is empty."]),
        (
            [{"step": 0, "eval/a/pass@1": 0.5, "eval/a/pass@1_low": 0.4, "eval/a/pass@1_high": 0.6}],
            "early",
            ["50.0% [40.0%, 60.0%]"],
        ),
    ],
)
def test_the_headline_says_whether_a_run_went_wrong_and_why(rows, state, words, tmp_path):
    judged = verdict(read(write_run(tmp_path / "run", rows), "run"))
    said = " ".join(judged.sentences)
    assert judged.state == state, said
    for each in words:
        assert each in said


def test_a_held_out_score_that_is_lost_is_a_collapse(tmp_path):
    """Also where the reward fell at the first update, and has been flat since."""
    rows = curve([0.3] + [0.0] * 13, policy__entropy=[0.04] + [0.14] * 13)
    for row, mean in ((rows[0], 0.4), (rows[-1], 0.0)):
        row |= {"eval/sums/pass@1": mean, "eval/sums/pass@1_low": max(mean - 0.1, 0), "eval/sums/pass@1_high": mean + 0.1}
    shown = document(write_run(tmp_path / "run", rows))
    assert shown["runs"][0]["sentences"][0].startswith("Collapse: yes. The held-out score fell from 40.0% [30.0%, 50.0%] to ")
    assert shown["summary"].endswith("run: collapsed, answers became noise (entropy 0.04 → 0.14).")


def test_a_cache_that_was_too_small_from_the_start_is_reported_with_figures(tmp_path):
    def judged(name, sparse, rejected):
        start = {"step": 0}
        for key, mean in (("pass@1", 0.4), ("pass@1_sparse", sparse)):
            start |= {f"eval/sums/{key}{end}": mean + add for end, add in (("", 0), ("_low", -0.05), ("_high", 0.05))}
        rows = curve([0.3, 0.31] * 5, sparse__rejection_rate=[rejected] + [0.0] * 9)
        return verdict(read(write_run(tmp_path / name, [start, *rows]), "run"))

    both = judged("both", 0.1, 0.75)
    assert both.signs[0] == "the sampler's cache was too small from the start"
    assert (
        "Sampler's cache: too small from the start (the model scores 10.0% [5.0%, 15.0%] on sums with this cache and 40.0% [35.0%, 45.0%] with a dense cache and 75% of the rollouts of step 1 were rejected). Raise kv.budget before changing anything else."
    ) in both.sentences
    assert "(75% of the rollouts" in " ".join(judged("rejected", 0.38, 0.75).sentences)
    assert "too small" not in " ".join(judged("fine", 0.33, 0.4).sentences)


@pytest.mark.parametrize(
    ("first", "equal", "words"),
    [
        (0.5, 1.0, "because the rewards of each group were equal. Try: lower optimizer.lr, from"),
        (0.0, 1.0, "because the rewards of each group were equal. Try: use easier or harder problems"),
        (
            0.5,
            0.2,
            "because all rollouts with a signal were rejected or not finite. Try: if all rollouts are rejected, raise kv.budget",
        ),
    ],
)
def test_updates_that_were_skipped_are_said_with_since_when_and_what_to_try(first, equal, words, tmp_path):
    count = {"response/mean_tokens": 10, "perf/rollout_s": 1, "perf/rollout_tokens_per_s": 480, "reward/std": 0.5}
    learns = {"reward/mean": first, "policy/loss": 0.1, "policy/skipped_updates": 0, "reward/zero_std_groups": 0, **count}
    idle = {"reward/mean": 0, "policy/skipped_updates": 1, "reward/zero_std_groups": equal, **count}

    def updates(name, *rows):
        run = write_run(tmp_path / name, [{"step": step, **row} for step, row in enumerate(rows, 1)])
        return [said for said in verdict(read(run, "run")).sentences if said.startswith("Updates:")]

    (said,) = updates("idle", learns, learns, idle, idle, idle, idle)
    assert said.startswith(f"Updates: skipped since step 3, {words}") and said.endswith(".")
    assert "gave no signal" not in " ".join(verdict(read(tmp_path / "idle", "run")).sentences)  # once is enough
    assert not updates("short", learns, learns, learns, learns, idle, idle)
    assert not updates("over", learns, idle, idle, idle, idle, learns)


def test_the_best_window_is_found_in_one_pass(tmp_path):
    values = np.random.default_rng(0).random(60_000)
    run = read(write_run(tmp_path / "run", []), "run")
    run.rows = curve(values.tolist())
    found, started = Curve(run, "reward/mean"), time.process_time()
    step, best = found.best
    assert time.process_time() - started < 1  # a mean of 6,000 for each of 54,000 windows takes several
    means = np.convolve(values, np.full(found.window, 1 / found.window), "valid")
    assert step == means.argmax() + found.window // 2 + 1 and best == pytest.approx(means.max())
    run.rows = run.rows[:2]
    assert Curve(run, "reward/mean").best == (2, pytest.approx(values[:2].mean()))


def test_noise_alone_is_no_collapse(tmp_path):
    draw = np.random.default_rng(0)
    states = []
    for number in range(40):
        rewards = np.clip(0.5 + 0.1 * draw.standard_normal(30), 0, 1)
        states.append(verdict(read(write_run(tmp_path / str(number), curve(rewards.tolist())), "run")).state)
    assert "collapsed" not in states and states.count("flat") >= 36
    for number in range(200):  # a problem so hard that one of 25 answers is right, by luck more at one time than at another
        rewards = draw.binomial(48, 0.04, 40) / 48
        states.append(verdict(read(write_run(tmp_path / f"hard-{number}", curve(rewards.tolist())), "run")).state)
    assert states.count("collapsed") <= 4 and states.count("flat") >= 220


def test_held_out_scores_are_told_with_their_intervals(tmp_path):
    rows = curve([0.3, 0.35] * 10, policy__entropy=np.linspace(0.04, 0.12, 20))
    for row, mean in ((rows[0], 0.2), (rows[-1], 0.6)):
        row |= {"eval/sums/pass@1": mean, "eval/sums/pass@1_low": max(mean - 0.1, 0), "eval/sums/pass@1_high": mean + 0.1}
    shown = document(write_run(tmp_path / "run", rows))
    assert shown["summary"].endswith("run: learned.")  # and its answers are not called noise
    (run,) = shown["runs"]
    assert (
        "Held-out sums with a dense cache: 20.0% [10.0%, 30.0%] before, 60.0% [50.0%, 70.0%] after (clearly better)."
        in run["sentences"]
    )
    assert run["scores"][0]["apart"] == 1 and run["state"] == "learned"
    assert "Collapse: no. The run learned: the held-out score rose from 20.0% [10.0%, 30.0%] to 60.0%" in run["sentences"][0]


# Several runs


def test_runs_that_differ_only_in_the_seed_are_one_group(looked_at, tmp_path):
    shutil.copytree(looked_at / "sparse_rl", tmp_path / "a")
    other_seed(looked_at / "sparse_rl", tmp_path / "b", 1)
    shutil.copytree(looked_at / "dense", tmp_path / "c")
    shown = document(tmp_path)
    assert [group["runs"] for group in shown["groups"]] == [[0, 1], [2]]
    assert shown["groups"][0]["name"] == "sparse_rl, 2 seeds" and shown["groups"][1]["name"] == "c"
    assert set(shown["differs"]) >= {"seed", "method"}
    shutil.copytree(tmp_path / "a", tmp_path / "d")  # the same seed again is another run, not another seed
    assert [group["runs"] for group in document(tmp_path)["groups"]] == [[0, 1], [2], [3]]


def test_alerts_stand_in_the_page(tmp_path):
    rows = curve([0.3] * 6, sparse__xi_p05=0.4)
    alert = document(write_run(tmp_path / "run", rows))["runs"][0]["alerts"]
    assert [each["name"] for each in alert] == ["xi_p05"] and alert[0]["step"] == 3 and alert[0]["remedy"]


# What is broken


def test_a_half_written_run_is_shown_with_what_is_missing(looked_at, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(looked_at / "sparse_rl", run)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    broken = [
        lines[0],
        "not json",
        '{"step": "one"}',
        "[1]",
        lines[1],
        '{"step": 9, "reward/mean": NaN, "x": true}',
        lines[2][:100],
    ]
    (run / "metrics.jsonl").write_text("\n".join(broken))
    (run / "config.toml").write_text("method = [")
    first, *_ = sorted((run / "rollouts").iterdir())
    first.write_bytes(first.read_bytes()[:200])
    (run / "rollouts/step-7.parquet").write_bytes(b"")
    (run / "xi.jsonl").write_text('{"step": 1, "counts": [1]}\n')
    shutil.rmtree(run / "model")
    (shown,) = document(run)["runs"]
    notes = " ".join(shown["notes"])
    assert "The last line of metrics.jsonl is incomplete: the run is still writing it, or was killed." in notes
    assert "skipped 3 lines that cannot be read (line 2, 3, 4)" in notes
    assert "config.toml cannot be read" in notes
    assert "step-1.parquet cannot be read" in notes and "step-7.parquet cannot be read" in notes
    assert "xi.jsonl: skipped 1 line that cannot be read." in notes
    assert "tokenizer is not on this disk" in notes
    assert shown["steps"] == [0, 1, 9] and [step for step, *_ in shown["rollouts"]] == [2]


def test_a_run_of_another_version_is_shown(tmp_path):
    rows = [{"step": 1, "reward/mean": 0.5, "brand/new": 3.0, "text": "no number"}]
    run = write_run(tmp_path / "run", rows, 'method = "sparse_rl"\nunheard = 1\n[kv]\nbudget = 64\n')
    write_rollouts(run, 1, [rollout(1, [4, 5])])
    import pyarrow.parquet as pq

    file = run / "rollouts/step-1.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["dense_logprobs", "evicted_at", "answer", "rejected"]), file)
    shown = document(run)
    (only,) = shown["runs"]
    assert any("another version" in note and "unheard" in note for note in only["notes"])
    assert shown["sections"][-1]["title"] == OTHER and shown["sections"][-1]["metrics"][0][0] == "brand/new"
    assert only["config"]["kv.budget"] == "64" and only["rollouts"] == [[1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("config", "veto"), [('veto = "none"', 1e-4), ("veto = nan", 1e-4), ("veto = 0.01", 0.01), ('preset = "tis"', 0)]
)
def test_the_veto_of_another_version(config, veto, tmp_path):
    run = write_run(tmp_path / "run", curve([0.5]), f'method = "sparse_rl"\nunheard = 1\n[correction]\n{config}\n')
    assert document(run)["runs"][0]["veto"] == veto


@pytest.mark.parametrize("value", [1e299, -1e299, 1e-320, 0.0])
def test_numbers_of_any_size_are_shown(value, tmp_path):
    keys = [key for key in runs_keys() if not key.startswith("eval/")]
    rows = [{"step": step, **dict.fromkeys(keys, value if step % 3 else -value)} for step in range(1, 13)]
    assert document(write_run(tmp_path / "run", rows))["runs"][0]["last"] == 12


def runs_keys():
    return [key for keys in SECTIONS.values() for key in keys]


def test_a_folder_that_is_no_run_is_named_and_the_others_shown(looked_at, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    main(
        [
            "report",
            str(looked_at / "dense"),
            str(tmp_path / "empty"),
            str(tmp_path / "gone"),
            "--out",
            str(tmp_path / "page.html"),
        ]
    )
    out = capsys.readouterr().out
    assert "empty is not a run" in out and "gone does not exist" in out and "page.html" in out
    assert len(parsed(tmp_path / "page.html").data["runs"]) == 1


def test_mistakes_end_in_a_sentence(looked_at, tmp_path, capsys):
    said = [
        small_runs.refused(capsys, "report", str(tmp_path)),
        small_runs.refused(capsys, "report", str(tmp_path / "nowhere")),
        small_runs.refused(capsys, "report", str(looked_at), "--out", str(tmp_path / "no/such/page.html")),
        small_runs.refused(capsys, "report", str(looked_at), "--serve", "--out", "page.html"),
        small_runs.refused(capsys, "report", str(looked_at), "--serve", "--port", "99999"),
    ]
    for words, sentence in zip(("not a run", "does not exist", "--out", "omit --out", "--port"), said, strict=True):
        assert words in sentence
    assert not list(tmp_path.iterdir())


def test_figures_without_matplotlib_name_the_remedy(looked_at, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'sparse-rl[figures]'" in small_runs.refused(
        capsys, "report", str(looked_at), "--figures", str(tmp_path / "figures")
    )


# Hostile text


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    """Every text that a run folder can hold, hostile: names, keys, values, prompts, answers and tokens, one of 1 MB."""
    run = tmp_path_factory.mktemp("hostile") / "<script>alert(2)<\u202e\x1b[2J"
    rows = [{"step": step, "reward/mean": 0.5, **dict.fromkeys(HOSTILE, 1.0)} for step in (1, 2, 3)]
    config = "".join(f"{json.dumps(str(number))} = {json.dumps(text)}\n" for number, text in enumerate(HOSTILE))
    write_run(run, rows, f'method = "</script><script>alert(3)</script>"\n{config}'.replace("\\u007f", "\\u007F"))
    texts = [*HOSTILE, "x" * 2**20]
    vocabulary = {"<pad>": 0} | {text: number for number, text in enumerate(texts, 1)}
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    (run / "model").mkdir()
    Tokenizer(WordLevel(vocabulary, "<pad>")).save(str(run / "model/tokenizer.json"))
    ids = list(vocabulary.values())
    table = [
        rollout(1, ids, prompt=ids, prompt_=None, answer=text, finish=text, text=text) | {"prompt": text} for text in texts
    ]
    write_rollouts(run, 1, [{key: value for key, value in row.items() if key != "prompt_"} for row in table])
    return run


def test_hostile_text_is_text_in_the_page(hostile_run, tmp_path):
    page.write(ReportSource([hostile_run]), tmp_path / "page.html")
    raw = (tmp_path / "page.html").read_bytes()
    found = Parsed(raw.decode("utf-8"))
    assert found.tags.count("script") == 3 == raw.lower().count(b"</script>")
    assert not [name for _, name, _ in found.attributes if name.startswith("on")] and "img" not in found.tags
    assert "alert(2)" in found.title and "\x1b" not in found.title and "\u202e" not in found.title
    assert b"\x1b" not in raw and b"\0" not in raw and len(raw) < 2_000_000
    assert printable("\uffff\ufffe") == "\\uffff\\ufffe"  # which XML does not know
    packed = gzip.decompress(base64.b64decode(found.blocks["rollouts-0-1"]))
    assert (
        max(len(row["answer"]) for row in json.loads(packed[4 : 4 + int.from_bytes(packed[:4], "little")])["rollouts"])
        < 21_000
    )
    shown = found.data
    keys = {key for section in shown["sections"] for key, _ in section["metrics"]}
    assert "</script><script>alert(1)</script>" in keys and "right \\u202eto left\\u202c \\u2066" in keys


def test_hostile_text_does_not_drive_the_terminal(hostile_run, tmp_path, capsys):
    main(["report", str(hostile_run), "--out", str(tmp_path / "page.html"), "--figures", str(tmp_path / "figures")])
    out = capsys.readouterr().out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", out)
    assert "<script>alert(2)" in out


def test_hostile_text_is_text_in_figures(hostile_run, tmp_path):
    main(["report", str(hostile_run), "--figures", str(tmp_path / "figures")])
    drawn = list((tmp_path / "figures").glob("*.svg"))
    assert drawn
    for file in drawn:
        tags = {element.tag.rpartition("}")[2] for element in ET.parse(file).iter()}
        assert not tags & {"script", "foreignObject", "a", "image"}


def test_figures_are_written_as_svg_and_png(looked_at, tmp_path, capsys):
    main(["report", str(looked_at), "--figures", str(tmp_path)])
    names = {file.name for file in tmp_path.iterdir()}
    assert {
        f"{name}.{kind}" for name in ("reward", "kv-memory", "xi-p05", "xi-2", "time-1") for kind in ("svg", "png")
    } <= names
    assert {"eval-arithmetic-pass1.svg", "eval-arithmetic-pass1_sparse.png"} <= names
    assert all(file.stat().st_size > 2000 for file in tmp_path.iterdir())


# Tokens


class Vocabulary:
    """A stand-in for `tokenizers.Tokenizer`."""

    def __init__(self, tokens, decoder):
        self.tokens = tokens
        self.decoder = type("Decoder", (), {"__getstate__": lambda self: decoder})()

    def id_to_token(self, token):
        return self.tokens[token] if token < len(self.tokens) else None


def test_tokens_that_are_parts_of_a_character_stay_bytes():
    letters = {code: letter for letter, code in byte_alphabet().items()}
    assert sorted(byte_alphabet().values()) == list(range(256))
    word = "".join(letters[code] for code in " Zoë".encode())
    half = letters["€".encode()[0]]
    pieces = Pieces(Vocabulary([word, half, "<|end|>", "日"], b'{"type":"ByteLevel"}'))
    assert pieces.of([0, 1, 2, 3, 99]) == [" Zoë", [0xE2], "<|end|>", "日", "⟨99⟩"]
    pieces = Pieces(Vocabulary(["\u2581the", "<0xE2>", "<0x0A>"], b'{"type":"Metaspace"}'))
    assert pieces.of([0, 1, 2]) == [" the", [0xE2], "\n"]


def test_what_does_not_fit_is_left_out_evenly(tmp_path):
    assert list(spread([1, 2, 3, 4, 5, 6, 7, 8, 9])) == [9, 1, 5, 3, 7, 2, 4, 6, 8]
    files = {step: write_rollouts(tmp_path, step, [rollout(step, range(2000))]) for step in range(1, 10)}
    packer = Packer(None, 1e-4)
    whole, notes = packer.all(files)
    assert list(whole) == list(files) and not notes
    some, notes = packer.all(files, budget_bytes=int(4.5 * len(whole[1].data)))
    assert list(some) == [1, 3, 5, 9] and "5 of 9 steps" in notes[0]
    assert packer._packed.keys() == {files[step] for step in some}  # a long run does not fill the memory


def test_percentiles_from_counts_are_those_of_the_ratios():
    draw = np.random.default_rng(0)
    log10_xi = np.clip(draw.standard_normal(20_000) - 1, LOW, HIGH - 1e-9)
    counts = np.histogram(log10_xi, BINS, (LOW, HIGH))[0].tolist()
    for share in (0.001, 0.05, 0.5, 0.95):
        assert np.log10(quantile(counts, share)) == pytest.approx(np.quantile(log10_xi, share), abs=0.1)


# Live


def test_serving_watches_a_run_on_this_machine_only(looked_at, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(looked_at / "sparse_rl", run)
    server = make_server(ReportSource([run]), 0)
    assert server.server_address[0] == "127.0.0.1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def get(path, host=None):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
        connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
        answer = connection.getresponse()
        return answer.status, answer.read()

    try:
        status, body = get("/")
        data = Parsed(body.decode()).data
        assert status == 200 and data["live"] and b"connect-src 'self'" in body
        assert get(f"/data.json?since={data['stamp']}") == (204, b"")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 3, "reward/mean": 0.25}) + "\n")
        status, body = get(f"/data.json?since={data['stamp']}")
        assert status == 200 and json.loads(body)["runs"][0]["steps"][-1] == 3
        status, body = get("/rollouts/0/1")
        assert status == 200 and gzip.decompress(body)
        for path in ("/rollouts/9/1", "/rollouts/0/77", "/config.toml", "/../config.toml", "/%2e%2e/config.toml"):
            assert get(path)[0] == 404
        assert get("/", host="evil.example")[0] == 403
        shutil.rmtree(run)
        assert get("/data.json")[0] == 503
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# Large


@pytest.mark.slow
def test_a_thousand_steps_and_five_thousand_rollouts(looked_at, tmp_path):
    run = big_run(tmp_path / "run", looked_at / "sparse_rl", steps=1000, rollouts=5, tokens=256)
    started = time.process_time()
    shown = page.write(ReportSource([run]), tmp_path / "page.html")
    assert time.process_time() - started < 20  # of one core: a machine may be busy
    (only,) = shown["runs"]
    assert len(only["steps"]) == 1000 and sum(count for _, count, *_ in only["rollouts"]) == 5000
    assert (tmp_path / "page.html").stat().st_size < 60 * 2**20
