// Charts of the report and of the live page. A line is told apart three ways: colour, dash pattern (bars: fill pattern) and its
// place in the key. `data`: `runs`, the lines' names, and `hidden`, those that are not shown at first. A canvas knows no CSS: when the
// theme changes, `clear` and draw anew.
const paraftCharts = (data) => {
  "use strict";
  const COLOURS = 6;
  const DASHES = [[], [9, 4], [2, 3], [12, 3, 2, 3], [5, 2], [14, 5]];
  const root = document.documentElement;
  let plots = [];

  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const colour = (i) => css("--c" + (i % COLOURS));
  // The second round of colours starts one dash further, so twelve runs still differ.
  const dash = (i) => DASHES[(i + Math.floor(i / COLOURS)) % DASHES.length];
  const element = (tag, cls, text) => {
    const e = document.createElement(tag);
    if (cls) e.className = cls;
    if (text !== undefined) e.textContent = text;
    return e;
  };

  // --- numbers ---
  const short = (v) => {
    if (v == null) return "";
    const a = Math.abs(v);
    const trim = (x) => String(+x.toPrecision(4));
    if (a >= 1e9) return trim(v / 1e9) + "G";
    if (a >= 1e6) return trim(v / 1e6) + "M";
    if (a >= 1e4) return trim(v / 1e3) + "k";
    return trim(v);
  };
  const percent = (v) => (v == null ? "" : +(v * 100).toPrecision(4) + " %");
  const bytes = (v) => (v == null ? "" : v >= 1e4 || v === 0 ? short(v) + "B" : short(v) + " B");
  const unit = { samples: (v) => short(v) + " samples", seconds: (v) => short(v) + " s", minutes: (v) => short(v) + " min", hours: (v) => short(v) + " h",
    steps: (v) => "step " + short(v), epochs: (v) => "epoch " + short(v), bytes, workers: (v) => short(v) + " workers" };
  const hidden = new Set(data.hidden);

  // --- how a run is marked ---
  const svg = (tag, attrs) => {
    const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const k in attrs) e.setAttribute(k, attrs[k]);
    return e;
  };
  const lineSwatch = (i) => {
    const s = svg("svg", { class: "swatch", viewBox: "0 0 30 12", "aria-hidden": "true" });
    s.append(svg("line", { x1: 1, x2: 29, y1: 6, y2: 6, "stroke-width": 2.5, "stroke-dasharray": dash(i).join(" "),
      style: "stroke: var(--c" + (i % COLOURS) + ")" }));
    return s;
  };
  // Solid, diagonal, dots, horizontal, the other diagonal, vertical.
  const tile = (i, scale) => {
    const c = document.createElement("canvas"), n = 6 * scale;
    c.width = c.height = n;
    const g = c.getContext("2d");
    g.scale(scale, scale);
    const kind = (i + Math.floor(i / COLOURS)) % 6;
    g.fillStyle = g.strokeStyle = colour(i);
    g.globalAlpha = kind === 0 ? 1 : 0.25;
    g.fillRect(0, 0, 6, 6);
    g.globalAlpha = 1;
    g.lineWidth = 2;
    g.beginPath();
    if (kind === 1) { g.moveTo(-2, 2); g.lineTo(2, -2); g.moveTo(-2, 8); g.lineTo(8, -2); g.moveTo(4, 8); g.lineTo(8, 4); }
    if (kind === 2) { g.arc(3, 3, 1.5, 0, 7); g.fill(); g.beginPath(); }
    if (kind === 3) { g.moveTo(0, 3); g.lineTo(6, 3); }
    if (kind === 4) { g.moveTo(-2, 4); g.lineTo(2, 8); g.moveTo(-2, -2); g.lineTo(8, 8); g.moveTo(4, -2); g.lineTo(8, 2); }
    if (kind === 5) { g.moveTo(3, 0); g.lineTo(3, 6); }
    g.stroke();
    return c;
  };
  const barSwatch = (i) => {
    const s = element("canvas", "swatch"), scale = devicePixelRatio || 1;
    s.width = 30 * scale;
    s.height = 12 * scale;
    const g = s.getContext("2d");
    g.fillStyle = g.createPattern(tile(i, scale), "repeat");
    g.fillRect(0, 0, s.width, s.height);
    g.strokeStyle = colour(i);
    g.lineWidth = 2 * scale;
    g.strokeRect(0, 0, s.width, s.height);
    return s;
  };

  // --- one chart ---
  const axis = (extra) => Object.assign({
    stroke: css("--soft"), font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 18,
    grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1, size: 4 }, gap: 4,
  }, extra);

  // Wide enough for the longest label, so that big numbers are not cut off.
  const fit = (u, labels) => 14 + 6.8 * Math.max(3, ...(labels || []).map((l) => (l == null ? 0 : String(l).length)));

  // The nearest place at which this run has a value: runs do not share their x.
  const nearest = (u, s, at) => {
    const ys = u.data[s];
    for (let d = 0; d < ys.length; d++) {
      if (ys[at - d] != null) return at - d;
      if (ys[at + d] != null) return at + d;
    }
    return at;
  };

  // A log axis with few, round marks: decades, or 1-2-5, or all digits, or finer; the first that gives three.
  const DIGITS = [[1], [1, 2, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9], Array.from({ length: 90 }, (_, i) => 1 + i / 10)];
  const logMarks = (u, axisIdx, lo, hi) => {
    let marks = [];
    for (const digits of DIGITS) {
      marks = [];
      for (let e = Math.floor(Math.log10(lo)); 10 ** e <= hi; e++) {
        for (const d of digits) marks.push(+(d * 10 ** e).toPrecision(2));
      }
      marks = marks.filter((m) => m >= lo && m <= hi);
      if (marks.length >= 3) break;
    }
    return marks.filter((m, i) => i % Math.ceil(marks.length / 7) === 0);
  };

  const tips = (box, runs, swatch, { title, value, none, names }) => {
    const tip = element("div", "tip");
    tip.hidden = true;
    return (u) => {
      const { left, idx, idxs } = u.cursor;
      if (left < 0 || idx == null) { tip.hidden = true; return; }
      tip.replaceChildren(element("div", "", title(u, idx)));
      runs.forEach((run, k) => {
        const v = u.data[k + 1][idxs[k + 1] ?? idx] ?? none;
        if (!u.series[k + 1].show || v == null) return;
        const row = element("div");
        row.append(swatch(run), document.createTextNode(names[run] + "  "), element("b", "", value(v)));
        tip.append(row);
      });
      if (!tip.parentNode) box.append(tip);
      tip.hidden = false;
      const x = left + u.over.offsetLeft, wide = tip.offsetWidth;
      tip.style.left = Math.max(0, x + wide + 18 > box.clientWidth ? x - wide - 12 : x + 14) + "px";
    };
  };

  const key = (figure, runs, swatch, plot, names, bands) => {
    const k = element("div", "key");
    runs.forEach((run, i) => {
      const b = element("button");
      b.type = "button";
      b.title = names[run] + ": show or hide";
      b.setAttribute("aria-pressed", String(names !== data.runs || !hidden.has(run)));
      b.append(swatch(run), document.createTextNode(names[run]));
      b.onclick = () => {
        const show = !plot().series[i + 1].show;
        for (const s of [i + 1, ...(bands.get(i) || [])]) plot().setSeries(s, { show });
        b.setAttribute("aria-pressed", String(show));
      };
      k.append(b);
    });
    figure.append(k);
  };

  const height = (width) => (width < 420 ? 220 : 260);

  const draw = (figure, runs, swatch, options, table, tip) => {
    let plot;
    key(figure, runs, swatch, () => plot, tip.names, options.bandsOf || new Map());
    const box = element("div", "plot");
    figure.append(box);
    const width = box.clientWidth || 320;
    options.hooks = Object.assign({ setCursor: [tips(box, runs, swatch, tip)] }, options.hooks);
    plot = new uPlot(Object.assign({ width, height: height(width), legend: { show: false }, padding: [8, 14, 0, 0] }, options), table, box);
    const watch = new ResizeObserver(() => {
      const w = box.clientWidth;
      if (w && w !== plot.width) plot.setSize({ width: w, height: height(w) });
    });
    watch.observe(box);
    plots.push(() => { watch.disconnect(); plot.destroy(); });
    return plot;
  };

  const targetLine = (target) => (u) => {
    const y = Math.round(u.valToPos(target, "y", true));
    if (target == null || y < u.bbox.top || y > u.bbox.top + u.bbox.height) return;
    const g = u.ctx, scale = devicePixelRatio || 1;
    g.save();
    g.strokeStyle = g.fillStyle = css("--soft");
    g.lineWidth = scale;
    g.setLineDash([3 * scale, 3 * scale]);
    g.beginPath();
    g.moveTo(u.bbox.left, y);
    g.lineTo(u.bbox.left + u.bbox.width, y);
    g.stroke();
    g.font = 11 * scale + "px system-ui, sans-serif";
    // On the left, where lines are still below the target.
    g.textAlign = "left";
    g.textBaseline = "bottom";
    g.fillText("target " + percent(target), u.bbox.left + 4 * scale, y - 2 * scale);
    g.restore();
  };

  // Where a line went on in another mode.
  const markLines = (chart, runs) => (u) => {
    const g = u.ctx, scale = devicePixelRatio || 1;
    g.save();
    g.font = 11 * scale + "px system-ui, sans-serif";
    g.textBaseline = "top";
    (chart.marks || []).forEach((m, k) => {
      const line = runs.indexOf(m.run), x = Math.round(u.valToPos(m.x, "x", true));
      if (line < 0 || !u.series[line + 1].show || x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
      g.strokeStyle = g.fillStyle = colour(m.run);
      g.lineWidth = scale;
      g.setLineDash([2 * scale, 3 * scale]);
      g.beginPath();
      g.moveTo(x, u.bbox.top);
      g.lineTo(x, u.bbox.top + u.bbox.height);
      g.stroke();
      const right = x > u.bbox.left + u.bbox.width * 0.8;
      g.textAlign = right ? "right" : "left";
      g.fillText("\u2192 " + m.text, x + (right ? -3 : 3) * scale, u.bbox.top + (2 + 13 * (k % 3)) * scale);
    });
    g.restore();
  };

  // What happened in a run: a line with a letter, which says it where the pointer rests on it.
  const eventMarks = (chart, runs) => {
    let made = null, marks = [];
    return (u) => {
      if (made !== chart.events) {
        marks.forEach((e) => e.remove());
        made = chart.events;
        marks = (made || []).map((m) => {
          const e = element("i", "event " + m.kind, m.letter);
          e.title = m.text;
          u.over.append(e);
          return e;
        });
      }
      marks.forEach((e, k) => {
        const m = made[k], line = runs.indexOf(m.run), x = u.valToPos(m.x, "x");
        e.hidden = line < 0 || !u.series[line + 1].show || !(x >= 0 && x <= u.over.clientWidth);
        e.style.left = x + "px";
      });
    };
  };

  const lineChart = (figure, chart) => {
    const names = chart.names || data.runs;
    const runs = chart.lines.map((_, i) => i).filter((i) => chart.lines[i].x.length > 0);
    if (!runs.length) return void figure.append(element("p", "empty", chart.empty));
    const value = chart.percent ? percent : short;
    const shown = (i) => !!chart.names || !hidden.has(i);
    const series = runs.map((i) => ({
      label: names[i], stroke: colour(i), width: 2, dash: dash(i), scale: "y", show: shown(i),
      // Where there are many they would cover the line.
      points: { show: (u, s) => !!chart.points && u.data[s].filter((v) => v != null).length * 12 * (devicePixelRatio || 1) < u.bbox.width,
        size: 6, fill: colour(i), stroke: colour(i) },
    }));
    // The edges of the bands come after the lines, so that a line's place does not depend on them.
    const tableOf = (lines) => {
      const columns = runs.map((i) => [lines[i].x, lines[i].y]);
      runs.forEach((i) => { if (lines[i].low) columns.push([lines[i].x, lines[i].high], [lines[i].x, lines[i].low]); });
      return uPlot.join(columns);
    };
    const bands = [], bandsOf = new Map();
    runs.forEach((i, k) => {
      if (!chart.lines[i].low) return;
      const first = series.length + 1;
      for (let edge = 0; edge < 2; edge++) series.push({ scale: "y", width: 0, show: shown(i), points: { show: false } });
      bands.push({ series: [first, first + 1], fill: colour(i) + "2e" });
      bandsOf.set(k, [first, first + 1]);
    });
    const table = tableOf(chart.lines);
    const few = chart.x === "workers" ? [...new Set(table[0])] : null;
    // Around one value uPlot leaves as much air as the value has; shares have none above 1.
    const inside = ([lo, hi]) => (chart.percent ? [Math.max(lo, 0), Math.min(hi, 1)] : [lo, hi]);
    const plot = draw(figure, runs, lineSwatch, {
      bands, bandsOf,
      scales: { x: { time: false, distr: few ? 3 : 1, log: 2,
        range: (u, lo, hi) => few ? [few[0] / 1.15, few[few.length - 1] * 1.15] : [lo === u.data[0][0] ? Math.min(0, lo) : Math.max(0, lo), Math.min(hi, u.data[0][u.data[0].length - 1] || hi) || 1] },
        y: { distr: chart.log ? 3 : 1, range: (u, lo, hi) => {
          if (lo == null) return chart.log ? [0.1, 1] : [0, 1];
          if (chart.log) return [lo / 1.15, hi * 1.15];
          if (chart.zero) return inside(uPlot.rangeNum(0, hi || 1, 0.1, true));
          if (chart.target != null) { lo = Math.min(lo, chart.target); hi = Math.max(hi, chart.target); }
          return inside(uPlot.rangeNum(lo, hi, 0.08, false));
        } } },
      series: [{}, ...series],
      axes: [axis(Object.assign({ label: chart.x, values: (u, vs) => vs.map(chart.x === "bytes" ? bytes : short), space: 60, size: 30 },
        few && { splits: () => few, filter: (u, marks) => marks })),
        axis(Object.assign({ values: (u, vs) => vs.map(value), size: fit },
          chart.log && { splits: logMarks, filter: (u, marks) => marks }))],
      cursor: { y: false, drag: { x: true, y: false }, dataIdx: nearest },
      hooks: { draw: [targetLine(chart.target), markLines(chart, runs), eventMarks(chart, runs)] },
    }, table, { title: (u, i) => unit[chart.x](u.data[0][i]), value, names });
    // The same lines, further on.
    return (now) => { chart.marks = now.marks; chart.events = now.events; plot.setData(tableOf(now.lines)); };
  };

  const barChart = (figure, chart) => {
    const runs = chart.shares.map((_, i) => i).filter((i) => chart.shares[i].length > 0);
    if (!runs.length) return void figure.append(element("p", "empty", chart.empty));
    const places = chart.bins.map((_, i) => i), wide = 0.8 / runs.length, scale = devicePixelRatio || 1;
    // Half a place of air on both sides, or the outer bars are cut; wide single bars look like a mistake.
    const air = Math.max(0.6, (6 - places.length) / 2);
    const series = runs.map((run, k) => ({
      label: data.runs[run], scale: "y", stroke: colour(run), width: 1, points: { show: false }, show: !hidden.has(run),
      fill: (u) => u.ctx.createPattern(tile(run, scale), "repeat"),
      paths: uPlot.paths.bars({ disp: {
        x0: { unit: 1, values: () => places.map((d) => d - 0.4 + k * wide) },
        size: { unit: 1, values: () => places.map(() => wide * 0.92) },
      } }),
    }));
    draw(figure, runs, barSwatch, {
      scales: { x: { time: false, range: () => [-air, places.length - 1 + air] }, y: { range: (u, lo, hi) => [0, Math.min(1, hi * 1.08) || 1] } },
      series: [{}, ...series],
      axes: [axis({ label: "delay in versions", size: 30, grid: { show: false },
        splits: (u) => {
          const step = Math.ceil((places.length * (6 + 7 * Math.max(...chart.bins.map((b) => b.length)))) / (u.bbox.width / scale));
          return places.filter((d) => d % step === 0);
        },
        values: (u, vs) => vs.map((d) => chart.bins[d]) }),
        axis({ values: (u, vs) => vs.map(percent), size: fit })],
      cursor: { y: false, x: false, drag: { x: false, y: false }, points: { show: false } },
    }, [places, ...runs.map((i) => chart.shares[i].map((share) => share || null))],
    { title: (u, i) => "delay " + chart.bins[i], value: percent, none: 0, names: data.runs });
  };

  const clear = () => {
    plots.forEach((end) => end());
    plots = [];
  };
  return { lineChart, barChart, lineSwatch, element, svg, short, percent, bytes, clear };
};
