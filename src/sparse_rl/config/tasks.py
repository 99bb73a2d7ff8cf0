"""Tasks by name: the source of their problems, their instruction, and the evaluation settings of the papers.

Imports neither torch nor datasets, so that help and dry runs are fast.
"""

from dataclasses import dataclass, replace
from typing import Literal

Split = Literal["train", "test"]
Kind = Literal["math", "integer", "arithmetic"]
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class HubData:
    """A data set on the hub, and how its rows are read."""

    id: str
    config: str | None = None
    split: str = "test"
    file: str | None = None
    """One file of the repository, if the repository holds several data sets."""
    prompt_column: str = "problem"
    answer_column: str = "answer"
    answer_after: str | None = None
    """Marker in the answer column. The answer is the text after its last occurrence."""


@dataclass(frozen=True)
class Origin:
    """Source of the problems of one split. If neither file nor hub is set, the package generates them."""

    file: str | None = None
    """File name in `data.dir`."""
    hub: HubData | None = None


@dataclass(frozen=True)
class Task:
    name: str
    title: str
    """Name of the task as used in papers."""
    kind: Kind
    """How answers are compared: as mathematics, as integers, or by the rule of the embedded task."""
    max_tokens: int
    """Maximum response tokens in the papers' evaluation."""
    samples: int
    """Responses per problem in the papers' evaluation: 1 is Pass@1, 32 is Avg@32."""
    train: Origin | None
    """Source of the training problems; None if the task has none."""
    test: Origin | None
    """Source of the held-out problems; None if the task has none."""
    instruction: str = BOXED
    """Text appended to the problem if `data.template` is not set."""

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
    """Return a benchmark with few problems and integer answers. Each problem is sampled 32 times, with longer responses."""
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
"""All tasks by name. Evaluation settings are those of Sparse-RL: 8,192 tokens and Pass@1, for contests 16,384 tokens and
Avg@32."""
