// What is said in words and tables: the headline, alerts, evaluations, the configuration.
"use strict";

const MARKS = { collapsed: "✕", fell: "▼", flat: "–", learned: "▲", early: "…", empty: "?" };

function summarySection() {
  const cards = visibleRuns().map((place) => {
    const run = data.runs[place];
    const [why, ...rest] = run.sentences;
    return el(
      "article",
      { className: `card ${run.state}` },
      el(
        "header",
        {},
        el("h3", {}, swatch(groupOf(place)), run.name),
        el("span", { className: "badge" }, `${MARKS[run.state] || ""} ${run.label}`),
      ),
      el("p", { className: "why" }, why),
      el("ul", {}, ...rest.map((sentence) => el("li", {}, ...emphasised(sentence)))),
      run.notes.length
        ? el(
            "details",
            { className: "notes", open: run.notes.length < 3 },
            el("summary", {}, `What is missing here (${run.notes.length})`),
            el("ul", {}, ...run.notes.map((note) => el("li", {}, note))),
          )
        : null,
    );
  });
  return el(
    "section",
    { id: "summary" },
    el("p", { className: "headline" }, data.summary),
    ...data.notes.map((note) => el("p", { className: "note" }, note)),
    el("div", { className: "cards" }, ...cards),
  );
}

/** The name before a colon stands out. */
function emphasised(sentence) {
  const end = sentence.indexOf(": ");
  return end > 0 && end < 60 ? [el("b", {}, sentence.slice(0, end + 1)), sentence.slice(end + 1)] : [sentence];
}

function alertSection() {
  const rows = visibleRuns().flatMap((place) =>
    data.runs[place].alerts.map((alert) =>
      el(
        "li",
        { className: alert.ended === null ? "alert" : "alert over" },
        el(
          "span",
          { className: "when" },
          alert.ended === null ? `since step ${alert.step}` : `steps ${alert.step} to ${alert.ended - 1}`,
        ),
        el(
          "div",
          {},
          el("b", {}, swatch(groupOf(place)), data.runs[place].name, " "),
          `${alert.sentence}.`,
          el("span", { className: "remedy" }, el("b", {}, "Try: "), `${alert.remedy}.`),
        ),
      ),
    ),
  );
  const none = "There are none: no metric was beyond its limit in [alerts] for long.";
  return el(
    "section",
    { id: "alerts" },
    el("h2", {}, "Alerts"),
    rows.length ? el("ul", { className: "alerts" }, ...rows) : el("p", { className: "fine" }, none),
  );
}

/** Every change of a budget that a run set itself, with its reason; nothing for fixed budgets. */
function budgetSection() {
  const rows = visibleRuns().flatMap((place) =>
    data.runs[place].budgets.map((change) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, swatch(groupOf(place)), data.runs[place].name),
        el("td", { className: "figure" }, `${change.step}`),
        el("td", { className: "figure" }, change.before ? `${change.before}` : "probe"),
        el("td", { className: "figure" }, `${change.after}`),
        el("td", {}, change.reason),
      ),
    ),
  );
  if (!rows.length) return "";
  const head = ["run", "after step", "budget before", "budget", "reason"].map((name) => el("th", { scope: "col" }, name));
  return el(
    "section",
    { id: "budgets" },
    el("h2", {}, "Budget"),
    el("div", { className: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows))),
  );
}

function evalSection() {
  const rows = visibleRuns().flatMap((place) =>
    data.runs[place].scores.map((score) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, swatch(groupOf(place)), data.runs[place].name),
        el("td", {}, score.key.replace(/^eval\//, "").replace(/\/pass@1(_sparse)?$/, "")),
        el("td", {}, score.key.endsWith("_sparse") ? "the sampler's" : "dense"),
        el("td", { className: "figure" }, score.before),
        el("td", { className: "figure" }, score.after),
        el("td", { className: "figure" }, `${score.best}, step ${score.steps[2]}`),
        el("td", {}, score.after ? { 1: "better", "-1": "worse", 0: "not told apart" }[score.apart] : "one evaluation"),
      ),
    ),
  );
  const head = ["run", "benchmark", "cache", "before", "after", "best", "intervals"].map((name) =>
    el("th", { scope: "col" }, name),
  );
  const how =
    "These are mean rewards on held-out problems (pass@1 where every reward is 0 or 1) with 95 % intervals: better or worse is said only where those before and after do not overlap, and more eval.problems tell closer runs apart.";
  return el(
    "section",
    { id: "evaluations" },
    el("h2", {}, "Evaluations"),
    rows.length
      ? el("div", { className: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)))
      : el("p", { className: "fine" }, "No held-out problems were evaluated: set data.test and eval.problems."),
    rows.length ? el("p", { className: "how" }, how) : null,
  );
}

/** Options of the runs that are shown, side by side. */
function configTable(keys) {
  const places = visibleRuns();
  const differs = new Set(data.differs);
  const head = places.map((place) => el("th", { scope: "col" }, swatch(groupOf(place)), data.runs[place].name));
  const rows = keys.map((key) =>
    el(
      "tr",
      { className: differs.has(key) ? "differs" : "" },
      el("th", { scope: "row" }, key),
      ...places.map((place) => el("td", {}, data.runs[place].config[key] ?? "not set")),
    ),
  );
  const table = el(
    "table",
    { className: "config" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "option"), ...head)),
    el("tbody", {}, ...rows),
  );
  return el("div", { className: "scroll" }, table);
}

/** Beside the outcome, since it is the first thing to ask after it; nothing for one run. */
function differsSection() {
  const keys = data.differs.filter((key) => key !== "run_dir");
  if (data.runs.length < 2) return "";
  return el(
    "section",
    { id: "differs" },
    el("h2", {}, "What differs"),
    keys.length ? configTable(keys) : el("p", { className: "fine" }, "Nothing but the folder."),
  );
}

function configSection() {
  const keys = [...new Set(visibleRuns().flatMap((place) => Object.keys(data.runs[place].config)))];
  return el(
    "section",
    { id: "configuration" },
    el("h2", {}, "Configuration"),
    keys.length
      ? el("details", { open: false }, el("summary", {}, `All ${keys.length} options`), configTable(keys))
      : el("p", { className: "fine" }, "No configuration could be read."),
  );
}
