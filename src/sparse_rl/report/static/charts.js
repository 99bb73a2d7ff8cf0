// Curves over steps, drawn by uPlot. All share the cursor and the zoom; each is drawn when it first comes into sight.
"use strict";

const charts = new Map(); // figure -> {make, plot}
const HEIGHT = 190;
const POWERS_OF_TWO = Array.from({ length: 50 }, (_, exponent) => 2 ** exponent);

const sight = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => draw(entry.target)),
  { rootMargin: "400px" },
);
const widths = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const plot = charts.get(target)?.plot;
    const width = roomIn(target);
    if (plot && width && plot.width !== width) plot.setSize({ width, height: plot.height });
  }
});

/**
 * A figure whose plot is made later: `make()` gives {x, lines, bands?, log?, format?}, a line being
 * {values, group?, label, colour?, fill?, dash?, width?, hidden?}.
 */
function chart(title, how, make, { wide = false, name = "" } = {}) {
  const readout = el("div", { className: "readout", "aria-live": "off" });
  const figure = el(
    "figure",
    { className: wide ? "chart wide" : "chart" },
    el("figcaption", {}, el("h3", {}, title), readout),
    el("div", { className: "plot" }),
    el("p", { className: "how" }, how),
  );
  figure.dataset.name = name || title;
  charts.set(figure, { make, plot: null, readout });
  sight.observe(figure);
  widths.observe(figure);
  return figure;
}

function roomIn(figure) {
  return Math.floor(figure.querySelector(".plot").clientWidth);
}

function draw(figure) {
  const entry = charts.get(figure);
  if (!entry || entry.plot || !roomIn(figure)) return;
  const made = entry.make();
  const place = figure.querySelector(".plot");
  if (!made.lines.some((line) => line.values.some((value) => value !== null && value !== undefined))) {
    place.replaceChildren(el("p", { className: "empty" }, "No values."));
    return;
  }
  place.replaceChildren();
  entry.plot = new uPlot(options(figure, made, entry.readout), [made.x, ...made.lines.map((line) => line.values)], place);
  if (state.zoom) zoom(entry.plot);
  read(entry.plot, made, entry.readout);
}

/** After runs were switched or data came in: what is drawn is drawn anew, what is not yet seen waits. */
function redrawAll() {
  for (const [figure, entry] of charts) {
    if (!figure.isConnected) {
      entry.plot?.destroy();
      charts.delete(figure);
      sight.unobserve(figure);
      widths.unobserve(figure);
    } else if (entry.plot || figure.querySelector(".empty")) {
      entry.plot?.destroy();
      entry.plot = null;
      draw(figure);
    }
  }
}

function drawEverything() {
  for (const figure of charts.keys()) draw(figure);
}

function zoomAll(range) {
  state.zoom = range;
  document.getElementById("unzoom").hidden = range === null;
  for (const { plot } of charts.values()) if (plot) zoom(plot);
}

/** What has fewer than two values there, as evaluations may, shows all its steps. */
function zoom(plot) {
  if (plot.keepsItsScale) return;
  const steps = plot.data[0];
  const [first, last] = state.zoom ?? [-Infinity, Infinity];
  const inside = steps.filter((step) => step >= first && step <= last).length > 1;
  plot.setScale("x", state.zoom && inside ? { min: first, max: last } : { min: steps[0], max: steps[steps.length - 1] });
}

function options(figure, made, readout) {
  const format = made.format || number;
  const overSteps = made.zooms !== false;
  const axis = {
    stroke: () => css("--muted"),
    grid: { stroke: () => css("--grid"), width: 1 },
    ticks: { stroke: () => css("--grid"), width: 1 },
    font: "11px system-ui, sans-serif",
  };
  return {
    width: roomIn(figure),
    height: made.height || HEIGHT,
    legend: { show: false },
    padding: [8, 12, 0, 0],
    cursor: {
      sync: overSteps
        ? {
            key: "steps",
            setSeries: false,
            scales: ["x", null],
            filters: { pub: (type) => type === "mousemove" || type === "mouseleave" },
          }
        : undefined,
      drag: { x: overSteps, y: false, setScale: false },
      bind: { dblclick: () => () => (overSteps ? zoomAll(null) : null) },
      points: { size: 6 },
      y: false,
    },
    scales: {
      x: {
        time: false,
        range: overSteps ? (plot, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) : made.range,
      },
      y: made.log ? { distr: 3, range: made.yRange } : { range: (plot, low, high) => spacious(low, high, made.fromZero) },
    },
    axes: [
      {
        ...axis,
        size: 30,
        values: made.tick || ((plot, splits) => splits.map((value) => (Number.isInteger(value) ? value : ""))),
      },
      {
        ...axis,
        size: (plot, labels) => Math.max(format === bytes ? 74 : 54, 14 + 7 * longest(labels)),
        ...(format === bytes ? { incrs: POWERS_OF_TWO } : {}),
        ...(made.log
          ? { splits: powersOfTen, filter: (plot, splits) => splits, values: (plot, splits) => splits.map(power) }
          : { values: (plot, splits) => ticks(splits, format) }),
      },
    ],
    series: [{}, ...made.lines.map(series)],
    bands: (made.bands || []).map(({ between, colour: fill }) => ({ series: between.map((place) => place + 1), fill })),
    hooks: {
      ready: [
        (plot) => {
          plot.keepsItsScale = !overSteps;
        },
      ],
      setCursor: [
        (plot) => {
          read(plot, made, readout);
          made.onStep?.(plot.cursor.idx);
        },
      ],
      setSelect: [
        (plot) => {
          if (plot.select.width < 4) return;
          const range = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          zoomAll(range);
        },
      ],
    },
  };
}

