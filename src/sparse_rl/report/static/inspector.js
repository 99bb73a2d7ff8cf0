// The rollout inspector: which token the dense model would not have written, and what the sampler could still see.
"use strict";

const NOT_STORED = -32768; // of a log-prob
const PER_NAT = 1000;
const AT_ONCE = 6000; // tokens that are put on the page before one asks for more
const SHADES = [
  [1e-4, "x5"],
  [1e-2, "x4"],
  [0.1, "x3"],
  [0.5, "x2"],
  [0.8, "x1"],
  [1.25, ""],
  [2, "y1"],
  [10, "y2"],
  [Infinity, "y3"],
];
const ARRAYS = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, int16: Int16Array };

const inspector = { run: 0, step: null, rollout: null, chunk: null, opened: null };

// Chunks

/** The page is drawn before its rollouts are read: who asks early waits for the rest of the file. */
function wholePage() {
  if (document.readyState !== "loading") return Promise.resolve();
  return new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
}

async function openChunk(place, step) {
  await wholePage();
  const packed = document.getElementById(`rollouts-${place}-${step}`);
  let source;
  if (packed)
    source = new Blob([Uint8Array.from(atob(packed.textContent.trim()), (character) => character.charCodeAt(0))]).stream();
  else {
    const answer = await fetch(`rollouts/${place}/${step}`);
    if (!answer.ok) throw new Error(`the server says ${answer.status}`);
    source = answer.body;
  }
  const buffer = await new Response(source.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const array = ([kind, start, count]) => {
    const Kind = ARRAYS[kind];
    const first = 4 + length + start;
    return new Kind(buffer.slice(first, first + count * Kind.BYTES_PER_ELEMENT));
  };
  return { ...head, array };
}

// The choice

function inspectorSection() {
  const section = el("section", { id: "rollouts" }, el("h2", {}, "Rollouts"));
  const withRollouts = runsWithRollouts();
  if (!withRollouts.length) {
    section.append(el("p", { className: "fine" }, "No rollouts are stored in these runs."));
    return section;
  }
  section.append(
    el(
      "p",
      { className: "how" },
      "Each token is shaded by ξ, how much likelier the dense model finds it than the sampler did; a rejected rollout opens at the token that caused it.",
    ),
    el(
      "div",
      { className: "choice" },
      el("label", {}, "run ", el("select", { id: "pick-run", onchange: (event) => pickRun(Number(event.target.value)) })),
      el("label", {}, "step ", el("select", { id: "pick-step", onchange: (event) => pickStep(Number(event.target.value)) })),
      el(
        "label",
        { className: "check" },
        el("input", { type: "checkbox", id: "only-rejected", onchange: () => fillSteps(true) }),
        " only steps with rejected ones",
      ),
    ),
    el(
      "div",
      { className: "inspector" },
      el("div", { id: "rollout-list", className: "rollout-list" }),
      el("div", { id: "rollout" }, el("p", { className: "fine" }, "Nothing opened yet.")),
    ),
  );
  const worst = withRollouts.find((place) => data.runs[place].rollouts.some(([, , rejected]) => rejected));
  inspector.run = worst ?? withRollouts[0];
  fillRuns(section.querySelector("#pick-run"));
  new IntersectionObserver((entries, watch) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watch.disconnect();
    fillSteps(true);
  }).observe(section);
  return section;
}

function runsWithRollouts() {
  return data.runs.map((run, place) => place).filter((place) => data.runs[place].rollouts.length);
}

function fillRuns(select) {
  select.replaceChildren(...runsWithRollouts().map((place) => el("option", { value: place }, data.runs[place].name)));
  select.value = inspector.run;
}

/** New runs and steps join the lists; what is open stays open. */
function refreshInspector() {
  if (inspector.step === null) return;
  fillRuns(document.getElementById("pick-run"));
  fillSteps(false);
}

function pickRun(place) {
  inspector.run = place;
  fillSteps(true);
}

function fillSteps(open) {
  const only = document.getElementById("only-rejected").checked;
  const steps = data.runs[inspector.run].rollouts.filter(([, , rejected]) => rejected || !only);
  const select = document.getElementById("pick-step");
  select.replaceChildren(
    ...steps.map(([step, count, rejected]) => {
      const rollouts = `${count} ${count === 1 ? "rollout" : "rollouts"}`;
      return el("option", { value: step }, `${step} · ${rollouts}${rejected ? `, ${rejected} rejected` : ""}`);
    }),
  );
  if (!open) {
    select.value = inspector.step;
    return;
  }
  const first = steps.find(([, , rejected]) => rejected) || steps[0];
  if (!first) {
    document
      .getElementById("rollout-list")
      .replaceChildren(el("p", { className: "fine" }, "No stored rollout of this run was rejected."));
    document.getElementById("rollout").replaceChildren();
    return;
  }
  select.value = first[0];
  pickStep(first[0]);
}

