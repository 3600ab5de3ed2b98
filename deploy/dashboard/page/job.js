// A job's view: its mode, workers, waits, delays, progress, end, logs.
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
      ...(lives && (j.tables || []).length ? [section("Sparse tables", table("Sparse tables", [{ text: "table", left: true }, "rows", "room for", "bytes a row", "created", "revived", "evicted", "expired", "gradients dropped"],
        j.tables.map((t) => row(t.name, number(t.rows), number(t.most), t.rows ? number(t.bytes / t.rows, 3) : "-", number(t.created), number(t.revived), number(t.evicted), number(t.expired), number(t.dropped)))))] : []),
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
      const answer = await get("log?job=" + j.id + "&worker=" + worker);
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
