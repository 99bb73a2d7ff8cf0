"""What is shipped runs: every recipe is a valid configuration, passes a dry run without a hub, and says what it needs."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from small_runs import cpu_of_children, refused
from sparse_rl.cli import build_parser, main
from sparse_rl.config import Config, from_flags, recipe, recipe_names, recipe_text
from sparse_rl.plan import recipe_table
from sparse_rl.plan.roofline import GPUS

ROOT = Path(__file__).parents[1]
PAPER = [name for name in recipe_names() if name.startswith("paper-")]
NAMED = ["quickstart", "pilot-512", "smollm2-products", "qwen-0.5b-gsm8k"]


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """And no copies of what is on it, nor packages that a run may need beside ours; an empty folder to be in."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


# Every recipe


def test_the_recipes_of_the_papers_and_the_small_ones_are_there():
    assert {Config(**recipe(name)).model.path for name in PAPER} == {
        *(f"Qwen/Qwen2.5-{size}" for size in ("1.5B", "3B", "7B")),
        "meta-llama/Llama-3.2-1B-Instruct",
    }
    assert set(NAMED) <= set(recipe_names())


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_passes_a_dry_run_without_a_hub(name, no_hub, capsys):
    main(["train", name, "--dry-run"])
    out = capsys.readouterr().out
    config = Config(**recipe(name))
    assert Config(**tomllib.loads(out.partition(f"\n\n{config.steps} steps")[0])) == config
    assert config.batch_summary in out and "computed: the run fits on one " in out
    seen = {"first answer: ", "first prompt, "} & set(re.findall(r"^first \w+[:,] ", out, flags=re.MULTILINE))
    assert len(seen) + out.count("not checked: ") >= 2  # what could not be looked at is said
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_fits_the_card_it_is_listed_with(name):
    gpu, plan = recipe_table.smallest_card(Config(**recipe(name)))
    assert plan.fits and plan.peak_bytes < gpu.memory_bytes <= GPUS["h200"].memory_bytes


@pytest.mark.parametrize("name", recipe_names())
def test_runs_of_different_recipes_go_to_different_folders(name):
    """Also where a recipe extends another: its runs would refuse to start."""
    others = [Config(**recipe(other)).run_dir for other in recipe_names() if other != name]
    assert Config(**recipe(name)).run_dir not in others


# The papers' runs


@pytest.mark.parametrize("name", PAPER)
def test_the_recipes_of_the_paper_have_its_settings(name):
    config = Config(**recipe(name))
    rollout, optimizer, loss = config.rollout, config.optimizer, config.loss
    assert (rollout.prompts_per_step, rollout.samples_per_prompt, rollout.max_tokens) == (128, 8, 4096)
    assert (rollout.temperature, rollout.sampling(0).top_p, rollout.sampling(0).top_k) == (1.0, 1.0, 0)
    assert rollout.rollouts_per_step / optimizer.updates_per_step == 256 and config.steps == 100
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (1e-6, (0.9, 0.98), 0.1)
    assert (optimizer.schedule, optimizer.warmup_steps) == ("constant", 0)
    assert (loss.name, *loss.clips) == ("grpo", 0.2, 0.2)
    assert (loss.kl_coef, loss.kl_estimator, loss.entropy_coef) == (1e-4, "k3", 0)
    assert (config.kv.policy, config.kv.budget, config.kv.interval) == ("rkv", 512, 128)
    assert (config.method, config.data.train, config.data.test) == ("sparse_rl", "simplerl-zoo-hard", "math500")
    assert not config.model.lora.rank


def paper_commands():
    """Run the page's loop with a stand-in for `sparse-rl` that prints its arguments."""
    (loop,) = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs/papers.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    script = 'sparse-rl() { echo "$@"; }\n' + loop
    output = subprocess.run(["bash", "-euc", script], check=True, capture_output=True, text=True).stdout
    return [line.split() for line in output.splitlines()]


