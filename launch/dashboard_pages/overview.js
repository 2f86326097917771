// Every run in a line, several runs in one chart, what raised an alarm, how episodes end, and how recipes differ.

import { getSeries } from "./api.js";
import { AXES, chart, line } from "./charts.js";
import { colourOf, drawn, filterBar, flip, listed, settingsOf } from "./chosen.js";
import { choice, clock, count, duration, h, num, percent, pill, show, sparkline } from "./dom.js";
import { episodeLink, link, set } from "./route.js";
import { STATES } from "./states.js";
import { endingKind } from "./verdict.js";

const CURVES = [
  ["rollout/success", "Success in training"],
  ["eval/success", "Success on held-out samples"],
  ["rollout/reward", "Reward"],
  ["policy/entropy", "Entropy of the policy"],
  ["behaviour/kl", "Gap between engine and learner (KL)"],
  ["optim/grad_norm", "Gradient norm"],
];
const SMOOTH = 5; // steps
const LEVELS = { critical: "bad", error: "bad", warning: "warn", info: "" };

export async function overviewPage({ query, runs }) {
  const element = h("div", {});
  const settings = { x: query.get("x") || "step", ...settingsOf(query) };
  const filter = h("div", { class: "bar" });
  let latest = runs;
  const table = h("div", {});
  const curves = h("div", { class: "grid" });
  const first = h("div", {});
  const byTask = h("div", {});
  const rest = h("div", { class: "grid" });

  async function draw(now) {
    latest = now;
    if (!now.runs.length)
      return show(
        element,
        h("section", {}, h("h1", {}, "No run yet"), h("p", {}, now.error || "The folders hold no run.")),
      );
    show(
      table,
      runTable(now.runs, settings, (run) => {
        flip(run, now.runs, settings);
        draw(now);
      }),
    );
    const chosen = drawn(now.runs, settings);
    show(first, alarms(listed(now.runs, settings)));
    show(byTask, chosen.map(tasksOf));
    show(rest, endings(chosen), differences(chosen, now.recipes));
    const shown = chosen.map((run) => ({ run, colour: colourOf(run, now.runs, settings) }));
    const all = await Promise.all(
      shown.map(({ run }) =>
        getSeries(
          run.name,
          CURVES.map(([name]) => name),
        ),
      ),
    );
    show(
      curves,
      CURVES.map(([name, text]) => {
        const lines = shown
          .map(({ run, colour }, at) => ({ ...line(all[at], name, settings.x), label: run.name, colour }))
          .filter((l) => l.x && l.y.some((v) => v !== null));
        if (!lines.length) return null;
        const one = shown.length === 1;
        return h(
          "section",
          { class: "card" },
          h("h3", {}, text, h("a", { class: "quiet code", href: link(["metrics"], { q: name }) }, name)),
          chart({
            lines,
            axis: settings.x,
            window: SMOOTH,
            series: all[0],
            events: one ? all[0].events : [],
            key: "overview",
            many: shown.length > 1,
          }),
        );
      }),
    );
  }

  show(
    element,
    h(
      "section",
      {},
      h(
        "div",
        { class: "bar" },
        h("h1", {}, "Runs"),
        h("span", { class: "quiet" }, "success, reward, speed and idle times: means of the last ten steps"),
      ),
      filter,
      table,
    ),
    byTask,
    first,
    h(
      "div",
      { class: "bar" },
      h("h2", {}, "Curves"),
      choice("against", Object.entries(AXES), settings.x, (x) => {
        set({ x });
        dispatchEvent(new HashChangeEvent("hashchange"));
      }),
      h("span", { class: "quiet" }, "means of five steps"),
    ),
    curves,
    h("h2", {}, "Episodes and recipes"),
    rest,
  );
  show(
    filter,
    filterBar(runs.runs, settings, () => draw(latest)),
  );
  await draw(runs);
  return { element, update: draw, title: "Overview" };
}

function head(names) {
  return h(
    "thead",
    {},
    h(
      "tr",
      {},
      names.map((name) => h("th", {}, name)),
    ),
  );
}

