// Draws a sweep's trials as lines through their settings (parallel coordinates), and sorts its table.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const asked = new URLSearchParams(location.search).get("theme");
  const SVG = "http://www.w3.org/2000/svg";
  const make = (tag, attrs, text) => {
    const e = document.createElementNS(SVG, tag);
    for (const k in attrs) e.setAttribute(k, attrs[k]);
    if (text != null) e.textContent = text;
    return e;
  };
  const place = document.getElementById("lines"), rows = {};
  document.querySelectorAll("#trials tbody tr").forEach((tr) => { rows[tr.dataset.trial] = tr; });
  const most = Math.max(...data.trials.map((t) => t.epochs));
  // 0 the worst, 1 the best.
  const good = (t) => {
    if (t.value == null || !data.span) return 0;
    const [lo, hi] = data.span, at = hi > lo ? (t.value - lo) / (hi - lo) : 1;
    return data.least ? 1 - at : at;
  };
  const point = (trial, on) => {
    rows[trial]?.classList.toggle("pointed", on);
    document.querySelectorAll(`#lines path[data-trial="${trial}"]`).forEach((p) => p.classList.toggle("pointed", on));
  };

  const draw = () => {
    root.dataset.theme = asked === "dark" || asked === "light" ? asked : dark.matches ? "dark" : "light";
    const axes = data.axes.concat({ key: data.metric, ticks: [] });
    if (data.span) {
      const shown = (v) => (data.least ? v.toFixed(4) : (100 * v).toFixed(2) + " %"), [lo, hi] = data.span;
      axes[axes.length - 1].ticks = data.least ? [[0, shown(hi)], [1, shown(lo)]] : [[0, shown(lo)], [1, shown(hi)]];
    }
    const width = Math.max(place.clientWidth || 700, 150 * axes.length), height = 340, top = 34, bottom = 24, side = 70;
    const x = (i) => (axes.length > 1 ? side + (i * (width - 2 * side)) / (axes.length - 1) : width / 2);
    const y = (p) => height - bottom - p * (height - top - bottom);
    const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Every trial as a line through its settings; the table below has the same" });
    for (const t of [...data.trials].sort((a, b) => good(a) - good(b))) {
      const at = t.places.concat(good(t)), path = at.map((p, i) => (i ? "L" : "M") + x(i).toFixed(1) + " " + y(p).toFixed(1)).join("");
      const line = make("path", { d: path, fill: "none", stroke: t.value == null ? "var(--soft)" : "var(--c0)", "stroke-width": t.epochs === most ? 2 : 1,
        "stroke-opacity": (t.value == null ? 0.2 : 0.12 + 0.88 * good(t) ** 3).toFixed(3), "data-trial": t.trial });
      line.append(make("title", {}, "trial " + t.trial));
      line.onpointerenter = () => point(t.trial, true);
      line.onpointerleave = () => point(t.trial, false);
      svg.append(line);
    }
    axes.forEach((a, i) => {
      svg.append(make("line", { x1: x(i), x2: x(i), y1: y(0), y2: y(1), stroke: "var(--soft)" }));
      svg.append(make("text", { x: x(i), y: 16, "text-anchor": "middle", fill: "var(--text)", "font-size": 12.5, "font-weight": 600 }, a.key));
      for (const [p, text] of a.ticks) svg.append(make("text", { x: x(i) + 6, y: y(p) + 4, fill: "var(--soft)", "font-size": 11.5, "paint-order": "stroke", stroke: "var(--card)", "stroke-width": 3 }, text));
    });
    place.replaceChildren(svg);
  };

  for (const id in rows) {
    rows[id].onpointerenter = () => point(id, true);
    rows[id].onpointerleave = () => point(id, false);
  }
  document.querySelectorAll("#trials thead th").forEach((th, column) => {
    th.querySelector("button").onclick = () => {
      const down = th.getAttribute("aria-sort") !== "descending";
      document.querySelectorAll("#trials thead th").forEach((o) => o.removeAttribute("aria-sort"));
      th.setAttribute("aria-sort", down ? "descending" : "ascending");
      const of = (tr) => tr.children[column].dataset.sort;
      // What has no value stands last, whichever way.
      const by = (a, b) => (of(a) == null) - (of(b) == null) || (of(b) - of(a)) * (down ? 1 : -1);
      const body = document.querySelector("#trials tbody");
      body.append(...[...body.children].sort(by));
    };
  });
  dark.addEventListener("change", draw);
  addEventListener("resize", draw);
  draw();
})();
