// The fleet's view: its jobs, replicas, servers, faults.
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
