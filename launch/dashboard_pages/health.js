// Whether each part of a run works: actors, engines, learner, tickets, publications, faults, what was refused, logs.

import { getHealth, hasPage, isReport } from "./api.js";
import { bytes, clock, count, duration, h, known, num, percent, pill, show } from "./dom.js";
import { STATES } from "./states.js";
import { link } from "./route.js";

export async function healthPage({ parts, runs }) {
  const run = parts[0] || runs.runs[0]?.name;
  const element = h("div", {});
  const logs = new Map();
  const again = async () => draw(element, run, await getHealth(run), logs);
  await again();
  return { element, update: again, title: `Health of ${run}` };
}

const MAX_OPEN = 4; // logs that are open at first
const NO_LOGS = [
  "There is no log in the run's folder.",
  "launch/local.py keeps what learner, actors and engines write in logs/;",
  "parts that are started one by one write to the terminal in which they were started.",
  "SGLang's servers write into engines/ beside the run's folder, which is shown if the dashboard was given the folder",
  "of all runs. Any file logs/NAME.log of the run is shown here.",
].join(" ");
const card = (title, ...children) => h("section", { class: "card" }, h("h3", {}, title), ...children);
const rows = (entries) =>
  h(
    "table",
    { class: "plain-table" },
    h(
      "tbody",
      {},
      entries
        .filter(([, v]) => v !== null && v !== undefined)
        .map(([name, value, kind]) =>
          h("tr", {}, h("td", {}, name), h("td", { class: `amount ${kind || ""}` }, value)),
        ),
    ),
  );

function draw(element, run, d, logs) {
  keepPlaces(element, logs);
  const at = (name) => d.latest[name];
  const some = (prefix) => Object.entries(d.latest).filter(([name, v]) => name.startsWith(prefix) && known(v));
  const bad = (v) => (v > 0 ? "bad-text" : "");
  const trouble = Object.entries(d.worst).filter(([name, v]) => v > 0 && !/ending\/(completed|max_turns)$/.test(name));
  show(
    element,
    h("h1", {}, `Health of ${run} `, pill(d.state, STATES[d.state])),
    d.words ? h("p", { class: d.state === "failed" ? "bad-text why" : "quiet why" }, `${d.state}: ${d.words}`) : null,
    h("p", { class: "quiet" }, whatIsShown(d)),
    h(
      "div",
      { class: "grid" },
      card(
        "Actors",
        rows([
          ["connected, at the last step", num(at("actors/known")), at("actors/known") === 0 ? "bad-text" : ""],
          ["idle", percent(at("actors/idle_frac"))],
          ["a group takes", duration(at("actors/group_s/mean"))],
          ["95 % within", duration(at("actors/group_s/p95"))],
          ["turns/s", num(at("speed/turns_per_s"))],
        ]),
      ),
      card(
        "Engines",
        rows([
          ["hold the newest version", num(at("publish/engines"))],
          ["left behind", num(at("publish/dropped")), bad(at("publish/dropped"))],
          ["asked again, a turn", num(at("rollout/engine_retries"))],
          ["refused requests", num(at("publish/refused_requests"))],
          ["canary gap", num(at("publish/canary_gap"))],
          ["gave no proof", num(at("publish/unproven")), bad(at("publish/unproven"))],
        ]),
      ),
      card(
        "Learner",
        rows([
          ["ranks, at the last checkpoint", num(d.ranks)],
          ["step takes", duration(at("time/step_s"))],
          ["idle", percent(at("learner/idle_frac"))],
          ["forward", duration(at("time/forward_s"))],
          ["backward", duration(at("time/backward_s"))],
          ["tokens/s", num(at("speed/tokens_per_s"))],
          ["steps without an update", num(at("optim/skipped_steps")), bad(at("optim/skipped_steps"))],
          ["stepped back", num(at("guard/rewinds")), bad(at("guard/rewinds"))],
        ]),
      ),
      card(
        "Queue and tickets",
        stack(
          [
            ["open", at("tickets/open"), "accent"],
            ["ready", at("queue/ready_groups"), "warn"],
          ],
          "groups on their way",
        ),
        rows([
          ["issued", num(at("tickets/issued"), 8)],
          ["trained on", num(at("tickets/trained"), 8)],
          ["being played", num(at("tickets/open"))],
          ["wait to be trained on", num(at("queue/ready_groups"))],
          ["issued again", num(at("tickets/reissued")), bad(at("tickets/reissued"))],
          ["dropped", num(at("tickets/dropped")), bad(at("tickets/dropped"))],
          ["evaluations open", num(at("tickets/open_evaluation"))],
        ]),
      ),
      card(
        "Last publication",
        stack(
          ["gather", "broadcast", "load", "pause", "proof"].map((p, i) => [
            p,
            at(`publish/${p}_s`),
            ["accent", "good", "", "bad", "warn"][i],
          ]),
          "its parts",
          duration,
        ),
        rows([
          ["took", duration(at("publish/seconds"))],
          ["sent to each engine", bytes(at("publish/bytes"))],
          ["version", num(at("policy_version"), 8)],
        ]),
        toMetrics("publish/", "all of them"),
      ),
      card(
        "Faults, the worst step of each",
        trouble.length
          ? rows(
              trouble.map(([name, v]) => [
                name.replace("rollout/", ""),
                v <= 1 && name.includes("ending") ? percent(v) : num(v),
                "bad-text",
              ]),
            )
          : nothing(d, "none"),
      ),
      card(
        "Refused, by reason",
        refused(d, [...some("wire/"), ...some("tickets/refused/"), ...some("tickets/dropped/")]),
        d.rejected.length
          ? h(
              "details",
              {},
              h("summary", {}, `${count(d.rejected.length, "message")} kept in ${run}/rejected`),
              h(
                "ul",
                { class: "code" },
                d.rejected.map((name) => h("li", {}, name)),
              ),
            )
          : null,
      ),
      card(
        "Checkpoints",
        rows([
          ["kept", num(d.checkpoints.length)],
          ["newest", d.checkpoints.length ? `step ${d.checkpoints.at(-1)}` : "none"],
          ["best", d.best?.step !== undefined ? `step ${d.best.step} (${num(d.best.value)})` : null],
          ["not written", num(at("checkpoint/failed")), bad(at("checkpoint/failed"))],
        ]),
        toMetrics("checkpoint", "its metrics"),
      ),
    ),
    h("h2", {}, "Logs"),
    d.logs.length
      ? d.logs.map((log) => logBox(log, logs.get(log.name) ?? { open: d.logs.length <= MAX_OPEN }))
      : h("p", { class: "quiet" }, isReport ? "A report holds no logs." : NO_LOGS),
    h("h2", {}, "Recipe and software"),
    h(
      "div",
      { class: "columns" },
      d.software ? card("Software", rows(Object.entries(d.software).map(([k, v]) => [k, String(v)]))) : null,
      ...Object.entries(d.recipe).map(([section, fields]) => recipeCard(section, flat(fields), new Set(d.set_fields))),
    ),
  );
}

