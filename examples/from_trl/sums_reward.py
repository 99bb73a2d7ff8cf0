"""A reward in TRL's convention, named by grpo.yaml. sparse-rl calls it as it is."""

from sparse_rl.data.arithmetic import grade


def right(completions, answer, **columns):
    return [grade(text, wanted) for text, wanted in zip(completions, answer, strict=True)]
