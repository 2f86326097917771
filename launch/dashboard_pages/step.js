// One step's batch: every recorded episode is a row, by group: when it was played, by which version, how it ended.

import { getStep, getSteps, hasEpisode } from "./api.js";
import {
  capital,
  clock,
  count,
  duration,
  h,
  known,
  num,
  percent,
  pill,
  placeText,
  select,
  show,
  signed,
} from "./dom.js";
import { episodeLink, link, set } from "./route.js";
import { endingKind } from "./verdict.js";

const SHADES = ["#0f766e", "#3b82a0", "#7c6bb0", "#b5678f", "#cf6b4f", "#b9442f"];
export const versionColour = (lag) => SHADES[Math.max(0, Math.min(SHADES.length - 1, lag))];
const BINS = 12;

export function fits(e, filter, version) {
  if (filter.outcome === "success" && !(e.success > 0)) return false;
  if (filter.outcome === "failure" && e.success > 0) return false;
  if (filter.outcome === "broken" && !e.has_failed) return false;
  if (filter.ending && e.ending !== filter.ending) return false;
  if (filter.lag && version - e.oldest !== Number(filter.lag)) return false;
  if (filter.turns && e.turns < Number(filter.turns)) return false;
  if (filter.low && e.reward < Number(filter.low)) return false;
  return !(filter.high && e.reward > Number(filter.high));
}

export const FILTERS = ["outcome", "ending", "lag", "turns", "low", "high", "groups"];
export const filterOf = (query) => Object.fromEntries(FILTERS.map((name) => [name, query.get(name) || ""]));

export async function stepPage({ parts, query }) {
  const [run, step] = parts;
  const { steps, evaluations } = await getSteps(run);
  const places = [...steps.map(String), ...evaluations].sort(
    (a, b) => parseInt(a, 10) - parseInt(b, 10) || (a < b ? -1 : 1),
  );
  if (!places.length)
    return {
      element: h(
        "section",
        {},
        h("h1", {}, "No recordings"),
        h("p", {}, `Run ${run} has recorded no step. Give its recipe record.every, such as --record.every 10.`),
      ),
      title: "Step",
    };
  const at = step ?? String(steps.at(-1) ?? evaluations.at(-1));
  const data = await getStep(run, at);
  const { version, evaluation } = data.header;
  const kin = places.filter((p) => p.includes("-") === at.includes("-"));
  const filter = filterOf(query);
  const element = h("div", {});
  const body = h("div", {});
  const counts = h("span", { class: "quiet" });
  const change = (part) => {
    Object.assign(filter, part);
    set(part);
    draw();
  };
  const groups = groupsOf(data.episodes, evaluation);
  const span = spanOf(data.episodes);
  const single = groups.every((g) => g.episodes.length === 1);

  function draw() {
    const shown = groups
      .map((g) => ({ ...g, shown: g.episodes.filter((e) => fits(e, filter, version)) }))
      .filter(
        (g) => g.shown.length && !(filter.groups === "flat" && !g.flat) && !(filter.groups === "mixed" && g.flat),
      );
    const number = shown.reduce((n, g) => n + g.shown.length, 0);
    counts.textContent = `${number} of ${count(data.episodes.length, "episode")}`;
    show(histogramPlace, histogram(data.episodes, filter, change));
    const row = (g) => episodeRow(run, at, g.shown[0], span, data.header, filter, g.episodes[0].sample_id);
    show(
      body,
      shown.length
        ? single
          ? h("section", { class: "group singles" }, shown.map(row))
          : shown.map((g) => groupRows(run, at, g, span, data.header, filter))
        : h("p", { class: "quiet" }, "No episode passes the filters."),
    );
  }

  const histogramPlace = h("div", {});
  const endings = [...new Set(data.episodes.map((e) => e.ending))].sort();
  const lags = [...new Set(agesOf(data.episodes, version))].sort((a, b) => a - b);
  const i = kin.indexOf(at);
  show(
    element,
    h(
      "div",
      { class: "bar" },
      h("h1", {}, capital(placeText(at))),
      neighbour(run, kin[i - 1], "‹ earlier"),
      select(
        "recording",
        places.map((p) => [p, placeText(p)]),
        at,
        (p) => {
          location.hash = link(["step", run, p], filter);
        },
      ),
      neighbour(run, kin[i + 1], "later ›"),
      h("span", { class: "quiet" }, `policy version ${version}, ${clock(data.header.time)}`),
    ),
    evaluation && !data.damages.length && data.header.played > data.episodes.length
      ? h(
          "p",
          { class: "quiet" },
          `${data.episodes.length} of its ${count(data.header.played, "episode")} are recorded: `,
          "the worst, and a few of the best (32 of each evaluation). The numbers are of all of them.",
        )
      : null,
    data.damages.length
      ? h(
          "details",
          { class: "damaged" },
          h(
            "summary",
            {},
            `${count(data.damages.length, "record")} of this recording could not be read; the others are shown`,
          ),
          h(
            "ul",
            {},
            data.damages.map((d) => h("li", {}, d)),
          ),
        )
      : null,
    facts(data, groups),
    h(
      "div",
      { class: "bar sticky" },
      select(
        "outcome",
        [
          ["", "all"],
          ["success", "success"],
          ["failure", "no success"],
          ["broken", evaluation ? "ended by a fault" : "not trained on"],
        ],
        filter.outcome,
        (v) => change({ outcome: v }),
      ),
      select("ending", [["", "all"], ...endings.map((e) => [e, e])], filter.ending, (v) => change({ ending: v })),
      select(
        "lag",
        [["", "all"], ...lags.map((l) => [String(l), l === 0 ? "0 (newest)" : String(l)])],
        filter.lag,
        (v) => change({ lag: v }),
      ),
      evaluation || single
        ? null
        : select(
            "groups",
            [
              ["", "all"],
              ["mixed", "with a spread"],
              ["flat", "without variance"],
            ],
            filter.groups,
            (v) => change({ groups: v }),
          ),
      h(
        "label",
        { class: "field" },
        h("span", { class: "label" }, "turns ≥"),
        h("input", { type: "number", min: 0, value: filter.turns, onchange: (e) => change({ turns: e.target.value }) }),
      ),
      counts,
      h(
        "button",
        {
          type: "button",
          class: "small",
          onclick: () => {
            location.hash = link(["step", run, at]);
          },
        },
        "clear",
      ),
    ),
    histogramPlace,
    h(
      "div",
      { class: "legend" },
      h("span", {}, "played by version:"),
      [...new Set(lags)].map((l) =>
        h(
          "span",
          {},
          h("i", { style: { background: versionColour(l) } }),
          l === 0 ? `${version} (newest)` : `${l} older`,
        ),
      ),
      h("span", {}, h("i", { class: "env" }), "environment"),
      h("span", {}, h("i", { class: "wait" }), "waiting"),
    ),
    body,
  );
  draw();
  return { element, title: `${capital(placeText(at))} of ${run}` };
}

