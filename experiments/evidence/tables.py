"""Rebuild the tables and figures of docs/evidence.md and RESULTS.md from the raw metrics: `make evidence`.

The text between `<!-- NAME -->` and `<!-- end -->` in a page is replaced by the table NAME; the rest is written by hand.
Intervals are 95 % over seeds (Student's t). Differences are paired by seed.
"""

import argparse
import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import alert_leads
import long_answers
import xi_tail
from collapse import ending
from curves import WINDOW, first_step
from figures import LONG_PANELS, budgets, plot, summary
from formatting import NOT_YET, interval, table
from raw import BESIDE, DENSE, HERE, SAMPLERS, SPARSE, Rows, ends, evaluated, read, starts
from stability import STABILITY_HEADS, plot_stability, stability_rows

from sparse_rl.monitor.alerts import check

DOCS = HERE.parents[1] / "docs"


def scores(question: str, *, one_cache: bool = True) -> str:
    """Return the table of the test scores seed by seed, with the dense cache and with the sampler's, and before training."""
    lines = []
    dense, sparse = ({"*before*": starts(question, key)} | ends(question, key) for key in (DENSE, SPARSE))
    if not one_cache:
        sparse["*before*"] = {}
    for arm, found in dense.items():
        if not found:
            continue
        cells = [arm, ", ".join(map(str, found))]
        for of in (found, sparse[arm]):
            cells += [", ".join(f"{of[seed]:.1f}" if seed in of else "-" for seed in found) if of else ""]
            cells += [interval(list(of.values())) if of else ""]
        lines.append(cells)
    return table(["arm", "seeds", "Pass@1, %", "mean", "with the sampler's cache, %", "mean"], lines)


def kept(question: str, arms: Sequence[str], dense: Sequence[str]) -> str:
    """Return each arm's share of the accuracy and of the gain of dense training. Several dense runs of a seed are averaged."""
    found, before = ends(question, DENSE), statistics.mean(starts("a-collapse", DENSE).values())
    lines = []
    for arm in arms:
        mine = found.get(arm, {})
        base = {seed: statistics.mean(found[each][seed] for each in dense if seed in found.get(each, {})) for seed in mine}
        pairs = [(mine[seed], base[seed]) for seed in mine]
        if not pairs:
            continue
        cells = [arm, ", ".join(map(str, mine)), interval([100 * own / theirs for own, theirs in pairs])]
        cells += [interval([100 * (own - before) / (theirs - before) for own, theirs in pairs])]
        cells += [
            ", ".join(f"{own - theirs:+.1f}" for own, theirs in pairs),
            interval([own - theirs for own, theirs in pairs], sign="+"),
        ]
        lines.append(cells)
    heads = ["arm", "seeds", "share of dense accuracy, %", "share of dense gain, %", "difference, points", "mean"]
    return table(heads, lines)


def gaps(question: str, arms: Sequence[str]) -> str:
    """Return the table of dense less sparse Pass@1 at the end of training, with a second sample where the model was kept."""
    first = starts(question, DENSE)
    lines = [
        ["*before*", ", ".join(map(str, first)), *points([first[seed] - starts(question, SPARSE)[seed] for seed in first]), ""]
    ]
    for arm in arms:
        runs, again = read(question).get(arm, {}), {}
        for seed, rows in runs.items():
            found = {
                row["setting"]: 100 * row["pass@1"]["mean"]
                for row in evaluated(question).get(f"{arm}-{seed}", {}).get("results", ())
            }
            if found:
                again[seed] = found.get("full", 100 * rows[-1][DENSE]) - found[SAMPLERS]
        gap = [100 * (rows[-1][DENSE] - rows[-1][SPARSE]) for rows in runs.values() if SPARSE in rows[-1]]
        cells = [arm, ", ".join(map(str, runs)), *(points(gap) if gap else ["", ""])]
        lines.append([*cells, ", ".join(f"{value:.1f} (seed {seed})" for seed, value in again.items())])
    return table(["arm", "seeds", "loss at the end, points", "mean", "second sample"], lines)


