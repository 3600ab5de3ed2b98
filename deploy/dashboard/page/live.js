// The live page: what the fleet is comes as events of a stream; at each of them the view that is open is drawn anew, and what differs is put
// into the page, so that focus, selection and scrolling stay; charts go on.
// The address says which view: #fleet, #job/NAME, #compare; a token in it is put aside at once, so that no history has it.
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
  let facts = null, curves = {}, events = [], runs = [], recorded = new Map();

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
  // Those of jobs that the fleet has, and of runs that were recorded.
  const curveOf = (id) => recorded.get(id) || curves[id] || { points: [], evaluations: [] };
  const last = (id) => { const p = curveOf(id).points; return p[p.length - 1]; };
  const isLost = (j) => j.stale && ["running", "waiting"].includes(j.state);
  const steps = (j) => Math.max(0, ...j.members.map((m) => m.clock));

  const table = (caption, head, rows, cls) => element("div", { cls: "scroll " + (cls || ""), tabindex: "0", role: "region", "aria-label": caption },
    element("table", null, element("thead", null, element("tr", null, ...head.map((h) => element("th", { scope: "col", cls: h.left ? "left" : null }, h.text ?? h)))),
      element("tbody", null, ...rows)));
  const row = (first, ...cells) => element("tr", null, element("th", { scope: "row" }, first), ...cells.map((c) => (c instanceof HTMLTableCellElement ? c : element("td", null, c ?? "-"))));
  const left = (text, cls) => element("td", { cls: "left wrap " + (cls || "") }, text);
  const section = (title, ...inside) => element("section", null, element("h2", null, title), ...inside);
  const stateOf = (state) => element("span", { cls: ["up", "serving", "running", "finished"].includes(state) ? "good" : ["silent", "unreachable", "lost", "no leader", "no-majority", "storage-stopped"].includes(state) ? "bad" : null }, state);
  const stateOfJob = (j) => stateOf(isLost(j) ? "no leader" : j.stopping ? "stopping" : j.state);

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
  const figure = (place, title, chart) => {
    const f = element("figure", null, element("h3", null, title));
    place.append(f);
    const lines = chart().lines.filter((l) => l.x.length).length;
    drawn.push({ f, title, chart, lines, update: charts.lineChart(f, chart()) });
  };
  const goOn = () => {
    for (const d of drawn) {
      const now = d.chart(), lines = now.lines.filter((l) => l.x.length).length;
      if (d.update && lines === d.lines) d.update(now);
      else {
        d.f.replaceChildren(element("h3", null, d.title));
        [d.lines, d.update] = [lines, charts.lineChart(d.f, now)];
      }
    }
  };
  const begin = (id) => { const c = curveOf(id), at = [c.points[0], c.evaluations[0]].filter((p) => p).map((p) => p.at); return at.length ? Math.min(...at) : 0; };
  const line = (id, of) => {
    const x = [], y = [], from = begin(id);
    for (const p of curveOf(id).points) {
      const v = of(p), t = (p.at - from) / 1000;
      // Nobody saw what was before.
      if (p.apart && x.length) { x.push(t - 0.001); y.push(null); }
      if (v != null) { x.push(t); y.push(v); }
    }
    return { x, y };
  };
  const scores = (id, of) => {
    const x = [], y = [], from = begin(id);
    for (const e of curveOf(id).evaluations) { x.push(Math.max(0, (e.at - from) / 1000)); y.push(of(e)); }
    return { x, y };
  };
  // What was seen near each other has one line: more than a few would lie on each other.
  const marks = (id) => {
    const from = begin(id), near = ((last(id) || { at: from }).at - from) / 12, shown = [];
    for (const e of events) {
      if ((e.job !== id && e.job != null) || !["election", "mode", "worker", "server"].includes(e.kind) || e.at < from) continue;
      const before = shown[shown.length - 1];
      if (before && e.at - before.at <= near) before.kinds.add(e.kind);
      else shown.push({ at: e.at, kinds: new Set([e.kind]) });
    }
    return shown.map(({ at, kinds }) => ({ run: 0, x: (at - from) / 1000, text: [...kinds].join(", ") }));
  };
  const CHARTS = [
    ["Training and held-out loss", (ids) => ids.length > 1 ? null : { names: ["training", "held-out"], points: true }, (id) => [line(id, (p) => p.loss), scores(id, (e) => e.loss)]],
    ["Training loss", (ids) => ids.length > 1 ? {} : null, (id) => [line(id, (p) => p.loss)]],
    ["Held-out accuracy", () => ({ percent: true, points: true }), (id) => [scores(id, (e) => e.accuracy || null)]],
    ["Samples a second", () => ({ zero: true }), (id) => [line(id, (p) => p.samples)]],
    ["Steps ahead of the slowest worker", () => ({ zero: true }), (id) => [line(id, (p) => p.ahead)]],
    ["Mean delay of a push, in versions", () => ({ zero: true }), (id) => [line(id, (p) => p.delay)]],
    ["Share of the time that workers wait for each other", () => ({ zero: true, percent: true }), (id) => [line(id, (p) => p.waited)]],
    ["Megabytes a second", (ids) => ids.length > 1 ? null : { names: ["pushed", "pulled"], zero: true }, (id) => [line(id, (p) => p.pushed == null ? null : p.pushed / 1e6), line(id, (p) => p.pulled == null ? null : p.pulled / 1e6)]],
  ];
  const drawCharts = (place, ids) => {
    const names = ids.map((id) => (recorded.has(id) ? id : jobName(facts.jobs.find((j) => j.id === id) || { id })));
    charts = paraftCharts({ runs: names, hidden: [] });
    drawn = [];
    for (const [title, options, lines] of CHARTS) {
      const o = options(ids);
      if (o) figure(place, title, () => ({ x: "seconds", names, empty: "nothing yet", marks: ids.length === 1 ? marks(ids[0]) : [], ...o, lines: ids.flatMap(lines) }));
    }
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
    const of = (a, b) => j.waits.find((w) => w.worker === a && w.of === b);
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
  const job = (id) => ({
    fixed: [id],
    moving: () => {
      const j = facts.jobs.find((j) => j.id === id);
      if (!j) return [element("h1", null, "No such job"), element("p", { cls: "empty" }, "It is deleted, or of another fleet.")];
      const p = last(id) || {}, runs = ["running", "waiting"].includes(j.state);
      const fact = (name, value) => [element("dt", null, name), element("dd", null, value)];
      return [
        element("div", { cls: "head" }, element("h1", null, jobName(j)), element("p", null, stateOfJob(j))),
        ...(isLost(j) ? [element("p", { cls: "note" }, "Nobody leads its first shard: what is here was seen last.")] : []),
        element("dl", { cls: "facts" }, ...[
          ["mode", j.mode + (j.auto ? " (auto, up to " + j.auto + ")" : "")], ["workers", j.members.filter((m) => !m.finished).length + " of " + j.workers], ["steps", number(steps(j), 6)],
          ["samples a second", number(isLost(j) ? null : p.samples)], ["training loss", number(p.loss)], ["held-out", j.evaluated ? number(j.evaluated.loss) + (j.evaluated.accuracy ? ", " + (100 * j.evaluated.accuracy).toFixed(2) + " %" : "") : "-"],
          ["shards, replicas", j.shards + ", " + j.replicas], ["durability", j.durability], ["pushes applied", number(j.pushes)], ["pushes lost", String(j.pushes_lost)],
          ["workers lost", String(j.workers_lost)], ["refused", String(j.refused)], ["checkpoint", j.checkpoint ? "step " + j.checkpoint[0] : "-"], ["record", j.run || "-"],
        ].map(([n, v]) => element("div", null, ...fact(n, v)))),
        facts.simulated ? element("p", { cls: "note" }, "Simulated: its seconds are the fleet's, and nothing can be done to it.") : runs ? element("div", { cls: "acts" }, ...modeOf(j), ...workersOf(j),
          button("stop", () => ask("Stop " + jobName(j) + "?", "Its workers finish where they are, and its weights are kept as after any end. It can't go on from there but by --resume of a checkpoint.", "Stop it", { act: "stop", job: j.name })),
          button("save a checkpoint", () => ask("Save a checkpoint of " + jobName(j) + "?", "Its lowest worker writes it after its next step, where the job's checkpoints go; it trains on when it is written.", "Save it", { act: "save", job: j.name })),
        ) : element("div", { cls: "acts" }, button("delete", () => ask("Delete " + jobName(j) + "?", "The servers forget its weights and optimizer state. Its files and checkpoints stay.", "Delete it", { act: "delete", job: j.name }))),
      ];
    },
    charts: [id],
    behind: () => {
      const j = facts.jobs.find((j) => j.id === id);
      if (!j) return [];
      const front = steps(j);
      return [
        section("Workers", table("Workers", [{ text: "worker", left: true }, "step", "behind", "state", "lease", { text: "host", left: true }, "device", ""], j.members.map((m) => row("w" + m.worker, number(m.clock, 6), m.clock === front ? "" : number(front - m.clock),
          stateOf(m.finished ? "finished" : m.idle ? "idle" : "running"), m.lease_ms == null ? "-" : (m.lease_ms / 1000).toFixed(1) + " s", left(m.host || "-"), m.device || "-",
          facts.simulated ? null : button("log", () => showLog(j, m.worker)))), "tall")),
        section("Who waits for whom", waits(j), element("p", { cls: "note" }, "Seconds that a worker was held up by the one whose push came last, since the shard's leader leads.")),
        section("How late pushes were", delays(j)),
        section("What has happened", happened((e) => e.job === id || e.job == null)),
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
    if (!on) { recorded.delete(name); return render(); }
    recorded.set(name, { points: [], evaluations: [] });
    render();
    try {
      const answer = await fetch("runs?name=" + encodeURIComponent(name), { headers: { authorization: "Bearer " + token() } });
      if (!answer.ok) throw new Error(await answer.text());
      const curves = await answer.json();
      if (recorded.has(name)) recorded.set(name, curves);
    } catch (e) {
      recorded.delete(name);
      say(name + ": " + e.message, true);
    }
    render(true);
  };
  const SIDE_BY_SIDE = 6;
  const compare = () => {
    const picked = [...recorded.keys()], jobs = facts.jobs.filter((j) => curves[j.id] && curves[j.id].points.length).map((j) => j.id);
    const ids = [...jobs.slice(-Math.max(1, SIDE_BY_SIDE - picked.length)), ...picked];
    // A job that is drawn as what it is now is not drawn from its record too.
    const own = new Set(facts.jobs.map((j) => (j.run || "").split("/").pop())), offered = runs.filter((r) => !own.has(r.name));
    return {
      fixed: ids, charts: ids,
      moving: () => [element("h1", null, "Jobs side by side"), element("p", { cls: "note" }, "The latest jobs that were seen to train, " + SIDE_BY_SIDE + " lines at most; seconds since each was first seen here.")],
      behind: () => (offered.length ? [section("Runs that were recorded", element("p", { cls: "note" }, "Beside the jobs, from their records in this fleet's folder of runs; seconds since their first step."),
        element("div", { cls: "picks" }, ...offered.map((r) => element("label", null, element("input", { type: "checkbox", name: r.name, checked: recorded.has(r.name), disabled: !recorded.has(r.name) && picked.length >= SIDE_BY_SIDE - 1,
          onchange: (e) => pick(r.name, e.target.checked) }), r.name, element("time", { datetime: new Date(r.at).toISOString() }, new Date(r.at).toLocaleString())))))] : []),
    };
  };

  // --- which view ---
  let shown = null, parts = [];
  const wanted = () => {
    const [what, of] = location.hash.slice(1).split("/");
    if (what === "job") return ["job/" + of, () => job(+of)];
    if (what === "compare") return ["compare", compare];
    if (what === "sweep") return ["sweep", sweepView];
    return ["fleet", fleet];
  };
  const nav = () => {
    const [now] = wanted(), link = (to, text) => element("a", { href: "#" + to, "aria-current": now === to ? "page" : null }, text);
    const running = facts.jobs.filter((j) => ["running", "waiting"].includes(j.state) || now === "job/" + j.id).slice(-8);
    renew(document.getElementById("nav"), [link("fleet", "Fleet"), ...running.map((j) => link("job/" + j.id, jobName(j))), link("compare", "Compare"), ...(sweep ? [link("sweep", "Sweep")] : [])]);
  };
  // Makes `old` like `fresh`, with as few changes as that takes.
  const morph = (old, fresh) => {
    if (old.nodeName !== fresh.nodeName) return void old.replaceWith(fresh);
    if (old.nodeType !== Node.ELEMENT_NODE) { if (old.data !== fresh.data) old.data = fresh.data; return; }
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    for (const on of ["onclick", "onchange", "onpointerenter", "onpointerleave"]) old[on] = fresh[on];
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
    document.title = (name === "fleet" ? "Fleet" : name === "compare" ? "Compare" : name === "sweep" ? "Sweep" : jobName(facts.jobs.find((j) => "job/" + j.id === name) || { id: "?" })) + " · Paraft";
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
  let refused = false;
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
    if (said.facts.at) facts = said.facts;
    if (kind === "all") [curves, events] = [said.curves, said.events];
    else {
      for (const id in said.news.points) {
        const c = (curves[id] ||= { points: [], evaluations: [] });
        c.points.push(said.news.points[id]);
        if (c.points.length > 1200) thin(c.points);
      }
      for (const id in said.news.evaluations) (curves[id] ||= { points: [], evaluations: [] }).evaluations.push(said.news.evaluations[id]);
      const known = events.length ? events[events.length - 1].number : 0;
      events = events.concat(said.news.events.filter((e) => e.number > known)).slice(-500);
    }
    if (facts) render();
  };
  const others = () => (facts ? facts.servers : []).map((s) => s.page).filter((p) => p && p !== location.host);
  const lost = async () => {
    state.className = "lost";
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
        tell("", "live, from " + location.host);
        const messages = (rest + value).split("\n\n");
        rest = messages.pop();
        for (const m of messages) {
          const of = (name) => m.split("\n").filter((l) => l.startsWith(name + ": ")).map((l) => l.slice(name.length + 2)).join("\n");
          if (of("data")) heard(of("event"), of("data"));
        }
      }
    } catch (e) { /* it is gone */ }
    still();
    state.textContent = location.host + " does not answer" + (others().length ? "; trying the others" : "");
    lost();
  };
  listen();
  lookAtSweep();
  lookAtRuns();
})();
