// Elements and formats. Text is only ever set as text: nothing of a run is interpreted as markup.

const DAY = { day: "numeric", month: "short", year: "numeric" };
const SVG = "http://www.w3.org/2000/svg";

function make(element, props, children) {
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "style") for (const [name, said] of Object.entries(value)) element.style.setProperty(name, said);
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "value" || key === "checked" || key === "hidden") element[key] = value;
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

export const h = (tag, props = {}, ...children) => make(document.createElement(tag), props, children);
export const svg = (tag, props = {}, ...children) => make(document.createElementNS(SVG, tag), props, children);

export function show(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter(Boolean));
  return element;
}

export const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function num(value, digits = 3) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size < 1e-12) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(1).replace("e+", "e").replaceAll("-", "−");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

export const signed = (value, digits = 3) =>
  known(value) ? (value > 1e-12 ? "+" : value < -1e-12 ? "−" : "") + num(Math.abs(value), digits) : "–";
export const percent = (value) => (known(value) ? `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %` : "–");
export const count = (n, one, many = `${one}s`) => `${num(n)} ${n === 1 ? one : many}`;

export const bytes = (n) =>
  known(n) ? (n < 1e6 ? `${num(n / 1e3)} kB` : n < 1e9 ? `${num(n / 1e6)} MB` : `${num(n / 1e9)} GB`) : "–";

export function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 90) return `${num(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}

// A time of day; with its date if that is not today.
export function clock(time) {
  if (!time) return "–";
  const at = new Date(1000 * time);
  const day = at.toDateString() === new Date().toDateString() ? "" : `${at.toLocaleDateString("en-GB", DAY)}, `;
  return `${day}${at.toLocaleTimeString("en-GB")}`;
}

// What a recording is of: `12` is a step, `12-NAME` an evaluation after it.
export function placeText(place) {
  const [step, name] = String(place).split("-");
  if (!name) return `step ${step}`;
  const kind = name.replace(/^greedy_/, "");
  const when =
    { before: "before training", after: "after training" }[kind] ||
    (kind === `step_${step}` ? `after step ${step}` : `“${kind}” after step ${step}`);
  return `${kind === name ? "" : "greedy "}evaluation ${when}`;
}
export const capital = (text) => text.replace(/^./, (c) => c.toUpperCase());

export function pill(text, kind = "", title = "") {
  return h("span", { class: `pill ${kind}`, title: title || null }, text);
}

export function sparkline(values, width = 120, height = 28) {
  const shown = values.filter(known);
  if (shown.length < 2) return h("span", { class: "quiet" }, "–");
  const low = Math.min(...shown, 0);
  const high = Math.max(...shown, low + 1e-9);
  const x = (i) => (i / (shown.length - 1)) * (width - 4) + 2;
  const y = (v) => height - 3 - ((v - low) / (high - low)) * (height - 6);
  const at = (v, i) => `${x(i).toFixed(1)},${y(v).toFixed(1)}`;
  return svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
    svg("polyline", { points: shown.map(at).join(" ") }),
  );
}

// Chooses among few values; `chosen` is given the new one.
export function choice(label, values, current, chosen) {
  const buttons = values.map(([value, text]) =>
    h(
      "button",
      { type: "button", "aria-pressed": String(value === current), "data-value": value, onclick: () => chosen(value) },
      text,
    ),
  );
  return h(
    "span",
    { class: "choice", role: "group", "aria-label": label },
    h("span", { class: "label" }, label),
    buttons,
  );
}

// A box for words to find; `changed` is given them with each letter.
export function searchBox(label, placeholder, value, changed) {
  return h("input", {
    type: "search",
    placeholder,
    value,
    "aria-label": label,
    oninput: (e) => changed(e.target.value),
  });
}

export function select(label, values, current, chosen) {
  const options = values.map(([value, text]) => h("option", { value, selected: value === current }, text));
  return h(
    "label",
    { class: "field" },
    h("span", { class: "label" }, label),
    h("select", { onchange: (e) => chosen(e.target.value) }, options),
  );
}