def collapsed_runs(question: str) -> dict[str, list[list[str]]]:
    """Return the table rows of the collapsed runs, by arm."""
    found: dict[str, list[list[str]]] = {}
    for arm, runs in read(question).items():
        for seed, rows in runs.items():
            end = ending(rows)
            if end.collapsed:
                cells = [f"{arm}-{seed}", f"{end.reward:.2f}", f"{100 * end.before:.1f} → {100 * end.after:.1f}"]
                change = f"{100 * (end.after - end.before):+.1f} ± {100 * end.half_width:.1f}"
                found.setdefault(arm, []).append([*cells, change])
    return found


def collapsed(question: str) -> str:
    lines = [line for lines in collapsed_runs(question).values() for line in lines]
    return table(["run", "last ten rewards / best ten", "Pass@1, %", "change, points"], lines)


def points(values: Sequence[float]) -> list[str]:
    return [", ".join(f"{value:.1f}" for value in values), interval(values)]


def over_steps(key: str, scale: float = 1.0, last: int = 0) -> Callable[[Rows], float]:
    """Return a function that computes the mean of a metric over the steps of a run, or over its last ones."""

    def mean(rows: Rows) -> float:
        values = [row[key] for row in rows[-last:] if key in row]
        return scale * statistics.mean(values) if values else math.nan

    return mean


def gradient(rows: Rows) -> list[float]:
    return [row["policy/grad_norm"] for row in rows if "policy/grad_norm" in row]


COLUMNS: dict[str, Callable[[Rows], float]] = {
    "reward": over_steps("reward/mean", last=10),
    "rejected, %": over_steps("sparse/rejection_rate", 100),
    "wasted, %": over_steps("sparse/wasted_tokens", 100),
    "clipped": over_steps("policy/clip_ratio"),
    "ξ p05": over_steps("sparse/xi_p05"),
    "k3": over_steps("sparse/mismatch_k3"),
    "ESS": over_steps("sparse/ess"),
    "lowest ESS": lambda rows: min((row["sparse/ess"] for row in rows if "sparse/ess" in row), default=math.nan),
    "grad norm": lambda rows: statistics.median(gradient(rows)),
    "grad norm variance": lambda rows: statistics.variance(gradient(rows)),
    "entropy": over_steps("policy/entropy", last=10),
    "tokens": over_steps("response/mean_tokens", last=10),
    "cut off, %": over_steps("response/truncated", 100, last=10),
    "saved, %": over_steps("kv/token_savings", 100),
}


def health(question: str) -> str:
    """Return the metrics of each arm, as medians over seeds: one wild run would decide a mean of variances."""
    lines = []
    for arm, runs in read(question).items():
        values = [statistics.median(column(rows) for rows in runs.values()) for column in COLUMNS.values()]
        lines.append([arm, *("" if math.isnan(value) else f"{value:.3g}" for value in values)])
    return table(["arm", *COLUMNS], lines)


def outcome(question: str, arms: dict[str, Sequence[str]]) -> str:
    """Build the summary: the final score of each arm, its difference from its dense arms, and its cost."""
    runs, scores, fallen = read(question), ends(question, DENSE), collapsed_runs(question)
    lines = []
    for arm, dense in arms.items():
        base = {
            seed: statistics.mean(scores[each][seed] for each in dense if seed in scores.get(each, {})) for seed in scores[arm]
        }
        away = interval([score - base[seed] for seed, score in scores[arm].items()], sign="+") if arm not in dense else ""
        cells = [arm, interval(list(scores[arm].values())), away, f"{len(fallen.get(arm, ()))} of {len(runs[arm])}"]
        medians = (
            statistics.median(COLUMNS[name](rows) for rows in runs[arm].values()) for name in ("rejected, %", "saved, %")
        )
        lines.append([*cells, *(f"{value:.3g}" for value in medians)])
    heads = ["arm", "Pass@1, %", "from dense, points", "collapsed", "rejected, %", "KV token-steps saved, %"]
    return table(heads, lines)


SETTLED = 4
"""Steps after which nothing is compiled any more."""

COSTS: dict[str, tuple[str, float, int]] = {
    "KV allocated, MiB": ("kv/peak_bytes", 2**-20, 0),
    "sampled tokens/s": ("perf/rollout_tokens_per_s", 1, 0),
    "sampling, s": ("perf/rollout_s", 1, 2),
    "learning, s": ("perf/learner_s", 1, 2),
    "step, s": ("perf/step_s", 1, 2),
    "peak, GiB": ("memory/peak_gib", 1, 1),
}


