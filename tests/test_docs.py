"""What the README and the guides tell a user to type runs as it stands, and what they list is what there is."""

import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

import small_runs
import sparse_rl
from sparse_rl.cli import build_parser, main
from sparse_rl.config import KV, AlertsConfig
from sparse_rl.data.arithmetic import write_problem
from sparse_rl.models.load import load_tokenizer
from sparse_rl.monitor.rules import RULES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = "experiments/evidence/RESULTS.md"
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    RESULTS,
    "experiments/RESULTS.md",
    "experiments/faults/README.md",
    "benchmarks/RESULTS.md",
    "benchmarks/scaling.md",
    *(f"docs/{path.name}" for path in sorted(DOCS.glob("*.md"))),
]


def blocks(page, *languages):
    """(language, text) of a page's fenced blocks, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [(language, text) for language, text in found if language in languages]


def commands(text):
    """The lines of a shell block that are ours; a backslash joins a line with the next."""
    return [line for line in text.replace("\\\n", " ").splitlines() if line.startswith("sparse-rl ")]


# The README


def test_the_first_python_example_runs_and_is_exact(capsys):
    _, block = blocks("README.md", "python")[0]
    exec(compile(block, "README.md", "exec"), {})
    text, numbers, *distances = capsys.readouterr().out.strip().splitlines()
    sums, first, second = map(int, re.search(r"\"(\d+):(\d\d)\+(\d\d)=\"", block).groups())
    solution = write_problem(first, second, sums).solution
    assert digits_apart(text)[:40] == digits_apart(solution)[:40]  # the model may slip in a sum, not yet in the form
    budget, interval = (int(re.search(rf"\b{name}=(\d+)", block).group(1)) for name in ("budget", "interval"))
    prompt = len(load_tokenizer("tiny")(f"{sums}:{first}+{second}=").input_ids)
    assert int(numbers.split()[0]) <= prompt + budget + interval
    sparse, dense = map(float, distances)
    assert sparse < 1e-4 < dense


def digits_apart(text):
    return re.sub(r"\d", "0", text)


@pytest.mark.parametrize("line", [line for _, text in blocks("README.md", "bash") for line in commands(text)])
def test_the_shell_examples_run(line, capsys, tmp_path, monkeypatch):
    """Those that sample as they stand; a training run, which takes minutes, up to its first step."""
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(line)[1:]
    if arguments[0] == "train":
        main([*arguments, "--dry-run"])
        assert "first prompt" in capsys.readouterr().out
    elif arguments[0] in ("generate", "bench"):
        main(arguments)
        assert "tokens/s" in capsys.readouterr().out


# The guides


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/first-run.md", "docs/train-your-own.md"])
def test_a_guide_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    """Every command, and every Python block that is more than a signature, one after the other in an empty folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    done = []
    for language, text in blocks(page, "bash", "python"):
        if language == "bash":
            for line in commands(text):
                main(shlex.split(line)[1:])
                done.append(line)
        else:
            exec(compile(text, page, "exec"), {})
    assert len(done) >= 4


def test_the_examples_of_the_python_api_run_one_after_the_other(capsys):
    names = {}
    for _, text in blocks("docs/api.md", "python"):
        exec(compile(text, "docs/api.md", "exec"), names)
    assert len(names["rollouts"]) == 8 and names["loss"].isfinite() and names["loss"].grad_fn


