// Sorts the table when a heading is clicked, and filters it.
"use strict";
(() => {
  const table = document.getElementById("matrix"), body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  const value = (row, column) => {
    const key = row.cells[column].dataset.key, number = Number(key);
    return key !== "" && Number.isFinite(number) ? number : key;
  };
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  headings.forEach((heading, column) => {
    heading.firstElementChild.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) => order(value(a, column), value(b, column)) * (down ? -1 : 1));
      body.replaceChildren(...rows);
    });
  });
  document.getElementById("filter").addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase();
    for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
})();