function series(line) {
  return {
    stroke: line.hidden ? undefined : line.colour || (() => colour(line.group)),
    fill: line.fill,
    width: line.hidden ? 0 : line.width || 1.75,
    dash: line.dash || (line.group === undefined ? [] : dash(line.group)),
    paths: line.paths,
    spanGaps: true,
    points:
      line.hidden || line.paths || line.area || line.flat
        ? { show: false }
        : { show: (plot, place) => plot.data[place].filter((value) => value !== null).length < 12, size: 5 },
  };
}

/** Characters of the longest label. uPlot asks once before there are labels. */
function longest(labels) {
  return Math.max(0, ...(labels || []).map((label) => String(label).length));
}

function powersOfTen(plot, axis, low, high) {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const count = Math.floor(Math.log10(high) + 1e-9) - first + 1;
  const every = Math.ceil(count / 6);
  return Array.from({ length: Math.ceil(count / every) }, (_, place) => 10 ** (first + place * every));
}

function ticks(splits, format) {
  const largest = Math.max(...splits.map(Math.abs));
  if (format === bytes) {
    const unit = unitOf(largest);
    const scaled = alike(splits.map((value) => value / 1024 ** unit));
    return splits.map((value, place) => (value ? `${scaled[place]} ${UNITS[unit]}` : "0"));
  }
  return format !== number || largest >= 1e6 || largest < 1e-3 ? splits.map((value) => format(value)) : alike(splits);
}

/** As many digits as it takes to tell one from the next. */
function alike(splits) {
  const gap = splits.length > 1 ? splits[1] - splits[0] : 1;
  let digits = 0;
  while (digits < 8 && Math.abs(gap * 10 ** digits - Math.round(gap * 10 ** digits)) > 1e-6 * gap * 10 ** digits) digits++;
  return splits.map((value) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
}

/** Room above and below, and a flat line in the middle. */
function spacious(low, high, fromZero) {
  if (low === null || high === null || (low === 0 && high === 0)) return [0, 1];
  if (fromZero) low = Math.min(low, 0);
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [fromZero && low === 0 ? 0 : low - room, high + room];
}

/** The values under the cursor, or the last ones. */
function read(plot, made, readout) {
  const under = plot.cursor.idx;
  const none = under === null || under === undefined;
  const format = made.format || number;
  const shown = made.lines
    .map((line, place) => ({ line, values: plot.data[place + 1] }))
    .filter(({ line }) => !line.hidden && line.label !== undefined);
  const parts = shown.map(({ line, values }) => {
    const value = none ? (made.atRest || lastOf)(line.shown || values) : (line.shown || values)[under];
    const mark = line.group === undefined ? keyed(line) : swatch(line.group);
    const named = line.group === undefined || (data.runs.length > 1 && shown.length < 4);
    return el(
      "span",
      { className: "value", title: line.label },
      mark,
      named ? `${line.label} ` : "",
      el("b", {}, format(value)),
    );
  });
  const step = none
    ? made.restName || "last"
    : made.stepName
      ? made.stepName(plot.data[0][under])
      : `step ${plot.data[0][under]}`;
  readout.replaceChildren(el("span", { className: "step" }, step), ...parts);
}

function keyed(line) {
  const mark = el("span", { className: "swatch" });
  mark.style.borderTopColor = typeof line.colour === "function" ? line.colour() : line.colour;
  if (line.dash?.length) mark.style.borderTopStyle = "dashed";
  if (line.area || line.fill) mark.classList.add("filled");
  return mark;
}

function lastOf(values) {
  for (let place = values.length - 1; place >= 0; place--)
    if (values[place] !== null && values[place] !== undefined) return values[place];
  return null;
}
