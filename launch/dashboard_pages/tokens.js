// How tokens are coloured, what each colour means, and what is told of the one under the pointer.

import { h, known, num, percent, signed } from "./dom.js";
import { versionColour } from "./step.js";

const tip = document.getElementById("tip");
const shade = (rgb, share) => `rgba(${rgb}, ${(0.75 * Math.max(0, Math.min(1, share))).toFixed(3)})`;
const RED = "220, 38, 38";
const GREEN = "22, 163, 74";
const BLUE = "37, 99, 235";
const ORANGE = "234, 88, 12";
const PURPLE = "147, 51, 234";
const log = (value, low, high) => (value <= low ? 0 : Math.log(value / low) / Math.log(high / low));
const most = (values) => Math.max(1e-9, ...(values || []).filter(known).map(Math.abs));

// name: [text, colour of token i of an episode (data), what the legend says]
export const MODES = {
  advantage: [
    "advantage",
    (d, i) => {
      const a = d.tokens.advantage?.[i];
      return known(a) ? shade(a < 0 ? RED : GREEN, Math.abs(a) / d.most) : "";
    },
    (d) => [
      [`−${num(d.most)}: made rarer`, shade(RED, 1)],
      ["0", ""],
      [`+${num(d.most)}: made likelier`, shade(GREEN, 1)],
    ],
    "advantage",
  ],
  logprob: [
    "logprob",
    (d, i) => {
      const v = d.tokens.logprob?.[i] ?? d.tokens.engine_logprob?.[i];
      return known(v) ? shade(ORANGE, -v / 4) : "";
    },
    () => [
      ["certain", ""],
      ["14 %", shade(ORANGE, 0.5)],
      ["2 % or less: a surprise", shade(ORANGE, 1)],
    ],
    "engine_logprob",
  ],
  gap: [
    "gap of engine and learner",
    (d, i) => {
      const v = d.tokens.gap?.[i];
      return known(v) ? shade(PURPLE, log(v, 1e-4, 0.3)) : "";
    },
    () => [
      ["≤ 0.0001", ""],
      ["0.005", shade(PURPLE, log(0.005, 1e-4, 0.3))],
      ["≥ 0.3: not the same model", shade(PURPLE, 1)],
    ],
    "gap",
  ],
  ratio: [
    "ratio",
    (d, i) => {
      const v = d.tokens.ratio?.[i];
      return known(v) && v > 0 ? shade(v < 1 ? BLUE : RED, Math.abs(Math.log(v)) / Math.log(3)) : "";
    },
    () => [
      ["⅓: rarer by now", shade(BLUE, 1)],
      ["1", ""],
      ["3: likelier by now", shade(RED, 1)],
    ],
    "ratio",
  ],
  entropy: [
    "entropy",
    (d, i) => {
      const v = d.tokens.entropy?.[i];
      return known(v) ? shade(BLUE, v / 2) : "";
    },
    () => [
      ["0: no doubt", ""],
      ["1 nat", shade(BLUE, 0.5)],
      ["≥ 2 nats", shade(BLUE, 1)],
    ],
    "entropy",
  ],
  version: [
    "version",
    (d, i) => {
      const v = d.tokens.version?.[i];
      return known(v) && d.mask[i] ? `${versionColour(d.header.version - v)}88` : "";
    },
    (d) =>
      [...new Set(d.tokens.version.filter(known))]
        .sort((a, b) => b - a)
        .map((v) => [
          `version ${v}${v === d.header.version ? " (newest)" : ""}`,
          `${versionColour(d.header.version - v)}88`,
        ]),
    "version",
  ],
  mask: [
    "mask",
    (d, i) =>
      !d.mask[i]
        ? ""
        : d.tokens.masked?.[i]
          ? shade(RED, 0.8)
          : d.tokens.clipped?.[i]
            ? shade(ORANGE, 0.8)
            : shade(GREEN, 0.45),
    (d) =>
      d.header.evaluation
        ? [
            ["given", ""],
            ["written by the model", shade(GREEN, 0.45)],
          ]
        : [
            ["given: no loss", ""],
            ["trained on", shade(GREEN, 0.45)],
            ["clipped: no gradient", shade(ORANGE, 0.8)],
            ["masked: left out", shade(RED, 0.8)],
          ],
    "version",
  ],
};

export const modesOf = (data) => Object.keys(MODES).filter((name) => MODES[name][3] in data.tokens);
export const prepare = (data) => Object.assign(data, { most: most(data.tokens.advantage) });
export const piece = (data, i) => (data.pieces.length ? data.pieces[i] : `#${data.token_ids[i]} `);

export function token(data, i, mode) {
  const element = h(
    "span",
    { class: data.mask[i] ? "token sampled" : "token", "data-token": i },
    visible(piece(data, i)),
  );
  element.style.backgroundColor = MODES[mode][1](data, i);
  return element;
}

const visible = (text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "→\t") || "∅";

// Colours anew what `root` shows.
export function paint(root, data, mode) {
  for (const element of root.querySelectorAll("[data-token]"))
    element.style.backgroundColor = MODES[mode][1](data, Number(element.dataset.token));
}

export function legend(data, mode) {
  return h(
    "span",
    { class: "legend" },
    MODES[mode][2](data).map(([text, background]) =>
      h("span", {}, h("i", { class: background ? "" : "none", style: background ? { background } : {} }), text),
    ),
  );
}

// Tells of the token under the pointer, until the pointer leaves it.
export function tips(root, data) {
  root.addEventListener("pointerover", (event) => {
    const target = event.target.closest("[data-token]");
    tip.hidden = !target;
    if (!target) return;
    const i = Number(target.dataset.token);
    const t = data.tokens;
    const at = (name) => t[name]?.[i];
    const rows = [["token", `${JSON.stringify(piece(data, i))}  #${data.token_ids[i]}`]];
    if (data.mask[i]) {
      if (known(at("logprob")))
        rows.push(["learner", `${num(at("logprob"), 4)}  (${percent(Math.exp(at("logprob")))})`]);
      rows.push(["engine", `${num(at("engine_logprob"), 4)}  (${percent(Math.exp(at("engine_logprob")))})`]);
      for (const name of ["gap", "ratio", "entropy", "value", "target"])
        if (known(at(name))) rows.push([name, num(at(name), 4)]);
      if (known(at("advantage"))) rows.push(["advantage", signed(at("advantage"), 4)]);
      rows.push(["version", `${at("version")}`]);
      if (at("clipped")) rows.push(["clipped", "no gradient"]);
      if (at("masked")) rows.push(["masked", "left out"]);
    } else rows.push(["", "given to the model; not trained on"]);
    tip.replaceChildren(
      h(
        "dl",
        {},
        rows.map(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]),
      ),
    );
    const box = target.getBoundingClientRect();
    const size = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(innerWidth - size.width - 4, box.left))}px`;
    tip.style.top = `${box.bottom + size.height + 8 > innerHeight ? box.top - size.height - 6 : box.bottom + 6}px`;
  });
  root.addEventListener("pointerleave", () => {
    tip.hidden = true;
  });
}
