// Charts: their lines, marks and axes; their files.
let charts = null, drawn = [];
const chosenAxes = (() => { try { return JSON.parse(sessionStorage.getItem("axes")) || {}; } catch (e) { return {}; } })();
const axes = { x: "time", log: false, smooth: 0, ...chosenAxes };
const save = (blob, name) => {
  const a = element("a", { href: URL.createObjectURL(blob), download: name });
  a.click();
  setTimeout(() => URL.revokeObjectURL(a.href), 10000);
};
const fileName = (title, end) => document.title.split(" · ")[0] + " " + title.replace(/[^\w]+/g, "-").toLowerCase() + end;
const asCsv = (title, chart) => {
  const cell = (v) => (v == null ? "" : /[",\n]/.test(v) ? '"' + String(v).replace(/"/g, '""') + '"' : String(v)), lines = chart.lines.map((l, i) => [l, chart.names[i]]).filter(([l]) => l.x.length);
  if (!lines.length) return;
  const table = uPlot.join(lines.map(([l]) => [l.x, l.y]));
  const rows = table[0].map((x, r) => [x, ...table.slice(1).map((c) => c[r])].map(cell).join(","));
  save(new Blob([[chart.x, ...lines.map(([, name]) => name)].map(cell).join(",") + "\n" + rows.join("\n") + "\n"], { type: "text/csv" }), fileName(title, ".csv"));
};
const asPng = (title, f) => {
  const from = f.querySelector("canvas"), names = [...f.querySelectorAll(".key button[aria-pressed=true]")];
  if (!from) return;
  const scale = devicePixelRatio || 1, css = (name) => getComputedStyle(root).getPropertyValue(name).trim(), to = document.createElement("canvas"), head = (names.length > 1 ? 52 : 30) * scale;
  [to.width, to.height] = [from.width, from.height + head];
  const g = to.getContext("2d");
  g.fillStyle = css("--card");
  g.fillRect(0, 0, to.width, to.height);
  g.fillStyle = css("--text");
  g.font = "600 " + 14 * scale + "px system-ui, sans-serif";
  g.fillText(title, 12 * scale, 20 * scale);
  let x = 12 * scale;
  g.font = 12 * scale + "px system-ui, sans-serif";
  for (const n of names.length > 1 ? names : []) {
    const line = n.querySelector("line");
    g.strokeStyle = getComputedStyle(line).stroke;
    g.lineWidth = 2.5 * scale;
    g.setLineDash((line.getAttribute("stroke-dasharray") || "").split(" ").filter((d) => d).map((d) => d * scale));
    g.beginPath();
    g.moveTo(x, 36 * scale);
    g.lineTo(x + 28 * scale, 36 * scale);
    g.stroke();
    g.fillText(n.textContent, x + 34 * scale, 40 * scale);
    x += 54 * scale + g.measureText(n.textContent).width;
  }
  g.drawImage(from, 0, head);
  to.toBlob((blob) => save(blob, fileName(title, ".png")));
};
const heading = (title, chart, f) => element("div", { cls: "head" }, element("h3", null, title), element("span", { cls: "saves" },
  element("button", { type: "button", "aria-label": "PNG of " + title, onclick: () => asPng(title, f) }, "PNG"), element("button", { type: "button", "aria-label": "CSV of " + title, onclick: () => asCsv(title, chart()) }, "CSV")));
const shape = (c) => c.x + c.log + c.lines.map((l) => +(l.x.length > 0)).join("");
const figure = (place, title, chart) => {
  const f = element("figure"), now = chart();
  f.append(heading(title, chart, f));
  place.append(f);
  drawn.push({ f, title, chart, shape: shape(now), update: charts.lineChart(f, now) });
};
const goOn = () => {
  for (const d of drawn) {
    const now = d.chart();
    if (d.update && shape(now) === d.shape) d.update(now);
    else {
      d.f.replaceChildren(heading(d.title, d.chart, d.f));
      [d.shape, d.update] = [shape(now), charts.lineChart(d.f, now)];
    }
  }
};
// The begin of the job, or the first that was seen of it.
const begin = (id) => {
  if (recordOf(id)) return recordOf(id).begin;
  const c = curveOf(id), at = [c.points[0], c.evaluations[0]].filter((p) => p).map((p) => p.at);
  return at.length ? Math.min(...at) : 0;
};
// So long are the lines; their unit is that of the longest.
const TIMES = { seconds: 1, minutes: 60, hours: 3600 };
const timeUnit = (ids) => {
  const most = Math.max(0, ...ids.map((id) => ((last(id) || { at: 0 }).at - begin(id)) / 1000));
  return most < 600 ? "seconds" : most < 4 * 3600 ? "minutes" : "hours";
};
const X = { time: "time", step: "step", epoch: "epoch", samples: "samples" };
const unitOf = (ids) => (axes.x === "time" ? timeUnit(ids) : { step: "steps", epoch: "epochs", samples: "samples" }[axes.x]);
const placeOf = (id, ids) => {
  const from = begin(id), by = 1000 * (TIMES[unitOf(ids)] || 1), run = (recordOf(id) || {}).run, epoch = run && run.samples_budget && run.epochs ? run.samples_budget / run.epochs : null;
  return { time: (p) => Math.max(0, (p.at - from) / by), step: (p) => p.step, samples: (p) => p.done ?? null, epoch: (p) => (epoch && p.done != null ? p.done / epoch : p.epoch ?? null) }[axes.x];
};
// The mean of what came before, weighted by its age, as TensorBoard does it.
const smoothed = (y) => {
  if (!axes.smooth) return y;
  let sum = 0, weight = 0;
  return y.map((v) => {
    if (v == null) return null;
    sum = axes.smooth * sum + (1 - axes.smooth) * v;
    weight = axes.smooth * weight + (1 - axes.smooth);
    return sum / weight;
  });
};
const draw = (points, place, of, smooth) => {
  const x = [], y = [];
  for (const p of points) {
    const v = of(p), at = place(p);
    // A restarted worker repeats steps.
    if (at == null || (x.length && at <= x[x.length - 1])) continue;
    // Nobody saw what was before.
    if (p.apart && x.length) { x.push((x[x.length - 1] + at) / 2); y.push(null); }
    if (v != null) { x.push(at); y.push(v); }
  }
  return { x, y: smooth ? smoothed(y) : y };
};
const line = (id, ids, of) => draw(curveOf(id).points, placeOf(id, ids), of, true);
const seen = (id, ids, of) => draw(curveOf(id).seen, placeOf(id, ids), of, true);
const scores = (id, ids, of) => draw(curveOf(id).evaluations, placeOf(id, ids), of, false);
// What happened: from the record, with its cost; else what this page's server saw.
const SEEN = { election: ["leader", "L"], mode: ["mode", "M"], worker: ["worker", "W"], server: ["server", "S"], checkpoint: ["checkpoint", "C"] };
const moments = (id) => {
  const record = recordOf(id);
  if (record) return record.moments;
  return events.filter((e) => (e.job === id || e.job == null) && SEEN[e.kind] && e.at >= begin(id)).map((e) => ({ at: e.at, kind: SEEN[e.kind][0], letter: SEEN[e.kind][1], text: e.what, cost: "" }));
};
const saidOf = (m) => m.text + (m.cost ? " (" + m.cost + ")" : "");
// Moments that are near each other have one mark: more than a few would lie on each other.
const marksOf = new Map();
const marks = (id, ids) => {
  const all = moments(id), points = curveOf(id).points, of = [all.length, axes.x, unitOf(ids), Math.ceil(points.length / 25), (all[all.length - 1] || {}).at].join(), known = marksOf.get(id);
  if (known && known.of === of) return known.marks;
  const place = placeOf(id, ids), end = points.length ? place(points[points.length - 1]) : null, shown = [];
  // Between the points before and after it.
  const at = (m) => {
    if (axes.x === "time") return place(m);
    const next = points.findIndex((p) => p.at >= m.at), b = points[next < 0 ? points.length - 1 : next], a = points[next > 0 ? next - 1 : 0];
    if (!b || place(b) == null) return null;
    return next <= 0 || b.at === a.at ? (next < 0 ? place(b) : 0) : place(a) + ((place(b) - place(a)) * (m.at - a.at)) / (b.at - a.at);
  };
  for (const m of all) {
    const x = at(m), before = shown[shown.length - 1];
    if (x == null || end == null) continue;
    if (before && x - before.x <= end / 40) { before.text += "\n" + saidOf(m); if (!before.letter.includes(m.letter)) before.letter += m.letter; }
    else shown.push({ run: 0, x, kind: m.kind, letter: m.letter, text: saidOf(m) });
  }
  marksOf.set(id, { of, marks: shown });
  return shown;
};
// Of a job, or of two that lie over each other.
let together = { of: [], marks: [] };
const marksOfAll = (ids, names) => {
  if (ids.length === 1) return marks(ids[0], ids);
  if (ids.length !== 2) return [];
  const of = ids.map((id) => marks(id, ids));
  if (!of.every((m, i) => m === together.of[i])) together = { of, marks: of.flatMap((all, run) => all.map((m) => ({ ...m, run, text: names[run] + ": " + m.text }))) };
  return together.marks;
};
const CHARTS = [
  ["Training and held-out loss", (ids) => ids.length > 1 ? null : { names: ["training", "held-out"], points: true, loss: true }, (id, ids) => [line(id, ids, (p) => p.loss), scores(id, ids, (e) => e.loss)]],
  ["Training loss", (ids) => ids.length > 1 ? { loss: true } : null, (id, ids) => [line(id, ids, (p) => p.loss)]],
  ["Held-out loss", (ids) => ids.length > 1 ? { points: true, loss: true } : null, (id, ids) => [scores(id, ids, (e) => e.loss)]],
  ["Held-out accuracy", () => ({ percent: true, points: true, rare: true }), (id, ids) => [scores(id, ids, (e) => e.accuracy || null)]],
  ["Samples a second", () => ({ zero: true }), (id, ids) => [line(id, ids, (p) => p.samples)]],
  ["Steps ahead of the slowest worker", () => ({ zero: true, idle: true }), (id, ids) => [seen(id, ids, (p) => p.ahead)]],
  ["Mean delay of a push, in versions", () => ({ zero: true, idle: true }), (id, ids) => [seen(id, ids, (p) => p.delay)]],
  ["Share of the time that workers wait for each other", () => ({ zero: true, percent: true, rare: true }), (id, ids) => [seen(id, ids, (p) => p.waited)]],
  ["Megabytes a second", (ids) => ids.length > 1 ? null : { names: ["pushed", "pulled"], zero: true, rare: true }, (id, ids) => [seen(id, ids, (p) => p.pushed == null ? null : p.pushed / 1e6), seen(id, ids, (p) => p.pulled == null ? null : p.pulled / 1e6)]],
];
// A chart of each further value of the record that changes: rates, norms, and what the script has named.
const TITLES = { learning_rate: "Learning rate", gradient_norm: "Norm of a worker's gradient" };
const namesOf = (id) => {
  const r = recordOf(id), first = {}, changes = new Set();
  if (!r) return [];
  if (!r.names) for (const p of r.points) for (const n in p.numbers || {}) if ((first[n] ??= p.numbers[n]) !== p.numbers[n]) changes.add(n);
  return (r.names ||= [...changes].sort());
};
const allCharts = (ids) => [...CHARTS, ...[...new Set(ids.flatMap(namesOf))].map((name) => [TITLES[name] || name, () => ({}), (id, ids) => [line(id, ids, (p) => (p.numbers || {})[name] ?? null)]])];
// In bsp workers are never apart by more than the step that they are in, and no push is late: a chart would be a constant. Others are left out
// where a record has no such numbers.
const inBsp = (id) => { const j = facts.jobs.find((j) => j.id === id), run = (recordOf(id) || {}).run; return (!run || run.mode === "bsp") && (!j || j.mode === "bsp") && !moments(id).some((m) => m.kind === "mode"); };
const isShown = ([, options, lines], ids) => {
  const o = options(ids);
  if (!o) return false;
  if (o.idle && ids.every(inBsp)) return false;
  return !(o.idle || o.rare) || ids.some((id) => lines(id, ids).some((l) => l.x.length)) || !ids.some((id) => curveOf(id).points.length > 1);
};
const chartsOf = (ids) => allCharts(ids).filter((c) => isShown(c, ids)).map(([title]) => title);
const drawCharts = (place, ids) => {
  const names = ids.map((id) => (typeof id === "string" ? id : jobName(facts.jobs.find((j) => j.id === id) || { id })));
  charts = paraftCharts({ runs: names, hidden: [] });
  drawn = [];
  for (const [title, options, lines] of allCharts(ids)) {
    if (!isShown([title, options, lines], ids)) continue;
    const o = options(ids);
    figure(place, title, () => ({ x: unitOf(ids), names, empty: "nothing yet", events: marksOfAll(ids, names), ...o, log: !!o.loss && axes.log, lines: ids.flatMap((id) => lines(id, ids)).map((l) => (o.loss && axes.log ? { x: l.x, y: l.y.map((v) => (v > 0 ? v : null)) } : l)) }));
  }
};
// How all charts are drawn.
const tools = () => {
  const set = (what) => { Object.assign(axes, what); sessionStorage.setItem("axes", JSON.stringify(axes)); render(); };
  return element("div", { cls: "tools" },
    element("label", null, "over ", element("select", { "aria-label": "Horizontal axis", onchange: (e) => set({ x: e.target.value }) }, ...Object.keys(X).map((x) => element("option", { value: x, selected: x === axes.x }, X[x])))),
    element("label", null, element("input", { type: "checkbox", checked: axes.log, onchange: (e) => set({ log: e.target.checked }) }), "logarithmic loss"),
    element("label", null, "smoothing ", element("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: axes.smooth, "aria-label": "Smoothing", oninput: (e) => set({ smooth: +e.target.value }) }), element("output", null, " " + axes.smooth.toFixed(2))));
};
