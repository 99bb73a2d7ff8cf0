"""The command as a user meets it: quick help, streamed text, one sentence and exit code 2 for a mistake."""

import logging
import subprocess
import sys
import warnings

import pytest

from small_runs import cpu_of_children
from sparse_rl.cli import main
from sparse_rl.rollout.console import printable

PROMPT = "15:47+85="


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "sparse_rl", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"], ["bench", "rollout", "--help"]])
def test_help_comes_at_once_and_without_torch(arguments):
    code = f"import sys; from sparse_rl.cli import main\ntry: main({arguments!r})\nfinally: assert 'torch' not in sys.modules"
    started = cpu_of_children()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sparse-rl" in done.stdout
    assert cpu_of_children() - started < 3  # a second on an idle machine


def test_a_reader_that_has_enough_is_no_error():
    slow = f"{sys.executable} -c 'import time; from sparse_rl.cli import main; time.sleep(0.3); main([\"recipes\"])' | true"
    done = subprocess.run(["bash", "-c", f"{slow}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_generate_streams_text_then_kv_use_and_speed(capsys):
    main(["generate", "tiny", PROMPT, PROMPT, "--samples-per-prompt", "2", "--temperature", "0", "--kv.budget", "48",
          "--kv.interval", "16", "--max-tokens", "60", "--kv.policy", "rkv", "--kv.protect-prompt", "false"])  # fmt: skip
    out = capsys.readouterr().out
    for header in ("prompt 1, sample 1", "prompt 1, sample 2", "prompt 2, sample 1", "prompt 2, sample 2"):
        assert out.count(f"--- {header} ---\n32 14:85+32=17 13:32+17=49 12:") == 1
    assert "59 tokens of a sequence" in out and "tokens/s" in out and "4 length" in out


def test_flags_take_dashes_and_underscores_and_json(capsys):
    main(["generate", "tiny", PROMPT, "--kv.policy", "rkv", "--kv.protect_prompt", "--kv.options", '{"mix": 0.2}', "--kv.budget", "64",
          "--max_tokens", "3", "--stop", "[1]", "--seed", "5"])  # fmt: skip
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "tiny", "1+1=", "--kv.bugdet", "64"], "unknown argument --kv.bugdet: did you mean --kv.budget?"),
        (
            ["generate", "tiny", "1+1=", "--kv.budget", "8"],
            "sparse-rl: kv.budget = 8 is too small: it must exceed window",
        ),
        (["generate", "tiny", "1+1=", "--kv.policy", "rvk"], "Unknown KV policy 'rvk' (did you mean 'rkv'?)"),
        (["generate", "tiny", "1+1=", "--kv.options", "mix=1"], "kv.options = mix=1 is not valid JSON"),
        (["generate", "tiny", "1+1=", "--max-tokens", "9000"], " exceeds the model's context of 8192"),
        (["generate", "/nowhere/at/all", "1+1="], "There is no model folder"),
        (["generate", "tinny", "1+1="], "did you mean tiny?"),
        (["generate", "tiny", ""], "A prompt is empty"),
        (["generate", "tiny", "\udcff"], "A prompt is not valid UTF-8"),
        (["generate", "tiny", "1+1=", "--device", "nonsense"], "cannot be used"),
        (["bench", "rollout", "--kv.policy", "full"], "kv.policy = full is the dense engine"),
        (["bench", "rollout", "--json", "/no/such/folder/x.json"], "does not exist"),
        (["plan", "tiny", "--json", "/"], "argument --json: / is a folder: pass the name of a file"),
        (
            ["train", "quickstart", "--ranks.count", "8"],
            "--ranks.count 8 has no effect here: the launcher sets the number of ranks. Start ranks with torchrun or --ray.workers, or use sparse-rl plan --gpus.",
        ),
        (["bench", "step", "tiny", "--ranks.count", "8"], "--ranks.count 8 has no effect here"),
        (["genrate", "tiny"], "invalid choice: 'genrate'"),
    ],
)
def test_mistakes_end_in_one_sentence_and_exit_code_2(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert sentence in err and err.startswith("sparse-rl: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "lower"),
    [
        (["generate", "tiny", "1+1=", "--device", "cpu"], "lower --slots, --kv.budget or --max-tokens"),
        (["bench", "rollout", "--model", "tiny", "--device", "cpu"], "lower --batch, --kv.budget or --max-tokens"),
        (["bench", "learner", "--model", "tiny", "--device", "cpu"], "lower --tokens-per-microbatch or --tokens"),
    ],
)
def test_a_full_gpu_is_not_a_device_that_cannot_be_used(arguments, lower, capsys, monkeypatch):
    import torch
    from transformers import PreTrainedModel

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(PreTrainedModel, "to", full)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    err = capsys.readouterr().err
    assert end.value.code == 2 and err == f"sparse-rl: The GPU's memory is exhausted: {lower}, or use a smaller model.\n"


def test_an_unexpected_error_is_one_sentence_with_a_log_file(monkeypatch, tmp_path, capsys):
    from sparse_rl.rollout import console

    def broken(*args):
        raise RuntimeError(f"a bug \x1b[2J{'x' * 70_000}\nand more")

    monkeypatch.setattr(console, "stream", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as end:
        main(["generate", "tiny", "1+1="])
    err = capsys.readouterr().err
    [log] = tmp_path.iterdir()
    assert end.value.code == 1 and err.count("\n") == 1 and len(err) < 1000
    assert err.startswith("sparse-rl: Unexpected error (RuntimeError: a bug \\x1b[2J") and str(log) in err
    assert "Traceback" in log.read_text() and "in broken" in log.read_text()


def test_no_message_drives_the_terminal_or_fills_it(capsys):
    for arguments in (
        ["train", "--\x1b[2Jx" + "y" * 70_000],
        ["train", "\x1b[2J" + "y" * 70_000 + ".toml"],
        ["train", "--steps", "\x1b[2J\n" + "9" * 70_000],
        ["train", "--kv.options", "\x9b2J" + "y" * 70_000],
        ["eval", "tiny", "--benchmarks", "arithmetic", "--problems", "9" * 70_000],
        ["eval", "tiny", "--benchmarks", "arithmetic", "--problems", "²"],
        ["report", "\udcff\u202e" + "y" * 70_000],
        ["export", "\x00", "out"],
        ["plan", "\x1b[2J" + "y" * 70_000],
        ["recipes", "\x1b[2J" + "y" * 70_000],
        ["\x1b[2J" + "y" * 70_000],
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        err = capsys.readouterr().err
        assert end.value.code == 2 and err.startswith("sparse-rl: ") and err.endswith("\n")
        assert len(err) <= 1020 and err[:-1].isprintable(), err[:300]


def test_warnings_about_optional_packages_that_a_cpu_cannot_use_are_silent(recwarn):
    main(["recipes", "quickstart"])
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)
    warnings.warn("Triton is not supported on current platform, roll back to CPU.", stacklevel=1)
    assert not recwarn


def test_module_runs_as_a_command():
    done = run("--version")
    assert done.returncode == 0 and done.stdout.startswith("sparse-rl 0.")


def test_bench_compares_three_ways_and_writes_its_figures(tmp_path, capsys):
    import json

    target = tmp_path / "rollout.json"
    main(["bench", "rollout", "--model", "tiny", "--batch", "2", "--max-tokens", "40", "--kv.budget", "16", "--kv.interval", "8",
          "--kv.window", "4", "--kv.policy", "rkv", "--kv.protect-prompt", "false", "--json", str(target)])  # fmt: skip
    out = capsys.readouterr().out
    assert "transformers generate" in out and "sparse-rl, dense" in out and "sparse-rl, rkv 16+8" in out
    record = json.loads(target.read_text())
    generate, dense, sparse = record["arms"]
    assert generate["tokens"] == dense["tokens"] == sparse["tokens"] == 80
    assert sparse["kv_bytes"] == 2 * 4 * 2 * 2 * 24 * 32 * 4
    assert generate["kv_bytes"] == 2 * 4 * 2 * 2 * (32 + 39) * 32 * 4
    assert record["versions"]["torch"] and record["machine"] and record["seed"] == 0


def test_control_characters_of_a_model_do_not_drive_the_terminal():
    assert printable("a\x1b[2Jb\n\tc\x07") == "a\\x1b[2Jb\n\tc\\x07"
