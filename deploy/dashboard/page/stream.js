// The stream of the server's news, and what to do when it stops.
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
    const answer = await get("live", { signal: silent.signal });
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
