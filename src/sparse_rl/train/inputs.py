"""Load the inputs of a run: the model, its tokenizer and the problems with their token ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import Config
from ..data.examples import TASK_PROBLEMS, Example, filter_by_length, load, too_few_note
from ..data.prompts import encoded
from ..models.load import load_model, load_tokenizer
from ..rewards.weighted_sum import refuse_without_answers


@dataclass(frozen=True)
class RunInputs:
    """Inputs of a trainer. A benchmark passes random weights and synthetic prompts instead of loading them."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    examples: list[Example]
    prompts: list[list[int]]
    limits: Callable[[list[int]], list[int]] | None = None
    """Function from the seeds of rollouts to the number of tokens at which each ends."""
    notes: Sequence[str] = ()
    """Sentences about the data for the user."""
    places: Sequence[int] = ()
    """Indices of the examples in their source; set if some were left out."""


def load_all(config: Config) -> RunInputs:
    """Load the model, the problems and their token ids that the configuration names."""
    settings = config.model
    tokenizer = load_tokenizer(settings.path, trust_remote_code=settings.trust_remote_code)
    loaded = load(config.data.train, "train", n=TASK_PROBLEMS, seed=config.seed, **config.data.reading)
    refuse_without_answers(config.data.train, loaded.examples[0], config.reward.function_for(config.data.train))
    prompts = encoded(tokenizer, loaded.examples, config.data)
    places, note = filter_by_length(config.data.train, prompts, config.data.max_prompt_tokens)
    few = too_few_note(config.data.train, len(places), config.rollout.prompts_per_step)
    model = load_model(
        settings.path, dtype=settings.dtype, device=settings.device, trust_remote_code=settings.trust_remote_code
    )
    return RunInputs(
        model,
        tokenizer,
        [loaded.examples[place] for place in places],
        [prompts[place] for place in places],
        notes=[line for line in (loaded.note, note, few) if line],
        places=places,
    )