def costs(question: str) -> str:
    """Return the costs of a step: medians of the settled steps of runs that had the GPU to themselves."""
    lines = []
    for arm, runs in read(question).items():
        rows = [row for each in runs.values() for row in each if row["step"] > SETTLED]
        medians = ((scale * statistics.median(row[key] for row in rows), digits) for key, scale, digits in COSTS.values())
        lines.append([arm, *(f"{value:,.{digits}f}" for value, digits in medians)])
    return table(["arm", *COSTS], lines)


def memory(questions: Sequence[str]) -> str:
    """Return the highest memory of the runs of each arm: of the cache, of a dense one, and the peak beside the plan."""
    lines = []
    arms = {
        arm: runs
        for question in questions
        for arm, runs in read(question).items()
        if arm not in BESIDE.get(question, {}).values()
    }
    for arm, runs in arms.items():
        most = {
            key: max(row[key] for rows in runs.values() for row in rows if key in row)
            for key in ("kv/peak_bytes", "kv/dense_bytes", "memory/peak_gib", "memory/predicted_gib")
        }
        allocated, dense, peak, planned = most.values()
        cells = [arm, f"{allocated / 2**20:,.0f}", f"{dense / 2**20:,.0f}", f"{peak:.2f}", f"{planned:.2f}"]
        lines.append([*cells, f"{100 * (peak / planned - 1):+.1f}"])
    return table(["arm", "cache, MiB", "dense would hold, MiB", "peak, GiB", "planned, GiB", "peak above plan, %"], lines)


def warned(question: str) -> str:
    """Return the alerts of each run at their default limits, with the steps at which they began and ended."""
    lines = []
    for arm, runs in read(question).items():
        for seed, rows in runs.items():
            spans: dict[str, list[str]] = {}
            for alert in check(rows, alert_leads.default_limits(arm)):
                spans.setdefault(alert.name, []).append(
                    f"{alert.step} to {alert.ended}" if alert.ended else f"{alert.step} on"
                )
            if spans:
                lines.append([f"{arm}-{seed}", "; ".join(f"{name}, step {', '.join(at)}" for name, at in spans.items())])
    return table(["run", "alerts"], lines) if lines or not read(question) else "None."


PROMPT = 100
"""Tokens of a problem of GSM8K, in the mean; those of G have 105."""


def tightness(question: str) -> str:
    """Return each arm's budget as a share of a sequence, and its rejections, at the beginning and at the end."""
    lines = []
    for arm, runs in read(question).items():
        cells = [arm]
        for part in (slice(5), slice(-10, None)):
            at = {
                key: statistics.mean(row[key] for rows in runs.values() for row in rows[1:][part])
                for key in ("kv/budget", "response/mean_tokens", "sparse/rejection_rate", "sparse/mismatch_k3")
            }
            length = PROMPT + at["response/mean_tokens"]
            share = at["kv/budget"] / length
            cells += [
                f"{share:.2f}" if share < 1 else "",
                f"{100 * at['sparse/rejection_rate']:.0f}",
                f"{at['sparse/mismatch_k3']:.2g}",
            ]
        lines.append(cells)
    heads = [
        f"{name}, {when}" for when in ("first five steps", "last ten") for name in ("budget / sequence", "rejected, %", "k3")
    ]
    return table(["arm", *heads], lines)


LEVELS = (0.22, 0.26)
"""Rewards whose time is asked for, chosen before steps were timed; every run of A reaches both."""


SAME_STEPS = {"dense-same-kv": "dense"}
"""Arms that were only timed: slots change how long a step takes and not what it does."""


