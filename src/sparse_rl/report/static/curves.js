// What is plotted: every metric, and three pictures that need more than one: the ratio, the memory, the time.
"use strict";

/** All steps that any of these runs has, in order. */
function stepsOf(places) {
  return [...new Set(places.flatMap((place) => data.runs[place].steps))].sort((a, b) => a - b);
}

/** A metric of a run, one value for each of `steps`. */
function along(steps, run, key) {
  const values = run.columns[key];
  const at = new Map(values ? run.steps.map((step, place) => [step, values[place]]) : []);
  return steps.map((step) => at.get(step) ?? null);
}

function present(rows, place) {
  return rows.map((row) => row[place]).filter((value) => value !== null);
}

/** One line for each group: a run, or the mean over seeds with a band from the lowest to the highest. */
function metricLines(key) {
  const log = key === "sparse/xi_min"; // where 0 has no place
  const visible = visibleRuns().filter((place) => data.runs[place].columns[key]);
  const ofRun = (steps, run) => along(steps, run, key).map((value) => (log && !(value > 0) ? null : value));
  const steps = stepsOf(visible);
  const columns = visible.map((place) => ofRun(steps, data.runs[place]));
  const x = steps.filter((_, place) => columns.some((column) => column[place] !== null));
  const made = { x, lines: [], bands: [], format: formatOf(key), log };
  data.groups.forEach((group, number) => {
    const runs = group.runs.filter((place) => visible.includes(place)).map((place) => data.runs[place]);
    if (!runs.length) return;
    const rows = runs.map((run) => ofRun(x, run));
    const label = runs.length === 1 ? runs[0].name : group.name;
    let low = null;
    let high = null;
    if (runs.length > 1) {
      low = x.map((_, place) => Math.min(...present(rows, place)));
      high = x.map((_, place) => Math.max(...present(rows, place)));
    } else if (runs[0].columns[`${key}_low`]) {
      low = along(x, runs[0], `${key}_low`);
      high = along(x, runs[0], `${key}_high`);
    }
    if (low) {
      const place = made.lines.length;
      made.lines.push({ values: high.map(finite), hidden: true }, { values: low.map(finite), hidden: true });
      made.bands.push({ between: [place, place + 1], colour: () => faint(number) });
    }
    made.lines.push({ values: x.map((_, place) => mean(present(rows, place))), group: number, label });
  });
  return made;
}

