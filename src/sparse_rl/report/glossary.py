"""The one-sentence caption of each metric's chart. docs/metrics.md describes the same metrics in more detail."""

import re
from collections.abc import Iterable

ANY_BENCHMARK = re.compile(r"^eval/.+/(?=pass@1|no_verdict|graded)")
ANY_PART = re.compile(r"^reward/.+/(?=mean$)")
OTHER = "Other"
"""Section of unknown keys, written by another version or by user code."""
UNKNOWN = "This version of sparse-rl does not define this metric. Another version or custom code logged it."
INTERVAL = "Bound of the score's 95 % confidence interval."

SECTIONS: dict[str, dict[str, str]] = {
    "Is it learning?": {
        "reward/mean": "Mean reward over rollouts with a verdict. It rises while the run learns.",
        "reward/<function>/mean": "Mean value of one function in a weighted reward sum, before its weight is applied.",
        "reward/std": "Standard deviation of the rewards in a step. At 0 there is no learning signal.",
        "reward/zero_std_groups": "Fraction of groups whose rewards are all equal. These groups give no learning signal.",
        "eval/<benchmark>/pass@1": "Mean reward on held-out problems with a dense cache. The band of a single run is the 95 % interval.",
        "eval/<benchmark>/pass@1_low": INTERVAL,
        "eval/<benchmark>/pass@1_high": INTERVAL,
        "eval/<benchmark>/graded": "1 if a held-out reward was neither 0 nor 1. The scores are then mean rewards, not pass rates.",
        "eval/<benchmark>/pass@1_sparse": "Mean reward of the same weights on the same problems with the sampler's cache. The gap to the dense score is the cost of the cache.",
        "eval/<benchmark>/no_verdict": "Number of evaluation rollouts without a verdict. The dense score excludes them.",
        "eval/<benchmark>/no_verdict_sparse": "Number of evaluation rollouts without a verdict. The score with the sampler's cache excludes them.",
        "eval/<benchmark>/pass@1_sparse_low": INTERVAL,
        "eval/<benchmark>/pass@1_sparse_high": INTERVAL,
    },
    "Are sampler and learner close?": {
        "sparse/mismatch_k1": "Estimate (k1) of the KL divergence between the sampler and the dense model. If it grows, raise kv.budget.",
        "sparse/mismatch_k3": "Estimate (k3) of the same divergence; never negative. If it is far above k1, a few very large ξ dominate it.",
        "sparse/xi_p05": "5th percentile of ξ over tokens. A lower value means a tighter budget.",
        "sparse/xi_p05_long": "5th percentile of ξ in the second half of the longest quarter of the responses. A budget that is too small for the length shows here first.",
        "sparse/xi_min": "Smallest ξ of the step. It is always small in long runs: watch the rejection rate instead.",
        "sparse/ess": "Effective sample size of the token weights, as a fraction of the tokens. Far below 1, a few tokens dominate the update.",
        "sparse/rejection_rate": "Fraction of rollouts that were rejected. If it rises, the budget is too small.",
        "sparse/unlikely": "Fraction of rollouts with a token that the dense model finds 10,000 times less likely than the sampler did. Under naive, these are the rollouts that sparse_rl would reject.",
        "sparse/replaced": "Number of rejected rollouts that were replaced by another sample (rollout.refill_rejected).",
        "sparse/wasted_tokens": "Fraction of response tokens that are not learned from. If it exceeds the rejection rate, mostly long answers are rejected.",
        "sparse/effective": "Effective sample size of the update after rejection, as a fraction of the sampled tokens. Far below the accepted fraction, a few sequences dominate the update.",
        "sparse/engine_noise": "Difference between sampler and learner log-probs caused by rounding alone. It should be far below the mismatch.",
        "routing/flip_rate": "Fraction of (token, router) pairs for which the learner's router would choose other experts than the sampler's did (model.routing_replay).",
    },
    "What did the cache cost and save?": {
        "kv/token_savings": "Fraction of a dense cache's tokens that the cache did not hold. At 0, all answers fit into the budget.",
        "kv/peak_bytes": "Bytes allocated for keys and values. They are constant over steps, unless kv.budget = auto changes the budget.",
        "kv/dense_bytes": "Peak bytes that a dense cache in pages would have held, with the prompt of each group once.",
        "kv/peak_tokens": "Peak number of tokens of one rollout that a head held after prefill; at most budget + interval, and a protected prompt.",
        "kv/evictions": "Number of cache compactions, those of long prompts included. At 0, nothing was evicted.",
        "kv/budget": "The budget of the step: kv.budget, or what kv.budget = auto chose. Without eviction (dense, or policy full), the longest sequence that the cache holds.",
        "kv/pool_used": "Peak fraction of the pages in use. At 1, sequences may have waited for pages.",
        "kv/page_waste": "Fraction of the used pages that holds no token.",
        "kv/straggler_pages": "Fraction of the used pages that stay for the last sample of a prompt.",
        "kv/preemptions": "Number of times that a dense sequence paused because no page was free.",
        "kv/recomputed_tokens": "Tokens recomputed when paused dense sequences continued, per sampled token.",
    },
    "How did the update go?": {
        "policy/loss": "Policy loss. Its value alone says little: look at the reward.",
        "policy/clip_ratio": "Fraction of sampled tokens whose ratio was clipped. If it grows, lower optimizer.lr.",
        "policy/entropy": "Mean entropy per token. A sharp drop means answers become identical; a rise means they become noise.",
        "policy/grad_norm": "Gradient norm before clipping. A rise to 2.5 times that of the first ten steps precedes a collapse. If it is always far above optimizer.clip_norm, lower optimizer.lr.",
        "policy/lr": "Learning rate of the step.",
        "policy/skipped_updates": "Number of updates that were skipped: all rewards equal, all rollouts rejected, or a value not finite.",
        "policy/kl_ref": "KL divergence between the policy and the reference model. It should rise slowly.",
        "policy/distillation_kl": "KL divergence between the dense and the sparse policy. Distillation reduces it.",
        "policy/opsm_dropped": "Number of sequences with a negative advantage that off-policy sequence masking dropped.",
    },
    "What was written, and how fast?": {
        "reward/no_verdict": "Number of rollouts for which the reward returned None.",
        "reward/dropped_groups": "Number of groups with fewer than two verdicts. They are not in the loss.",
        "reward/timeouts": "Number of rollouts whose reward took longer than reward.timeout_s. See reward.log.",
        "reward/errors": "Number of rollouts whose reward raised, crashed or returned no finite number. See reward.log.",
        "response/mean_tokens": "Mean response length in tokens.",
        "response/p90_tokens": "90th percentile of the response length in tokens.",
        "response/truncated": "Fraction of rollouts that were truncated. A rise with a falling reward is a collapse.",
        "response/repetition": "Fraction of rollouts that were stopped for repetition.",
        "perf/step_s": "Seconds per step, excluding evaluation and checkpoint.",
        "perf/rollout_s": "Seconds of sampling and grading. If the reward is the slow part, raise reward.workers.",
        "perf/prefill_s": "Seconds of prefill.",
        "perf/decode_s": "Seconds of decoding.",
        "perf/compaction_s": "Seconds of cache compaction. A longer kv.interval reduces them.",
        "perf/idle_slots": "Fraction of decode steps in which a slot was empty or its rollout had ended.",
        "perf/grade_s": "Seconds of grading after the last rollout ended.",
        "perf/rank_wait": "Fraction of the sampling time that ranks waited for the slowest rank.",
        "perf/rebuild_s": "Seconds of rebuilding the cache and its graphs after a change of the budget (kv.budget = auto).",
        "perf/learner_s": "Seconds of the learner, from its first forward pass to its last update.",
        "perf/old_logprobs_s": "Seconds of the learner's forward passes without gradient.",
        "perf/update_s": "Seconds of the learner's updates.",
        "perf/rollout_tokens_per_s": "Sampled tokens per second of sampling and grading.",
        "perf/learner_tokens_per_s": "Prompt and response tokens that the learner processes per second.",
        "memory/peak_gib": "Peak GiB allocated by torch since the run began. A value that keeps growing indicates a leak.",
        "memory/predicted_gib": "Peak GiB predicted by the plan. It should be within 10 % of the measured peak.",
    },
}


def placed(keys: Iterable[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (section title, [(key, caption), …]) of these keys, in section order. Unknown keys come last."""
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
