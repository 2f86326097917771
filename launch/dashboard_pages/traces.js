// The timeline of a trace: what each process did from when to when, on one clock.

import { getTrace, getTraces } from "./api.js";
import { bytes, count, duration, h, num, select, show } from "./dom.js";
import { link } from "./route.js";

const ROW = 13; // height of one span
const GAP = 3; // between threads
const HEAD = 20; // of a process, above its threads
const SHOWN_THREADS = 8; // of a process, until all are asked for
const AXIS = 22;
const LEFT = 190; // for names
const NARROW = 34; // narrower spans bear no name
const SAME_US = 0.0005; // half of the least difference of two times in a file
const SHORTEST_US = 20; // that the timeline shows in all
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isWait = (name) => name.startsWith("wait ") || name === "queue";
const say = (us) => (us < 1000 ? `${num(us)} µs` : us < 1e6 ? `${num(us / 1e3, 4)} ms` : duration(us / 1e6));

export async function tracesPage({ parts, runs }) {
  const run = parts[0] || runs.runs[0]?.name;
  const { traces } = await getTraces(run);
  if (!traces.length)
    return {
      element: h(
        "section",
        {},
        h("h1", {}, "No traces"),
        h("p", {}, `Run ${run} has traced no step. Give its recipe trace.steps, such as --trace.steps "[10, 12]".`),
      ),
      title: "Traces",
    };
  const name = parts[1] || traces[0].name;
  const trace = await getTrace(run, name);
  const place = traces.find((t) => t.name === name);
  const { first, last } = place || trace.about;
  const steps = first === last ? `step ${first}` : `steps ${first} to ${last}`;
  const view = timeline(trace);
  const lost = trace.about.lost_spans;
  const element = h(
    "div",
    {},
    h("h1", {}, `Trace of ${run}, ${steps}`),
    h(
      "p",
      { class: "quiet" },
      [
        `${count(view.total, "span")} in ${say(view.end - view.begin)}.`,
        place ? `The file, of ${bytes(place.bytes)}, also opens at ui.perfetto.dev: traces/${name}.json.gz.` : "",
        lost ? `${count(lost, "span")} lost.` : "",
        "Drag to move, turn the wheel to zoom, click to measure one.",
      ].join(" "),
    ),
    traces.length > 1
      ? select(
          "trace",
          traces.map((t) => [t.name, `${t.first} to ${t.last}`]),
          name,
          (next) => (location.hash = link(["traces", run, next])),
        )
      : null,
    view.element,
  );
  return { element, title: `Trace of ${run}`, key: view.key, leave: view.leave };
}

// The threads' spans with how deep each lies in others; sorted by begin, the outer one first.
function laidOut(trace) {
  return trace.processes.map((process) => ({
    name: process.name,
    open: false,
    threads: process.threads.map((thread) => {
      const stack = [];
      let deepest = 0;
      const spans = thread.spans.map(([number, begin, took, note]) => {
        while (stack.length && stack.at(-1) <= begin + SAME_US) stack.pop();
        const depth = stack.length;
        stack.push(begin + took);
        deepest = Math.max(deepest, depth);
        return { name: trace.names[number], number, begin, end: begin + took, note, depth };
      });
      return { name: thread.name, spans, height: (deepest + 1) * ROW + GAP };
    }),
  }));
}