function finite(value) {
  return Number.isFinite(value) ? value : null;
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

/** A score of 0 has an interval that is not. */
function isZero(key) {
  const columns = visibleRuns().map((place) => data.runs[place].columns);
  const values = columns.flatMap((found) => [...(found[key] || []), ...(found[`${key}_high`] || [])]);
  const known = values.filter((value) => value !== null);
  return known.length > 0 && known.every((value) => value === 0);
}

function isBound(key, keys) {
  return /_(low|high)$/.test(key) && keys.has(key.replace(/_(low|high)$/, ""));
}

function curveSections() {
  return data.sections.map((section) => {
    const keys = new Set(section.metrics.map(([key]) => key));
    const special = [
      ...(keys.has("sparse/xi_p05") ? ratioCharts() : []),
      ...(keys.has("kv/peak_bytes") ? [...budgetCharts(), ...memoryCharts()] : []),
      ...(keys.has("perf/step_s") ? timeCharts() : []),
    ];
    const plain = section.metrics.filter(([key]) => !isBound(key, keys));
    const figures = (metrics) => metrics.map(([key, how]) => chart(key, how, () => metricLines(key)));
    const zero = plain.filter(([key]) => isZero(key));
    return el(
      "section",
      { className: "curves" },
      el("h2", {}, section.title),
      el("div", { className: "grid" }, ...special, ...figures(plain.filter((metric) => !zero.includes(metric)))),
      zero.length ? folded(section.title, zero, figures(zero)) : null,
    );
  });
}

function folded(title, metrics, figures) {
  const remember = ({ target }) => state.unfolded[target.open ? "add" : "delete"](title);
  return el(
    "details",
    { className: "zero", open: state.unfolded.has(title), ontoggle: remember },
    el("summary", {}, `Zero throughout: ${metrics.map(([key]) => key).join(", ")}`),
    el("div", { className: "grid" }, ...figures),
  );
}

// The ratio xi

const SHARES = [0.001, 0.05, 0.5, 0.95, 0.999];

/** The ratio below which a share of the tokens lies, from counts in bins of log10 xi. */
function quantile(counts, share) {
  const { low, high, bins } = data.xi_bins;
  const total = counts.reduce((sum, count) => sum + count, 0);
  let left = share * total;
  for (let bin = 0; bin < bins && total; bin++) {
    if (left <= counts[bin] && counts[bin]) return 10 ** (low + ((bin + left / counts[bin]) * (high - low)) / bins);
    left -= counts[bin];
  }
  return null;
}

function ratioCharts() {
  const several = visibleRuns().length > 1;
  return visibleRuns().flatMap((place) => {
    const run = data.runs[place];
    const title = several ? `ξ over training: ${run.name}` : "ξ over training";
    const what = "ξ is how much likelier the dense model finds a token than the sampler did:";
    const veto = run.veto > 0 ? `one token below the veto of ${number(run.veto)}` : "without a veto no token";
    const how = `${what} the dark band holds 90 % of the tokens, the light one 99.8 %, and ${veto} rejects its rollout.`;
    if (!run.xi.steps.length)
      return [
        chart(
          title,
          `${what} only its 5th percentile and its smallest are known, since the run has no xi.jsonl.`,
          () => ratioWithoutCounts(run),
          { wide: true, name: "xi" },
        ),
      ];
    const shown = { place: run.xi.steps.length - 1 };
    const step = histogram(run, shown);
    return [chart(title, how, () => ratioFan(run, shown, step), { wide: true, name: "xi" }), step];
  });
}

function vetoLine(run, x) {
  return run.veto > 0
    ? [{ values: x.map(() => run.veto), colour: () => css("--bad"), dash: [6, 4], label: "veto", flat: true }]
    : [];
}

function ratioWithoutCounts(run) {
  const x = run.steps.filter((_, place) => (run.columns["sparse/xi_p05"] || [])[place] != null);
  const line = (key, label, dashes, tint) => ({
    values: along(x, run, key).map((value) => (value > 0 ? value : null)),
    label,
    dash: dashes,
    colour: () => css(tint),
  });
  return {
    x,
    log: true,
    lines: [
      line("sparse/xi_p05", "5th percentile", [], "--c0"),
      line("sparse/xi_min", "smallest", [2, 3], "--muted"),
      ...vetoLine(run, x),
    ],
  };
}

function ratioFan(run, shown, figure) {
  const x = run.xi.steps;
  const rows = SHARES.map((share) => run.xi.counts.map((counts) => quantile(counts, share)));
  const exact = along(x, run, "sparse/xi_p05").map((value, place) => (value > 0 ? value : rows[1][place]));
  const tint = (share) => () => `color-mix(in srgb, ${css("--c0")} ${share}%, transparent)`;
  return {
    x,
    log: true,
    lines: [
      { values: rows[4], hidden: true },
      { values: rows[3], hidden: true },
      { values: exact, label: "5th percentile", colour: () => css("--c1"), width: 2.25 },
      { values: rows[0], hidden: true },
      {
        values: along(x, run, "sparse/xi_min").map((value) => (value > 0 ? value : null)),
        label: "smallest",
        colour: () => css("--muted"),
        dash: [2, 3],
        width: 1,
      },
      ...vetoLine(run, x),
    ],
    bands: [
      { between: [0, 3], colour: tint(16) },
      { between: [1, 2], colour: tint(38) },
    ],
    onStep(under) {
      const place = under ?? x.length - 1;
      if (place === shown.place) return;
      shown.place = place;
      figure.querySelector("h3").textContent = histogramTitle(run, shown);
      const entry = charts.get(figure);
      if (!entry?.plot) return;
      const made = entry.make();
      entry.plot.setData([made.x, ...made.lines.map((line) => line.values)]);
      read(entry.plot, made, entry.readout);
    },
  };
}

function histogramTitle(run, shown) {
  return `ξ at step ${run.xi.steps[shown.place]}`;
}

function histogram(run, shown) {
  const { low, high, bins } = data.xi_bins;
  const width = (high - low) / bins;
  const x = Array.from({ length: bins }, (_, bin) => low + (bin + 0.5) * width);
  const make = () => {
    const counts = run.xi.counts[shown.place];
    const part = (wanted) =>
      counts.map((count, bin) => (count && wanted === x[bin] < Math.log10(run.veto || 1e-300) ? count : null));
    const bars = uPlot.paths.bars({ size: [0.9, 40], align: 0 });
    return {
      x,
      zooms: false,
      range: () => [low, high],
      log: true,
      yRange: (plot, least, most) => [0.5, (most || 1) * 2],
      restName: "all",
      atRest: (values) => values.reduce((sum, count) => sum + (count || 0), 0),
      stepName: (value) => `ξ about ${number(10 ** value)}`,
      tick: (plot, splits) => splits.map((value) => (Number.isInteger(value) ? power(10 ** value) : "")),
      lines: [
        { values: part(false), label: "tokens", colour: () => css("--c0"), fill: () => css("--c0"), paths: bars },
        { values: part(true), label: "below the veto", colour: () => css("--bad"), fill: () => css("--bad"), paths: bars },
      ],
    };
  };
  const how =
    "These are the tokens of the step under the cursor by their ξ, on log scales; the outermost bars also hold what lies beyond.";
  return chart(histogramTitle(run, shown), how, make, { name: "xi-step" });
}

// The budget that a run sets itself

/** Budget and length in one picture, and beside it the share that the budget is set by; nothing for runs with a fixed budget. */
function budgetCharts() {
  const own = visibleRuns().filter((place) => data.runs[place].budgets.length);
  const several = own.length > 1;
  return own.flatMap((place) => {
    const run = data.runs[place];
    const name = several ? `: ${run.name}` : "";
    const x = run.steps.filter((step) => step > 0);
    const line = (key, label, tint, dash = []) => ({ values: along(x, run, key), label, colour: () => css(tint), dash });
    const sizes = () => ({
      x,
      fromZero: true,
      lines: [
        line("kv/budget", "budget", "--c0"),
        line("response/p90_tokens", "response, 90th percentile", "--c1"),
        line("response/mean_tokens", "response, mean", "--c1", [2, 3]),
      ],
    });
    const [key, word] = run.judged;
    const target = { values: x.map(() => run.target), label: "target", colour: () => css("--bad"), dash: [6, 4], flat: true };
    const shares = () => ({
      x,
      fromZero: true,
      format: formatOf(key),
      lines: [line(key, word, "--c0"), ...(run.target ? [target] : [])],
    });
    const how = "Tokens that a compaction keeps, as kv.budget = auto set them, and the lengths of the responses.";
    const judged = {
      rejected: "The share of rejected rollouts, which the budget is set by.",
      unlikely: "The share of rollouts with some ξ below 1e-4, which the budget is set by, since the correction rejects none.",
    };
    const title = `${word[0].toUpperCase()}${word.slice(1)} against the target${name}`;
    return [
      chart(`Budget and length${name}`, how, sizes, { name: "budget" }),
      chart(title, judged[word], shares, { name: word }),
    ];
  });
}

// Memory

function memoryCharts() {
  const make = () => {
    const visible = visibleRuns();
    const x = stepsOf(visible).filter((step) => step > 0);
    const lines = visible.flatMap((place) => {
      const run = data.runs[place];
      const name = visible.length > 1 ? `${run.name}: ` : "";
      const group = groupOf(place);
      return [
        { values: along(x, run, "kv/peak_bytes"), colour: () => colour(group), dash: [], label: `${name}held` },
        {
          values: along(x, run, "kv/dense_bytes"),
          colour: () => colour(group),
          dash: [4, 4],
          width: 1.25,
          label: `${name}dense would hold`,
        },
      ];
    });
    return { x, lines, format: bytes, fromZero: true };
  };
  const how =
    "The solid line is what was allocated for keys and values, the dashed one the most that a dense cache would have held: the gap is what the budget saves.";
  return [chart("KV memory against dense", how, make, { wide: true, name: "kv" })];
}

// Time

function timeCharts() {
  const several = visibleRuns().length > 1;
  return visibleRuns().map((place) => {
    const run = data.runs[place];
    const how =
      "These are the seconds of each step by phase, in the order they happen; the rest is scheduling, logging and moving data.";
    return chart(several ? `Time by phase: ${run.name}` : "Time by phase", how, () => stacked(run), {
      wide: true,
      name: "time",
    });
  });
}

function stacked(run) {
  const x = run.steps.filter((step) => step > 0);
  const phases = data.phases.map(([label, key]) => [label, along(x, run, key).map((value) => value ?? 0)]);
  const whole = along(x, run, "perf/step_s");
  phases.push([
    "rest",
    whole.map((value, place) => Math.max(0, (value ?? 0) - phases.reduce((sum, [, values]) => sum + values[place], 0))),
  ]);
  const lines = [];
  const bands = [];
  let below = x.map(() => 0);
  phases.forEach(([label, values], place) => {
    below = below.map((sum, step) => sum + values[step]);
    const tint = () => css(`--c${place % COLOURS}`);
    const fill = () => `color-mix(in srgb, ${tint()} 55%, transparent)`;
    lines.push({
      values: below,
      shown: values,
      label,
      colour: tint,
      fill: place ? undefined : fill,
      area: true,
      dash: [],
      width: 1,
    });
    if (place) bands.push({ between: [place, place - 1], colour: fill });
  });
  return { x, lines, bands, fromZero: true, format: (value) => (value === null ? "–" : `${number(value)} s`) };
}