function runTable(all, settings, flipped) {
  const runs = listed(all, settings);
  const chosen = new Set(drawn(all, settings));
  const heads = [
    "",
    "run",
    "progress",
    "success",
    "held-out",
    "reward",
    "version",
    "turns/s",
    "learner idle",
    "actors idle",
    "time left",
    "alarms",
    "episodes",
  ];
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "runs" },
      head(heads),
      h(
        "tbody",
        {},
        runs.map((r) =>
          h(
            "tr",
            {},
            h(
              "td",
              {},
              h("input", {
                type: "checkbox",
                checked: chosen.has(r),
                title: "show its curves",
                "aria-label": `curves of ${r.name}`,
                style: { "accent-color": colourOf(r, all, settings) },
                onchange: () => flipped(r),
              }),
            ),
            h(
              "td",
              {},
              h("a", { href: link(["health", r.name]) }, h("strong", {}, r.name)),
              " ",
              pill(r.state, STATES[r.state]),
              r.words ? h("div", { class: r.state === "failed" ? "why bad-text" : "why quiet" }, r.words) : null,
              r.damaged
                ? pill(
                    count(r.damaged, "damaged line"),
                    "warn",
                    "lines of metrics.jsonl or alarms.jsonl that could not be read",
                  )
                : null,
            ),
            h(
              "td",
              {},
              h(
                "div",
                { class: "progress", title: `${num(r.minutes)} minutes of training` },
                h("i", { style: { width: `${r.total_steps ? Math.min(100, (100 * r.step) / r.total_steps) : 0}%` } }),
              ),
              h("small", {}, `${num(r.step, 6)}${r.total_steps ? ` / ${num(r.total_steps, 6)}` : ""} steps`),
            ),
            h("td", {}, h("div", { class: "with-spark" }, h("strong", {}, percent(r.success)), sparkline(r.spark))),
            h("td", {}, percent(r.held_out)),
            h("td", {}, num(r.reward)),
            h("td", {}, num(r.version, 6)),
            h("td", {}, num(r.speed)),
            h("td", { class: r.learner_idle > 0.5 ? "warn-text" : "" }, percent(r.learner_idle)),
            h("td", { class: r.actors_idle > 0.5 ? "warn-text" : "" }, percent(r.actors_idle)),
            h("td", {}, r.state === "running" && r.left_s ? duration(r.left_s) : "–"),
            h(
              "td",
              {},
              r.alarm_count
                ? pill(
                    String(r.alarm_count),
                    r.alarms.some((a) => a.over === null && LEVELS[a.level] === "bad") ? "bad" : "warn",
                  )
                : "0",
            ),
            h(
              "td",
              {},
              r.recorded
                ? h("a", { href: link(["step", r.name, r.recorded_last]) }, count(r.recorded, "step"))
                : r.evaluations
                  ? null
                  : h("span", { class: "quiet" }, "not recorded"),
              r.recorded && r.evaluations ? h("br") : null,
              r.evaluations
                ? h("a", { href: link(["step", r.name, r.evaluation_last]) }, count(r.evaluations, "evaluation"))
                : null,
            ),
          ),
        ),
      ),
    ),
  );
}

// The tasks of a run of several, and its held-out sets that no task has the name of.
function tasksOf(run) {
  const others = run.sets.filter((each) => !run.tasks.some((task) => task.name === each.name));
  if (!run.tasks.length && !others.length) return null;
  const heads = ["task or held-out set", "success", "held-out", "reward", "turns", "share of groups", "equal rewards"];
  const rows = [...run.tasks, ...others.map((each) => ({ name: each.name, held_out: each.success }))];
  return h(
    "section",
    {},
    h("h2", {}, "Tasks", h("span", { class: "quiet" }, ` of ${run.name}, means of the last ten steps`)),
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        { class: "runs" },
        head(heads),
        h(
          "tbody",
          {},
          rows.map((task) =>
            h(
              "tr",
              {},
              h("td", {}, h("a", { href: link(["metrics"], { q: `/${task.name}/` }) }, h("strong", {}, task.name))),
              h(
                "td",
                {},
                h("div", { class: "with-spark" }, h("strong", {}, percent(task.success)), sparkline(task.spark || [])),
              ),
              h("td", {}, percent(task.held_out)),
              h("td", {}, num(task.reward)),
              h("td", {}, num(task.turns)),
              h("td", {}, percent(task.share)),
              h("td", {}, percent(task.without_variance)),
            ),
          ),
        ),
      ),
    ),
  );
}