// The fields that were set first; those with their defaults are folded.
function recipeCard(section, fields, set) {
  const isSet = ([name]) => set.has(name ? `${section}.${name}` : section);
  const given = fields.filter(isSet);
  const rest = fields.filter((field) => !isSet(field));
  return card(
    section,
    given.length ? h("div", { class: "set" }, rows(given)) : null,
    rest.length
      ? h(
          "details",
          {},
          h("summary", { class: "label" }, `${count(rest.length, "field")} with the default`),
          rows(rest),
        )
      : null,
  );
}

function logBox(log, { open, top }) {
  const lines = h(
    "pre",
    { class: "log", tabindex: 0, "aria-label": log.name },
    log.lines.map((text) =>
      h(
        "span",
        { class: /ERROR|Traceback/.test(text) ? "bad-text" : /WARNING/.test(text) ? "warn-text" : null },
        `${text}\n`,
      ),
    ),
  );
  const place = () => {
    lines.scrollTop = top ?? lines.scrollHeight;
  };
  requestAnimationFrame(place);
  return h(
    "details",
    { open, "data-log": log.name, ontoggle: place },
    h(
      "summary",
      {},
      h("span", { class: "code" }, log.name),
      h("span", { class: "quiet" }, ` its last ${count(log.lines.length, "line")} `),
      warnings(log.lines),
    ),
    lines,
  );
}

// Which logs are open and how far they are read; one that is read at its end stays there.
function keepPlaces(element, logs) {
  for (const box of element.querySelectorAll("[data-log]")) {
    const lines = box.querySelector("pre");
    const atEnd = !box.open || lines.scrollTop + lines.clientHeight > lines.scrollHeight - 8;
    logs.set(box.dataset.log, { open: box.open, top: atEnd ? undefined : lines.scrollTop });
  }
}

const toMetrics = (q, text) =>
  hasPage("metrics") ? h("p", {}, h("a", { href: link(["metrics"], { q }) }, text)) : null;

function stack(parts, label, say = num) {
  const some = parts.filter(([, v]) => v > 0);
  return some.length
    ? h(
        "div",
        {},
        h(
          "div",
          { class: "stack", title: label },
          some.map(([name, v, kind]) =>
            h("i", { class: kind, style: { "flex-grow": 1000 * v }, title: `${name}: ${say(v)}` }),
          ),
        ),
        h(
          "small",
          { class: "quiet" },
          some.map(([name, v, kind]) => [h("i", { class: `mark square ${kind}` }), `${name} ${say(v)}  `]),
        ),
      )
    : null;
}

// A green word only where something was read.
const nothing = (d, word) =>
  d.steps ? h("p", { class: "good-text" }, word) : h("p", { class: "quiet" }, "not known yet: there was no step");

function whatIsShown(d) {
  if (!d.steps) return "There was no step yet; what is counted with each step is not known.";
  const of = d.total_steps ? ` of ${num(d.total_steps, 7)}` : "";
  return [
    `Numbers of the last step, ${num(d.latest.step, 7)}${of}, ${clock(d.time)};`,
    "the overview has means of the last ten. Faults are the worst of all steps.",
  ].join(" ");
}

function refused(d, entries) {
  const some = entries.filter(([name, v]) => v > 0 && name.split("/").length > 2);
  return some.length ? rows(some.map(([name, v]) => [name, num(v), "warn-text"])) : nothing(d, "nothing");
}

function warnings(lines) {
  const n = lines.filter((text) => /ERROR|WARNING|Traceback/.test(text)).length;
  return n ? pill(count(n, "warning"), "warn") : null;
}

function flat(fields, prefix = "") {
  if (typeof fields !== "object" || fields === null || Array.isArray(fields)) return [[prefix, JSON.stringify(fields)]];
  return Object.entries(fields).flatMap(([k, v]) =>
    typeof v === "object" && v !== null && !Array.isArray(v) && Object.keys(v).length
      ? flat(v, prefix ? `${prefix}.${k}` : k)
      : [[prefix ? `${prefix}.${k}` : k, typeof v === "string" ? v : JSON.stringify(v)]],
  );
}
