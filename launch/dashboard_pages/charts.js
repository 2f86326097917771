// Curves of one metric over one or several runs, with events and the healthy range, by uPlot.

import uPlot from "./uplot/uPlot.esm.js";
import { h, num } from "./dom.js";

export const AXES = { step: "step", "progress/minutes": "minutes", "progress/episodes": "episodes" };
const SOON_MS = 5000; // a chart is on the page by then
const KINDS = { alarm: "--bad", resumed: "--accent", "engine lost": "--warn", checkpoint: "--faint" };
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const NAMED = 8; // colours of the style sheet; further ones are spread over the circle of hues
export const colour = (i) =>
  i < NAMED ? css(`--run${i + 1}`) : `hsl(${Math.round(i * 137.5) % 360} 60% ${i % 2 ? 45 : 60}%)`;

export function smooth(values, window) {
  if (window < 2) return values;
  const sums = [0];
  const counts = [0];
  values.forEach((v, i) => {
    sums.push(sums[i] + (v ?? 0));
    counts.push(counts[i] + (v === null ? 0 : 1));
  });
  return values.map((v, i) => {
    const low = Math.max(0, i - Math.floor((window - 1) / 2));
    const high = Math.min(values.length, i + Math.floor(window / 2) + 1);
    return v === null ? null : (sums[high] - sums[low]) / (counts[high] - counts[low]);
  });
}

// x of evaluations, which count steps alone, on the axis of the steps.
function interpolate(at, steps, axis) {
  return at.map((step) => {
    const right = steps.findIndex((s) => s >= step);
    return right < 0 ? (axis[axis.length - 1] ?? 0) : axis[right];
  });
}

// One line of `metric` of a run's series; null without a value.
export function line(series, metric, axis) {
  const axes = series.axes[axis] || series.axes.step;
  if (metric in series.values) return { x: axes, y: series.values[metric] };
  if (metric in series.evaluations)
    return {
      x: interpolate(series.evaluation_axes.step, series.axes.step, axes),
      y: series.evaluations[metric],
      sparse: true,
    };
  return null;
}

function place(events, series, axis) {
  const steps = series.axes.step;
  const axes = series.axes[axis] || steps;
  return events.map((event) => ({ ...event, x: interpolate([event.step], steps, axes)[0] }));
}

function marks(events, low, high) {
  return (u) => {
    const { ctx, bbox } = u;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const bound of [low, high]) {
      if (bound === undefined) continue;
      const y = u.valToPos(bound, "y", true);
      ctx.strokeStyle = css("--good");
      ctx.setLineDash([4 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
    }
    ctx.setLineDash([]);
    for (const event of events) {
      const x = u.valToPos(event.x, "x", true);
      const tick = event.kind === "checkpoint";
      ctx.strokeStyle = css(KINDS[event.kind] || "--faint");
      ctx.lineWidth = (tick ? 1 : 1.5) * ratio;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top + (tick ? bbox.height - 7 * ratio : 0));
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };
}

// Of the y axis; values that are all alike lie in the middle, or on the ground where they are 0.
function heights(_, low, high) {
  if (low === null || (low === 0 && high === 0)) return [0, 1];
  return low === high ? [low - Math.abs(low) / 10, low + Math.abs(low) / 10] : uPlot.rangeNum(low, high, 0.1, true);
}

// uPlot itself keeps each plot until it is destroyed. Those that have left the page are, when the next one is drawn.
export const drawn = new Map();
function forget() {
  for (const [box, { plot, at }] of drawn) {
    if (box.isConnected || performance.now() - at < SOON_MS) continue;
    plot.destroy();
    drawn.delete(box);
  }
}

// `lines`: {label, colour, x, y, dash, sparse}; a sparse line is not smoothed. `events`: those of overview.py, with the
// `series` on which each is drawn.
// `many`: its legend is shown only below the pointer, since the page has one.
export function chart({
  lines,
  series,
  axis,
  window = 1,
  events = [],
  low,
  high,
  height = 170,
  key = "",
  many = false,
}) {
  const box = h("div", { class: many ? "chart many" : "chart" });
  const note = h("div", { class: "chart-note" });
  const placed = series ? place(events, series, axis) : [];
  const tables = lines.map(({ x, y, sparse }) => [x, sparse ? y : smooth(y, window)]);
  const data = tables.length > 1 ? uPlot.join(tables.map(([x, y]) => [x, y])) : tables[0] || [[], []];
  const few = data[0].length < 40;
  const options = {
    width: 300,
    height,
    legend: { show: true, live: true, markers: { width: 2 } },
    cursor: { sync: key ? { key } : undefined, points: { size: 5 }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { range: heights } },
    axes: [
      {
        stroke: css("--quiet"),
        grid: { show: false },
        ticks: { stroke: css("--line"), size: 4 },
        font: "11px system-ui",
        size: 26,
        label: undefined,
      },
      {
        stroke: css("--quiet"),
        grid: { stroke: css("--line"), width: 1 },
        ticks: { show: false },
        font: "11px system-ui",
        size: 46,
        values: (_, ticks) => ticks.map((t) => num(t, 4)),
      },
    ],
    series: [
      { label: AXES[axis] || axis, value: (_, v) => num(v, 5) },
      ...lines.map((l) => ({
        label: l.label,
        stroke: l.colour,
        width: 1.75,
        dash: l.dash,
        spanGaps: true,
        value: (_, v) => num(v, 4),
        points: { show: few, size: 4, fill: l.colour },
      })),
    ],
    hooks: {
      draw: [marks(placed, low, high)],
      setCursor: [
        (u) => {
          const near = placed.find((e) => Math.abs(u.valToPos(e.x, "x") - u.cursor.left) < 4);
          note.textContent = near ? `${near.kind}, step ${near.step}: ${near.text}` : "";
        },
      ],
    },
  };
  const plot = new uPlot(options, data, box);
  forget();
  drawn.set(box, { plot, at: performance.now() });
  new ResizeObserver(() => box.clientWidth && plot.setSize({ width: box.clientWidth, height })).observe(box);
  return h("div", { class: "chart-box" }, box, note);
}

// Makes what is drawn only when it comes near the window.
export function lazily(element, make) {
  const seen = new IntersectionObserver(
    (entries) => {
      if (entries.some((e) => e.isIntersecting)) {
        seen.disconnect();
        make();
      }
    },
    { rootMargin: "300px" },
  );
  seen.observe(element);
  return element;
}