function alarms(runs) {
  const all = runs
    .flatMap((run) => run.alarms.map((alarm) => ({ ...alarm, run: run.name })))
    .sort((a, b) => (a.over !== null) - (b.over !== null) || (b.time || 0) - (a.time || 0));
  if (!all.length) return null;
  return h(
    "section",
    {},
    h("h2", {}, "Alarms"),
    all.slice(0, 30).map((a) =>
      h(
        "details",
        { class: `alarm ${a.over === null ? (LEVELS[a.level] ?? "warn") : "over"}` },
        h(
          "summary",
          {},
          pill(String(a.level || "alarm"), LEVELS[a.level] ?? "warn"),
          h("strong", {}, String(a.message || a.rule || "")),
          h(
            "span",
            { class: "quiet" },
            ` ${runs.length > 1 ? `${a.run}, ` : ""}step ${num(a.step, 7)}, ${clock(a.time)}`,
            a.over === null ? "" : `, over at step ${num(a.over, 7)}`,
          ),
        ),
        h(
          "dl",
          {},
          [
            ["cause", a.cause],
            ["look at", a.look_at],
            ["what to do", a.cure],
            [
              "values",
              a.values &&
                (typeof a.values === "object"
                  ? Object.entries(a.values)
                      .map(([k, v]) => `${k} = ${typeof v === "number" ? num(v) : v}`)
                      .join(", ")
                  : a.values),
            ],
          ]
            .filter(([, text]) => text)
            .map(([name, text]) => [h("dt", {}, name), h("dd", {}, String(text))]),
          Array.isArray(a.episodes) && a.episodes.length
            ? [
                h("dt", {}, "episodes"),
                h(
                  "dd",
                  {},
                  a.episodes.slice(0, 20).map((e) => episodeOf(a, e)),
                ),
              ]
            : null,
        ),
      ),
    ),
  );
}

function episodeOf(alarm, episode) {
  const id = typeof episode === "object" && episode ? String(episode.id || episode.episode || "") : String(episode);
  const step = (typeof episode === "object" && episode?.step) || alarm.step;
  return h(
    "a",
    { class: "chip", href: id.includes("/") ? episodeLink(alarm.run, step, id) : link(["step", alarm.run, step]) },
    id,
  );
}

function endings(runs) {
  return h(
    "section",
    { class: "card" },
    h("h3", {}, "How episodes end", h("span", { class: "quiet" }, "last ten steps")),
    runs.map((run) =>
      h(
        "div",
        { class: "row" },
        runs.length > 1 ? h("small", {}, run.name) : null,
        h(
          "div",
          { class: "stack" },
          Object.entries(run.endings)
            .filter(([, share]) => share > 0)
            .map(([ending, share]) =>
              h(
                "i",
                {
                  class: endingKind(ending),
                  style: { "flex-grow": 1000 * share },
                  title: `${ending}: ${percent(share)}`,
                },
                share > 0.12 ? `${ending} ${percent(share)}` : "",
              ),
            ),
        ),
      ),
    ),
  );
}

function differences(runs, all) {
  if (runs.length < 2) return null;
  const recipes = all.filter((row) => new Set(runs.map((r) => JSON.stringify(row.values[r.name] ?? ""))).size > 1);
  return h(
    "section",
    { class: "card wide" },
    h("h3", {}, "Where the recipes differ", h("span", { class: "quiet" }, count(recipes.length, "field"))),
    recipes.length
      ? h(
          "details",
          { open: recipes.length < 30 },
          h("summary", { class: "label" }, "fields"),
          h(
            "div",
            { class: "scroll" },
            h(
              "table",
              {},
              head(["field", ...runs.map((r) => r.name)]),
              h(
                "tbody",
                {},
                recipes.map((row) =>
                  h(
                    "tr",
                    {},
                    h("td", { class: "code" }, row.field),
                    runs.map((r) => h("td", {}, String(row.values[r.name] ?? ""))),
                  ),
                ),
              ),
            ),
          ),
        )
      : h("p", { class: "quiet" }, "They are the same."),
  );
}