def times(trained: Sequence[str], timed: str) -> str:
    """Return the first step whose last five rewards have a mean of each level, and its seconds for arms that were timed alone."""
    runs = {arm: runs for question in trained for arm, runs in read(question).items()}
    runs |= {arm: runs[of] for arm, of in SAME_STEPS.items()}
    settled = {
        arm: [row for rows in mine.values() for row in rows if row["step"] > SETTLED] for arm, mine in read(timed).items()
    }
    lines = []
    for arm, mine in runs.items():
        second = statistics.median(row["perf/step_s"] for row in settled[arm]) if arm in settled else math.nan
        cells = [arm, "" if math.isnan(second) else f"{second:.2f}"]
        for level in LEVELS:
            steps = [first_step(rows, level) for rows in mine.values()]
            cells.append(", ".join("never" if step is None else f"{step}" for step in steps))
            seconds = [math.nan if step is None else second * step for step in steps]
            cells.append("" if math.isnan(sum(seconds)) else interval(seconds, 0))
        lines.append(cells)
    heads = [f"{what} {level:g}" for level in LEVELS for what in ("steps to a reward of", "seconds to")]
    return table(["arm", "step time alone, s", *heads], lines)


def robust(question: str, runs: Sequence[str]) -> str:
    """Return the scores of trained models under every cache, their differences from a dense one, and the mismatch."""
    lines = []
    for run in runs:
        for row in evaluated(question)[run]["results"]:
            away = row.get("difference")
            cells = [run, row["setting"], f"{row['mean_tokens']:.0f}", f"{100 * row['pass@1']['mean']:.1f}"]
            cells.append(f"{100 * away['mean']:+.1f} [{100 * away['low']:+.1f}, {100 * away['high']:+.1f}]" if away else "")
            cells += [f"{100 * row['mismatch']['rejection_rate']:.1f}", f"{100 * row['token_savings']:.0f}"]
            cells += [f"{100 * row[key]:.1f}" for key in ("truncated", "repetition")]
            lines.append(cells)
    heads = [
        "model",
        "cache",
        "tokens",
        "Pass@1, %",
        "difference from full, points",
        "rejected, %",
        "saved, %",
        "cut off, %",
        "repeats, %",
    ]
    return table(heads, lines)


