"""Training from Python: objects in place of names, results as objects, and the same run as the command line."""

import asyncio
import json
import shutil
import threading

import pytest
from datasets import Dataset

import sparse_rl
from sparse_rl import Config, Trainer, UserError, load_tokenizer
from sparse_rl.cli import main
from sparse_rl.models.load import TINY
from sparse_rl.rewards.pool import RewardPool

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "kind": "sum"} for a in range(1, 4) for b in range(2, 5)]


def settings(world, run, **more):
    """A run of two steps with four rollouts each."""
    return {
        "model": {"path": str(world / "model")},
        "kv": {"policy": "rkv", "budget": 16, "interval": 4, "window": 4, "sinks": 2, "protect_prompt": False},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 12, "slots": 4},
        "optimizer": {"lr": 1e-3},
        "reward": {"truncated": "grade"},
        "eval": {"problems": 0},
        "steps": 2,
        "run_dir": str(run),
        **more,
    }


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    """A run with a closure, a `Dataset` and a callback; what the closure and the callback were told."""
    seen, steps = [], []
    rows = [{"prompt": row["prompt"], "answer": row["answer"], "kind": row["kind"]} for row in ROWS]

    def reward(prompts, completions, answer, kind, finish, **columns):
        seen.append((prompts[0], answer[0], kind[0], finish[0], threading.current_thread().name))
        return [float(sum(map(ord, completions[0])) % 1009)]

    def callback(step, metrics):
        steps.append((step, metrics["reward/mean"]))

    run = tmp_path_factory.mktemp("api") / "closure"
    trainer = Trainer(settings(world, run), reward=reward, dataset=Dataset.from_list(rows), callback=callback)
    return trainer.train(), seen, steps


def test_a_closure_grades_and_a_callback_hears_of_every_step(trained):
    run, seen, steps = trained
    assert run.finished and [step for step, _ in steps] == [1, 2]
    assert [row["reward/mean"] for row in run.metrics if "reward/mean" in row] == [mean for _, mean in steps]
    assert len(seen) == 1 + 2 * 4  # the try on a reference answer, and every rollout
    assert {each[2] for each in seen} == {"sum"} and {each[4] for each in seen} == {"reward"}


def test_the_result_is_an_object(trained):
    run, _, _ = trained
    assert len(run.rollouts(1)) == 4 and {"prompt", "reward"} <= run.rollouts(1)[0].keys()
    assert sparse_rl.load_model(str(run.model)).config.num_hidden_layers
    assert run.report.read_text().lstrip().startswith("<!")
    shown = run._repr_html_()
    assert "<iframe" in shown and "sparse_rl" in shown and "<script>" not in shown  # the report is escaped


def test_the_data_is_beside_the_run_and_a_command_says_how_to_continue(trained, capsys):
    run, _, _ = trained
    stored = run.path.with_name("closure.train.jsonl")
    assert [json.loads(line) for line in stored.read_text().splitlines()] == ROWS
    assert run.config.data.train == str(stored)
    with pytest.raises(SystemExit):
        main(["train", "--resume", "--run-dir", str(run.path), "--steps", "3"])
    assert "passed to Trainer as a Python object" in capsys.readouterr().err


def test_a_run_that_a_callback_stops_continues_from_its_checkpoint(world, tmp_path):
    def reward(completions, **columns):
        return [float(len(set(text))) for text in completions]

    values = settings(world, tmp_path / "run", steps=3)
    stopped = Trainer(values, reward=reward, dataset=ROWS, callback=lambda step, metrics: step == 1).train()
    assert not stopped.finished and max(row["step"] for row in stopped.metrics) == 1
    whole = Trainer(values, reward=reward, dataset=ROWS).train(resume=True)
    assert whole.finished and max(row["step"] for row in whole.metrics) == 3


