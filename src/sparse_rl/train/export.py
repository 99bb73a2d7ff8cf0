"""Write the weights of a checkpoint as a Hugging Face folder, and push it to the hub."""

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.markup import escape

from ..config import Config
from ..errors import UserError
from ..hub import check_push, is_hub_id, push_folder
from ..terminal import Terminal
from .card import model_card
from .run_folder import RunFolder


def export(
    run: str,
    out: Path | None,
    *,
    step: int | str | None = None,
    merge: bool = False,
    push: str | None = None,
    private: bool = False,
) -> str | None:
    """Write the weights of one checkpoint to `out`, and upload them to the repository `push`. Return its address, or None.

    `step` is a step number, "best", or None for the last checkpoint. Without `out`, a push writes to a temporary folder.
    """
    from . import checkpoint, checkpoint_folder

    if out is None and push is None:
        raise UserError("export has no target: pass a folder to write, or --push REPO.")
    if private and push is None:
        raise UserError("--private is an option of a push: add --push REPO, or omit it.")
    folder = RunFolder(run, writes=False)
    folder.recover_if_abandoned()
    config = folder.config()
    steps = checkpoint_folder.steps_in(folder.checkpoints)
    if not steps:
        raise UserError(f"{run} has no checkpoint to export: wait for the first checkpoint, or lower checkpoint.every.")
    if step == "best":
        step = checkpoint.best_step(folder.checkpoints)
    if step is not None and step not in steps:
        raise UserError(f"{run} has no checkpoint of step {step}: choose one of {', '.join(map(str, steps))}.")
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty: pass another folder.")
    if merge and not config.model.lora.rank:
        raise UserError("The run trained all weights and has no adapter to merge: omit --merge.")
    if push is not None:
        check_push(push)  # before the weights are loaded
    console = Terminal(soft_wrap=True, highlight=False)
    with ExitStack() as stack:
        target = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparse-rl-")), "model")
        done = _write(folder, config, target, [step] if isinstance(step, int) else steps, push, merge, console)
        if step is None and done < config.steps:
            console.print(
                f"warning: the exported checkpoint is step {done} of {config.steps}: the run has no later checkpoint."
            )
        if merge and config.model.lora.base == "4bit":
            console.print(
                "warning: the adapter was trained on 4-bit weights and is merged into the original ones: scores may differ."
            )
        if out is not None:
            console.print(f"Exported step {done} of {escape(str(run))} to {escape(str(out))}.")
        if push is None:
            return None
        if config.model.lora.rank and not merge and not is_hub_id(config.model.path):
            console.print(
                f"warning: the adapter's base model is {config.model.path}, which is not on the hub: others can load it only "
                "if pushed with --merge.",
                markup=False,
            )
        url = push_folder(target, push, private=private, message=f"Add step {done} of a {config.method} run")
        console.print(f"Pushed step {done} of {escape(str(run))} to {url}.")
        return url


def _write(
    folder: RunFolder, config: Config, target: Path, steps: list[int], push: str | None, merge: bool, console: Terminal
) -> int:
    """Write the last readable checkpoint of `steps` to `target` and return its step."""
    from ..models.actor import Actor
    from ..models.export import write_model
    from ..models.load import load_model, load_tokenizer, no_progress_bar
    from . import checkpoint, checkpoint_folder

    model = config.model
    with no_progress_bar():
        base = load_model(model.path, dtype=model.dtype, device="cpu", trust_remote_code=model.trust_remote_code)
        actor = Actor(base, model.lora.changed(merge=True))
        done, statistics = checkpoint.load_last_weights(folder.checkpoints, steps, actor, partial(console.print, markup=False))
        tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        if folder.remote:
            folder.remote.fetch(folder.metrics.name)
        kv = config.sampler_kv
        if config.sets_budget:
            state, _ = checkpoint.read_state(checkpoint_folder.at_step(folder.checkpoints, done))
            kv = kv.changed(budget=state.budget["state"]["budget"])
        card = model_card(config, kv, folder.read_metrics(), done, push or target.resolve().name, merge=merge)
        write_model(target, actor, tokenizer, kv, statistics, merge=merge, card=card)
    return done
