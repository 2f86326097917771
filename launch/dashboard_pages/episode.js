// One episode: why it ended so, each turn's image beside its answer, tokens coloured by choice, its group side by side.

import { getEpisode, getStep, hasEpisode, imageUrl } from "./api.js";
import { choice, count, duration, h, known, num, pill, placeText, show, signed } from "./dom.js";
import { current, episodeLink, link, set } from "./route.js";
import { filterOf, fits } from "./step.js";
import { MODES, legend, modesOf, paint, prepare, tips, token } from "./tokens.js";
import { advantageOf, denied, endingKind, leaves, valueBefore, verdict } from "./verdict.js";

const MAX_SIDE = 12; // episodes side by side
const MAX_SMALL = 4; // pictures of a turn in the strip
const LONG_NOTE = 300; // characters; a longer one folds
const kept = { colour: "advantage", raw: false }; // while the page is open

export async function episodePage({ parts, query }) {
  const [run, step, ...rest] = parts;
  const id = rest.join("/"); // a ticket's id may hold slashes
  const [data, batch] = await Promise.all([getEpisode(run, step, id).then(prepare), getStep(run, step)]);
  data.doubtful = new Set(denied(data.turns).map(([name]) => name));
  const modes = modesOf(data);
  const filter = filterOf(query);
  const has = (e) => hasEpisode(run, step, e.id);
  const listed = batch.episodes.filter((e) => has(e) && fits(e, filter, batch.header.version));
  kept.colour = query.get("colour") || kept.colour;
  if (!modes.includes(kept.colour)) kept.colour = modes[0];
  const at = listed.findIndex((e) => e.id === id);
  const element = h("div", { class: "episode" });
  const turns = h("div", { class: "turns" });
  const colours = h("div", { class: "bar sticky" });
  const go = (e) => {
    if (e) location.hash = episodeLink(run, step, e.id, { ...filter, view: current().query.get("view") });
    return true;
  };
  const group = data.group.filter(has);
  const inGroup = group.findIndex((e) => e.id === id);
  let selected = -1;

  function bar() {
    show(
      colours,
      choice(
        "colour",
        modes.map((m) => [m, MODES[m][0]]),
        kept.colour,
        recolour,
      ),
      legend(data, kept.colour),
      h("span", { class: "grow" }),
      h(
        "button",
        { type: "button", class: "small", "aria-pressed": String(kept.raw), title: "r", onclick: raw },
        "as the model reads it",
      ),
    );
  }
  function recolour(mode) {
    kept.colour = mode;
    set({ colour: mode });
    paint(turns, data, mode);
    bar();
  }
  function raw() {
    kept.raw = !kept.raw;
    fill();
    bar();
  }
  function fill() {
    show(
      turns,
      data.turns.map((t, i) => turnCard(run, data, t, i, kept)),
      data.tail
        ? h(
            "section",
            { class: "turn" },
            h("div", {}),
            h("div", {}, h("h3", {}, "After the last answer"), h("pre", { class: "seen" }, data.tail)),
          )
        : null,
    );
  }
  function pick(to) {
    selected = Math.max(0, Math.min(data.turns.length - 1, to));
    turns.querySelectorAll(".turn").forEach((t, i) => t.classList.toggle("selected", i === selected));
    turns.children[selected]?.scrollIntoView({ block: "center", behavior: "instant" });
    set({ turn: selected + 1 });
    return true;
  }

  const said = verdict(data);
  const s = data.summary;
  const side = query.get("view") === "group";
  show(
    element,
    h(
      "div",
      { class: "bar" },
      h("a", { href: link(["step", run, step], filter) }, `‹ ${placeText(step)}`),
      h("h1", {}, s.sample_id || id),
      h("span", { class: "quiet code" }, id),
      h("span", { class: "grow" }),
      h(
        "button",
        { type: "button", class: "small", disabled: at < 1, title: "←", onclick: () => go(listed[at - 1]) },
        "‹ previous",
      ),
      h("span", { class: "quiet" }, at < 0 ? "not in the filter" : `${at + 1} of ${listed.length}`),
      h(
        "button",
        {
          type: "button",
          class: "small",
          disabled: at < 0 || at + 1 >= listed.length,
          title: "→",
          onclick: () => go(listed[at + 1]),
        },
        "next ›",
      ),
    ),
    h(
      "section",
      { class: `verdict ${said.kind}` },
      h("h2", {}, said.headline),
      said.error ? h("pre", { class: "error" }, said.error) : null,
      h(
        "ul",
        {},
        said.reasons.map((r) => h("li", {}, r)),
      ),
    ),
    strip(run, data, pick),
    groupBar(run, step, data, filter, side),
  );
  if (side) element.append(await sideBySide(run, step, data));
  else {
    fill();
    bar();
    tips(turns, data);
    element.append(colours, turns, h("details", {}, h("summary", {}, "All that is recorded of it"), facts(data)));
  }

  if (!side && Number(query.get("turn")) > 0)
    requestAnimationFrame(() => element.isConnected && pick(Number(query.get("turn")) - 1));
  const key = (name) => {
    if (name === "ArrowLeft") return go(listed[at - 1]);
    if (name === "ArrowRight") return go(at < 0 ? listed[0] : listed[at + 1]);
    if (name === "ArrowUp") return group.length > 1 && go(group[inGroup - 1]);
    if (name === "ArrowDown") return group.length > 1 && go(group[inGroup + 1]);
    if (name === "j") return pick(selected + 1);
    if (name === "k") return pick(selected - 1);
    if (name === "t") {
      recolour(modes[(modes.indexOf(kept.colour) + 1) % modes.length]);
      return true;
    }
    if (name === "r") {
      raw();
      return true;
    }
    if (name === "g") {
      location.hash = episodeLink(run, step, id, { ...filter, view: side ? "" : "group" });
      return true;
    }
    return false;
  };
  return {
    element,
    key,
    leave: () => {
      document.getElementById("tip").hidden = true;
    },
    title: `Episode ${id}`,
  };
}

