// The live page: what the fleet is comes as events of a stream; at each of them the view that is open is drawn anew, and what differs is put
// into the page, so that focus, selection and scrolling stay; charts go on.
// The address says which view: #fleet, #job/NUMBER, #compare, else the only job; a token in it is put aside at once, so that no history has it.
// Curves come from a job's record where the page's server has it, and from the stream since then.
(() => {
  "use strict";
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

  // --- what is known ---
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

  // --- acting ---
  const said = document.getElementById("said");
  let hides;
  const say = (text, bad) => {
    said.textContent = text;
    said.className = bad ? "bad" : "";
    said.hidden = false;
    clearTimeout(hides);
    hides = setTimeout(() => { said.hidden = true; }, 8000);
  };
  const ask = (what, why, yes, act) => {
    const dialog = document.getElementById("ask");
    document.getElementById("ask-what").textContent = what;
    document.getElementById("ask-why").textContent = why;
    document.getElementById("ask-yes").textContent = yes;
    dialog.returnValue = "no";
    dialog.onclose = async () => {
      if (dialog.returnValue !== "yes") return;
      try {
        const answer = await fetch("act", { method: "POST", headers: { authorization: "Bearer " + token(), "content-type": "application/json" }, body: JSON.stringify(act) });
        say(await answer.text(), !answer.ok);
        if (answer.ok && act.act === "mode") { for (const j of facts.jobs) if (j.name === act.job) delete chosen[j.id]; render(); }
        if (answer.ok && act.act === "workers") { delete numbers[act.job]; render(); }
      } catch (e) {
        say("nobody answered: " + e.message, true);
      }
    };
    dialog.showModal();
  };
  const button = (text, act) => element("button", { type: "button", onclick: act }, text);

  // --- charts ---
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

  // --- records ---
  // A job's record, once, and again when something has happened to the job; numbers of the script's own are only there.
  const RECORD_AGE = 3000, NUMBERS_AGE = 30000;
  const wantRecord = async (id) => {
    const j = facts.jobs.find((j) => j.id === id), known = records.get(id) || { of: null, at: 0 };
    if (!j || ended) return;
    const happened = events.filter((e) => e.job === id || e.job == null), of = j.state + since + "," + happened.filter((e) => e.kind !== "evaluation" && e.kind !== "action").length + (namesOf(id).length && runsOn(j) ? "," + Math.floor(Date.now() / NUMBERS_AGE) : "");
    if (known.of === of || known.asks || Date.now() - known.at < RECORD_AGE) return;
    records.set(id, { ...known, asks: true });
    const now = { ...known, of, at: Date.now(), asks: false };
    try {
      const answer = await fetch("record?job=" + id, { headers: { authorization: "Bearer " + token() } });
      if (answer.status === 200) now.record = await answer.json();
    } catch (e) { /* the stream says so */ }
    if (ended) return;
    records.set(id, now);
    render();
  };

  // --- views ---
  const happened = (of) => {
    // Evaluations are on the charts; here they would push out what is rare.
    const list = events.filter((e) => e.kind !== "evaluation" && of(e)).slice(-100).reverse();
    return list.length ? element("ul", { cls: "events", tabindex: "0", "aria-label": "Events" }, ...list.map((e) => element("li", null, element("time", { datetime: new Date(e.at).toISOString() }, clock(e.at)),
      element("span", { cls: "kind" }, e.kind), element("span", { cls: "what" }, e.what)))) : element("p", { cls: "empty" }, "Nothing has happened since this page's server looks.");
  };
  // So many rows are taken in at a glance; of more, a row for each job, and the first of those that do not serve.
  const FEW = 32, FIRST = 8, unfolded = new Set();
  const replicas = () => {
    const jobs = [...new Set(facts.shards.map((s) => s.job))], folds = facts.shards.length > FEW;
    const how = (s, id) => s.leader === id ? "leads" : s.silent.includes(id) ? "silent" : s.voters.includes(id) ? "votes" : s.learners.includes(id) ? "learns" : null;
    const cell = (s, id) => {
      const lag = s.lag[id], does = how(s, id);
      if (!does) return element("td", null, "");
      return element("td", null, element("span", { cls: does, title: does + (lag ? ", " + lag + " entries behind" : "") }, does + (does !== "leads" && lag ? " −" + number(lag) : "")));
    };
    const state = (s) => [stateOf(s.state), s.leader == null ? element("span", { cls: "bad" }, ", no leader") : "", s.trouble ? ": " + s.trouble : ""];
    const one = (s) => row((jobs.length > 1 ? ownerName(s.job) + " / " : "shard ") + s.shard, ...facts.servers.map((v) => cell(s, v.id)), element("td", { cls: "left wrap" }, ...state(s)));
    const serves = (s) => ["serving", "repairing"].includes(s.state) && s.leader != null;
    const all = (job) => {
      const own = facts.shards.filter((s) => s.job === job), open = unfolded.has(job), bad = own.filter((s) => !serves(s)), lack = own.filter((s) => serves(s) && s.silent.length).length;
      const fold = element("button", { type: "button", cls: "fold", "aria-expanded": String(open), onclick: () => { if (!unfolded.delete(job)) unfolded.add(job); render(); } }, ownerName(job) + ", " + count(own.length, "shard"));
      const sums = facts.servers.map((v) => {
        const of = (does) => own.filter((s) => how(s, v.id) === does).length;
        const said = ["leads", "votes", "learns", "silent"].map((does) => [does, of(does)]).filter(([, n]) => n);
        return element("td", null, said.length ? element("span", { cls: "sums" }, ...said.map(([does, n]) => element("span", { cls: does === "silent" ? "bad" : null }, does + " " + n))) : "");
      });
      const summary = element("tr", { cls: "sum" }, element("th", { scope: "row" }, fold), ...sums,
        element("td", { cls: "left wrap" }, bad.length ? element("span", { cls: "bad" }, bad.length + (bad.length === 1 ? " does not serve" : " do not serve")) : element("span", { cls: "good" }, "all serve"),
          lack ? ", " + lack + (lack === 1 ? " lacks a replica" : " lack a replica") : ""));
      return [summary, ...(open ? own : bad.slice(0, FIRST)).map(one)];
    };
    return table("Who replicates what", [{ text: "shard", left: true }, ...facts.servers.map((s) => "s" + s.id), { text: "state", left: true }],
      folds ? jobs.flatMap(all) : facts.shards.map(one), "grid tall");
  };
  const fleet = () => ({
    fixed: [],
    moving: () => [
      element("h1", null, "Fleet of " + count(facts.servers.length, "server")),
      element("p", { cls: "headline" }, facts.simulated ? "Simulated, as its clock and its failures are. Nothing can be done to it." : !facts.at ? "Asking its servers…" : facts.leader == null ? element("span", { cls: "bad" }, facts.servers.every((v) => v.state === "silent") ? "No server answers: the fleet has ended, or cannot be reached from here." : "The control group has no leader that can agree on anything.") : "s" + facts.leader + " leads the control group."),
      section("Jobs", facts.jobs.length ? table("Jobs", [{ text: "job", left: true }, "state", "mode", "workers", "steps", "samples/s", "loss", "accuracy", "bytes"],
        facts.jobs.slice().reverse().map((j) => row(element("a", { href: "#job/" + j.id }, jobName(j)), stateOfJob(j), j.mode || "-",
          j.members.filter((m) => !m.finished).length + " of " + j.workers, number(steps(j)), number(isLost(j) ? null : (last(j.id) || {}).samples), number((last(j.id) || {}).loss),
          j.evaluated && j.evaluated.accuracy ? (100 * j.evaluated.accuracy).toFixed(2) + " %" : "-", bytes(j.bytes)))) : element("p", { cls: "empty" }, "This fleet has no jobs.")),
      section("Who replicates what", replicas()),
      section("Servers", table("Servers", [{ text: "server", left: true }, { text: "address", left: true }, "state", "leads", "holds", "bytes", "memory, at most", "free", "processor", ...(facts.simulated ? [] : [""])],
        facts.servers.map((s) => row("s" + s.id, left(s.address || "-"), element("td", null, stateOf(s.state), s.trouble ? ": " + s.trouble : ""), String(s.leads), String(s.holds), bytes(s.bytes),
          bytes(s.peak_rss_bytes), bytes(s.free), s.cpu_seconds == null ? "-" : number(s.cpu_seconds, 3) + " s", ...(facts.simulated ? [] : [drainButton(s)]))))),
      ...(facts.faults ? [section("Faults on purpose", faults())] : []),
      section("What has happened", happened(() => true)),
    ],
  });
  // What each does, as `paraft chaos` names them.
  const FAULTS = {
    partition: "It reaches no other process and no other process reaches it, until you take it back. The others continue without it, as long as they are a majority.",
    "slow-link": "All that goes to it is held back for 50 ms, until you take it back.",
    "slow-disk": "Each of its fsyncs takes 50 ms longer, until you take it back.",
    "disk-full": "Its files can't grow, until you take it back: its shards are led and served by others meanwhile.",
    eio: "Its writes and fsyncs fail, until you take it back; its replicas are filled by the others then.",
    readonly: "Its file system can't be written, until you take it back.",
  };
  const fault = { server: null, what: "partition" };
  const faults = () => {
    const option = (value, text, chosen) => element("option", { value, selected: value === chosen }, text);
    const to = fault.server ?? facts.servers[0]?.id;
    return element("div", null,
      element("div", { cls: "acts" },
        element("select", { "aria-label": "Server", onchange: (e) => { fault.server = +e.target.value; } }, ...facts.servers.map((s) => option(s.id, "s" + s.id, to))),
        element("select", { "aria-label": "Fault", onchange: (e) => { fault.what = e.target.value; } }, ...Object.keys(FAULTS).map((f) => option(f, f, fault.what))),
        button("put", () => { const on = fault.server ?? facts.servers[0].id; ask("Put " + fault.what + " on s" + on + "?", FAULTS[fault.what], "Put it", { act: "fault", server: on, fault: fault.what }); })),
      facts.faults.length ? element("ul", { cls: "faults" }, ...facts.faults.map(([s, f]) => element("li", null, element("span", { cls: "bad" }, f + " on s" + s), " ",
        button("take back", () => ask("Take " + f + " back from s" + s + "?", "It is as it was, and the server catches up with the others.", "Take it back", { act: "fault", server: s, fault: f, undo: true }))))) : element("p", { cls: "note" }, "None is on."));
  };
  const drainButton = (s) => s.state === "draining"
    ? button("fill again", () => ask("Fill s" + s.id + " again?", "It takes replicas and leaders again.", "Fill it", { act: "drain", server: s.id, undo: true }))
    : button("drain", () => ask("Empty s" + s.id + "?", "What it leads (" + count(s.leads, "shard") + ") and holds (" + count(s.holds, "replica") + ") moves to other servers; training continues. Without enough others it stays as it is.", "Empty it", { act: "drain", server: s.id }));

  const chosen = {};
  const modeOf = (j) => {
    const modes = [...new Set([j.mode, "bsp", "ssp:1", "ssp:4", "ssp:16", "asp", "auto"])].filter((m) => m);
    const select = element("select", { "aria-label": "Mode", onchange: (e) => { chosen[j.id] = e.target.value; } },
      ...modes.map((m) => element("option", { value: m, selected: m === (chosen[j.id] || j.mode) }, m)));
    const to = () => chosen[j.id] || j.mode;
    return [select, button("switch mode", () => ask("Switch " + jobName(j) + " from " + j.mode + " to " + to() + "?",
      { bsp: "Workers wait for each other in every step.", asp: "Workers no longer wait for each other; gradients may be late.", auto: "A rule chooses how far workers may be apart." }[to()] || "Workers may be so many steps apart.",
      "Switch", { act: "mode", job: j.name, mode: to() }))];
  };
  const numbers = {};
  const workersOf = (j) => {
    if (!j.most) return [];
    const now = j.members.filter((m) => !m.finished).length, to = () => numbers[j.id] ?? now;
    return [element("input", { type: "number", min: 1, max: j.most, "aria-label": "Workers", value: to(), onchange: (e) => { numbers[j.id] = +e.target.value; } }),
      button("set workers", () => !(Number.isInteger(to()) && to() >= 1 && to() <= j.most) ? say("From 1 to " + count(j.most, "worker") + ", as in its job file.", true) : ask("Let " + jobName(j) + " have " + count(to(), "worker") + ", not " + now + "?", to() < now
        ? "The last ones leave after their step. With train.sampler = \"leased\" the others train their samples; with \"static\" nobody does." : "They come back and go on where the others are.",
        "Set workers", { act: "workers", job: j.id, workers: to() }))];
  };
  const waits = (j) => {
    // Also those that have left.
    const ids = [...new Set([...j.members.map((m) => m.worker), ...j.waits.flatMap((w) => [w.worker, w.of])])].sort((a, b) => a - b);
    if (!j.waits.length) return element("p", { cls: "empty" }, "No worker has waited for another.");
    const all = new Map(j.waits.map((w) => [w.worker + "," + w.of, w])), of = (a, b) => all.get(a + "," + b);
    const some = ids.length > 24 ? [...new Set(j.waits.slice().sort((a, b) => b.seconds - a.seconds).map((w) => w.of))].slice(0, 12).sort((a, b) => a - b) : ids;
    return table("Who waits for whom, in seconds", [{ text: "waits ↓ for →", left: true }, ...some.map((b) => "w" + b)],
      ids.map((a) => row("w" + a, ...some.map((b) => { const w = of(a, b); return element("td", null, w ? number(w.seconds, 3) : ""); }))), "grid tall");
  };
  const delays = (j) => {
    const all = j.delays.reduce((a, b) => a + b, 0);
    if (!all) return element("p", { cls: "empty" }, "No pushes yet.");
    // 0, 1, 2, 3 to 4, 5 to 8, ...
    const bins = [];
    j.delays.forEach((n, d) => { const b = d < 2 ? d : 1 + Math.ceil(Math.log2(d)); bins[b] = (bins[b] || 0) + n; });
    const most = Math.max(...bins.map((n) => n || 0)), ends = (b) => (b < 3 ? String(b) : 2 ** (b - 2) + 1 + " to " + 2 ** (b - 1));
    const shown = [...bins].map((n, b) => [ends(b), n || 0]);
    return element("div", { cls: "shares" }, ...shown.map(([d, n]) => element("div", { cls: "share" }, element("span", { cls: "what" }, d + (d === "1" ? " version" : " versions")),
      element("span", { cls: "bar" }, element("b", { style: "width: " + (100 * n) / most + "%" })), element("span", { cls: "value" }, percent(n / all)), element("span", { cls: "each" }, number(n)))));
  };
  const factList = (list, cls) => element("dl", { cls: "facts " + (cls || "") }, ...list.map(([name, value]) => element("div", null, element("dt", null, name), element("dd", null, value))));
  // How far it is: of the steps, else of the samples, that the record says.
  const progressOf = (j) => {
    const record = recordOf(j.id), run = record && record.run, p = last(j.id);
    if (!record || !p) return null;
    const step = Math.max(p.step, steps(j)), begun = run.resumed_step || 0;
    let share = record.total_steps ? (step - begun) / (record.total_steps - begun) : run.samples_budget && p.done != null ? p.done / run.samples_budget : null;
    const isDone = endOf(j) && endOf(j).state === "finished";
    if (isDone) share = 1;
    if (share == null || !Number.isFinite(share)) return null;
    share = Math.min(1, Math.max(0, share));
    // By how fast it was lately.
    const points = curveOf(j.id).points, from = points[Math.max(0, points.length - 1 - Math.ceil(points.length / 5))], of = (q) => (record.total_steps ? q.step : q.done), all = record.total_steps || run.samples_budget;
    const rate = p.at > from.at ? (of(p) - of(from)) / (p.at - from.at) : 0;
    return { share, left: rate > 0 ? (all - of(p)) / rate / 1000 : null, epoch: run.epochs ? Math.min(run.epochs, Math.floor(share * run.epochs) + 1) : null, epochs: run.epochs, step: isDone && record.total_steps ? record.total_steps : step, steps: record.total_steps };
  };
  const progressBar = (j) => {
    const p = progressOf(j);
    if (!p) return [];
    const words = [percent(p.share), p.epoch ? "epoch " + p.epoch + " of " + p.epochs : null, p.steps ? "step " + number(p.step, 6) + " of " + number(p.steps, 6) : null, runsOn(j) && answers && p.left != null ? "about " + span(p.left < 100 ? Math.ceil(p.left) : p.left) + " left" : null];
    return [element("div", { cls: "progress" }, element("progress", { max: 1, value: p.share.toFixed(4), "aria-label": "Progress" }), element("span", null, words.filter((w) => w).join(" · ")))];
  };
  const ENDS = { finished: "Finished", stopped: "Stopped before its end", failed: "Failed", interrupted: "Interrupted", "no-end": "Its launcher is gone and has recorded no end" };
  const endPanel = (j) => {
    const end = endOf(j), record = recordOf(j.id);
    if (!end) return [];
    const s = end.summary, score = s.final_accuracy != null ? (100 * s.final_accuracy).toFixed(2) + " %" : null;
    const bad = ["failed", "interrupted", "no-end"].includes(end.state);
    const file = (what, path) => element("p", null, what + " ", element("code", null, path));
    return [element("section", { cls: "end" + (bad ? " ill" : ""), "aria-label": "The end of the run" },
      element("p", { cls: "headline" }, ENDS[end.state] + (s.seconds > 0 && s.samples ? (end.state === "no-end" ? ": " : " after ") + span(s.seconds) + " of training, " + number(s.samples) + " samples" : "")),
      end.reason ? element("p", { cls: "bad reason" }, end.reason) : null,
      element("p", null, [s.final_loss != null ? "loss " + number(s.final_loss) : null, score ? "accuracy " + score : null, s.samples_per_s > 0 ? number(s.samples_per_s) + " samples/s" : null,
        s.servers_lost ? "servers lost " + s.servers_lost : null, s.longest_stall_seconds != null ? "longest stall " + span(s.longest_stall_seconds) : null, s.workers_lost ? "workers lost " + s.workers_lost : null].filter((t) => t).join(" · ")),
      end.report ? file("report", end.report) : file("for a report:", "paraft report " + record.folder),
      file("this page again:", "paraft dashboard --fleet " + record.folder))];
  };
  // What happened to the job, with what it cost.
  const momentsTable = (id) => {
    const record = recordOf(id);
    if (!record) return [];
    const all = record.moments, from = record.begin, more = record.more_moments;
    if (!all.length) return [element("p", { cls: "empty" }, "No failure, election, switch or checkpoint is recorded.")];
    return [element("div", { cls: "scroll tall", tabindex: "0", role: "region", "aria-label": "What has happened in the run" }, element("table", { cls: "happened" },
      element("thead", null, element("tr", null, ...["after", "what", "cost"].map((h) => element("th", { scope: "col" }, h)))),
      element("tbody", null, ...all.slice(-100).reverse().map((m) => element("tr", null, element("th", { scope: "row" }, span((m.at - from) / 1000)), element("td", null, element("i", { cls: "letter " + m.kind }, m.letter), m.text), element("td", null, m.cost)))))),
      element("p", { cls: "note" }, "Time is since the run's begin; the charts have a mark with the same letter. A stall is the time until a shard's new leader served." + (more || all.length > 100 ? " Earlier ones and most checkpoints are only in metrics.jsonl." : ""))];
  };
  const setting = (run) => [["model", run.model], ["data", run.data], ["optimizer", run.optimizer], ["learning rate", run.lr ? number(run.lr) : "-"], ["samples in a step", run.batch ? number(run.batch) : "-"], ["parameters", run.parameters ? number(run.parameters) : "-"], ["seed", String(run.seed)]];
  const job = (id) => ({
    fixed: [id, chartsOf([id])],
    moving: () => {
      const j = facts.jobs.find((j) => j.id === id);
      if (!j) return [element("h1", null, "No such job"), element("p", { cls: "empty" }, "It is deleted, or of another fleet.")];
      wantRecord(id);
      const runs = runsOn(j), record = recordOf(id), e = curveOf(id).evaluations.slice(-1)[0] || j.evaluated;
      const rate = runs && answers && !isLost(j) ? latest(id, (p) => p.samples) : endOf(j) ? endOf(j).summary.samples_per_s : null;
      return [
        element("div", { cls: "head" }, element("h1", null, jobName(j)), element("p", null, stateOfJob(j))),
        ...(runs && !answers ? [element("p", { cls: "note bad" }, "Its servers do not answer: the run has ended, or its host cannot be reached. What is here was seen last.")]
          : runs && isLost(j) ? [element("p", { cls: "note" }, "Nobody leads its first shard: what is here was seen last.")] : []),
        ...progressBar(j), ...endPanel(j),
        factList([
          ["training loss", number(latest(id, (p) => p.loss))], ["held-out", e && e.loss != null ? number(e.loss) + (e.accuracy ? ", " + (100 * e.accuracy).toFixed(2) + " %" : "") : "-"], ["samples a second", number(rate)],
          ["steps", number(Math.max(steps(j), (last(id) || { step: 0 }).step), 6)], ["mode", j.mode + (j.auto ? " (auto, up to " + j.auto + ")" : "")], ["workers", facts.servers.length ? j.members.filter((m) => !m.finished).length + " of " + j.workers : String(j.workers)],
        ]),
        facts.simulated ? element("p", { cls: "note" }, "Simulated: its seconds are the fleet's, and nothing can be done to it.") : !answers || ended || !facts.servers.length ? "" : runs ? element("div", { cls: "acts" }, ...modeOf(j), ...workersOf(j),
          button("stop", () => ask("Stop " + jobName(j) + "?", "Its workers finish where they are, and its weights are kept as after any end. It can't go on from there but by --resume of a checkpoint.", "Stop it", { act: "stop", job: j.name })),
          button("save a checkpoint", () => ask("Save a checkpoint of " + jobName(j) + "?", "Its lowest worker writes it after its next step, where the job's checkpoints go; it trains on when it is written.", "Save it", { act: "save", job: j.name })),
        ) : element("div", { cls: "acts" }, button("delete", () => ask("Delete " + jobName(j) + "?", "The servers forget its weights and optimizer state. Its files and checkpoints stay.", "Delete it", { act: "delete", job: j.name }))),
        tools(),
      ];
    },
    charts: [id],
    behind: () => {
      const j = facts.jobs.find((j) => j.id === id);
      if (!j) return [];
      const front = steps(j), record = recordOf(id), lives = facts.servers.length > 0;
      return [
        ...(record ? [section("What has happened", ...momentsTable(id))] : []),
        ...(lives ? [section("Workers", table("Workers", [{ text: "worker", left: true }, "step", "behind", "state", "lease", { text: "host", left: true }, "device", ""], j.members.map((m) => row("w" + m.worker, number(m.clock, 6), m.clock === front ? "" : number(front - m.clock),
          m.finished ? stateOf("finished") : !answers || ended ? "-" : stateOf(m.idle ? "idle" : "running"), m.lease_ms == null || !answers || ended ? "-" : (m.lease_ms / 1000).toFixed(1) + " s", left(m.host || "-"), m.device || "-",
          facts.simulated || ended ? null : button("log", () => showLog(j, m.worker)))), "tall")),
        section("Who waits for whom", waits(j), element("p", { cls: "note" }, "Seconds that a worker was held up by the one whose push came last, since the shard's leader leads.")),
        section("How late pushes were", delays(j))] : []),
        section("Details", factList([
          ...(lives ? [["shards, replicas", j.shards + ", " + j.replicas], ["durability", j.durability], ["pushes applied", number(j.pushes)], ["pushes lost", String(j.pushes_lost)], ["workers lost", String(j.workers_lost)], ["refused", String(j.refused)],
            ["checkpoint", j.checkpoint ? "step " + j.checkpoint[0] : "-"]] : [["shards, replicas", j.shards + ", " + j.replicas]]),
          ["record", record ? record.folder : j.run || "-"], ...(record ? setting(record.run) : []),
        ])),
        ...(lives ? [section("Events of the fleet", happened((e) => e.job === id || e.job == null))] : []),
      ];
    },
  });
  // The last lines of a worker's log, as long as the dialog is open.
  let looking = 0;
  const showLog = (j, worker) => {
    const mine = ++looking;
    const dialog = document.getElementById("log"), lines = document.getElementById("log-lines");
    document.getElementById("log-what").textContent = "The last lines of w" + worker + " of " + jobName(j);
    lines.textContent = "";
    const look = async () => {
      if (!dialog.open || mine !== looking) return;
      try {
        const answer = await fetch("log?job=" + j.id + "&worker=" + worker, { headers: { authorization: "Bearer " + token() } });
        const text = answer.ok ? (await answer.json()).join("\n") || "It has logged nothing." : await answer.text();
        if (mine !== looking) return;
        lines.textContent = text;
      } catch (e) {
        lines.textContent = "nobody answered: " + e.message;
      }
      setTimeout(look, 2000);
    };
    dialog.showModal();
    look();
  };

  // Of who serves the page for a sweep: its trials.
  let sweep = null, sorted = [1, true], mark = () => {};
  const lookAtSweep = async () => {
    try {
      const answer = await fetch("sweep", { headers: { authorization: "Bearer " + token() } });
      if (answer.status === 204) return;
      if (answer.ok) {
        const text = await answer.text();
        if (JSON.stringify(sweep) !== text) { sweep = JSON.parse(text); render(); }
      }
    } catch (e) { /* the stream says so */ }
    setTimeout(lookAtSweep, 2000);
  };
  const point = (trial, on) => { mark(trial, on); view.querySelector(`tr[data-trial="${trial}"]`)?.classList.toggle("pointed", on); };
  const drawSweep = () => {
    const place = document.getElementById("lines"), of = place && JSON.stringify(sweep) + place.clientWidth;
    if (place && place.drawn !== of) { mark = paraftLines(place, sweep, point); place.drawn = of; }
  };
  const trials = () => {
    const shown = (t) => t.value == null ? t.why || "-" : sweep.least ? t.value.toFixed(4) : (100 * t.value).toFixed(2) + " %";
    const columns = [["trial", (t) => t.trial, (t) => t.trial], [sweep.metric, (t) => t.value, shown], ["epochs", (t) => t.epochs, (t) => t.epochs], ["seconds", (t) => t.seconds, (t) => t.seconds.toFixed(1)],
      ...sweep.axes.map((a, i) => [a.key, (t) => t.places[i], (t) => t.set[i]])];
    const [column, down] = sorted, of = columns[column][1];
    const by = (a, b) => (of(a) == null) - (of(b) == null) || (of(b) - of(a)) * (down ? 1 : -1);
    const head = columns.map(([name], i) => element("th", { scope: "col", "aria-sort": i === column ? (down ? "descending" : "ascending") : null },
      button(name, () => { sorted = [i, i === column ? !down : true]; render(); })));
    const rows = [...sweep.trials].sort(by).map((t) => element("tr", { cls: "trial", "data-trial": t.trial, onpointerenter: () => point(t.trial, true), onpointerleave: () => point(t.trial, false) },
      ...columns.map(([, , text], i) => element(i ? "td" : "th", { scope: i ? null : "row" }, String(text(t))))));
    return [
      element("h1", null, sweep.job + ": " + count(sweep.trials.length, "trial")),
      ...sweep.headline.map((h) => element("p", { cls: "headline" }, h)),
      section("What each setting matters", element("div", { cls: "shares" }, ...sweep.axes.map((a) => element("div", { cls: "share" }, element("span", { cls: "what" }, a.key),
        element("span", { cls: "bar" }, element("b", { style: "width: " + 100 * (a.matters || 0) + "%" })), element("span", { cls: "value" }, percent(a.matters)), element("span"))))),
      section("Every trial, through its settings", element("div", { cls: "scroll", id: "lines", tabindex: "0", role: "region", "aria-label": "Lines" }), element("p", { cls: "note" }, "A line is a trial; the brighter the better. Those that were stopped early are thin.")),
      section("Trials", element("div", { cls: "scroll tall", tabindex: "0", role: "region", "aria-label": "Trials" }, element("table", { cls: "groups", id: "trials" }, element("thead", null, element("tr", null, ...head)), element("tbody", null, ...rows)))),
    ];
  };
  const sweepView = () => ({ fixed: [], moving: () => sweep ? trials() : [element("h1", null, "No sweep"), element("p", { cls: "empty" }, "This page is not of a sweep.")] });

  // Runs whose records the page's server reads; each once.
  const lookAtRuns = async () => {
    try {
      const answer = await fetch("runs", { headers: { authorization: "Bearer " + token() } });
      if (answer.status === 200) { runs = await answer.json(); render(); }
    } catch (e) { /* the stream says so */ }
  };
  const pick = async (name, on) => {
    if (picked.includes(name)) picked.splice(picked.indexOf(name), 1);
    if (!on) return render();
    picked.push(name);
    render();
    try {
      const answer = await fetch("runs?name=" + encodeURIComponent(name), { headers: { authorization: "Bearer " + token() } });
      if (!answer.ok) throw new Error(await answer.text());
      records.set(name, { record: await answer.json() });
    } catch (e) {
      if (picked.includes(name)) picked.splice(picked.indexOf(name), 1);
      say(name + ": " + e.message, true);
    }
    render(true);
  };
  const SIDE_BY_SIDE = 6;
  const accuracyOf = (v) => (v == null ? "-" : (100 * v).toFixed(2) + " %");
  const shownOr = (v) => v ?? "-";
  // Of each column: its name, what it sorts by, how it reads; the settings first.
  const SETTINGS = [["mode", (r) => r.mode, shownOr], ["model", (r) => r.what, shownOr], ["workers", (r) => r.workers, shownOr], ["batch", (r) => r.batch, shownOr], ["epochs", (r) => r.epochs, shownOr], ["optimizer", (r) => r.optimizer, shownOr], ["learning rate", (r) => r.lr, (v) => number(v)], ["seed", (r) => r.seed, shownOr]];
  const RESULTS = [["loss", (r) => r.loss, (v) => number(v)], ["accuracy", (r) => r.accuracy, accuracyOf], ["samples/s", (r) => r.samples_per_s, (v) => number(v)], ["training time", (r) => r.seconds, span], ["servers lost", (r) => r.servers_lost, shownOr], ["longest stall", (r) => r.longest_stall_seconds, span]];
  let runsBy = ["changed", true];
  // A job of the fleet as a row.
  const rowOfJob = (j) => {
    const run = (recordOf(j.id) || {}).run || {}, end = endOf(j), s = end ? end.summary : {}, e = curveOf(j.id).evaluations.slice(-1)[0] || {};
    return { job: j, name: jobName(j), at: facts.at, state: end ? end.state : j.state, mode: j.mode, what: run.model ? run.model + " on " + run.data : undefined, workers: j.workers, batch: run.batch, epochs: run.epochs, optimizer: run.optimizer, lr: run.lr, seed: run.seed,
      loss: s.final_loss ?? e.loss ?? latest(j.id, (p) => p.loss), accuracy: s.final_accuracy ?? (e.accuracy || null), samples_per_s: s.samples_per_s ?? latest(j.id, (p) => p.samples), seconds: s.seconds, servers_lost: s.servers_lost, longest_stall_seconds: s.longest_stall_seconds };
  };
  const runsTable = () => {
    // A job that is drawn as what it is now is not drawn from its record too.
    const own = new Set(facts.jobs.map((j) => (j.run || "").split("/").pop()));
    const all = [...facts.jobs.map(rowOfJob), ...runs.filter((r) => !own.has(r.name))];
    if (!all.length) return [element("p", { cls: "empty" }, "There are no runs.")];
    const known = all.filter((r) => r.mode !== undefined), same = (of) => known.length > 1 && new Set(known.map(of).filter((v) => v !== undefined)).size < 2;
    const columns = [["run", (r) => r.name, shownOr], ["state", (r) => r.state, shownOr], ["changed", (r) => r.at, (v) => new Date(v).toLocaleString()], ...SETTINGS.filter(([, of]) => !same(of)), ...RESULTS.filter(([, of]) => known.some((r) => of(r)))];
    const common = SETTINGS.filter(([, of]) => same(of)).map(([name, of, text]) => [name, text(known.map(of).find((v) => v !== undefined))]).filter(([, v]) => v && v !== "-");
    const column = Math.max(0, columns.findIndex(([name]) => name === runsBy[0])), of = columns[column][1], down = runsBy[1];
    const by = (a, b) => { const [x, y] = [of(a), of(b)]; return (x == null) - (y == null) || (x > y ? -1 : x < y ? 1 : 0) * (down ? 1 : -1); };
    const head = [element("th", { scope: "col" }, "draw"), ...columns.map(([name], i) => element("th", { scope: "col", cls: i < 2 ? "left" : null, "aria-sort": i === column ? (down ? "descending" : "ascending") : null }, button(name, () => { runsBy = [name, i === column ? !down : true]; render(); })))];
    const full = picked.length >= SIDE_BY_SIDE - 1;
    const rows = [...all].sort(by).map((r) => element("tr", null, element("td", null, r.job ? "" : element("input", { type: "checkbox", name: r.name, "aria-label": "Draw " + r.name, checked: picked.includes(r.name), disabled: !picked.includes(r.name) && full, onchange: (e) => pick(r.name, e.target.checked) })),
      ...columns.map(([name, of, text], i) => i === 0 ? element("th", { scope: "row" }, r.job ? element("a", { href: "#job/" + r.job.id }, r.name) : r.name) : element("td", { cls: i === 1 ? "left" : null, title: i === 1 ? r.reason : null }, i === 1 ? (r.state ? stateOf(r.state.replace("-", " ")) : "-") : String(text(of(r)))))));
    return [element("div", { cls: "scroll tall sorts", tabindex: "0", role: "region", "aria-label": "Runs" }, element("table", { cls: "runs" }, element("thead", null, element("tr", null, ...head)), element("tbody", null, ...rows))),
      common.length ? element("p", { cls: "note" }, "The same in all: " + common.map(([name, v]) => name + " " + v).join(", ") + ".") : ""];
  };
  const compare = () => {
    const jobs = facts.jobs.map((j) => j.id).filter((id) => curveOf(id).points.length), ids = [...jobs.slice(-Math.max(1, SIDE_BY_SIDE - picked.length)), ...picked];
    return {
      fixed: [ids, chartsOf(ids)], charts: ids,
      moving: () => { facts.jobs.slice(-SIDE_BY_SIDE).forEach((j) => wantRecord(j.id)); return [element("h1", null, "Runs"), element("p", { cls: "note" }, "The latest jobs of the fleet, and the runs that you draw from the table: " + SIDE_BY_SIDE + " at most, each from its begin."), ...(ids.length ? [tools()] : [])]; },
      behind: () => [section("All runs", ...runsTable())],
    };
  };

  // --- which view ---
  let shown = null, parts = [];
  const wanted = () => {
    const [what, of] = location.hash.slice(1).split("/");
    if (what === "job") return ["job/" + of, () => job(+of)];
    if (what === "compare") return ["compare", compare];
    if (what === "sweep") return ["sweep", sweepView];
    if (what === "fleet" || !facts) return ["fleet", fleet];
    if (sweep) return ["sweep", sweepView];
    // The only job, or the only one that runs.
    const running = facts.jobs.filter(runsOn), only = facts.jobs.length === 1 ? facts.jobs[0] : running.length === 1 ? running[0] : null;
    return only ? ["job/" + only.id, () => job(only.id)] : ["fleet", fleet];
  };
  const nav = () => {
    const [now] = wanted(), link = (to, text) => element("a", { href: "#" + to, "aria-current": now === to ? "page" : null }, text);
    const running = facts.jobs.filter((j) => ["running", "waiting"].includes(j.state) || now === "job/" + j.id).slice(-8);
    if (facts.jobs.length === 1 && !running.length) running.push(facts.jobs[0]);
    renew(document.getElementById("nav"), [...running.map((j) => link("job/" + j.id, jobName(j))), ...(facts.servers.length ? [link("fleet", "Fleet")] : []), link("compare", "Runs"), ...(sweep ? [link("sweep", "Sweep")] : [])]);
  };
  // Makes `old` like `fresh`, with as few changes as that takes.
  const morph = (old, fresh) => {
    if (old.nodeName !== fresh.nodeName) return void old.replaceWith(fresh);
    if (old.nodeType !== Node.ELEMENT_NODE) { if (old.data !== fresh.data) old.data = fresh.data; return; }
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    for (const on of ["onclick", "onchange", "oninput", "onpointerenter", "onpointerleave"]) old[on] = fresh[on];
    // Drawn when there is something new to draw.
    if (old.id === "lines") return;
    // Who chooses just now goes on choosing.
    if (["SELECT", "INPUT"].includes(old.nodeName) && old === document.activeElement && old.type !== "checkbox") return;
    const value = fresh.value;
    renew(old, [...fresh.childNodes]);
    if (old.nodeName === "SELECT") old.value = value;
    if (old.nodeName === "INPUT") [old.value, old.checked] = [value, fresh.checked];
  };
  const renew = (place, fresh) => {
    const old = [...place.childNodes];
    fresh.forEach((f, i) => (old[i] ? morph(old[i], f) : place.append(f)));
    old.slice(fresh.length).forEach((o) => o.remove());
  };
  const render = (anew) => {
    // Who does not look needs no picture.
    if (!facts || document.hidden) return;
    nav();
    const [name, make] = wanted(), now = make(), key = name + JSON.stringify(now.fixed);
    if (anew || key !== shown) {
      if (charts) charts.clear();
      [shown, charts, drawn] = [key, null, []];
      parts = [element("div"), element("div", { cls: "pair" }), element("div")];
      view.replaceChildren(...parts);
      if (now.charts && now.charts.length) { drawCharts(parts[1], now.charts); parts[1].style.marginBottom = "28px"; }
    } else goOn();
    renew(parts[0], now.moving());
    if (now.charts) parts[0].style.marginBottom = "28px";
    renew(parts[2], now.behind ? now.behind() : []);
    drawSweep();
    document.title = (name === "fleet" ? "Fleet" : name === "compare" ? "Runs" : name === "sweep" ? "Sweep" : jobName(facts.jobs.find((j) => "job/" + j.id === name) || { id: "?" })) + " · Paraft";
  };
  // Once for all that has come in the meantime: on a busy machine that may be much.
  let due = false;
  const soon = () => {
    if (due) return;
    due = true;
    setTimeout(() => { due = false; render(); });
  };
  addEventListener("hashchange", () => {
    if (takeToken() && refused) listen();
    if (location.hash === "#compare") lookAtRuns();
    render(); view.focus();
    scrollTo(0, 0);
  });
  dark.addEventListener("change", () => { theme(); render(true); });
  document.addEventListener("visibilitychange", () => render());

  // --- the stream ---
  const state = document.getElementById("state");
  let refused = false, heardAt = Date.now();
  // One goes that lies closest between its neighbours for its age; as the server does it.
  const thin = (points) => {
    const now = points[points.length - 1].at + 1;
    let least = Infinity, at = 1;
    for (let i = 1; i < points.length - 1; i++) {
      const apart = (points[i + 1].at - points[i - 1].at) / Math.max(1, now - points[i].at);
      if (apart < least) [least, at] = [apart, i];
    }
    const [gone] = points.splice(at, 1);
    if (gone.apart && points[at]) points[at].apart = true;
  };
  // A server says each second that it has nothing to say; one that hangs says nothing.
  const QUIET = 2000, SILENCE = 4000;
  const heard = (kind, text) => {
    const said = JSON.parse(text);
    if (kind === "ended") {
      // What is here stays, with the end.
      if (!said.record) return;
      ended = said;
      if (said.job != null) records.set(said.job, { record: said.record });
      return render();
    }
    if (said.facts.at) facts = said.facts;
    answers = true;
    if (kind === "all") {
      // Another fleet may have come after one that has ended, with the same numbers.
      if (ended) for (const id of [...records.keys()]) if (typeof id === "number") records.delete(id);
      [ended, curves, events] = [null, said.curves, said.events];
      since++;
    } else {
      for (const id in said.news.points) {
        const c = (curves[id] ||= { points: [], evaluations: [] });
        c.points.push(said.news.points[id]);
        if (c.points.length > 1200) thin(c.points);
      }
      for (const id in said.news.evaluations) (curves[id] ||= { points: [], evaluations: [] }).evaluations.push(said.news.evaluations[id]);
      const known = events.length ? events[events.length - 1].number : 0;
      events = events.concat(said.news.events.filter((e) => e.number > known)).slice(-500);
    }
    if (facts) soon();
  };
  const others = () => (facts ? facts.servers : []).map((s) => s.page).filter((p) => p && p !== location.host);
  const GONE = 10000;
  const lost = async () => {
    if (ended) return void setTimeout(listen, 2000);
    state.className = "lost";
    if (facts && answers && Date.now() - heardAt > GONE) { answers = false; render(); }
    for (const other of others()) {
      try {
        await fetch("//" + other + "/", { mode: "no-cors", signal: AbortSignal.timeout(2000) });
        location.replace("//" + other + "/" + location.search + "#token=" + token() + "&" + location.hash.slice(1));
        return;
      } catch (e) { /* gone too */ }
    }
    setTimeout(listen, 1000);
  };
  const listen = async () => {
    const silent = new AbortController();
    let wakes, doubts;
    const still = () => { clearTimeout(wakes); clearTimeout(doubts); };
    const tell = (cls, text) => { if (state.textContent !== text) [state.className, state.textContent] = [cls, text]; };
    const alive = () => {
      still();
      const until = Date.now() + SILENCE;
      // A timer that is late by more than that comes after a sleep: what was said meanwhile is not read yet.
      wakes = setTimeout(() => { if (Date.now() < until + QUIET) silent.abort(); else alive(); }, SILENCE);
      doubts = setTimeout(() => tell("lost", location.host + " has said nothing for " + QUIET / 1000 + " s"), QUIET);
    };
    alive();
    refused = false;
    try {
      const answer = await fetch("live", { headers: { authorization: "Bearer " + token() }, signal: silent.signal });
      if (!answer.ok) {
        if (ended) return void lost();
        state.className = "lost";
        refused = answer.status === 403;
        state.textContent = refused ? "not let in: open the address that was printed, with its token (all servers need the same for a page to go on with another)" : await answer.text();
        still();
        if (!refused) setTimeout(listen, 3000);
        return;
      }
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        alive();
        heardAt = Date.now();
        tell("", facts && !facts.servers.length && facts.jobs.length ? "from the record" : "live, from " + location.host);
        const messages = (rest + value).split("\n\n");
        rest = messages.pop();
        for (const m of messages) {
          const of = (name) => m.split("\n").filter((l) => l.startsWith(name + ": ")).map((l) => l.slice(name.length + 2)).join("\n");
          if (of("data")) heard(of("event"), of("data"));
        }
      }
    } catch (e) { /* it is gone */ }
    still();
    if (ended) [state.className, state.textContent] = ["", "the run has ended"];
    else state.textContent = location.host + " does not answer" + (others().length ? "; trying the others" : "");
    lost();
  };
  listen();
  lookAtSweep();
  lookAtRuns();
})();
