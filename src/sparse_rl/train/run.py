"""`sparse-rl train`: train one run, or several methods one after the other, and print a table at the end."""

import json
import os
import shlex
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.markup import escape

from ..config import Config, to_toml
from ..data.examples import TASK_PROBLEMS, check_sources, filter_by_length, load, too_few_note
from ..data.prompts import encoded
from ..errors import MissingResource, UserError
from ..format import counted, duration, gib
from ..models.folder import check_model_folder, refuse_missing
from ..plan.dimensions import HUB_SHAPES, dimensions
from ..plan.evaluation import run_s
from ..plan.recipe_table import smallest_card
from ..plan.roofline import step_time
from ..report.live import LiveReport
from ..rewards.find import refuse_inside_a_reward
from ..rewards.gold import try_on_gold
from ..rewards.pool import pool_for
from ..terminal import Terminal, wide_console
from ..text import message
from .api import PythonObjects
from .result import TrainResult
from .run_folder import RunFolder
from .storage import is_address
from .summary import print_summary

if TYPE_CHECKING:
    from ..world import World


def dry_run(config: Config) -> None:
    """Show the resolved run. Write nothing, load no weights.

    A missing package or an unreachable hub is reported, not fatal.
    """
    config.refuse_unused_bits()
    check_sources(config.data, evaluates=config.eval.problems > 0)
    if config.model.path != "tiny" and config.model.path not in HUB_SHAPES:
        refuse_missing(config.model.path)
        check_model_folder(config.model.path, trust_remote_code=config.model.trust_remote_code)
    console = Terminal(highlight=False, soft_wrap=True)
    console.print(to_toml(config) + config.defaults_comment, markup=False)
    console.print(config.batch_summary, markup=False)
    if line := planned(config):
        console.print(line, markup=False)
    console.print()
    examples, example, tried = [], None, None
    with report_if_missing(console):
        loaded = load(config.data.train, "train", n=TASK_PROBLEMS, seed=config.seed, **config.data.reading)
        examples, example = loaded.examples, loaded.examples[0]
        if loaded.note:
            console.print(f"{loaded.note}\n", markup=False)
    workers = min(config.reward.workers, 1)
    with pool_for(config.reward, config.reward.function_for(config.data.train), workers=workers) as pool:
        if example:
            tried = try_on_gold(pool, example)
            what = f"first answer: {json.dumps(tried.gold, ensure_ascii=False)}"
            if tried.gold is None:
                what = "no answer column to test the reward with (set --data.answer-column); empty text"
            console.print(f"{what}, graded {tried.fault or tried.value}", markup=False)
    from ..kv.policies import from_settings  # imported late, because importing torch takes seconds
    from ..models.load import load_tokenizer

    from_settings(config.sampler_kv)
    with report_if_missing(console):
        tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        if example:
            prompts = encoded(tokenizer, examples, config.data)
            places, left_out = filter_by_length(config.data.train, prompts, config.data.max_prompt_tokens)
            prompts = [prompts[place] for place in places]
            few = too_few_note(config.data.train, len(prompts), config.rollout.prompts_per_step)
            for line in filter(None, (left_out, few)):
                console.print(line, markup=False)
            if warning := config.cache_warning(prompts):
                console.print(warning, markup=False)
            lengths = sorted(map(len, prompts))
            console.print(f"prompts: {lengths[0]} to {lengths[-1]} tokens, median {lengths[len(lengths) // 2]}", markup=False)
            ids = prompts[0]
            shown = json.dumps(tokenizer.decode(ids), ensure_ascii=False)
            console.print(f"first prompt, {counted(len(ids), 'token')}: {shown}", markup=False)
    if tried and tried.fault:
        raise UserError(tried.sentence)


@contextmanager
def report_if_missing(console: Console) -> Iterator[None]:
    try:
        yield
    except MissingResource as error:
        console.print(f"not checked: {message(str(error))}", markup=False)