const neighbour = (run, step, text) =>
  step === undefined ? h("span", { class: "quiet" }, text) : h("a", { href: link(["step", run, step]) }, text);

export function groupsOf(episodes, evaluation) {
  const found = new Map();
  for (const e of episodes) found.set(e.ticket_id, [...(found.get(e.ticket_id) || []), e]);
  return [...found].map(([id, all]) => {
    const rewards = all.filter((e) => !e.has_failed).map((e) => e.reward);
    const mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1);
    const spread = Math.sqrt(rewards.reduce((a, b) => a + (b - mean) ** 2, 0) / (rewards.length || 1));
    return { id, episodes: all, mean, spread, flat: !evaluation && all.length > 1 && spread < 1e-9 };
  });
}

// An episode without a token has no age.
const agesOf = (episodes, version) => episodes.filter((e) => e.oldest >= 0).map((e) => version - e.oldest);

function facts({ episodes, header }, groups) {
  if (header.evaluation) {
    const all = header.metrics;
    const lost = all.failed > 0 ? "bad-text" : "";
    return factRow([
      ["success", percent(all.success)],
      ["reward, mean", num(all.reward)],
      ["turns, mean", num(all.turns)],
      ["tokens written, mean", num(all.model_tokens)],
      ["episodes", num(header.played)],
      ["ended by a fault", percent(all.failed), lost],
      ["recorded", num(episodes.length)],
    ]);
  }
  const sound = episodes.filter((e) => !e.has_failed);
  const ages = agesOf(episodes, header.version); // not failed, as in rollout/*
  const mean = (of) => (sound.length ? sound.reduce((sum, e) => sum + of(e), 0) / sound.length : NaN);
  const flat = groups.filter((g) => g.flat).length;
  const said = [
    ["success", percent(mean((e) => (e.success > 0 ? 1 : 0)))],
    ["reward, mean", num(mean((e) => e.reward))],
    ["turns, mean", num(mean((e) => e.turns))],
    ["tokens written, mean", num(mean((e) => e.tokens))],
    ["oldest tokens", count(Math.max(0, ...ages), "version back", "versions back")],
    ["recorded", num(episodes.length)],
    ["not trained on", num(episodes.length - sound.length)],
  ];
  if (groups.some((g) => g.episodes.length > 1))
    said.push(["groups without variance", `${flat} of ${groups.length}`, flat > groups.length / 2 ? "bad-text" : ""]);
  return factRow(said);
}

const factRow = (said) =>
  h(
    "div",
    { class: "facts" },
    said.map(([name, value, kind]) => h("div", {}, h("b", { class: kind || "" }, value), h("small", {}, name))),
  );

