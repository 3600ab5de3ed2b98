// Runs whose records the page's server reads; each once.
const lookAtRuns = async () => {
  try {
    const answer = await get("runs");
    if (answer.status === 200) { runs = await answer.json(); render(); }
  } catch (e) { /* the stream says so */ }
};
const pick = async (name, on) => {
  if (picked.includes(name)) picked.splice(picked.indexOf(name), 1);
  if (!on) return render();
  picked.push(name);
  render();
  try {
    const answer = await get("runs?name=" + encodeURIComponent(name));
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