def planned(config: Config) -> str:
    """Return a sentence with the computed memory and time of the run. Empty if the model's shape would need a download."""
    path = config.model.path
    if path != "tiny" and path not in HUB_SHAPES and not Path(path).is_dir():
        return ""
    try:
        dimensions(path)
    except UserError as error:
        return f"no plan: {error}"
    gpu, plan = smallest_card(config)
    if not plan.fits:
        return f"computed: the run does not fit on one {gpu.name}; see sparse-rl plan."
    step_s = step_time(plan, gpu).total_s
    return (
        f"computed: the run fits on one {gpu.name} with {counted(plan.slots, 'slot')}, peak {gib(plan.peak_bytes)} GiB; a "
        f"step of full-length responses takes {duration(step_s)} at best, all steps and evaluations {duration(run_s(plan, gpu))}."
    )


def train(
    config: Config, *, resume: bool, overwrite: bool, launch: str | None = None, objects: PythonObjects | None = None
) -> list[TrainResult]:
    """Train as a single process, or as one of the ranks that a launcher started. Return the runs: one per compared method, or
    a single one. The last may be unfinished.

    `launch` is an id shared by all restarts of one launch and by no other launch; the default is torchrun's id. After the run
    has begun, a restart of the same launch resumes it, regardless of `resume` and `overwrite`. Before that, the run that
    `overwrite` replaces is kept as a backup, and a restart overwrites it again.
    """
    from .distributed import joined
    from .distributed import launch as current_launch

    refuse_inside_a_reward()
    launch = current_launch() if launch is None else launch
    with joined(config) as world:
        config = config.changed(ranks={"count": world.size})
        console = wide_console() if world.is_main else Terminal(file=StringIO(), width=160, highlight=False)
        restarted = world.is_main and RunFolder(config.run_dir).launched_by(launch)  # after a lost rank
        if world.gather(restarted)[0]:
            resume, overwrite = True, False
        objects = objects or PythonObjects()
        runs = train_all(config, console, world, resume=resume, overwrite=overwrite, launch=launch, objects=objects)
        world.barrier()  # rank 0 may still write after the other ranks finish
    return runs


def train_all(
    config: Config,
    console: Console,
    world: "World",
    *,
    resume: bool,
    overwrite: bool,
    launch: str,
    objects: PythonObjects,
) -> list[TrainResult]:
    if not resume:
        config.refuse_unused_bits()
    configs, resume_with = [config], f"sparse-rl train --resume --run-dir {shlex.quote(config.run_dir)}"
    if config.compare:
        if is_address(config.run_dir):
            raise UserError("compare needs a --run-dir on a local disk: on remote storage, pass one --method.")
        resume_with = "the same command and --resume"
        configs = [arm(config, method) for method in config.compare]
    check_sources(config.data, evaluates=config.eval.problems > 0)  # report a misspelt name before any other work
    if world.is_main:
        refuse_folders(configs, config.run_dir, resume=resume, overwrite=overwrite)
    from ..kv.policies import from_settings

    for each in configs:  # report a misspelt policy before any other work
        from_settings(each.sampler_kv)
    with ExitStack() as locks:
        folders = [RunFolder(each.run_dir, writes=world.is_main) for each in configs]
        for folder in folders:
            locks.enter_context(folder.locked(launch))
        runs: list[TrainResult] = []
        for each, folder in zip(configs, folders, strict=True):
            with pushed(folder):
                finished = train_one(
                    each,
                    folder,
                    console,
                    resume=resume,
                    overwrite=overwrite,
                    resume_with=resume_with,
                    world=world,
                    launch=launch,
                    objects=objects,
                )
            runs.append(TrainResult(each, finished))
            if not finished:
                return runs
        print_end(config, configs, console, world)
    return runs


@contextmanager
def pushed(folder: RunFolder) -> Iterator[None]:
    """Copy the run to shared storage after the block, even if the block fails."""
    try:
        yield
    except BaseException:
        with suppress(UserError):  # report the error of the block, not of the copy
            if folder.begun:
                folder.push()
        raise
    folder.push()


def print_end(config: Config, configs: list[Config], console: Console, world: "World") -> None:
    if not world.is_main:
        return
    print_summary(configs, console)
    for each in configs:
        console.print(
            f"{each.method}: {escape(each.run_dir)} (report.html, metrics.jsonl, rollouts/, checkpoints/, model/)",
            soft_wrap=True,
        )
    if config.compare:
        LiveReport(Path(config.run_dir), None, partial(console.print, markup=False)).write()
        console.print(f"all runs: {escape(str(Path(config.run_dir) / 'report.html'))}", soft_wrap=True)