function histogram(episodes, filter, change) {
  const rewards = episodes.map((e) => e.reward);
  const low = Math.min(...rewards);
  const high = Math.max(...rewards);
  if (!(high > low)) return null;
  const width = (high - low) / BINS;
  const bins = Array.from({ length: BINS }, () => ({ good: 0, bad: 0 }));
  for (const e of episodes)
    bins[Math.min(BINS - 1, Math.floor((e.reward - low) / width))][e.success > 0 ? "good" : "bad"] += 1;
  const most = Math.max(...bins.map((b) => b.good + b.bad));
  return h(
    "div",
    { class: "histogram" },
    h("small", { class: "quiet" }, "reward (click filters)"),
    h(
      "div",
      { class: "bins" },
      bins.map((b, i) => {
        const from = low + i * width;
        const to = from + width;
        const on = filter.low !== "" && Math.abs(Number(filter.low) - from) < 1e-6;
        return h(
          "button",
          {
            type: "button",
            "aria-pressed": String(on),
            title: `${num(from)} to ${num(to)}: ${count(b.good + b.bad, "episode")}, ${b.good} with success`,
            onclick: () =>
              change(on ? { low: "", high: "" } : { low: (from - 1e-9).toFixed(7), high: (to + 1e-9).toFixed(7) }),
          },
          h("i", { class: "bad", style: { height: `${(44 * b.bad) / most}px` } }),
          h("i", { class: "good", style: { height: `${(44 * b.good) / most}px` } }),
        );
      }),
    ),
    h("div", { class: "ends" }, h("small", {}, num(low)), h("small", {}, num(high))),
  );
}

function spanOf(episodes) {
  const timed = episodes.filter((e) => e.started > 0);
  if (!timed.length)
    return { from: 0, length: Math.max(1e-6, ...episodes.map((e) => e.generate_s + e.env_s + e.wait_s)), timed: false };
  const from = Math.min(...timed.map((e) => e.started));
  const to = Math.max(...timed.map((e) => e.started + e.seconds));
  return { from, length: Math.max(1e-6, to - from), timed: true };
}

function groupRows(run, step, group, span, header, filter) {
  const sample = group.episodes[0]?.sample_id || group.id;
  return h(
    "section",
    { class: group.flat ? "group flat" : "group" },
    h(
      "header",
      {},
      h("strong", { title: `ticket ${group.id}` }, sample),
      group.episodes.length > 1
        ? [
            h("span", {}, `reward ${num(group.mean)} ± ${num(group.spread)}`),
            h(
              "span",
              { class: "dots" },
              group.episodes.map((e) =>
                h("i", {
                  class: e.success > 0 ? "good" : e.has_failed ? "broken" : "bad",
                  title: `${e.id}: ${num(e.reward)}`,
                }),
              ),
            ),
          ]
        : null,
      group.flat ? pill("no variance: teaches a group-relative objective nothing", "bad") : null,
    ),
    group.shown.map((e) => episodeRow(run, step, e, span, header, filter)),
  );
}

function episodeRow(run, step, e, span, { version, evaluation }, filter, name = "") {
  const share = (s) => `${(100 * s) / span.length}%`;
  const lag = version - e.oldest;
  const busy = e.generate_s + e.env_s + e.wait_s;
  const before = span.timed && e.started ? e.started - span.from : 0;
  const rest = span.timed ? Math.max(0, e.seconds - busy) : 0;
  const shown = hasEpisode(run, step, e.id);
  return h(
    shown ? "a" : "div",
    {
      class: "episode-row",
      href: shown ? episodeLink(run, step, e.id, filter) : null,
      title: e.error || e.refused || (shown ? null : "this episode is not in the report"),
    },
    h(
      "span",
      { class: name ? "name" : "code", title: name ? `${name}, ticket ${e.ticket_id}` : null },
      name || `#${e.index}`,
    ),
    pill(
      e.success > 0 ? "success" : e.has_failed ? (evaluation ? "fault" : "not trained") : "no success",
      e.success > 0 ? "good" : "bad",
    ),
    h("span", { class: "amount" }, signed(e.reward)),
    pill(e.ending, endingKind(e.ending)),
    h("span", { class: "quiet" }, `${count(e.turns, "turn")}, ${e.tokens} tokens`),
    h(
      "span",
      {
        class: "time-line",
        title:
          `engine ${duration(e.generate_s)}, environment ${duration(e.env_s)}, waiting ${duration(e.wait_s)}; ` +
          `version ${e.oldest === e.newest ? e.oldest : `${e.oldest} to ${e.newest}`}`,
      },
      h("i", { style: { "margin-left": share(before), width: share(e.generate_s), background: versionColour(lag) } }),
      h("i", { class: "env", style: { width: share(e.env_s) } }),
      h("i", { class: "wait", style: { width: share(e.wait_s + rest) } }),
    ),
    h(
      "span",
      { class: "quiet", title: "mean gap between engine and learner" },
      e.trained && known(e.mean_gap) ? `gap ${num(e.mean_gap, 2)}` : "",
    ),
  );
}
