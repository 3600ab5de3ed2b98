// Draws the charts of report.html from the JSON in #data.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const { lineChart, barChart, lineSwatch, element, clear } = paraftCharts(data);
  const root = document.documentElement;
  const asked = new URLSearchParams(location.search).get("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const build = () => {
    clear();
    root.dataset.theme = asked === "dark" || asked === "light" ? asked : dark.matches ? "dark" : "light";
    document.querySelectorAll("th[data-run]").forEach((th) => {
      th.querySelector(".swatch")?.remove();
      if (data.runs.length > 1) th.prepend(lineSwatch(+th.dataset.run));
    });
    const place = document.getElementById("charts");
    place.replaceChildren();
    for (const group of data.groups) {
      const section = element("section"), pair = element("div", group.charts.length === 3 ? "pair three" : "pair");
      section.append(element("h2", "", group.title), pair, element("p", "note", group.note));
      place.append(section);
      for (const chart of group.charts) {
        const figure = element("figure");
        figure.append(element("h3", "", chart.title));
        pair.append(figure);
        (chart.bins ? barChart : lineChart)(figure, chart);
      }
    }
  };
  dark.addEventListener("change", build);
  build();
})();
