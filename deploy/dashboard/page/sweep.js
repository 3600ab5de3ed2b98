// Of who serves the page for a sweep: its trials.
let sweep = null, sorted = [1, true], mark = () => {};
const lookAtSweep = async () => {
  try {
    const answer = await get("sweep");
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
