// The page: its parts in order, the choice of runs, light and dark, and a live run that comes in.
"use strict";

function render() {
  const parts = document.getElementById("parts");
  const opened = inspector.step === null ? null : document.getElementById("rollouts"); // what is being read stays
  const before = [summarySection(), differsSection(), alertSection(), budgetSection()];
  const curves = curveSections();
  curves[0]?.setAttribute("id", "curves");
  parts.replaceChildren(...before, evalSection(), ...curves, opened || inspectorSection(), configSection());
  redrawAll();
}

// Which runs

function chips() {
  const box = document.getElementById("runs");
  box.replaceChildren(
    ...data.groups.map((group, number) =>
      el(
        "span",
        { className: "chip-group" },
        group.runs.length > 1 ? el("span", { className: "group-name" }, swatch(number), group.name) : null,
        ...group.runs.map((place) => {
          const box = el("input", {
            type: "checkbox",
            checked: !state.hidden.has(place),
            onchange: (event) => toggle(place, event.target.checked),
          });
          box.dataset.run = place;
          const run = data.runs[place];
          return el(
            "label",
            { className: "chip", title: run.path },
            box,
            group.runs.length > 1 ? null : swatch(number),
            group.runs.length > 1 ? `seed ${run.seed ?? "?"}` : run.name,
          );
        }),
      ),
    ),
  );
  box.hidden = data.runs.length < 2;
}

function toggle(place, shown) {
  if (shown) state.hidden.delete(place);
  else state.hidden.add(place);
  keepPlace(render);
}

/** What is on the screen stays where it is while the page is made anew. */
function keepPlace(change) {
  const at = window.scrollY;
  change();
  window.scrollTo({ top: at, behavior: "instant" });
}

// Light and dark

function remembered(value) {
  try {
    if (value !== undefined) localStorage.setItem("sparse-rl-theme", value);
    return localStorage.getItem("sparse-rl-theme");
  } catch {
    return null; // a page from disk may have no storage
  }
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

/** Without a theme, the one that was chosen here before, else the system's. */
function setTheme(theme = remembered() || (prefersDark.matches ? "dark" : "light")) {
  document.documentElement.dataset.theme = theme;
  for (const { plot } of charts.values()) plot?.redraw(false);
}

document.getElementById("theme").addEventListener("click", () => {
  const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  remembered(other);
  setTheme(other);
});
prefersDark.addEventListener("change", () => setTheme());
document.getElementById("unzoom").addEventListener("click", () => zoomAll(null));

// Paper is white, and shows what nobody has scrolled to yet
let onScreen;
window.addEventListener("beforeprint", () => {
  onScreen = document.documentElement.dataset.theme;
  setTheme("light");
  drawEverything();
});
window.addEventListener("afterprint", () => {
  setTheme(onScreen);
});

// A live run

async function poll() {
  try {
    const answer = await fetch(`data.json?since=${encodeURIComponent(data.stamp)}`);
    if (answer.status === 200) {
      const fresh = await answer.json();
      keepPlace(() => {
        takeIn(fresh);
        chips();
        render();
        refreshInspector();
      });
    }
    live(answer.ok ? "watching" : `the run cannot be read: ${visible(await answer.text())}`, answer.ok);
  } catch {
    live("the server has stopped: this is the last it showed", false);
  }
  setTimeout(poll, 2000);
}

/** Runs may have joined: what was chosen is found again by its folder. */
function takeIn(fresh) {
  const moved = (place) => fresh.runs.findIndex((run) => run.path === data.runs[place].path);
  state.hidden = new Set([...state.hidden].map(moved));
  inspector.run = Math.max(0, moved(inspector.run));
  data = fresh;
}

function live(text, going) {
  const sign = document.getElementById("live");
  sign.hidden = false;
  sign.textContent = `${text} · ${data.made}`;
  sign.classList.toggle("going", going);
}

setTheme();
document.getElementById("made").textContent = `sparse-rl ${data.version} · ${data.made}`;
chips();
render();
if (data.live) poll();
