// What every part of the page uses: the data, what the reader has chosen, elements, numbers, colours.
"use strict";

let data = JSON.parse(document.getElementById("data").textContent);

const state = {
  hidden: new Set(), // places of runs that are switched off
  unfolded: new Set(), // titles of sections whose charts of nothing but zeros are shown
  zoom: null, // [first, last] step that all curves show
};

/** An element. Text is always text: nothing here parses HTML. */
function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Groups of runs: one colour and one kind of line each, so that colour is never the only sign

const COLOURS = 7;
const DASHES = [[], [9, 4], [2, 3], [10, 3, 2, 3]];

function colour(group) {
  return css(`--c${group % COLOURS}`);
}

function faint(group) {
  return `color-mix(in srgb, ${colour(group)} 18%, transparent)`;
}

function dash(group) {
  return DASHES[group % DASHES.length];
}

function swatch(group) {
  const mark = el("span", { className: "swatch" });
  mark.style.borderTopColor = `var(--c${group % COLOURS})`;
  mark.style.borderTopStyle = ["solid", "dashed", "dotted", "dashed"][group % DASHES.length];
  return mark;
}

function groupOf(place) {
  return data.groups.findIndex((group) => group.runs.includes(place));
}

function visibleRuns() {
  return data.runs.map((run, place) => place).filter((place) => !state.hidden.has(place));
}

// Numbers

function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1).replace(".0e", "e");
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

function power(value) {
  const exponent = String(Math.round(10 * Math.log10(value)) / 10);
  return `10${[...exponent].map((digit) => ({ "-": "⁻", ".": "·" })[digit] || "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("")}`;
}

const UNITS = ["B", "KiB", "MiB", "GiB"];

/** The place of the unit in which a number of bytes is between 1 and 1024. */
function unitOf(value) {
  return Math.max(0, Math.min(UNITS.length - 1, Math.floor(Math.log2(Math.abs(value) || 1) / 10)));
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  const unit = unitOf(value);
  return `${Number((value / 1024 ** unit).toPrecision(3))} ${UNITS[unit]}`;
}

function formatOf(key) {
  return key.endsWith("_bytes") ? bytes : number;
}
