// The frame of all pages: navigation, theme, help, and looking again while runs write.

import * as api from "./api.js";
import { h, show } from "./dom.js";
import { current, link } from "./route.js";

const LOOK_AGAIN_MS = 3000;
const page = document.getElementById("page");
const top = document.getElementById("top");
const PAGES = {
  // loaded when first shown; a report has only some of them
  overview: async () => (await import("./overview.js")).overviewPage,
  metrics: async () => (await import("./metrics.js")).metricsPage,
  step: async () => (await import("./step.js")).stepPage,
  episode: async () => (await import("./episode.js")).episodePage,
  health: async () => (await import("./health.js")).healthPage,
  traces: async () => (await import("./traces.js")).tracesPage,
};
const home = api.hasPage("overview") ? link([]) : api.start;
const state = { runs: null, seen: "", view: null, turn: 0, lost: false };

function theme(next) {
  if (next)
    try {
      localStorage.setItem("theme", next);
    } catch {
      /* a report has no storage */
    }
  let chosen = next;
  if (!chosen)
    try {
      chosen = localStorage.getItem("theme");
    } catch {
      chosen = null;
    }
  chosen ||= matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = chosen;
  return chosen;
}

const isLive = () => (state.runs?.runs || []).some((run) => run.state === "running");

function navigation() {
  const { parts } = current();
  const name = parts[0] || "overview";
  const runs = state.runs?.runs || [];
  const run = runs.find((r) => r.name === parts[1]) || runs.find((r) => r.recorded) || runs[0];
  const step = parts[1] === run?.name && parts[2] ? parts[2] : (run?.recorded_last ?? run?.evaluation_last);
  const tabs = [
    ["overview", "Overview", home],
    ["metrics", "Metrics", link(["metrics"])],
  ];
  if (run) {
    tabs.push(["step", "Step", link(["step", run.name, ...(step === null || step === undefined ? [] : [step])])]);
    if (name === "episode") tabs.push(["episode", "Episode", location.hash]);
    tabs.push(["health", "Health", link(["health", run.name])]);
    tabs.push(["traces", "Traces", link(["traces", run.name])]);
  }
  const pick =
    runs.length > 1 && parts[1]
      ? h(
          "select",
          {
            "aria-label": "run",
            onchange: (e) => {
              location.hash = link([["health", "traces"].includes(name) ? name : "step", e.target.value]);
            },
          },
          runs.map((r) => h("option", { value: r.name, selected: r.name === parts[1] }, r.name)),
        )
      : parts[1]
        ? h("span", { class: "run-name" }, parts[1])
        : "";
  show(
    top,
    h("a", { class: "brand", href: home }, "Pronk"),
    h(
      "nav",
      {},
      tabs
        .filter(([key]) => api.hasPage(key))
        .map(([key, text, href]) => h("a", { href, "aria-current": key === name ? "page" : null }, text)),
    ),
    pick,
    h("span", { class: "grow" }),
    api.isReport
      ? h("span", { class: "quiet" }, api.title)
      : h(
          "span",
          {
            class: state.lost ? "live lost" : isLive() ? "live" : "live still",
            title: "looks again every three seconds",
          },
          state.lost ? "server not reached" : isLive() ? "live" : "no run is running",
        ),
    h("button", { type: "button", class: "plain", title: "light or dark (d)", onclick: toggle }, "◐"),
    h("button", { type: "button", class: "plain", title: "keys (?)", onclick: help }, "?"),
  );
}

function toggle() {
  theme(theme() === "dark" ? "light" : "dark");
  draw();
}

async function draw() {
  const turn = ++state.turn;
  const { parts, query } = current();
  navigation();
  const name = parts[0] || "overview";
  state.view?.leave?.();
  state.view = null;
  try {
    if (!Object.hasOwn(PAGES, name)) throw new Error("there is no such page");
    if (!api.hasPage(name)) throw new Error("this page is not in the report");
    const view = await (await PAGES[name]())({ parts: parts.slice(1), query, runs: state.runs });
    if (turn !== state.turn) return view.leave?.();
    state.view = view;
    show(page, view.element);
    document.title = `${view.title || "Overview"} · Pronk`;
  } catch (error) {
    if (turn === state.turn)
      show(
        page,
        h(
          "section",
          { class: "damaged" },
          h("h1", {}, "This cannot be shown"),
          h("p", {}, error.message),
          h("p", {}, h("a", { href: home }, api.hasPage("overview") ? "To the overview" : "To the episode")),
        ),
      );
  }
}

// What of the runs would change a page.
const signature = (runs) =>
  JSON.stringify(
    runs.runs.map((r) => [r.name, r.step, r.state, r.words, r.alarm_count, r.recorded, r.evaluations, r.damaged]),
  );

async function look() {
  try {
    const runs = await api.getRuns();
    const seen = signature(runs);
    const changed = seen !== state.seen;
    const was = state.lost;
    Object.assign(state, { runs, seen, lost: false });
    if (changed || was) {
      navigation();
      if (changed) state.view?.update?.(runs);
    }
  } catch {
    state.lost = true;
    navigation();
  }
}

function help() {
  const open = document.querySelector("dialog");
  if (open) return open.close();
  const keys = [
    ["o m s h x", "overview, metrics, step, health, traces"],
    ["← →", "the previous, the next episode"],
    ["↑ ↓", "the previous, the next of its group"],
    ["j k", "the next, the previous turn"],
    ["t", "what colours the tokens"],
    ["r", "the stream as the model reads it, or as text"],
    ["g", "its group side by side"],
    ["d", "light or dark"],
  ];
  const dialog = h(
    "dialog",
    { onclick: () => dialog.close(), onclose: () => dialog.remove() },
    h("h2", {}, "Keys"),
    h(
      "dl",
      { class: "keys" },
      keys.map(([key, text]) => [
        h(
          "dt",
          {},
          key.split(" ").map((k) => h("kbd", {}, k)),
        ),
        h("dd", {}, text),
      ]),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  if (event.key === "?") return help();
  if (event.key === "d") return toggle();
  const tab = { o: "Overview", m: "Metrics", s: "Step", h: "Health", x: "Traces" }[event.key];
  const to = tab && [...top.querySelectorAll("nav a")].find((a) => a.textContent === tab);
  if (to) {
    location.hash = to.getAttribute("href");
    return;
  }
  if (state.view?.key?.(event.key)) event.preventDefault();
});
addEventListener("hashchange", () => {
  draw();
  scrollTo(0, 0);
});

theme();
if (api.isReport && !location.hash && api.start) history.replaceState(null, "", api.start);
state.runs = await api.getRuns().catch((error) => ({ runs: [], recipes: [], error: error.message }));
state.seen = signature(state.runs);
await draw();
if (!api.isReport)
  setInterval(() => {
    if (!document.hidden) look();
  }, LOOK_AGAIN_MS);