def test_the_python_api_documents_every_public_name():
    documented = set(re.findall(r"^\.\. auto\w+:: sparse_rl\.(\w+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE))
    assert documented == set(sparse_rl.__all__)


def test_the_page_of_commands_has_a_line_for_each_that_parses():
    lines = [shlex.split(line)[1:] for _, text in blocks("docs/cli.md", "text") for line in commands(text)]
    commands_there = next(action.choices for action in build_parser()._actions if action.choices)
    assert sorted(line[0] for line in lines) == sorted(commands_there)
    for line in lines:
        build_parser().parse_args(line)


def test_the_example_of_own_rewards_gives_what_it_says():
    spec = importlib.util.spec_from_file_location("own_rewards", ROOT / "examples" / "own_rewards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    completions = ["32 2:85+32=17 1:32+17=49", "32 2:85+32=18 1:32+18=50", ""]
    problems = {"prompts": ["3:47+85="] * 3, "completions": completions, "sums": [3, 3, None], "answer": ["49"] * 3}
    assert module.share_right(**problems) == pytest.approx([1.0, 2 / 3, None])
    assert module.share_right_and_brief(**problems) == pytest.approx([1.0, 0.7, None])


def test_the_example_of_own_data_is_right():
    for name in ("own_data", "own_test"):
        for line in (ROOT / "examples" / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            first, second = map(int, re.fullmatch(rf"{row['sums']}:(\d\d)\+(\d\d)=", row["prompt"]).groups())
            problem = write_problem(first, second, row["sums"])
            assert (problem.prompt, problem.answer) == (row["prompt"], row["answer"])


# What the pages list


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The keys that runs write: with every optional term, dense to shadow included, and with a dense cache."""
    world = small_runs.make_world(tmp_path_factory.mktemp("world"))
    evaluated = ["--data.test", str(world / "problems.jsonl"), "--eval.problems", "2", "--rollout.samples-per-prompt", "4"]
    terms = ["--loss.kl-coef", "0.01", "--correction.opsm", "0.5", "--rollout.refill-rejected", "true"]
    keys = set()
    several = ["--reward.function", "{0}:sums + 0.2 * {0}:same".format(world / "rewards.py"), "--kv.protect-prompt", "true"]
    for method, more in (("sparse_rl", terms), ("smd", several), ("dense", [])):
        run = world / method
        small_runs.train(world, run, "--method", method, *evaluated, *more)
        for line in (run / "metrics.jsonl").read_text().splitlines():
            found = {key.replace("eval/problems/", "eval/<benchmark>/") for key in json.loads(line)}
            keys |= {re.sub("^reward/(sums|same)/", "reward/<function>/", key) for key in found}
    # of several ranks, see test_distributed, of a budget that changes, see test_auto_budget, of experts, see test_routing_replay
    return keys - {"step"} | {"perf/rank_wait", "perf/rebuild_s", "routing/flip_rate"}


def test_the_page_of_metrics_lists_exactly_what_runs_write(written):
    rows = [line for line in (DOCS / "metrics.md").read_text().splitlines() if line.startswith("| `")]
    listed = [key for row in rows for key in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    assert len(listed) == len(set(listed))
    assert set(listed) == written


def test_metrics_that_the_guides_name_exist(written):
    """A key in any page is one that runs write."""
    groups = sorted({key.split("/")[0] for key in written} - {"eval"})
    for page in PAGES:
        for key in re.findall(rf"`((?:{'|'.join(groups)})/[a-z_0-9]+)`", (ROOT / page).read_text()):
            assert key in written, f"{page}: {key}"


def test_the_page_of_options_is_made_from_the_schema():
    spec = importlib.util.spec_from_file_location("make_config", DOCS / "make_config.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run: python docs/make_config.py"


def test_the_tables_of_scale_are_what_the_script_computes():
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks/scaling.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text()
    for table in (module.measured(), module.scaled(), module.largest()):
        assert table in page, "run: python benchmarks/scaling.py"


def test_the_tables_of_evidence_are_those_of_the_raw_metrics(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments/evidence")
    tables = importlib.import_module("tables")
    assert set(tables.PAGES) == {DOCS / "evidence.md", ROOT / RESULTS}
    for page, made in tables.PAGES.items():
        assert set(re.findall(r"^<!-- (\S+) -->$", page.read_text(), re.MULTILINE)) == {*made, "end"}
        assert page.read_text() == tables.rebuilt(page), f"{page.name}: run make evidence"


@pytest.fixture
def shootout(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments/shootout")
    return importlib.import_module("page")


def test_the_tables_of_the_shootout_are_those_of_the_raw_data(shootout):
    for page, tables in shootout.PAGES.items():
        text = page.read_text()
        assert set(re.findall(r"^<!-- (\S+) -->$", text, re.MULTILINE)) == {*tables, "end"}
        assert text == shootout.rebuilt(page), "run make evidence"
    assert shootout.DETAILS.read_text() == shootout.details(), "run make evidence"


def test_every_decimal_that_is_written_about_the_shootout_stands_in_its_tables(shootout):
    """Text is written by hand, tables are made: a number of the first is one of the second."""
    readme, guide = (page.read_text() for page in (shootout.README, shootout.GUIDE))
    about = guide.partition("[The shoot-out]")[2].partition("Training on the long task")[0]
    made = decimals("\n".join(re.findall(r"^\|.*$", readme, re.MULTILINE)) + shootout.details())
    for text in (re.sub(r"^\|.*$", "", readme, flags=re.MULTILINE), about):
        assert decimals(text) and decimals(text) <= made


def decimals(text):
    return set(re.findall(r"(?<![\w.])\d+\.\d+", text))


def test_every_decimal_of_the_summary_of_evidence_stands_in_its_results():
    """The page is written by hand, the tables of RESULTS.md are made: a number of the first is one of the second."""
    summary, results = (set(re.findall(r"\d[\d,]*\.\d+", path.read_text())) for path in (DOCS / "evidence.md", ROOT / RESULTS))
    assert len(summary) > 30 and summary <= results


def test_the_page_of_collapse_lists_every_alert_with_its_limit():
    section = (DOCS / "collapse.md").read_text().partition("## Alerts\n")[2].partition("\n##")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")]
    limits = {f"`alerts.{name}`": str(value) for name, value in AlertsConfig().model_dump().items() if name != "steps"}
    assert {row[0]: row[2] for row in rows} == {**limits, "`no_update`": ""} and len(rows) == len(RULES)
    for row in rows:
        rule = RULES[row[0].strip("`").removeprefix("alerts.")]
        named = set(re.findall(r"`((?:reward|policy|response|sparse)/\w+)`", row[1]))
        assert named <= set(rule.needs)
        for option in re.findall(r"`([a-z]+\.[a-z_]+)`", row[3]):
            remedy = rule.remedy.format(cache=KV().remedy)
            assert option in remedy, f"{option} is not what the alert says: {remedy}"


def test_options_that_the_guides_name_exist():
    """`section.key` and `--section.key` in any page are options. Other libraries' names stand left in their table."""
    known = set(re.findall(r"^\| `([\w.]+)` \|", (DOCS / "config.md").read_text(), flags=re.MULTILINE))
    sections = {key.rpartition(".")[0] for key in known} - {""}
    named = re.compile(rf"(?:`|--)((?:{'|'.join(sorted(map(re.escape, sections), reverse=True))})\.[a-z][\w.-]*)")
    for page in PAGES:
        lines = (ROOT / page).read_text().splitlines()
        if page.startswith("docs/coming-from"):
            lines = [line.partition(" | ")[2] if line.startswith("| ") else line for line in lines]
        for key in named.findall("\n".join(lines)):
            assert key.rstrip(".").replace("-", "_") in known | sections or Path(key).suffix in (".md", ".log", ".py"), (
                f"{page}: {key}"
            )


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", (ROOT / page).read_text()):
        if target.startswith("http"):
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def anchors(page):
    """The headings of a page as GitHub links to them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_test_that_the_page_of_papers_names_exists():
    sources = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for name in re.findall(r"\b(test_\w+)(?!\w|\.py)", (DOCS / "papers.md").read_text()):
        assert f"def {name}(" in sources or (Path(__file__).parent / f"{name}.py").exists(), name
