// Addresses: #/page/part/part?name=value. Every view has one, so that it can be sent to somebody.

export function current() {
  const [path, query] = (location.hash.slice(1) || "/").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query || "") };
}

export function link(parts, query = {}) {
  const said = new URLSearchParams(
    Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined),
  );
  return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}${[...said].length ? `?${said}` : ""}`;
}

export const episodeLink = (run, step, id, query = {}) => link(["episode", run, step, ...id.split("/")], query);

// Changes a view's own settings without a step in the browser's history.
export function set(changes) {
  const { parts, query } = current();
  const merged = { ...Object.fromEntries(query), ...changes };
  history.replaceState(null, "", link(parts, merged));
}
