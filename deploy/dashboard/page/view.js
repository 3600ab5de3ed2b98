// Which view is open, and how it is drawn anew.
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
