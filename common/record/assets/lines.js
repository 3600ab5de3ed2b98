// A sweep's trials as lines through their settings (parallel coordinates): of the report and of the live page.
// paraftLines(place, data, point): draws into `place`; `point(trial, on)` is told at which line somebody points. Gives what marks a line.
const paraftLines = (() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const make = (tag, attrs, text) => {
    const e = document.createElementNS(SVG, tag);
    for (const k in attrs) e.setAttribute(k, attrs[k]);
    if (text != null) e.textContent = text;
    return e;
  };
  return (place, data, point) => {
    const most = Math.max(...data.trials.map((t) => t.epochs), 0);
    // 0 the worst, 1 the best.
    const good = (t) => {
      if (t.value == null || !data.span) return 0;
      const [lo, hi] = data.span, at = hi > lo ? (t.value - lo) / (hi - lo) : 1;
      return data.least ? 1 - at : at;
    };
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
    return (trial, on) => place.querySelectorAll(`path[data-trial="${trial}"]`).forEach((p) => p.classList.toggle("pointed", on));
  };
})();
