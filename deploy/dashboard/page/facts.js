// The live page: what the fleet is comes as events of a stream; at each of them the view that is open is drawn anew, and what differs is put
// into the page, so that focus, selection and scrolling stay; charts go on.
// The address says which view: #fleet, #job/NUMBER, #compare, else the only job; a token in it is put aside at once, so that no history has it.
// Curves come from a job's record where the page's server has it, and from the stream since then.
// The files of this folder are one script in the order in which `serve/answers.rs` names them.

const root = document.documentElement, view = document.getElementById("view");
const params = new URLSearchParams(location.search), dark = matchMedia("(prefers-color-scheme: dark)");
const theme = () => {
  const asked = params.get("theme");
  root.dataset.theme = asked === "dark" || asked === "light" ? asked : dark.matches ? "dark" : "light";
};
theme();
const takeToken = () => {
  const hash = location.hash.match(/token=(\w+)/);
  if (!hash) return false;
  sessionStorage.setItem("token", hash[1]);
  history.replaceState(null, "", location.pathname + location.search + (location.hash.split("&")[1] ? "#" + location.hash.split("&")[1] : ""));
  return true;
};
takeToken();
const token = () => sessionStorage.getItem("token") || "";
const get = (path, more) => fetch(path, { headers: { authorization: "Bearer " + token() }, ...more });

// Records are by a job's number, or by the name of a run in the table; `ended`: what the server said last.
let facts = null, curves = {}, events = [], runs = [], ended = null, answers = true, since = 0;
const records = new Map(), picked = [];

const element = (tag, attrs, ...inside) => {
  const e = document.createElement(tag);
  for (const k in attrs || {}) {
    if (k.startsWith("on")) e[k] = attrs[k];
    else if (attrs[k] != null && attrs[k] !== false) e.setAttribute(k === "cls" ? "class" : k, attrs[k] === true ? "" : attrs[k]);
  }
  e.append(...inside.filter((i) => i != null));
  return e;
};
const number = (v, digits = 4) => {
  if (v == null) return "-";
  const a = Math.abs(v), t = (x) => String(+x.toPrecision(digits));
  return a >= 1e9 ? t(v / 1e9) + "G" : a >= 1e6 ? t(v / 1e6) + "M" : a >= 1e4 ? t(v / 1e3) + "k" : t(v);
};
const bytes = (v) => {
  if (v == null) return "-";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (v >= 1024 && i < 4) { v /= 1024; i++; }
  return (i ? v.toFixed(v < 10 ? 1 : 0) : v) + " " + units[i];
};
const percent = (v) => (v == null ? "-" : (100 * v).toFixed(v < 0.1 ? 1 : 0) + " %");
const clock = (at) => new Date(at).toLocaleTimeString();
const server = (id) => facts.servers.find((s) => s.id === id);
const jobName = (j) => j.name || "job " + j.id;
// The group of shards that a fleet is founded with is no job until a worker begins one.
const ownerName = (id) => { const j = facts.jobs.find((j) => j.id === id); return j ? jobName(j) : "no job"; };
const count = (n, what) => n + " " + what + (n === 1 ? "" : "s");
// Of a record and of what was seen since; and of runs in the table, which have only a record.
const NONE = { points: [], evaluations: [], seen: [] }, joined = new Map();
const recordOf = (id) => (records.get(id) || {}).record || null;
const curveOf = (id) => {
  const record = recordOf(id), live = curves[id] || NONE;
  if (!record) return { seen: live.points, ...live };
  const of = [record, live.points.length, (live.points[live.points.length - 1] || {}).at, live.evaluations.length], known = joined.get(id);
  if (known && known.of.every((v, i) => v === of[i])) return known;
  const until = Math.max(0, ...[record.points, record.evaluations].map((p) => (p.length ? p[p.length - 1].at : 0))), last = record.points[record.points.length - 1];
  const rate = last && last.step ? last.done / last.step : null, epochs = new Set(record.evaluations.map((e) => e.epoch));
  const after = (p) => ({ ...p, done: rate == null ? null : Math.round(p.step * rate) });
  // What only this page's server has seen is drawn as far as that goes.
  const curve = { of, seen: live.points.map(after), points: record.points.concat(live.points.filter((p) => p.at > until).map(after)), evaluations: record.evaluations.concat(live.evaluations.filter((e) => e.at > until && !epochs.has(e.epoch)).map(after)) };
  joined.set(id, curve);
  return curve;
};
const last = (id) => { const p = curveOf(id).points; return p[p.length - 1]; };
// The latest known value.
const latest = (id, of) => { const p = curveOf(id).points; for (let i = p.length - 1; i >= 0 && i > p.length - 40; i--) if (of(p[i]) != null) return of(p[i]); return null; };
const isLost = (j) => j.stale && ["running", "waiting"].includes(j.state);
const steps = (j) => Math.max(0, ...j.members.map((m) => m.clock));

const table = (caption, head, rows, cls) => element("div", { cls: "scroll " + (cls || ""), tabindex: "0", role: "region", "aria-label": caption },
  element("table", null, element("thead", null, element("tr", null, ...head.map((h) => element("th", { scope: "col", cls: h.left ? "left" : null }, h.text ?? h)))),
    element("tbody", null, ...rows)));
const row = (first, ...cells) => element("tr", null, element("th", { scope: "row" }, first), ...cells.map((c) => (c instanceof HTMLTableCellElement ? c : element("td", null, c ?? "-"))));
const left = (text, cls) => element("td", { cls: "left wrap " + (cls || "") }, text);
const section = (title, ...inside) => element("section", null, element("h2", null, title), ...inside);
const stateOf = (state) => element("span", { cls: ["up", "serving", "running", "finished"].includes(state) ? "good" : ["silent", "unreachable", "lost", "no leader", "no-majority", "storage-stopped", "failed", "interrupted", "no end", "no answer"].includes(state) ? "bad" : null }, state);
// How a job has ended, by its record; null while it runs, or where nobody has recorded it.
const endOf = (j) => {
  const end = (recordOf(j.id) || {}).end, runs = ["running", "waiting"].includes(j.state);
  return end && (ended || !runs) && (end.state !== "no-end" || !facts.servers.length) ? end : null;
};
const runsOn = (j) => ["running", "waiting"].includes(j.state) && !endOf(j);
const stateOfJob = (j) => stateOf(endOf(j) ? endOf(j).state.replace("-", " ") : !answers && runsOn(j) ? "no answer" : isLost(j) ? "no leader" : j.stopping ? "stopping" : j.state.replace("-", " "));
const span = (s) => s == null ? "-" : s < 100 ? number(s, 3) + " s" : s < 5940 ? Math.floor(s / 60) + " min " + Math.round(s % 60) + " s" : Math.floor(s / 3600) + " h " + Math.round((s % 3600) / 60) + " min";