function picture(run, image, small = false) {
  const url = imageUrl(run, image.file);
  const label = `${image.width} × ${image.height} pixels → ${image.tokens ? count(image.tokens, "token") : "?"}`;
  if (!url || image.format === "bin")
    return h("span", { class: "no-image" }, url ? "an image that cannot be read" : "image not in the report");
  const element = h("img", {
    src: url,
    alt: label,
    title: label,
    class: image.width < 300 ? "pixels" : null,
    onerror: (e) => e.target.replaceWith(h("span", { class: "no-image" }, "this image is damaged")),
  });
  return small ? element : h("figure", {}, element, h("figcaption", {}, label));
}

const imagesOf = (data, turn) => data.images.slice(turn.first_image, turn.last_image);

// A turn's pictures: its own, and those that the model sees again, since a segment begins there.
function picturesOf(data, i) {
  const all = imagesOf(data, data.turns[i]);
  if (!i || !segmentBegun(data, data.turns[i - 1].end, data.turns[i])) return { own: all, again: [] };
  const earlier = new Set(data.turns.slice(0, i).flatMap((t) => imagesOf(data, t).map((image) => image.file)));
  const fresh = all.filter((image) => !earlier.has(image.file));
  const own = fresh.length ? fresh : all.slice(-1); // what is shown now may look as it did before
  return { own, again: all.filter((image) => !own.includes(image)) };
}

// One small picture for each turn, with what it earned.
function strip(run, data, pick) {
  if (data.turns.length < 2) return null;
  const most = Math.max(1e-9, ...data.turns.map((t) => Math.abs(t.reward)));
  return h(
    "div",
    { class: "strip" },
    data.turns.map((t, i) => {
      const images = picturesOf(data, i).own;
      return h(
        "button",
        { type: "button", title: `turn ${i + 1}: ${t.answer.slice(0, 200)}`, onclick: () => pick(i) },
        images.length
          ? h(
              "span",
              { class: "pair" },
              images.slice(0, MAX_SMALL).map((image) => picture(run, image, true)),
            )
          : h("span", { class: "no-image" }, "no image"),
        h("i", { class: t.reward < 0 ? "bad" : "good", style: { width: `${(100 * Math.abs(t.reward)) / most}%` } }),
        h("small", {}, i + 1),
      );
    }),
  );
}