def test_prompts_may_be_messages_of_a_chat(tmp_path):
    """The model reads them as its chat template writes them. The reward gets them as they are, and answers as messages."""
    model, seen = shutil.copytree(TINY, tmp_path / "chat"), []
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    rows = [
        {
            "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": row["prompt"]}],
            "answer": row["answer"],
        }
        for row in ROWS[:4]
    ]

    def reward(prompts, completions, answer, **columns):
        seen.append((prompts[0], completions[0], answer[0]))
        return [float(sum(map(ord, completions[0][-1]["content"])) % 1009)]

    values = settings(
        model, tmp_path / "run", model={"path": str(model)}, kv={"policy": "rkv", "budget": 16, "interval": 4}, steps=1
    )
    run = Trainer(values, reward=reward, dataset=rows).train()
    assert run.finished and run.metrics[-1]["policy/skipped_updates"] == 0
    asked = [(row["prompt"], row["answer"]) for row in rows]
    assert len(seen) == 1 + 4 and all((prompt, answer) in asked for prompt, _, answer in seen)
    assert {(len(answer), answer[0]["role"]) for _, answer, _ in seen} == {(1, "assistant")}
    stored, decode = run.rollouts(1), load_tokenizer("tiny").decode
    for row in stored:
        system, user = json.loads(row["prompt"])
        assert decode(row["prompt_tokens"]) == f"system:{system['content']};user:{user['content']};assistant:"
    assert sorted(row["text"] for row in stored) == sorted(answer[0]["content"] for _, answer, _ in seen[1:])


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_rows_of_an_earlier_run_are_not_replaced_by_a_refused_one(trained, world, monkeypatch, rank):
    monkeypatch.setenv("RANK", rank)  # every rank writes the rows
    run, _, _ = trained
    stored = run.path.with_name("closure.train.jsonl")
    before, other = stored.read_text(), ROWS[:4]
    for options, sentence in (({}, "overwrite"), ({"resume": True}, "pass the same rows")):
        with pytest.raises(UserError, match=sentence):
            Trainer(settings(world, run.path), reward=len, dataset=iter(other)).train(**options)
        assert stored.read_text() == before


def test_a_run_that_could_not_be_overwritten_has_its_rows_again(world, tmp_path):
    def reward(completions, **columns):
        return [float(len(set(text))) for text in completions]

    values = settings(world, tmp_path / "run")
    Trainer(values, reward=reward, dataset=ROWS, callback=lambda step, metrics: step == 1).train()
    with pytest.raises(UserError, match="missing"):
        Trainer(values | {"model": {"path": str(tmp_path / "missing")}}, reward=reward, dataset=ROWS[:4]).train(overwrite=True)
    run = Trainer(values, reward=reward, dataset=ROWS).train(resume=True)
    assert run.finished and max(row["step"] for row in run.metrics) == 2


def test_a_restart_by_the_same_launcher_continues_the_run(world, tmp_path, monkeypatch):
    """As torchrun --max-restarts does after a rank was lost, with the same arguments."""

    def reward(completions, **columns):
        return [float(len(set(text))) for text in completions]

    def callback(step, metrics):
        steps.append(step)
        if len(steps) == 2:
            raise RuntimeError("this rank is lost")

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch")
    steps = []
    values = settings(world, tmp_path / "run", steps=3, checkpoint={"every": 1})
    with pytest.raises(RuntimeError, match="this rank is lost"):
        Trainer(values, reward=reward, dataset=ROWS, callback=callback).train()
    run = Trainer(values, reward=reward, dataset=ROWS, callback=callback).train()
    assert run.finished and steps == [1, 2, 2, 3]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another launch")
    with pytest.raises(UserError, match="already contains a run"):
        Trainer(values, reward=reward, dataset=ROWS).train()


