"""The one-sentence caption of each metric's chart. docs/metrics.md describes the same metrics in more detail."""

import re
from collections.abc import Iterable

ANY_BENCHMARK = re.compile(r"^eval/.+/(?=pass@1|no_verdict|graded)")
ANY_PART = re.compile(r"^reward/.+/(?=mean$)")
OTHER = "Other"
"""Section of unknown keys, written by another version or by user code."""
UNKNOWN = "This key is not among the metrics of this version: another one wrote it, or code of your own."
INTERVAL = "This is a bound of the 95 % interval of the score."

SECTIONS: dict[str, dict[str, str]] = {
    "Is it learning?": {
        "reward/mean": "Mean reward of all rollouts with a verdict: it rises while a run learns.",
        "reward/<function>/mean": "What one function of a sum of rewards gives, before its weight.",
        "reward/std": "How much the rewards of a step differ: at 0 nothing tells good answers from bad ones.",
        "reward/zero_std_groups": "The share of groups whose rewards are all equal, and which therefore teach nothing.",
        "eval/<benchmark>/pass@1": "The mean reward on held-out problems with a dense cache; the band of a single run is its 95 % interval.",
        "eval/<benchmark>/pass@1_low": INTERVAL,
        "eval/<benchmark>/pass@1_high": INTERVAL,
        "eval/<benchmark>/graded": "It is 1 where a held-out reward was neither 0 nor 1: the scores are then mean rewards, not shares.",
        "eval/<benchmark>/pass@1_sparse": "The same weights on the same problems with the sampler's cache: the gap to the dense score is what the cache costs.",
        "eval/<benchmark>/no_verdict": "Evaluated rollouts without a verdict, which the dense score leaves out.",
        "eval/<benchmark>/no_verdict_sparse": "Evaluated rollouts without a verdict, which the sampler's score leaves out.",
        "eval/<benchmark>/pass@1_sparse_low": INTERVAL,
        "eval/<benchmark>/pass@1_sparse_high": INTERVAL,
    },
    "Are sampler and learner close?": {
        "sparse/mismatch_k1": "An estimate of how far the sampler is from the dense model: where it grows, raise kv.budget.",
        "sparse/mismatch_k3": "The same distance, never negative: far above k1 it comes from a few huge ξ.",
        "sparse/xi_p05": "One token in twenty has a ξ below this: the lower it is, the tighter the budget.",
        "sparse/xi_min": "The smallest ξ of the step, which is always small in long runs: watch the rejection rate instead.",
        "sparse/ess": "The share of the tokens that the weighted sum is worth: far below 1 a few of them carry the update.",
        "sparse/rejection_rate": "The share of rollouts that were dropped: where it rises, the budget is too tight.",
        "sparse/wasted_tokens": "The share of response tokens that teach nothing: above the rejection rate it is the long answers that go.",
        "sparse/effective": "The share of the sampled tokens that the update is worth: far below what was not rejected, a few sequences carry it.",
        "sparse/engine_noise": "What rounding alone puts between sampler and learner: it should be far below the mismatch.",
    },
    "What did the cache cost and save?": {
        "kv/token_savings": "The share of a dense cache's tokens that was not held: at 0 the answers fit into the budget.",
        "kv/peak_bytes": "The bytes allocated for keys and values, which stay the same from step to step.",
        "kv/dense_bytes": "The most bytes that a dense cache would have held at one moment.",
        "kv/peak_tokens": "The most tokens of one rollout that a head held after its prompt: at most budget and interval together.",
        "kv/evictions": "How often the cache of a rollout was compacted: at 0 nothing was evicted.",
        "kv/budget": "The budget, kv.budget, or what a slot can hold where the cache is dense.",
    },
    "How did the update go?": {
        "policy/loss": "What was minimised, which by itself says little: look at the reward.",
        "policy/clip_ratio": "The share of sampled tokens that the clip held back: where it grows, lower optimizer.lr.",
        "policy/entropy": "How open the choice of a token is: a crash means answers all alike, a rise means noise.",
        "policy/grad_norm": "The norm of the gradient before it is clipped: growing to 2.5 times that of the first ten steps it precedes a collapse; always far above optimizer.clip_norm it asks for a lower optimizer.lr.",
        "policy/lr": "The learning rate of the step.",
        "policy/skipped_updates": "Updates that changed nothing, because rewards were equal, all was rejected or a number was not finite.",
        "policy/kl_ref": "How far the policy has moved from where it started: it should rise slowly.",
        "policy/distillation_kl": "How far dense and sparse policy are apart, which the distillation makes smaller.",
        "policy/opsm_dropped": "Bad answers that off-policy masking dropped.",
    },
    "What was written, and how fast?": {
        "reward/no_verdict": "Rollouts for which the reward returned None.",
        "reward/timeouts": "Rollouts whose reward took longer than reward.timeout_s: reward.log has more.",
        "reward/errors": "Rollouts whose reward raised, crashed or gave no finite number: reward.log has more.",
        "response/mean_tokens": "The mean length of a response in tokens.",
        "response/truncated": "The share of rollouts that were cut off: a rise with a falling reward is a collapse.",
        "response/repetition": "The share of rollouts that were ended because they repeated themselves.",
        "perf/step_s": "Seconds of the step, without evaluation and checkpoint.",
        "perf/rollout_s": "Seconds of sampling and grading: where it is the reward that is slow, raise reward.workers.",
        "perf/prefill_s": "Seconds in which the prompts were read into the cache.",
        "perf/decode_s": "Seconds in which tokens were sampled.",
        "perf/compaction_s": "Seconds in which the cache was compacted: a longer kv.interval makes it less.",
        "perf/grade_s": "Seconds in which answers were decoded and graded.",
        "perf/rank_wait": "Share of the sampling time that ranks waited for the slowest of them.",
        "perf/learner_s": "Seconds of the learner, from its first pass to its last update.",
        "perf/old_logprobs_s": "Seconds of the learner's passes without a gradient.",
        "perf/update_s": "Seconds of the learner's updates.",
        "perf/rollout_tokens_per_s": "Tokens sampled in a second of sampling and grading.",
        "perf/learner_tokens_per_s": "Tokens of prompts and responses that the learner takes in a second.",
        "memory/peak_gib": "The most GiB that torch has had allocated since the run began: one that grows is a leak.",
        "memory/predicted_gib": "The GiB that the plan expected, which should be within a tenth of the peak.",
    },
}


def placed(keys: Iterable[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (section title, [(key, caption), …]) for the given keys, in section order. Unknown keys come last."""
    left = sorted(keys)
    titled: list[tuple[str, list[tuple[str, str]]]] = []
    for title, sentences in SECTIONS.items():
        rows = [(key, sentence) for known, sentence in sentences.items() for key in left if _general(key) == known]
        if rows:
            titled.append((title, rows))
    others = [key for key in left if not any(_general(key) in sentences for sentences in SECTIONS.values())]
    if others:
        titled.append((OTHER, [(key, UNKNOWN) for key in others]))
    return titled


def _general(key: str) -> str:
    return ANY_PART.sub("reward/<function>/", ANY_BENCHMARK.sub("eval/<benchmark>/", key))
