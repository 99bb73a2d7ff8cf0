"""The tasks that are known by name: where their problems lie, how they are asked and how the papers evaluate on them.

Imports neither torch nor datasets, so that help and dry runs are quick.
"""

from dataclasses import dataclass, replace
from typing import Literal

Split = Literal["train", "test"]
Kind = Literal["math", "integer", "arithmetic"]
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class HubData:
    """A data set on the hub and how its rows are read."""

    id: str
    config: str | None = None
    split: str = "test"
    file: str | None = None
    """One file of the repository, where it holds several data sets."""
    prompt_column: str = "problem"
    answer_column: str = "answer"
    answer_after: str | None = None
    """The answer is what follows the last of these marks in its column."""


@dataclass(frozen=True)
class Origin:
    """Where the problems of one split lie; with neither file nor hub the package makes them itself."""

    file: str | None = None
    """The name in `data.dir`."""
    hub: HubData | None = None


@dataclass(frozen=True)
class Task:
    name: str
    title: str
    """As papers write it."""
    kind: Kind
    """How answers are compared: as mathematics, as integers, or as the embedded task does."""
    max_tokens: int
    """The most tokens of a response when the papers evaluate."""
    samples: int
    """Responses to each problem when the papers evaluate: 1 is Pass@1, 32 is Avg@32."""
    train: Origin | None
    """None: there is nothing to train on."""
    test: Origin | None
    """None: nothing is held out."""
    instruction: str = BOXED
    """Follows the problem unless `data.template` says otherwise."""

    def origin(self, split: Split) -> Origin | None:
        return self.train if split == "train" else self.test


def _gsm8k(split: Split) -> Origin:
    hub = HubData("openai/gsm8k", "main", split, prompt_column="question", answer_after="####")
    return Origin(f"gsm8k-{split}.jsonl.gz", hub)


_SIMPLERL = HubData(
    "hkust-nlp/SimpleRL-Zoo-Data",
    split="train",
    file="simplelr_qwen_level3to5/train.parquet",
    prompt_column="question",
    answer_column="gt_answer",
)
_OLYMPIADBENCH = HubData(
    "Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train", prompt_column="question", answer_column="final_answer"
)
_GAOKAO = HubData("MARIO-Math-Reasoning/Gaokao2023-Math-En", split="train", prompt_column="question")
_MINERVA = HubData("math-ai/minervamath", prompt_column="question")
_AIME24 = HubData("HuggingFaceH4/aime_2024", split="train")
_AMC23 = HubData("math-ai/amc23", prompt_column="question")
_MATH500 = HubData("HuggingFaceH4/MATH-500")


def _benchmark(name: str, title: str, file: str, hub: HubData) -> Task:
    return Task(name, title, "math", 8192, 1, None, Origin(file, hub))


def _contest(name: str, title: str, file: str, hub: HubData) -> Task:
    """Few problems, whose answers are integers: they are sampled 32 times each, and longer."""
    return replace(_benchmark(name, title, file, hub), kind="integer", max_tokens=16384, samples=32)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("arithmetic", "arithmetic", "arithmetic", 256, 1, Origin(), Origin(), instruction=""),
        Task(
            "simplerl-zoo-hard",
            "SimpleRL-Zoo hard",
            "math",
            8192,
            1,
            Origin("simplerl-zoo-hard-train.jsonl.gz", _SIMPLERL),
            None,
        ),
        Task("gsm8k", "GSM8K", "integer", 8192, 1, _gsm8k("train"), _gsm8k("test")),
        _benchmark("math500", "MATH500", "math500.jsonl.gz", _MATH500),
        _benchmark("gaokao2023en", "Gaokao2023en", "gaokao2023en.jsonl.gz", _GAOKAO),
        _benchmark("minerva", "Minerva", "minerva-math.jsonl.gz", _MINERVA),
        _benchmark("olympiadbench", "OlympiadBench", "olympiadbench-math-en.jsonl.gz", _OLYMPIADBENCH),
        _contest("aime24", "AIME24", "aime24.jsonl.gz", _AIME24),
        _contest("amc23", "AMC23", "amc23.jsonl.gz", _AMC23),
    )
}
"""Every task by name; evaluation settings are those of Sparse-RL (8,192 tokens and Pass@1, contests 16,384 and Avg@32)."""
