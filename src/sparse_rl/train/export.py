"""Write the weights of a checkpoint as a Hugging Face folder."""

from functools import partial
from pathlib import Path

from rich.markup import escape

from ..errors import UserError
from ..terminal import Terminal
from .run_folder import RunFolder
from .storage import within


def export(run: str, out: Path, *, step: int | str | None, merge: bool) -> None:
    """Write the weights of one checkpoint to `out`. `step` is a step number, "best", or None for the last checkpoint."""
    from ..models.actor import Actor
    from ..models.export import write_model
    from ..models.load import load_model, load_tokenizer, no_progress_bar
    from . import checkpoint

    folder = RunFolder(run, writes=False)
    folder.recover_if_abandoned()
    config = folder.config()
    steps = checkpoint.steps_in(folder.checkpoints)
    if not steps:
        raise UserError(f"{run} has no checkpoint to export: wait for the first checkpoint, or lower checkpoint.every.")
    if step == "best":
        step = checkpoint.best_step(folder.checkpoints)
    if step is not None and step not in steps:
        raise UserError(f"{run} has no checkpoint of step {step}: choose one of {', '.join(map(str, steps))}.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty: pass another folder.")
    model, lora = config.model, config.model.lora
    if merge and not lora.rank:
        raise UserError("The run trained all weights and has no adapter to merge: omit --merge.")
    console = Terminal(soft_wrap=True, highlight=False)
    with no_progress_bar():
        base = load_model(model.path, dtype=model.dtype, device="cpu", trust_remote_code=model.trust_remote_code)
        actor = Actor(base, lora.model_copy(update={"merge": True}))
        done, statistics = checkpoint.load_last_weights(
            folder.checkpoints, [step] if isinstance(step, int) else steps, actor, partial(console.print, markup=False)
        )
        tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        kv = config.sampler_kv
        if config.sets_budget:
            state, _ = checkpoint.read_state(within(folder.checkpoints, f"step-{done}"))
            kv = kv.model_copy(update={"budget": state.budget["state"]["budget"]})
        write_model(out, actor, tokenizer, kv, statistics, merge=merge)
    if step is None and done < config.steps:
        console.print(f"warning: the exported checkpoint is step {done} of {config.steps}: the run has no later checkpoint.")
    console.print(f"Exported step {done} of {escape(str(run))} to {escape(str(out))}.")
