"""Load the inputs of a run: the model, its tokenizer and the problems with their token ids. Check the longest prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import Config, Sampling
from ..data.examples import TASK_PROBLEMS, Example, filter_by_length, load, name_of, too_few_note
from ..data.prompts import encoded
from ..errors import PromptError
from ..models.load import load_model, load_tokenizer
from ..models.routing import install
from ..models.support import set_head_dtype
from ..rewards.weighted_sum import refuse_without_answers
from ..rollout.engine import Engine


@dataclass(frozen=True)
class HeldOut:
    """The problems of one held-out set."""

    source: str
    examples: list[Example]
    prompts: list[list[int]]
    note: str | None = None
    """Message about skipped rows; None if no row was skipped."""

    @property
    def name(self) -> str:
        """The set's name in metrics, such as `eval/<name>/pass@1`."""
        return name_of(self.source)


@dataclass(frozen=True)
class RunInputs:
    """Inputs of a Trainer. Training gets them from `load_all`; benchmarks pass random weights and synthetic prompts."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    examples: list[Example]
    prompts: list[list[int]]
    limits: Callable[[list[int]], list[int]] | None = None
    """Function that maps the seeds of rollouts to the response length, in tokens, at which each rollout ends."""
    notes: Sequence[str] = ()
    """Sentences about the data that are shown to the user."""
    places: Sequence[int] = ()
    """Index of each example in the data source, before prompts longer than `data.max_prompt_tokens` are removed."""
    held_out: Sequence[HeldOut] = ()
    """The held-out sets. Empty if the run is not evaluated."""


def load_all(config: Config) -> RunInputs:
    """Load the model, the tokenizer and the tokenized problems that `config` specifies."""
    settings = config.model
    tokenizer = load_tokenizer(settings.path, trust_remote_code=settings.trust_remote_code)
    loaded = load(config.data.train, "train", n=TASK_PROBLEMS, seed=config.seed, **config.data.reading)
    refuse_without_answers(config.data.train, loaded.examples[0], config.reward.function_for(config.data.train))
    prompts = encoded(tokenizer, loaded.examples, config.data)
    places, note = filter_by_length(config.data.train, prompts, config.data.max_prompt_tokens)
    few = too_few_note(config.data.train, len(places), config.rollout.prompts_per_step)
    held_out = load_held_out(config, tokenizer)  # before the model: an empty set ends the run
    model = load_model(
        settings.path,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
        base=settings.lora.base,
    )
    set_head_dtype(model, settings.head_dtype)
    if settings.routing_replay:
        install(model)
    return RunInputs(
        model,
        tokenizer,
        [loaded.examples[place] for place in places],
        [prompts[place] for place in places],
        notes=[line for line in (loaded.note, note, few, *(each.note for each in held_out)) if line],
        places=places,
        held_out=held_out,
    )


def load_held_out(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[HeldOut]:
    """Load at most `eval.problems` problems of every held-out set. Return an empty list if the run is not evaluated."""
    sets, most = [], config.eval.problems
    for source in config.data.held_out if most else ():
        loaded = load(source, "test", n=most, seed=0, **config.data.reading)
        examples = loaded.examples[:most]
        sets.append(HeldOut(source, examples, encoded(tokenizer, examples, config.data), loaded.note))
    return sets


def check_longest(
    engine: Engine, sampling: Sampling, prompts: Sequence[list[int]], source: str, places: Sequence[int] = ()
) -> None:
    """Raise PromptError if the longest prompt of a data source leaves no room for a response.

    `places` is given only for training problems. The error then suggests a value of `data.max_prompt_tokens`.
    """
    at, longest = max(enumerate(prompts), key=lambda pair: len(pair[1]))
    try:
        engine.check_prompt(longest, sampling)
    except PromptError as error:
        fix = error.fix
        most = engine.most_prompt_tokens(sampling)
        if places and most is not None and min(map(len, prompts)) <= most < len(longest):
            longer = f"{sum(len(prompt) > most for prompt in prompts):,} of {len(prompts):,} problems"
            fix = f"{fix}, or skip {longer} with --data.max-prompt-tokens {most}"
        raise error.named(f"Problem {(places[at] if places else at) + 1} of {source}", fix) from None