function timeline(trace) {
  const processes = laidOut(trace);
  const all = processes.flatMap((p) => p.threads.flatMap((t) => t.spans));
  const begin = all.reduce((low, s) => Math.min(low, s.begin), Infinity);
  const end = all.reduce((high, s) => Math.max(high, s.end), begin + 1);
  const at = { from: begin, to: end, chosen: null, only: "" };
  const canvas = h("canvas", { class: "timeline", tabindex: 0, role: "img", "aria-label": "timeline" });
  const totals = h("tbody", {});
  const measured = h("p", { class: "measured", "aria-live": "polite" });
  const folds = h("div", { class: "folds" });
  const tip = document.getElementById("tip");
  let boxes = []; // of the threads on the canvas: {thread, process, top}

  const width = () => Math.max(1, canvas.clientWidth - LEFT);
  const x = (time) => LEFT + ((time - at.from) / (at.to - at.from)) * width();
  const when = (span) => `${say(span.end - span.begin)}, from ${say(span.begin - begin)} on`;
  const time = (px) => at.from + ((px - LEFT) / width()) * (at.to - at.from);

  function place() {
    let top = AXIS;
    boxes = [];
    for (const process of processes) {
      boxes.push({ process, top });
      top += HEAD;
      for (const thread of process.open ? process.threads : process.threads.slice(0, SHOWN_THREADS)) {
        boxes.push({ process, thread, top });
        top += thread.height;
      }
    }
    canvas.style.height = `${top + GAP}px`;
    show(
      folds,
      processes
        .filter((p) => p.threads.length > SHOWN_THREADS)
        .map((p) =>
          h(
            "button",
            { type: "button", "aria-expanded": String(p.open), onclick: () => ((p.open = !p.open), place()) },
            `${p.name}: ${p.open ? `the first ${SHOWN_THREADS}` : `all ${p.threads.length}`} threads`,
          ),
        ),
    );
    draw();
  }

  function draw() {
    if (!canvas.isConnected) return;
    const ratio = devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = canvas.clientHeight * ratio;
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.font = `11px ${css("--code")}`;
    ctx.textBaseline = "middle";
    axis(ctx);
    const colours = trace.names.map((name, i) => (isWait(name) ? css("--line") : css(`--run${(i % 8) + 1}`)));
    const [ink, quiet, page] = ["--ink", "--quiet", "--page"].map(css);
    for (const { process, thread, top } of boxes) {
      if (!thread) {
        ctx.fillStyle = ink;
        ctx.fillText(process.name, 2, top + HEAD / 2 + 2);
        continue;
      }
      ctx.fillStyle = quiet;
      ctx.fillText(thread.name, 14, top + ROW / 2);
      ctx.save();
      ctx.beginPath();
      ctx.rect(LEFT, top, width(), thread.height);
      ctx.clip();
      const drawn = []; // up to which pixel each depth is covered: thousands of spans fit into one
      for (const span of thread.spans) {
        if (span.begin > at.to) break;
        const left = Math.max(LEFT - 1, x(span.begin));
        const right = Math.min(LEFT + width() + 1, x(span.end));
        if (span.end < at.from || (drawn[span.depth] ?? -1) >= right) continue;
        drawn[span.depth] = Math.max(right, left + 1);
        ctx.globalAlpha = at.only && span.name !== at.only ? 0.15 : 1;
        ctx.fillStyle = colours[span.number];
        const wide = Math.max(1, right - left - 0.5);
        ctx.fillRect(left, top + span.depth * ROW, wide, ROW - 1);
        if (span === at.chosen) {
          ctx.strokeStyle = ink;
          ctx.strokeRect(left + 0.5, top + span.depth * ROW + 0.5, Math.max(1, wide - 1), ROW - 2);
        }
        if (wide > NARROW) {
          ctx.fillStyle = isWait(span.name) ? quiet : page;
          ctx.fillText(fitting(ctx, span.name, wide - 6), left + 3, top + span.depth * ROW + ROW / 2);
        }
      }
      ctx.restore();
    }
    table();
  }

  function axis(ctx) {
    const rough = (at.to - at.from) / Math.max(2, width() / 110);
    const ten = 10 ** Math.floor(Math.log10(rough));
    const unit = [1, 2, 5, 10].map((n) => n * ten).find((n) => n >= rough);
    ctx.strokeStyle = css("--line");
    ctx.fillStyle = css("--quiet");
    for (let t = Math.ceil((at.from - begin) / unit) * unit + begin; t <= at.to; t += unit) {
      ctx.beginPath();
      ctx.moveTo(x(t), 0);
      ctx.lineTo(x(t), canvas.clientHeight);
      ctx.stroke();
      ctx.fillText(say(t - begin), x(t) + 3, AXIS / 2);
    }
  }

  function fitting(ctx, text, room) {
    if (ctx.measureText(text).width <= room) return text;
    const letters = Math.floor((room / ctx.measureText(text).width) * text.length) - 1;
    return letters > 1 ? `${text.slice(0, letters)}…` : "";
  }

  // How often each name is in sight, and for how long.
  function table() {
    const sums = new Map();
    for (const span of all) {
      if (span.end < at.from || span.begin > at.to) continue;
      const row = sums.get(span.name) || { times: 0, sum: 0, most: 0 };
      row.times += 1;
      row.sum += Math.min(span.end, at.to) - Math.max(span.begin, at.from);
      row.most = Math.max(row.most, span.end - span.begin);
      sums.set(span.name, row);
    }
    const rows = [...sums].sort((a, b) => b[1].sum - a[1].sum);
    show(
      totals,
      rows.map(([name, row]) =>
        h(
          "tr",
          { "data-name": name, class: at.only === name ? "selected" : null },
          h(
            "td",
            {},
            h(
              "button",
              {
                type: "button",
                class: "plain",
                "aria-pressed": String(at.only === name),
                onclick: () => {
                  at.only = at.only === name ? "" : name;
                  draw();
                },
              },
              name,
            ),
          ),
          h("td", { class: "amount" }, num(row.times, 7)),
          h("td", { class: "amount" }, say(row.sum)),
          h("td", { class: "amount" }, say(row.sum / row.times)),
          h("td", { class: "amount" }, say(row.most)),
        ),
      ),
    );
  }

  function under(event) {
    const area = canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - area.left, event.clientY - area.top];
    const box = boxes.find((b) => b.thread && py >= b.top && py < b.top + b.thread.height);
    if (!box || px < LEFT) return null;
    const depth = Math.floor((py - box.top) / ROW);
    const t = time(px);
    const near = ((at.to - at.from) / width()) * 2;
    const hit = box.thread.spans.filter((s) => s.depth === depth && s.begin - near <= t && t <= s.end + near);
    return hit.length ? { span: hit[0], box } : null;
  }

  function zoom(factor, centre) {
    const from = centre - (centre - at.from) * factor;
    const to = centre + (at.to - centre) * factor;
    if (to - from < SHORTEST_US) return;
    at.from = Math.max(begin, from);
    at.to = Math.min(end, to);
    draw();
  }

  function move(by) {
    const held = Math.max(begin - at.from, Math.min(end - at.to, by));
    at.from += held;
    at.to += held;
    draw();
  }

  let held = null; // where the pointer went down, and whether it has moved since
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (held && !held.moved) {
      at.chosen = under(event)?.span || null;
      show(
        measured,
        at.chosen ? `${at.chosen.name}: ${when(at.chosen)}${at.chosen.note ? `; ${at.chosen.note}` : ""}` : "",
      );
      draw();
    }
    held = null;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held) {
      const by = event.clientX - held.x;
      held.moved ||= Math.abs(by) > 3;
      if (held.moved) {
        move((-by / width()) * (at.to - at.from));
        held.x = event.clientX;
      }
      tip.hidden = true;
      return;
    }
    const found = under(event);
    tip.hidden = !found;
    if (!found) return;
    const { span, box } = found;
    show(
      tip,
      h("b", {}, span.name),
      h("div", {}, when(span)),
      h("div", { class: "quiet" }, `${box.process.name}, ${box.thread.name}`),
      span.note ? h("div", { class: "quiet" }, span.note) : null,
    );
    const size = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(innerWidth - size.width - 4, event.clientX + 12))}px`;
    const isLow = event.clientY + size.height + 20 > innerHeight;
    tip.style.top = `${isLow ? event.clientY - size.height - 8 : event.clientY + 16}px`;
  });
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const area = canvas.getBoundingClientRect();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, time(Math.max(LEFT, event.clientX - area.left)));
    },
    { passive: false },
  );

  const middle = () => (at.from + at.to) / 2;
  const keys = {
    "+": () => zoom(0.5, middle()),
    "-": () => zoom(2, middle()),
    0: () => {
      [at.from, at.to] = [begin, end];
      draw();
    },
    ArrowLeft: () => move((at.from - at.to) / 4),
    ArrowRight: () => move((at.to - at.from) / 4),
  };
  const button = (key, text, title) => h("button", { type: "button", title, onclick: () => keys[key]() }, text);
  const element = h(
    "div",
    {},
    h(
      "div",
      { class: "bar" },
      button("+", "zoom in", "+"),
      button("-", "zoom out", "-"),
      button("0", "all of it", "0"),
      button("ArrowLeft", "earlier", "←"),
      button("ArrowRight", "later", "→"),
    ),
    measured,
    canvas,
    folds,
    h("h2", {}, "In sight"),
    h(
      "table",
      { class: "totals" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["span", "times", "in all", "mean", "longest"].map((text) => h("th", {}, text)),
        ),
      ),
      totals,
    ),
  );
  const again = new ResizeObserver(() => draw());
  again.observe(canvas);
  requestAnimationFrame(place);
  return {
    element,
    total: all.length,
    begin,
    end,
    key: (name) => Object.hasOwn(keys, name) && (keys[name](), true),
    leave: () => {
      again.disconnect();
      tip.hidden = true;
    },
  };
}
