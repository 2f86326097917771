// What the server answers; in an exported report, what stands in the report itself.

const place = document.getElementById("embedded");
const report = place ? JSON.parse(await unpacked(place.textContent)) : null;
const enc = encodeURIComponent;
const NAMES = 48; // metrics in one question

export const isReport = Boolean(report);
export const title = report ? report.title : "";
export const start = report ? report.start : "";

export const hasPage = (name) => !report || report.pages.includes(name);
export const hasEpisode = (run, step, id) => !report || episodePath(run, step, id) in report.answers;

// The text of base64 of gzip.
async function unpacked(text) {
  if (!globalThis.DecompressionStream) {
    document.getElementById("page").textContent =
      "This browser is too old for the report, which is packed; one of 2023 or later opens it.";
    throw new Error("no DecompressionStream");
  }
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function get(path) {
  if (report) {
    if (!(path in report.answers))
      throw new Error("this is not in the report; start the dashboard on the run's folder");
    return report.answers[path];
  }
  const response = await fetch(`api/${path}`);
  const said = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(said.error);
  return said;
}

export const getRuns = () => get("runs");
export const getMetrics = (run) => get(`runs/${enc(run)}/metrics`);
export const getSteps = (run) => get(`runs/${enc(run)}/steps`);
export const getStep = (run, step) => get(`runs/${enc(run)}/steps/${step}`);
const episodePath = (run, step, id) => `runs/${enc(run)}/steps/${step}/${id.split("/").map(enc).join("/")}`;
export const getEpisode = (run, step, id) => get(episodePath(run, step, id));
export const getHealth = (run) => get(`runs/${enc(run)}/health`);

export const getTraces = (run) => get(`runs/${enc(run)}/traces`);
export const getTrace = (run, name) => get(`runs/${enc(run)}/traces/${enc(name)}`);

export async function getSeries(run, names) {
  if (report) return get(`runs/${enc(run)}/series`);
  let whole = null;
  for (let at = 0; at < names.length || !whole; at += NAMES) {
    const part = await get(
      `runs/${enc(run)}/series?names=${names
        .slice(at, at + NAMES)
        .map(enc)
        .join(",")}`,
    );
    if (whole) {
      Object.assign(whole.values, part.values);
      Object.assign(whole.evaluations, part.evaluations);
    } else whole = part;
  }
  return whole;
}

export function imageUrl(run, file) {
  return report ? report.images[`${run}/${file}`] || "" : `api/runs/${enc(run)}/images/${enc(file)}`;
}