def test_python_and_the_command_line_train_the_same_run(world, tmp_path):
    function = f"{world / 'rewards.py'}:sums"
    values = settings(world, tmp_path / "python", data={"train": str(world / "problems.jsonl")})
    run = sparse_rl.train(values, reward=function)
    config = tmp_path / "recipe.toml"
    config.write_text((run.path / "config.toml").read_text())
    main(["train", str(config), "--run-dir", str(tmp_path / "command")])
    rewards = [
        [json.loads(line).get("reward/mean") for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (run.path, tmp_path / "command")
    ]
    assert rewards[0] == rewards[1]


def test_a_config_is_an_object_a_recipe_or_a_dict(tmp_path):
    dict_form = Trainer({"extends": "quickstart", "method": "sparse_rl", "steps": 3}).config
    assert (dict_form.steps, dict_form.kv.budget, dict_form.compare) == (3, 54, ())
    assert Trainer(dict_form).config == dict_form == Trainer(Config(**dict_form.model_dump(by_alias=True))).config
    path = tmp_path / "own.toml"
    path.write_text('extends = "quickstart"\ncompare = []\nsteps = 3\n')
    assert Trainer(path).config == dict_form


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"config": "quickstart"}, "trains several runs: pass one method"),
        ({"config": 7}, "config is a int: pass a Config"),
        ({"config": {"stepss": 2}}, "stepss"),
        ({"config": {}, "reward": 3}, "reward is a int, which is not callable"),
        (
            {"config": {"reward": {"function": lambda completions, **columns: [1.0]}}},
            r"^reward.function = <lambda> is a Python object, and a configuration holds names: pass it as "
            r"Trainer\(config, reward=f\)\.$",
        ),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        Trainer(**arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"prompt": "1+1=", "answer": object()}], "Row 1 of the train rows cannot be written as JSON"),
        ("problems.jsonl", "train is a str, not rows"),
        ([], "has no rows"),
    ],
)
def test_rows_that_cannot_be_stored_are_refused(world, tmp_path, rows, sentence):
    with pytest.raises(UserError, match=sentence):
        Trainer(settings(world, tmp_path / "run"), reward=len, dataset=rows).train()
    assert not (tmp_path / "run").exists()


def test_ray_is_left_to_the_command_line_with_a_reward_that_it_can_name(tmp_path):
    values, command = {"run_dir": str(tmp_path / "run"), "ray": {"workers": 2}}, "use sparse-rl train --ray.workers N"
    for reward, rest in (("exact", r"\."), (len, r", and name the reward, such as --reward\.function my_rewards\.py:f\.")):
        with pytest.raises(UserError, match=f"{command}{rest}$"):
            Trainer(values, reward=reward, dataset=ROWS).train()
    assert not list(tmp_path.iterdir())


# Threads


def graded(call, texts, **options):
    with RewardPool("python:call", call=call, **options) as pool:
        return pool.grade(["p"] * len(texts), texts, {"answer": texts})


def test_a_call_over_its_time_costs_its_sample_alone():
    release = threading.Event()

    def reward(prompts, completions, **columns):
        if completions[0] == "hangs":
            release.wait(60)
        if completions[0] == "raises":
            raise RuntimeError("out of ideas")
        return [float(completions[0])]

    texts = ["1", "hangs", "2", "raises", "hangs", "3", "4"]
    result = graded(reward, texts, workers=2, timeout_s=0.2)
    release.set()
    assert result.values == [1.0, None, 2.0, None, None, 3.0, 4.0]
    assert (result.timeouts, result.errors) == (2, 1) and "out of ideas" in result.first_error


@pytest.mark.parametrize("workers", [0, 3])
def test_an_async_closure_runs_next_to_a_running_event_loop(workers):
    """As in a notebook, whose main thread has one."""

    async def reward(prompts, completions, **columns):
        await asyncio.sleep(0)
        return [float(text) for text in completions]

    async def cell():
        return graded(reward, ["1", "2", "3"], workers=workers)

    assert asyncio.run(cell()).values == [1.0, 2.0, 3.0]


def test_a_function_that_returns_a_coroutine_is_awaited_in_every_thread():
    async def grade(text):
        await asyncio.sleep(0.01)
        return [float(text)]

    result = graded(lambda completions, **columns: grade(completions[0]), [str(n) for n in range(16)], workers=4)
    assert result.values == [float(n) for n in range(16)] and result.errors == 0


def test_without_workers_a_closure_is_called_once_with_all_samples():
    calls = []

    def reward(prompts, completions, **columns):
        calls.append((len(completions), threading.current_thread() is threading.main_thread()))
        return [1.0] * len(completions)

    assert graded(reward, ["a", "b", "c"], workers=0).values == [1.0] * 3
    assert calls == [(3, True)]


def test_messages_reach_a_closure_as_messages():
    def reward(prompts, completions, **columns):
        return [float(len(completion[-1]["content"])) for completion in completions]

    with RewardPool("python:reward", call=reward) as pool:
        result = pool.grade([[{"role": "user", "content": "1+1="}]], ["2 or 3"], {})
    assert result.values == [6.0]