def refuse_folders(configs: list[Config], run_dir: str, *, resume: bool, overwrite: bool) -> None:
    """Raise UserError if a run folder is already in use, or if there is no run to resume. Runs before any other work."""
    for each in configs:
        RunFolder(each.run_dir, writes=False).refuse_if_taken(resume=resume, overwrite=overwrite)
    if resume and not any(RunFolder(each.run_dir, writes=False).exists for each in configs):
        raise UserError(
            f"{run_dir} has no run to resume: omit --resume, or pass the --run-dir of the run. For a comparison, also pass "
            "its recipe."
        )


def arm(config: Config, method: str) -> Config:
    """Return the configuration of one method of a comparison. Its run folder is `run_dir`/`method`.

    Only `sparse_rl` keeps the correction settings and `rollout.refill_rejected`; the other methods use their defaults.
    """
    values = config.model_dump(by_alias=True) | {"method": method, "compare": ()}
    values["run_dir"] = str(Path(config.run_dir) / method)
    if method != "sparse_rl":
        values["correction"], values["rollout"]["refill_rejected"] = {}, False
    return Config(**values)


def train_one(
    config: Config,
    folder: RunFolder,
    console: Console,
    *,
    resume: bool,
    overwrite: bool,
    resume_with: str,
    world: "World",
    launch: str,
    objects: PythonObjects,
) -> bool:
    """Train one run. Return whether it reached its last step. `resume_with` is the command that continues a stopped run."""
    from torch import OutOfMemoryError

    from ..models.load import no_progress_bar, place
    from . import checkpoint_folder
    from .loggers import opened_loggers
    from .memory import out_of_memory
    from .stop import StopHandler
    from .terminal import RunTerminal
    from .trainer import TrainingRun

    dtype, _ = place(config.model.dtype, config.model.device)  # store the resolved dtype, so that an export uses it too
    config = config.changed(model={"dtype": dtype})
    reward = config.reward
    trainer: TrainingRun | None = None
    with (
        ExitStack() as log,
        RunTerminal(config, console) as terminal,
        StopHandler(terminal.warn) as stop,
        no_progress_bar(),
        ExitStack() as opened,
    ):
        try:
            with folder.opening(config, resume=resume, overwrite=overwrite):
                folder.note_launch(launch)
                world.barrier()  # the folder exists from here on
                if not world.is_main:
                    console.file = log.enter_context(rank_log(folder, world))
                    console.print(f"rank {world.rank} of {world.size}, process {os.getpid()} on {socket.gethostname()}")
                console.print(f"[bold]{config.method}[/bold]: {config.batch_summary}", soft_wrap=True)
                name = f"logs/reward-{world.rank}.log" if world.rank else "reward.log"
                if folder.remote and world.rank:
                    folder.remote.fetch(name)
                function, reward_log = reward.function_for(config.data.train), folder.path / name
                pool = opened.enter_context(pool_for(reward, function, log=reward_log, call=objects.reward))
                first_step = max(checkpoint_folder.steps_in(folder.checkpoints), default=-1) + 1
                loggers = opened.enter_context(opened_loggers(folder.path, config, first_step)) if world.is_main else []
                trainer = TrainingRun(
                    config, folder, terminal, pool, loggers, resume=resume, world=world, callback=objects.callback
                )
            trainer.run(stop)
        except UserError as error:
            if not world.is_main:
                console.print(str(error), soft_wrap=True, markup=False)
            raise
        except OutOfMemoryError as error:
            raise out_of_memory(config, trainer.plan if trainer else None) from error
        finally:
            if trainer and world.is_main and folder.metrics.exists():  # also write the report of a failed run
                trainer.report.write()
        done = trainer.state.step >= config.steps
        if not done:
            terminal.note(f"Stopped at step {trainer.state.step}; continue with {resume_with}.")
    return done


def rank_log(folder: RunFolder, world: "World") -> TextIO:
    """Open logs/rank-N.log, the log of a rank other than rank 0."""
    (folder.path / "logs").mkdir(exist_ok=True)
    name = f"logs/rank-{world.rank}.log"
    if folder.remote:
        folder.remote.fetch(name)  # append to the log of an earlier start
    return (folder.path / name).open("a", buffering=1)