def narrowed(question: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Return by how much less a cache costs the second model of each pair than the first. The interval covers the draws of these
    models, as if problems were drawn anew for each. It does not cover other seeds."""
    found = evaluated(question)
    costs: dict[str, list[list[dict[str, float]]]] = {}
    for pair in pairs:
        for run in pair:
            for row in found[run]["results"]:
                if "difference" in row:
                    costs.setdefault(row["setting"], []).append(row["difference"])
    lines = []
    for setting, rows in costs.items():
        first, second = rows[::2], rows[1::2]
        half = math.hypot(*((row["high"] - row["low"]) / 2 for row in rows)) / len(pairs)
        less = statistics.mean(row["mean"] for row in second) - statistics.mean(row["mean"] for row in first)
        cells = [setting, *(", ".join(f"{-100 * row['mean']:.1f}" for row in part) for part in (first, second))]
        lines.append([*cells, f"{100 * less:+.1f} ± {100 * half:.1f}"])
    return table(["cache", "loss, dense-trained", "loss, sparse-trained", "reduction, points"], lines)


FEWEST = 5000
"""Tokens whose mean is shown."""


def numerics(question: str, by: str, columns: dict[str, tuple[Sequence[str], str, int]]) -> str:
    """Return means by position (`xi`), by compactions or by response length (`noise`) over the runs of each column under its cache.

    The last number of a column is the place of the value in a raw row: 2 is |log xi| or noise, 4 the share under the veto."""
    found = {run: result["by_position"] for run, result in evaluated(question).items()}
    values = []
    for runs, setting, place in columns.values():
        sums: dict[float, list[tuple[float, float]]] = {}
        for run in runs:
            for row in found[run][setting].get(by, ()):
                sums.setdefault(row[0], []).append((row[1] * (row[0] if by == "noise" else 1), row[place]))
        weights = {key: sum(weight for weight, _ in parts) for key, parts in sums.items()}
        scale, digits = (1000, 1) if place == 4 else (1, 4)
        values.append({
            key: f"{scale * sum(weight * value for weight, value in parts) / weights[key]:.{digits}f}"
            for key, parts in sums.items()
            if weights[key] >= FEWEST
        })  # fmt: skip
    keys = sorted(set().union(*values))
    heads = {"xi": "position from", "noise": "response tokens from", "compactions": "compactions"}
    return table([heads[by], *columns], [[f"{key:.0f}", *(of.get(key, "") for of in values)] for key in keys])


def score(row: dict[str, float], key: str) -> str:
    """Return a test score and its 95 % interval over problems in percent. Empty if the row has none."""
    if key not in row:
        return ""
    return "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * row[name] for name in (key, f"{key}_low", f"{key}_high")))


def course(question: str, every: int, steps: int) -> str:
    """Return the test scores over training, and reward, length, mismatch and rejection at its end, run by run."""
    at = range(0, steps + 1, every)
    lines = []
    for arm, runs in read(question).items():
        for seed, rows in runs.items():
            by_step = {row["step"]: row for row in rows}
            last = [row for row in rows if "reward/mean" in row][-WINDOW:]
            cells = [arm, str(seed), *(score(by_step.get(step, {}), DENSE) for step in at)]
            cells.append(next((score(row, SPARSE) for row in reversed(rows) if SPARSE in row), ""))
            for key, form in (("reward/mean", ".3f"), ("response/mean_tokens", ",.0f"), ("sparse/mismatch_k3", ".4f")):
                cells.append(f"{statistics.mean(row[key] for row in last):{form}}")
            lines.append([*cells, f"{100 * statistics.mean(row['sparse/rejection_rate'] for row in last):.1f}"])
    heads = ["arm", "seed", *(f"step {step}, %" for step in at), "sampler's cache, %"]
    return table([*heads, "reward", "tokens", "k3", "rejected, %"], lines)


DENSE_TRAINED, PAPER_TRAINED = ("dense-again-1", "dense-again-2"), ("paper-1", "paper-2")
FOUR = (
    "naive-4",
    "paper-4",
    "reject_only",
    "reweight_only",
    "released",
    "sequence_mask",
    "on_policy_sparse",
    "smd",
    "paper-guard",
)
BUDGETS = (*(f"rkv-{size}" for size in (96, 128, 160, 192, 256)), "rkv-256-protected", "snapkv-128", "snapkv-192")
BOTH = {"dense-trained": DENSE_TRAINED, "sparse-trained": PAPER_TRAINED}
UNDER_VETO = {f"{name}, ‰ below the veto at 160": (runs, "rkv@160", 4) for name, runs in BOTH.items()}


def each_under(*settings: str) -> dict[str, tuple[Sequence[str], str, int]]:
    return {f"{name}, {setting}": (runs, setting, 2) for name, runs in BOTH.items() for setting in settings}


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    DOCS / "evidence.md": {
        "long-answers": lambda: long_answers.score_table(10),
        "long-steps": lambda: table(long_answers.STEP_HEADS, long_answers.step_times()),
        "long-seconds": lambda: long_answers.seconds_table(0.4),
        "outcome": lambda: outcome(
            "a-collapse",
            {
                **dict.fromkeys(("dense", "naive", "paper"), ("dense", "dense-again")),
                **dict.fromkeys(("dense-4", "naive-4", "paper-4"), ("dense-4",)),
            },
        ),
    },
    HERE / "RESULTS.md": {
        "pilot-scores": lambda: scores("pilot"),
        "a-scores": lambda: scores("a-collapse"),
        "a-kept": lambda: kept("a-collapse", ("naive", "paper"), ("dense", "dense-again")),
        "a-kept-4": lambda: kept("a-collapse", ("naive-4", "paper-4"), ("dense-4",)),
        "a-collapsed": lambda: collapsed("a-collapse"),
        "a-alerts": lambda: warned("a-collapse"),
        "a-tightness": lambda: tightness("a-collapse"),
        "a-health": lambda: health("a-collapse"),
        "corrections-scores": lambda: scores("a-corrections"),
        "corrections-kept": lambda: kept("a-corrections", FOUR, ("dense-4",)),
        "corrections-alerts": lambda: warned("a-corrections"),
        "corrections-health": lambda: health("a-corrections"),
        "c-gaps": lambda: gaps("a-collapse", ("dense-again", "dense-4", "naive", "paper", "naive-4", "paper-4")),
        "c-robust": lambda: robust("a-collapse", [*DENSE_TRAINED, *PAPER_TRAINED]),
        "c-narrowed": lambda: narrowed("a-collapse", list(zip(DENSE_TRAINED, PAPER_TRAINED, strict=True))),
        "e-position": lambda: numerics("a-collapse", "xi", each_under("full", "rkv@256", "rkv@160")),
        "e-compactions": lambda: numerics(
            "a-collapse", "compactions", each_under("rkv@256", "rkv@160", "rkv@96") | UNDER_VETO
        ),
        "e-noise": lambda: numerics(
            "a-collapse",
            "noise",
            {setting: (DENSE_TRAINED, setting, 2) for setting in ("full", "rkv@256", "rkv@160", "rkv@96")},
        ),
        "b-scores": lambda: scores("b-budget", one_cache=False),
        "b-kept": lambda: kept("b-budget", BUDGETS, ("full", "full-again")),
        "b-tightness": lambda: tightness("b-budget"),
        "b-alerts": lambda: warned("b-budget"),
        "b-health": lambda: health("b-budget"),
        "d-memory": lambda: memory(("a-collapse", "a-corrections", "b-budget", "d-samples")),
        "d-costs": lambda: costs("d-savings"),
        "d-times": lambda: times(("a-collapse", "d-samples"), "d-savings"),
        "h-alerts": lambda: table(alert_leads.alert_heads("alert"), alert_leads.alert_rows()),
        "h-limits": lambda: table(alert_leads.alert_heads("limit of `xi_p05`"), alert_leads.xi_limit_rows()),
        "h-naive": lambda: table(alert_leads.NAIVE_HEADS, alert_leads.naive_rows()),
        "h-stability": lambda: table(STABILITY_HEADS, stability_rows()),
        "h-tail": lambda: table(xi_tail.TAIL_HEADS, xi_tail.tail_rows()),
        "l-scores": lambda: long_answers.score_table(10, 30),
        "l-course": lambda: course("l-long", 10, 30),
        "l-steps": lambda: table(long_answers.STEP_HEADS, long_answers.step_times()),
        "l-differences": lambda: table(long_answers.DIFFERENCE_HEADS, long_answers.difference_rows()),
        "l-seconds": lambda: long_answers.seconds_table(0.4, 0.45),
        "l-rewards": lambda: table(long_answers.REWARD_HEADS, long_answers.steps_to_rewards()),
        "l-health": lambda: health("l-long"),
        "l-alerts": lambda: warned("l-long"),
        "d-scores": lambda: scores("d-samples"),
        "g-scores": lambda: scores("g-graded", one_cache=False),
        "g-health": lambda: health("g-graded"),
        "g-alerts": lambda: warned("g-graded"),
        "g-length-scores": lambda: scores("g-length", one_cache=False),
        "g-length-tightness": lambda: tightness("g-length"),
        "g-length-health": lambda: health("g-length"),
        "g-length-memory": lambda: memory(("g-length",)),
        "g-length-alerts": lambda: warned("g-length"),
    },
}
"""The tables of each page."""

PLOTS = {
    "pilot": HERE / "pilot" / "curves.svg",
    "a-collapse": DOCS / "evidence-a.svg",
    "a-corrections": HERE / "a-corrections" / "curves.svg",
    "g-length": HERE / "g-length" / "curves.svg",
}
"""Figures of the curves of a question. docs/ has those that its page shows."""


def with_table(path: Path, page: str, name: str, table: str) -> str:
    made, found = re.subn(
        rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda block: f"{block[1]}{table}\n{block[2]}", page, flags=re.DOTALL
    )
    if found != 1 and table != NOT_YET:
        raise SystemExit(f"{path} has {found} places for {name}. It needs one.")
    return made


def rebuilt(path: Path) -> str:
    """Return the text of a page with every table made from the raw metrics."""
    text = path.read_text()
    for name, build in PAGES[path].items():
        text = with_table(path, text, name, build())
    return text


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path in PAGES:
        path.write_text(rebuilt(path))
    for question, path in PLOTS.items():
        if read(question):
            plot(question, path)
    summary(DOCS / "evidence-summary.svg")
    budgets(DOCS / "evidence-b.svg")
    plot("l-long", HERE / "l-long" / "curves.svg", LONG_PANELS, columns=4)
    plot_stability(DOCS / "evidence-h.svg")
    long_answers.plot_long_answers(DOCS / "evidence-long.svg")


if __name__ == "__main__":
    main()
