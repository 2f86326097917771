// Which of many runs are listed, and which are drawn.

import { colour } from "./charts.js";
import { count, h, searchBox } from "./dom.js";
import { set } from "./route.js";

const NEWEST = 6; // runs that are drawn at first

// What the address says: `runs` drawn (empty: the newest), `find` a word of their names, `all` those moved aside too.
export function settingsOf(query) {
  return {
    on: new Set((query.get("runs") || "").split(",").filter(Boolean)),
    find: query.get("find") || "",
    all: query.get("all") === "yes",
  };
}

const isHidden = (run) => run.is_aside || (run.is_empty && run.state !== "running" && run.state !== "failed");

export function listed(runs, settings) {
  const words = settings.find.toLowerCase().split(/\s+/).filter(Boolean);
  const some = runs.filter((run) => words.every((word) => run.name.toLowerCase().includes(word)));
  const kept = settings.all ? some : some.filter((run) => !isHidden(run) || settings.on.has(run.name));
  return kept.length || words.length ? kept : some;
}

const newest = (some) => [...some].sort((a, b) => b.changed - a.changed).slice(0, NEWEST);

export function drawn(runs, settings) {
  const some = listed(runs, settings);
  const chosen = settings.on.size ? null : new Set(newest(some));
  return some.filter((run) => (chosen ? chosen.has(run) : settings.on.has(run.name)));
}

// The colour of a run: distinct among those that are listed, the same whichever of them are drawn.
export function colourOf(run, runs, settings) {
  const some = listed(runs, settings);
  const first = new Set(newest(some));
  return colour(Math.max(0, [...some.filter((r) => first.has(r)), ...some.filter((r) => !first.has(r))].indexOf(run)));
}

// Draws a run, or no longer.
export function flip(run, runs, settings) {
  const names = new Set(drawn(runs, settings).map((each) => each.name));
  if (!names.delete(run.name)) names.add(run.name);
  settings.on = names.size ? names : new Set(["-"]); // none of them
  set({ runs: [...settings.on].join(",") });
}

// A box for a word of their names, and one for those that are hidden; none of it where there are few runs.
export function filterBar(runs, settings, changed) {
  const hidden = runs.filter(isHidden).length;
  if (runs.length <= NEWEST && !hidden) return null;
  return [
    searchBox("runs", "a word of a run's name", settings.find, (find) => {
      settings.find = find;
      set({ find });
      changed();
    }),
    hidden
      ? h(
          "label",
          { class: "check" },
          h("input", {
            type: "checkbox",
            checked: settings.all,
            onchange: (e) => {
              settings.all = e.target.checked;
              set({ all: settings.all ? "yes" : "" });
              changed();
            },
          }),
          `with ${count(hidden, "run")} moved aside or empty`,
        )
      : null,
  ];
}