function turnCard(run, data, turn, i, { colour, raw }) {
  const value = valueBefore(data, turn);
  const advantage = advantageOf(data, turn);
  const { own, again } = picturesOf(data, i);
  const before = i ? data.turns[i - 1].end : 0;
  const range = (a, b) => Array.from({ length: b - a }, (_, n) => a + n);
  const tokens = (a, b) => range(a, b).map((n) => token(data, n, colour));
  const numbers = [
    ["reward", signed(turn.reward), turn.reward < 0 ? "bad-text" : turn.reward > 0 ? "good-text" : ""],
    ["value before", known(value) ? num(value) : null],
    ["advantage", known(advantage) ? signed(advantage) : null, advantage < 0 ? "bad-text" : "good-text"],
  ];
  return h(
    "section",
    { class: "turn" },
    h(
      "div",
      { class: "pictures" },
      own.map((image) => picture(run, image)),
      again.length
        ? h(
            "div",
            { class: "again" },
            h("span", { class: "label" }, "seen again"),
            again.map((image) => picture(run, image, true)),
          )
        : null,
    ),
    h(
      "div",
      {},
      h(
        "h3",
        {},
        `Turn ${i + 1}`,
        numbers
          .filter(([, text]) => text)
          .map(([name, text, kind]) =>
            h("span", { class: "number" }, h("small", {}, name), h("b", { class: kind || "" }, text)),
          ),
        h("small", { class: "quiet" }, times(turn)),
      ),
      raw
        ? h("pre", { class: "stream" }, tokens(before, turn.start))
        : seen(turn.seen, i, segmentBegun(data, before, turn)),
      h("div", { class: "label" }, raw ? "" : "the model answered"),
      h("pre", { class: "answer" }, tokens(turn.start, turn.end)),
      info(turn.info, turn.answer, data.doubtful),
    ),
  );
}

// The number of the segment that begins between an answer's end and the next turn, counted from 1; 0 if none begins.
function segmentBegun(data, before, turn) {
  const at = (data.segments || []).findIndex((start) => start >= before && start <= turn.start);
  return at < 0 ? 0 : at + 2;
}

// The text before an answer; a long one folds.
function seen(text, i, segment) {
  const trimmed = text
    .replace(/<\|im_start\|>\w+\n/g, "\n")
    .replace(/<\|[^|<>]{1,40}\|>/g, "")
    .replace(/\n{3,}/g, "\n\n")
    .trim(); // the template's own
  if (!trimmed) return null;
  return h(
    "details",
    { open: trimmed.length < 700 },
    h(
      "summary",
      { class: "label" },
      segment
        ? `segment ${segment}: what the model reads, from the prompt on`
        : i
          ? "the environment showed"
          : "prompt and first observation",
    ),
    h("pre", { class: "seen" }, trimmed),
  );
}

function times(turn) {
  const parts = [
    ["engine", turn.generate_s],
    ["environment", turn.env_s],
    ["waiting", turn.wait_s],
  ].filter(([, s]) => s > 0);
  return parts.map(([name, s]) => `${name} ${duration(s)}`).join(", ");
}

function info(said, answer, doubtful) {
  if (said === null || said === undefined || (typeof said === "object" && !Object.keys(said).length)) return null;
  const entries = leaves(said).filter(
    ([name, value]) => name !== "reward" && !(typeof value === "string" && value.length > 12 && answer.includes(value)),
  );
  const chip = ([name, value]) =>
    h(
      "span",
      { class: `chip ${value === true ? "good" : value === false && doubtful.has(name) ? "bad" : ""}` },
      typeof value === "boolean"
        ? `${value ? "✓" : "✗"} ${name}`
        : `${name ? `${name}: ` : ""}${typeof value === "string" ? value : JSON.stringify(value)}`,
    );
  const isLong = ([, value]) => typeof value === "string" && value.length > LONG_NOTE;
  const note = ([name, value]) =>
    h(
      "details",
      { class: "note" },
      h(
        "summary",
        {},
        `${name || "note"}: ${value.slice(0, 80)}… `,
        h("small", { class: "quiet" }, `${num(value.length, 7)} characters`),
      ),
      h("pre", { class: "seen" }, value),
    );
  return h(
    "div",
    { class: "info" },
    h("span", { class: "label" }, "the environment said"),
    entries.filter((entry) => !isLong(entry)).map(chip),
    entries.filter(isLong).map(note),
  );
}