async function pickStep(step) {
  const place = inspector.run;
  inspector.step = step;
  const list = document.getElementById("rollout-list");
  list.replaceChildren(el("p", { className: "fine" }, "Opening…"));
  try {
    const chunk = await openChunk(place, step);
    if (inspector.run !== place || inspector.step !== step) return;
    inspector.chunk = chunk;
    listRollouts(list, chunk);
  } catch (error) {
    list.replaceChildren(el("p", { className: "note" }, `The rollouts of step ${step} cannot be opened: ${error.message}.`));
  }
}

function listRollouts(list, chunk) {
  const samples = new Map();
  const rows = chunk.rollouts.map((rollout, place) => {
    const sample = (samples.get(rollout.prompt) || 0) + 1;
    samples.set(rollout.prompt, sample);
    rollout.name = `prompt ${rollout.prompt + 1}, sample ${sample}`;
    const signs = [
      rollout.reward === null ? "no verdict" : `reward ${number(rollout.reward)}`,
      `${rollout.log_xi[2]} tokens`,
      rollout.finish === "stop" ? "" : visible(rollout.finish ?? ""),
      rollout.evicted ? "with cache" : "",
    ];
    return el(
      "button",
      {
        type: "button",
        className: "rollout-row",
        title: visible(rollout.start ?? ""),
        onclick: () => openRollout(place),
      },
      el("span", {}, rollout.name, rollout.rejected ? el("em", {}, "rejected") : ""),
      el(
        "small",
        {},
        signs.filter(Boolean).join(" · "),
        rollout.lowest === null ? "" : ` · least ξ ${number(rollout.lowest)}`,
      ),
    );
  });
  const order = chunk.rollouts
    .map((_, place) => place)
    .sort((a, b) => chunk.rollouts[a].prompt - chunk.rollouts[b].prompt || a - b);
  list.replaceChildren(...order.map((place) => rows[place]));
  inspector.rows = rows;
  const rejected = chunk.rollouts.findIndex((rollout) => rollout.rejected);
  if (rows.length) openRollout(Math.max(0, rejected));
}

// One rollout

function openRollout(place) {
  const { chunk } = inspector;
  const rollout = chunk.rollouts[place];
  inspector.rows.forEach((row, number) => row.setAttribute("aria-current", number === place));
  const view = {
    rollout,
    prompt: rollout.prompt_tokens,
    tokens: chunk.array(rollout.tokens),
    logXi: chunk.array(rollout.log_xi),
    sampler: chunk.array(rollout.sampler),
    evicted: rollout.evicted ? chunk.array(rollout.evicted) : null,
    spans: [],
    states: [],
  };
  inspector.opened = view;
  const told = el("output", { className: "token-readout" }, "Point at a token, or click the text and use the arrow keys.");
  const text = el("div", { className: "tokens", tabIndex: 0, role: "group", "aria-label": "the rollout, token by token" });
  text.addEventListener(
    "pointermove", // not pointerover: text that scrolls away under a pointer at rest is not pointed at
    (event) => event.target.dataset.place && tell(view, Number(event.target.dataset.place), told),
  );
  text.addEventListener(
    "click",
    (event) => event.target.dataset.place && tell(view, Number(event.target.dataset.place), told),
  );
  text.addEventListener("keydown", (event) => walk(view, event, told));
  const more = el("p", { id: "more-tokens" });
  document
    .getElementById("rollout")
    .replaceChildren(
      facts(view),
      view.evicted ? cacheControls(view, text) : noTrace(),
      legend(),
      told,
      text,
      more,
      chunk.pieces ? "" : wholeText(rollout),
    );
  writeTokens(view, text, more);
  if (rollout.cause !== null) openAt(view, text, rollout.cause);
}

/** Scrolls the text and not the page, which somebody is reading. */
function openAt(view, text, cause) {
  const span = tokenAt(view, view.prompt + cause);
  text.scrollTop += span.getBoundingClientRect().top - text.getBoundingClientRect().top - text.clientHeight / 2;
  view.goTo?.(cause);
}

function facts(view) {
  const { rollout } = view;
  const badges = [
    rollout.rejected ? el("span", { className: "badge bad" }, "rejected") : null,
    rollout.rejected || rollout.reward === null ? null : el("span", { className: "badge" }, "took part"),
    el("span", { className: "badge" }, rollout.reward === null ? "no verdict" : `reward ${number(rollout.reward)}`),
    rollout.advantage === null || rollout.advantage === undefined
      ? null
      : el("span", { className: "badge" }, `advantage ${number(rollout.advantage)}`),
    el("span", { className: "badge" }, `ended by ${visible(rollout.finish || "?")}`),
    el("span", { className: "badge" }, `${view.prompt} + ${view.logXi.length} tokens`),
  ];
  const parts = [
    el("h3", {}, `Step ${inspector.step}, ${rollout.name}`),
    el("p", { className: "badges" }, ...badges),
    rollout.answer === null || rollout.answer === undefined
      ? null
      : el("p", {}, el("b", {}, "gold: "), el("bdi", { className: "mono" }, visible(rollout.answer))),
  ];
  if (rollout.rejected) parts.push(whyRejected(view));
  return el("div", { className: "facts" }, ...parts);
}

