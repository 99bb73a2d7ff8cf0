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

function hasInterval(key) {
  return data.runs.some((run) => run.columns[`${key}_low`]);
}

function isBound(key, keys) {
  return /_(low|high)$/.test(key) && keys.has(key.replace(/_(low|high)$/, ""));
}

function curveSections() {
  return data.sections.map((section) => {
    const keys = new Set(section.metrics.map(([key]) => key));
    const special = [
      ...(keys.has("sparse/xi_p05") ? ratioCharts() : []),
      ...(keys.has("kv/peak_bytes") ? memoryCharts() : []),
      ...(keys.has("perf/step_s") ? timeCharts() : []),
    ];
    const plain = section.metrics
      .filter(([key]) => !isBound(key, keys))
      .map(([key, how]) => chart(key, hasInterval(key) ? `${how} Band: its 95 % interval.` : how, () => metricLines(key)));
    return el(
      "section",
      { className: "curves" },
      el("h2", {}, section.title),
      el("div", { className: "grid" }, ...special, ...plain),
    );
  });
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
    const how =
      "ξ = π_dense / π_sampler of every response token, on a log scale: 1 is agreement, far below 1 are tokens that the sampler " +
      "chose and the dense model finds all but impossible. The dark band holds 90 % of the tokens, the light one 99.8 %. " +
      (run.veto > 0
        ? `One token below the veto line (${number(run.veto)}) rejects its rollout.`
        : "No token rejects its rollout here (no veto).");
    if (!run.xi.steps.length)
      return [
        chart(
          title,
          `${how} There is no xi.jsonl in this run: only 5th percentile and smallest are known.`,
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
      const entry = charts.get(figure);
      if (!entry?.plot) return;
      const made = entry.make();
      entry.plot.setData([made.x, ...made.lines.map((line) => line.values)]);
      figure.querySelector("h3").textContent = histogramTitle(run, shown);
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
    "Tokens of one step by their ratio, both on log scales; the step is the one under the cursor on the left. The first and last bar also hold what lies beyond.";
  return chart(histogramTitle(run, shown), how, make, { name: "xi-step" });
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
    "Bytes allocated for keys and values (solid) against the most a dense cache would have held for the same rollouts at one moment (dashed): the gap is what the budget saves.";
  return [chart("KV memory against dense", how, make, { wide: true, name: "kv" })];
}

// Time

function timeCharts() {
  const several = visibleRuns().length > 1;
  return visibleRuns().map((place) => {
    const run = data.runs[place];
    const how =
      "Seconds of each step, stacked by phase in the order they happen; the rest is the host's: scheduling, logging, moving data. A phase that grows from step to step is where to look.";
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