def test_the_page_of_papers_has_a_command_for_every_run():
    """Four models, two policies, four methods; dense keeps everything, so one of it serves both policies."""
    runs = {}
    for command in paper_commands():
        args = build_parser().parse_args(command)
        config = from_flags(args, Config, recipe(args.recipe))
        runs[config.model.path, config.sampler_kv.policy, config.method] = config.run_dir
        assert recipe_table.smallest_card(config)[1].fits
    models = {Config(**recipe(name)).model.path for name in PAPER}
    sparse = {(model, policy, method) for model in models for policy in ("rkv", "snapkv") for method in ("sparse_rl", "naive", "smd")}  # fmt: skip
    assert set(runs) == sparse | {(model, "full", "dense") for model in models}
    assert len(set(runs.values())) == len(runs) == len(paper_commands())


# Files beside a recipe


def test_the_products_are_right_and_none_that_is_held_out_is_trained_on():
    config = Config(**recipe("smollm2-products"))
    pairs = {}
    for split, source in (("train", config.data.train), ("test", config.data.test)):
        assert Path(source).is_absolute()
        rows = [json.loads(line) for line in Path(source).read_text().splitlines()]
        found = [tuple(map(int, re.fullmatch(r"What is (\d+) times (\d+)\?", row["prompt"]).groups())) for row in rows]
        assert [row["answer"] for row in rows] == [str(left * right) for left, right in found]
        pairs[split] = {frozenset(pair) for pair in found}
    assert not pairs["train"] & pairs["test"]
    assert pairs["train"] | pairs["test"] == {frozenset((a, b)) for a in range(2, 13) for b in range(2, 13)}


def test_paths_of_ones_own_recipe_are_meant_from_where_one_is(tmp_path):
    (tmp_path / "mine.toml").write_text('extends = "quickstart"\n[data]\ntrain = "products-train.jsonl"\n')
    assert recipe(str(tmp_path / "mine.toml"))["data"]["train"] == "products-train.jsonl"


# The dry run


def test_a_wrong_path_is_a_mistake_and_not_a_hub_out_of_reach(no_hub, capsys):
    for flags in (
        ["--model.path", "./nowhere"],
        ["--model.path", "/no/where"],
        ["--model.path", "nowhere.gguf"],
        ["--data.train", "./nowhere.jsonl", "--reward.function", "exact"],
        ["--data.train", "gsm8", "--reward.function", "exact"],
        ["--data.train", "gsm8k", "--data.dir", "nowhere"],
        ["--data.train", "gsm8k", "--reward.function", "nowhere:graded"],
    ):
        refused(capsys, "train", "quickstart", "--dry-run", *flags)


def test_a_dry_run_says_where_a_run_does_not_fit(no_hub, capsys):
    main(["train", "paper-qwen2.5-7b", "--dry-run", "--optimizer.state", "fp32"])
    assert "computed: the run does not fit on one H200; see sparse-rl plan." in capsys.readouterr().out


# The list


def test_the_list_comes_at_once_and_without_torch():
    code = (
        "import sys; from sparse_rl.cli import main\nmain(['recipes'])\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    started = cpu_of_children()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert cpu_of_children() - started < 3  # half a second on an idle machine
    for name in recipe_names():
        (row,) = [line for line in done.stdout.splitlines() if line.startswith(f"│ {name} ")]
        assert Config(**recipe(name)).model.path.rpartition("/")[2] in row and re.search(r"\d (s|min|h) |measured", row)


def test_a_recipe_is_shown_with_every_value(capsys):
    main(["recipes", "paper-qwen2.5-3b"])
    assert Config(**tomllib.loads(capsys.readouterr().out)) == Config(**recipe("paper-qwen2.5-3b"))
    assert "did you mean pilot-512?" in refused(capsys, "recipes", "pilot-51")


def test_a_measured_time_is_the_one_that_the_recipe_names():
    (said,) = re.findall(r"^# Measured: (.*)\.$", recipe_text("quickstart"), flags=re.MULTILINE)
    assert recipe_table._row("quickstart")[-1] == f"measured: {said}"


@pytest.mark.slow
def test_the_wheel_holds_every_recipe_and_what_lies_beside(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    beside = {path.name for path in (ROOT / "src/sparse_rl/recipes").iterdir()}
    assert {f"{name}.toml" for name in recipe_names()} | {"products-train.jsonl", "products-test.jsonl"} == beside
    assert {f"sparse_rl/recipes/{name}" for name in beside} <= names