function whyRejected(view) {
  const { cause } = view.rollout;
  const { veto } = data.runs[inspector.run];
  if (cause === null)
    return el(
      "p",
      { className: "note" },
      "Rejected by a rule on the whole sequence, or by a ratio that is not a number: no single token below the veto caused it.",
    );
  const jump = el(
    "button",
    { type: "button", className: "link", id: "to-cause", onclick: () => showCause(view, cause) },
    `response token ${cause + 1}`,
  );
  return el(
    "p",
    { className: "note" },
    "Rejected because of ",
    jump,
    `: ξ = ${number(Math.exp(view.logXi[cause] / PER_NAT))} lies below the veto of ${number(veto)}.`,
  );
}

function showCause(view, cause) {
  tokenAt(view, view.prompt + cause).scrollIntoView({ block: "center" });
  view.goTo?.(cause);
}

function wholeText(rollout) {
  return rollout.text === null || rollout.text === undefined
    ? ""
    : el("div", {}, el("h4", {}, "The whole text"), el("div", { className: "tokens whole" }, visible(rollout.text)));
}

function legend() {
  const entry = (name, label) => el("span", {}, el("i", { className: `t ${name}` }, " ξ "), label);
  return el(
    "p",
    { className: "legend" },
    entry("x5", "< 10⁻⁴"),
    entry("x4", "< 10⁻²"),
    entry("x3", "< 0.1"),
    entry("x2", "< 0.5"),
    entry("x1", "< 0.8"),
    entry("", "about 1"),
    entry("y1", "> 1.25"),
    entry("y2", "> 2"),
    entry("y3", "> 10"),
  );
}

// Tokens

/** Characters that would not be seen, or would turn the text around, as signs that are. */
function visible(text) {
  return text.replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu,
    (character) => {
      const code = character.codePointAt(0);
      return code < 32 ? String.fromCharCode(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
    },
  );
}

/** The text of each token. Bytes of one character may be spread over several: it stands at the last of them. */
function texts(view, from, to) {
  const { pieces, ids } = inspector.chunk;
  const decoder = new TextDecoder();
  let open = false;
  return Array.from({ length: to - from }, (_, offset) => {
    const place = view.tokens[from + offset];
    const piece = pieces ? pieces[place] : `⟨${ids[place]}⟩`;
    if (typeof piece !== "string") {
      open = true;
      return decoder.decode(Uint8Array.from(piece), { stream: true });
    }
    const rest = open ? decoder.decode() : "";
    open = false;
    return rest + piece;
  });
}

function shade(logXi) {
  if (logXi === undefined || logXi === NOT_STORED) return "";
  const xi = Math.exp(logXi / PER_NAT);
  return SHADES.find(([below]) => xi < below)?.[1] ?? "";
}

function writeTokens(view, text, more) {
  const from = view.spans.length;
  const to = Math.min(view.tokens.length, from + AT_ONCE);
  const part = document.createDocumentFragment();
  texts(view, from, to).forEach((piece, offset) => {
    const place = from + offset;
    const response = place - view.prompt;
    const span = document.createElement("span");
    span.className = response < 0 ? "t prompt" : `t ${shade(view.logXi[response])}`;
    if (response >= 0 && response === view.rollout.cause) span.classList.add("cause");
    span.dataset.place = place;
    span.textContent = piece === "" ? "·" : visible(piece).replace(/\n/g, "↵\n");
    if (response === 0) part.append(el("span", { className: "turn", title: "here the response begins" }, "▸"));
    part.append(span);
    view.spans.push(span);
  });
  text.append(part);
  const left = view.tokens.length - to;
  more.replaceChildren(
    left
      ? el(
          "button",
          {
            type: "button",
            onclick: () => {
              writeTokens(view, text, more);
              view.refresh?.();
            },
          },
          `Show ${Math.min(left, AT_ONCE).toLocaleString("en")} more of ${left.toLocaleString("en")} tokens`,
        )
      : "",
  );
}

