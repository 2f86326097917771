// Every metric with its meaning, healthy range and what to do; by lag where it is split.

import { getMetrics, getSeries } from "./api.js";
import { AXES, chart, colour, lazily, line } from "./charts.js";
import { colourOf, drawn, filterBar, flip, listed, settingsOf } from "./chosen.js";
import { choice, h, searchBox, select, show } from "./dom.js";
import { set } from "./route.js";

const NARROW = 760; // pixels: there the sections are folded at first
const title = (section) => section.replaceAll("_", " ").replace(/^./, (c) => c.toUpperCase());

export async function metricsPage({ query, runs }) {
  const settings = {
    x: query.get("x") || "step",
    smooth: Number(query.get("smooth") || 5),
    q: query.get("q") || "",
    ...settingsOf(query),
  };
  let shown = drawn(runs.runs, settings);
  const described = new Map();
  for (const { metrics } of await Promise.all(
    listed(runs.runs, { ...settings, find: "" }).map((r) => getMetrics(r.name)),
  ))
    for (const m of metrics) described.set(m.name, m);
  const sections = Map.groupBy
    ? Map.groupBy([...described.values()], (m) => m.section)
    : group([...described.values()]);
  const body = h("div", {});
  const element = h("div", {});
  const split = new Set();

  function draw() {
    const words = settings.q.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (m) => words.every((w) => m.name.toLowerCase().includes(w) || m.meaning.toLowerCase().includes(w));
    show(
      body,
      [...sections].map(([section, metrics]) => {
        const some = metrics.filter(fits);
        return some.length
          ? h(
              "details",
              { class: "section", open: words.length > 0 || innerWidth > NARROW },
              h(
                "summary",
                {},
                h("h2", { id: section }, title(section), h("span", { class: "quiet" }, ` ${some.length}`)),
              ),
              h("div", { class: "grid" }, some.map(card)),
            )
          : null;
      }),
    );
    if (!body.children.length)
      show(body, h("p", { class: "quiet" }, "No metric has these words in its name or meaning."));
  }

  function card(metric) {
    const place = h("div", { class: "chart-place" });
    const fill = async () => {
      const names = split.has(metric.name) ? [...metric.lags].sort(byLag) : [metric.name];
      const all = await Promise.all(shown.map((r) => getSeries(r.name, names)));
      const lines = shown
        .flatMap((r, at) =>
          names.map((name, i) => ({
            ...line(all[at], name, settings.x),
            label: split.has(metric.name) ? name.split("/").pop().replace("_", " ") : r.name,
            colour: split.has(metric.name) ? colour(i) : colourOf(r, runs.runs, settings),
            dash: split.has(metric.name) && at ? [4, 3] : undefined,
          })),
        )
        .filter((l) => l.x && l.y.some((v) => v !== null));
      show(
        place,
        lines.length
          ? chart({
              lines,
              axis: settings.x,
              window: settings.smooth,
              series: all[0],
              events: shown.length === 1 ? all[0].events : [],
              low: metric.low,
              high: metric.high,
              key: "metrics",
              many: shown.length > 1 && !split.has(metric.name),
            })
          : h("p", { class: "quiet" }, "no value yet"),
      );
    };
    const lagButton = metric.lags.length
      ? h(
          "button",
          {
            type: "button",
            class: "small",
            "aria-pressed": String(split.has(metric.name)),
            onclick: (e) => {
              split.has(metric.name) ? split.delete(metric.name) : split.add(metric.name);
              e.target.setAttribute("aria-pressed", String(split.has(metric.name)));
              fill();
            },
          },
          "by lag",
        )
      : null;
    place.refill = fill;
    return h(
      "article",
      { class: "card metric" },
      h("h3", { class: "code" }, metric.name, lagButton),
      h("p", {}, metric.meaning || "a metric that the catalogue does not describe"),
      lazily(place, () => {
        place.filled = true;
        fill();
      }),
      h(
        "p",
        { class: "advice" },
        metric.healthy ? [h("b", { class: "good-text" }, "healthy "), metric.healthy] : null,
        metric.cure ? [h("br"), h("b", {}, "otherwise "), metric.cure] : null,
      ),
    );
  }

  const again = () => body.querySelectorAll(".chart-place").forEach((place) => place.filled && place.refill());
  const boxes = h("span", { class: "run-boxes" });
  function chosen() {
    shown = drawn(runs.runs, settings);
    const some = listed(runs.runs, settings);
    show(
      boxes,
      runs.runs.length > 1
        ? some.map((r) =>
            h(
              "label",
              { class: "check" },
              h("input", {
                type: "checkbox",
                checked: shown.includes(r),
                style: { "accent-color": colourOf(r, runs.runs, settings) },
                onchange: () => {
                  flip(r, runs.runs, settings);
                  chosen();
                },
              }),
              h("i", { class: "mark", style: { background: colourOf(r, runs.runs, settings) } }),
              r.name,
            ),
          )
        : null,
    );
    again();
  }
  const search = searchBox("search", "a word of its name or meaning", settings.q, (q) => {
    settings.q = q;
    set({ q });
    draw();
  });
  const bar = h(
    "div",
    { class: "bar sticky" },
    h("h1", {}, "Metrics"),
    search,
    choice("against", Object.entries(AXES), settings.x, (x) => {
      set({ x });
      dispatchEvent(new HashChangeEvent("hashchange"));
    }),
    select(
      "mean of",
      [1, 5, 20, 100].map((n) => [String(n), n === 1 ? "1 step" : `${n} steps`]),
      String(settings.smooth),
      (n) => {
        settings.smooth = Number(n);
        set({ smooth: n });
        again();
      },
    ),
    filterBar(runs.runs, settings, chosen),
    boxes,
    h(
      "span",
      { class: "quiet legend-marks" },
      h("i", { class: "mark bad" }),
      "alarm",
      h("i", { class: "mark accent" }),
      "resumed",
      h("i", { class: "mark warn" }),
      "engine lost",
      h("i", { class: "mark" }),
      "checkpoint",
      h("i", { class: "mark dashed" }),
      "healthy bound",
    ),
  );
  draw();
  chosen();
  show(element, bar, body);
  return { element, update: again, title: "Metrics" };
}

const byLag = (a, b) => parseInt(a.split("_").pop(), 10) - parseInt(b.split("_").pop(), 10);

function group(metrics) {
  const found = new Map();
  for (const m of metrics) found.set(m.section, [...(found.get(m.section) || []), m]);
  return found;
}
