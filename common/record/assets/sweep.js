// The page of a sweep: its lines, and its table, which is sorted.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const asked = new URLSearchParams(location.search).get("theme");
  const place = document.getElementById("lines"), rows = {};
  document.querySelectorAll("#trials tbody tr").forEach((tr) => { rows[tr.dataset.trial] = tr; });
  let mark = () => {};
  const point = (trial, on) => {
    rows[trial]?.classList.toggle("pointed", on);
    mark(trial, on);
  };
  const draw = () => {
    root.dataset.theme = asked === "dark" || asked === "light" ? asked : dark.matches ? "dark" : "light";
    mark = paraftLines(place, data, point);
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