function tell(view, place, told) {
  view.spans[view.at]?.classList.remove("at");
  view.at = place;
  view.spans[place].classList.add("at");
  const response = place - view.prompt;
  const id = inspector.chunk.ids[view.tokens[place]];
  const quoted = JSON.stringify(view.spans[place].textContent.slice(0, 60));
  const stored = (value) => (value === undefined || value === NOT_STORED ? null : value / PER_NAT);
  const sampler = response < 0 ? null : stored(view.sampler[response]);
  const logXi = response < 0 ? null : stored(view.logXi[response]);
  const parts = [
    el("bdi", { className: "mono" }, quoted),
    `id ${id}`,
    response < 0 ? `prompt token ${place + 1}` : `response token ${response + 1}`,
  ];
  if (logXi !== null)
    parts.push(
      `ξ = ${number(Math.exp(logXi))}`,
      `sampler ${number(Math.exp(sampler))}`,
      `dense ${number(Math.exp(sampler + logXi))}`,
    );
  told.replaceChildren(...parts.flatMap((part, number) => (number ? [" · ", part] : [part])));
}

function walk(view, event, told) {
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!move) return;
  event.preventDefault();
  const place = Math.min(view.spans.length - 1, Math.max(0, (view.at ?? view.prompt - 1) + move));
  tell(view, place, told);
  view.spans[place].scrollIntoView({ block: "nearest" });
}

function tokenAt(view, place) {
  while (view.spans.length <= place) document.querySelector("#more-tokens button").click();
  tell(view, place, document.querySelector(".token-readout"));
  return view.spans[place];
}

// The cache

function noTrace() {
  const { method, config } = data.runs[inspector.run];
  const set = config["log.traces_per_step"];
  const why =
    method === "dense" || config["kv.policy"] === "full"
      ? "This cache evicts nothing, so there is no slider to show what it held."
      : `What the cache held is not shown, because the evictions of this rollout were not stored: raise log.traces_per_step${set ? `, here ${set},` : ""} to store more of them.`;
  return el("p", { className: "fine" }, why);
}

function cacheLegend() {
  const entry = (name, label) => el("span", {}, el("i", { className: `t ${name}` }, "token"), ` ${label}`);
  return el(
    "p",
    { className: "legend cache" },
    entry("held", "held"),
    entry("gone", "evicted"),
    entry("later", "not yet written"),
  );
}

/** Sampling response token k asks with the query before it, at q = prompt + k - 1: it sees keys up to q not evicted by then. */
function cacheControls(view, text) {
  const { rollout } = view;
  const last = view.logXi.length - 1;
  const on = el("input", { type: "checkbox", id: "cache-on" });
  const layer = el(
    "select",
    { id: "layer" },
    ...Array.from({ length: rollout.layers }, (_, place) => el("option", { value: place }, String(place))),
  );
  const head = el(
    "select",
    { id: "head" },
    ...Array.from({ length: rollout.heads }, (_, place) => el("option", { value: place }, String(place))),
  );
  const slider = el("input", {
    type: "range",
    id: "time",
    min: 0,
    max: Math.max(0, last),
    value: last,
    "aria-label": "response token that is sampled",
  });
  const told = el("output", { id: "held" });
  let waiting = false;
  const show = () => {
    waiting = false;
    text.classList.toggle("cache", on.checked);
    if (on.checked) told.textContent = markHeld(view, Number(layer.value), Number(head.value), Number(slider.value));
    else told.textContent = "switched off";
  };
  const later = () => {
    if (!waiting) requestAnimationFrame(show);
    waiting = true;
  };
  const moved = () => {
    on.checked = true;
    later();
  };
  on.addEventListener("change", later);
  for (const control of [layer, head, slider]) control.addEventListener("input", moved);
  view.refresh = later;
  view.goTo = (k) => {
    slider.value = k;
    moved();
  };
  told.textContent = "move the slider";
  return el(
    "div",
    { className: "cache-controls" },
    el("label", { className: "check" }, on, " what the cache held"),
    el("label", {}, "layer ", layer),
    el("label", {}, "KV head ", head),
    el("label", { className: "time" }, "while sampling token ", slider),
    told,
    cacheLegend(),
  );
}

function markHeld(view, layer, head, k) {
  const { rollout, tokens, evicted } = view;
  const query = view.prompt + k - 1;
  const offset = (layer * rollout.heads + head) * tokens.length;
  let held = 0;
  for (let place = 0; place < tokens.length; place++) {
    const time = rollout.times[evicted[offset + place]];
    const now = place > query ? "later" : time !== null && time <= query ? "gone" : "held";
    held += now === "held";
    if (view.states[place] !== now && view.spans[place]) {
      const { classList } = view.spans[place];
      if (view.states[place]) classList.remove(view.states[place]);
      classList.add(now);
      view.states[place] = now;
    }
  }
  return `response token ${k + 1}: ${held} of ${query + 1} tokens held (${Math.round((100 * held) / Math.max(1, query + 1))} %)`;
}