function groupBar(run, step, data, filter, side) {
  if (data.group.length < 2) return null;
  return h(
    "div",
    { class: "bar group-bar" },
    h("span", { class: "label" }, `its group of ${data.group.length}`),
    data.group.map((e) =>
      h(
        "a",
        {
          class: `chip ${e.success > 0 ? "good" : "bad"}`,
          "aria-current": e.id === data.id ? "true" : null,
          href: hasEpisode(run, step, e.id) ? episodeLink(run, step, e.id, filter) : null,
          title: e.ending,
        },
        `#${e.index}  ${signed(e.reward)}`,
      ),
    ),
    h(
      "a",
      { class: "small button", href: episodeLink(run, step, data.id, { ...filter, view: side ? "" : "group" }) },
      side ? "this episode alone" : "side by side",
    ),
  );
}

async function sideBySide(run, step, data) {
  const all = await Promise.all(
    data.group.slice(0, MAX_SIDE).map((e) =>
      e.id === data.id
        ? data
        : getEpisode(run, step, e.id).then(prepare, (error) => ({
            failed: error.message,
            id: e.id,
            turns: [],
            summary: e,
          })),
    ),
  );
  const rows = Math.max(...all.map((d) => d.turns.length));
  const heads = all.map((d) =>
    h(
      "th",
      { class: d.id === data.id ? "selected" : "" },
      h("a", { href: hasEpisode(run, step, d.id) ? episodeLink(run, step, d.id) : null }, `#${d.summary.index}`),
      " ",
      pill(d.summary.success > 0 ? "success" : "no success", d.summary.success > 0 ? "good" : "bad"),
      h("br"),
      h("small", {}, `${signed(d.summary.reward)}, ${d.failed || d.summary.ending}`),
    ),
  );
  const cell = (d, i) => {
    const t = d.turns[i];
    return h(
      "td",
      {},
      t
        ? [
            h(
              "div",
              { class: "pair" },
              picturesOf(d, i).own.map((image) => picture(run, image, true)),
            ),
            h("pre", { class: "answer" }, t.answer),
            h("small", { class: t.reward < 0 ? "bad-text" : "good-text" }, signed(t.reward)),
          ]
        : null,
    );
  };
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "side" },
      h("thead", {}, h("tr", {}, h("th", {}, "turn"), heads)),
      h(
        "tbody",
        {},
        Array.from({ length: rows }, (_, i) =>
          h(
            "tr",
            {},
            h("th", {}, i + 1),
            all.map((d) => cell(d, i)),
          ),
        ),
      ),
    ),
  );
}

function facts(data) {
  const s = data.summary;
  const said = {
    ending: s.ending,
    "policy versions": s.oldest === s.newest ? s.oldest : `${s.oldest} to ${s.newest}`,
    [data.header.evaluation ? "evaluated version" : "trained at version"]: data.header.version,
    weights: data.weights.join(", "),
    actor: s.actor,
    seed: s.seed,
    "tokens written": s.tokens,
    "tokens with images": s.expanded,
    "played in": duration(s.seconds),
    "its group in": duration(data.group_s),
    label: data.label,
    ...data.metrics,
  };
  return h(
    "div",
    {},
    h(
      "dl",
      { class: "facts-list" },
      Object.entries(said)
        .filter(([, v]) => v !== "" && v !== null)
        .map(([name, v]) => [h("dt", {}, name), h("dd", {}, typeof v === "number" ? num(v, 8) : String(v))]),
    ),
    data.metadata ? h("pre", { class: "seen" }, JSON.stringify(data.metadata, null, 1)) : null,
    pill(s.ending, endingKind(s.ending)),
  );
}
