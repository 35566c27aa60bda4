// The module tree: a WAI-ARIA tree grid of rows.
"use strict";
function moduleTree() {
  const body = byId("heat").tBodies[0], rows = [...body.rows];
  const parents = rows.map((row) => Number(row.dataset.parent));
  const isOpen = (row) => row.getAttribute("aria-expanded") === "true";
  const layOut = () => {
    const shown = [];
    rows.forEach((row, i) => {
      const parent = parents[i];
      shown[i] = parent < 0 || (shown[parent] && isOpen(rows[parent]));
      row.hidden = !shown[i];
    });
  };
  const open = (row, yes) => { if (row.hasAttribute("aria-expanded")) { row.setAttribute("aria-expanded", yes); layOut(); } };
  const focus = (row) => { if (!row) return; for (const other of rows) other.tabIndex = -1; row.tabIndex = 0; row.focus(); };
  const visible = () => rows.filter((row) => !row.hidden);
  body.addEventListener("click", (event) => { const row = event.target.closest("tr"); open(row, !isOpen(row)); focus(row); });
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr"), list = visible(), at = list.indexOf(row);
    const moves = {
      ArrowDown: () => focus(list[at + 1]), ArrowUp: () => focus(list[at - 1]), Home: () => focus(list[0]), End: () => focus(list[list.length - 1]),
      ArrowRight: () => (isOpen(row) || !row.hasAttribute("aria-expanded") ? focus(list[at + 1]) : open(row, true)),
      ArrowLeft: () => (isOpen(row) ? open(row, false) : focus(rows[Number(row.dataset.parent)])),
      Enter: () => open(row, !isOpen(row)), " ": () => open(row, !isOpen(row)),
    };
    if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
  });
  const all = (yes) => { for (const row of rows) if (row.hasAttribute("aria-expanded")) row.setAttribute("aria-expanded", yes); layOut(); };
  byId("open-all").addEventListener("click", () => all(true));
  byId("close-all").addEventListener("click", () => all(false));
  byId("heat-metric").addEventListener("change", (event) => {
    const metric = event.target.value, isAmount = metric === "s" || metric === "t";
    for (const legend of document.querySelectorAll(".scale")) legend.hidden = legend.dataset.metric !== (isAmount ? metric : "error");
    for (const cell of body.querySelectorAll("td")) {
      const value = cell.dataset[metric], bar = value.indexOf("|");
      cell.className = `${isAmount ? "q" : "h"}${value.slice(0, bar)}`;
      cell.firstElementChild.textContent = value.slice(bar + 1);
    }
  });
  // The module chosen is marked, and shown even if a module that holds it was collapsed.
  whenChosen(({ module }) => {
    rows.forEach((row, i) => {
      const is = module !== null && row.cells[0].title === module;
      row.classList.toggle("chosen", is);
      if (!is) return;
      for (let up = parents[i]; up >= 0; up = parents[up]) rows[up].setAttribute("aria-expanded", true);
    });
    layOut();
  });
}

if (byId("heat")) moduleTree();
