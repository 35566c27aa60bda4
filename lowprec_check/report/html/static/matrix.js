// Sorts and filters the matrix. What is chosen is also the URL's hash, so that a link shows the same rows.
"use strict";
(() => {
  const at = (id) => document.getElementById(id);
  const table = at("matrix"), body = table.tBodies[0], given = [...body.rows], shown = at("shown");
  const headings = [...table.tHead.rows[0].cells], words = [...document.querySelectorAll(".words [data-word]")];
  const chosen = {};
  const reset = () => Object.assign(chosen, {q: "", op: "", code: "", sort: "", by: "error", down: false, status: new Set()});
  const list = (text) => (text ? text.split(" ").map(Number) : []);
  const facts = new Map(given.map((row) => [row, {
    text: row.textContent.toLowerCase(),
    word: row.dataset.word,
    codes: list(row.dataset.codes),
    cells: [...row.cells].slice(3).map((cell) => ({cell, word: cell.dataset.word, ops: list(cell.dataset.ops), codes: list(cell.dataset.codes)})),
  }]));

  const value = (row, column) => {
    const data = row.cells[column].dataset, key = column > 2 ? data[chosen.by] : data.key, number = Number(key);
    return key !== "" && Number.isFinite(number) ? number : key;
  };
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));

  // Where a name is among the options of a selection, without the first, which is "any"; -1 if the page has none of that name.
  const position = (id, name) => (at(id) ? [...at(id).options].findIndex((option, index) => index && option.value === name) - 1 : -1);

  // A cell matches if all of status, op and finding are its own; a finding about the whole model is that of each of its cells.
  const filtered = () => {
    const op = position("op", chosen.op), code = position("code", chosen.code);
    const matches = (fact, each) =>
      (!chosen.status.size || chosen.status.has(each.word)) &&
      (!chosen.op || each.ops.includes(op)) &&
      (!chosen.code || each.codes.includes(code) || fact.codes.includes(code));
    const some = chosen.status.size || chosen.op || chosen.code;
    let count = 0;
    for (const row of given) {
      const fact = facts.get(row), found = fact.cells.filter((each) => matches(fact, each));
      const failed = fact.word && chosen.status.has(fact.word) && !chosen.op && !chosen.code;
      for (const each of fact.cells) each.cell.classList.toggle("match", Boolean(some) && found.includes(each));
      row.hidden = !(fact.text.includes(chosen.q.toLowerCase()) && (!some || found.length || failed));
      count += row.hidden ? 0 : 1;
    }
    shown.textContent = `${count} of ${given.length} models`;
    at("all").hidden = count === given.length;
  };

  const sorted = () => {
    const column = chosen.sort === "" ? -1 : Number(chosen.sort);
    headings.forEach((heading, index) => {
      if (index === column) heading.setAttribute("aria-sort", chosen.down ? "descending" : "ascending");
      else heading.removeAttribute("aria-sort");
    });
    const rows = column < 0 ? given : [...given].sort((a, b) => order(value(a, column), value(b, column)) * (chosen.down ? -1 : 1));
    body.replaceChildren(...rows);
  };

  const show = () => {
    for (const id of ["op", "code", "sort", "by"]) if (at(id)) at(id).value = chosen[id];
    if (at("filter").value !== chosen.q) at("filter").value = chosen.q;
    at("down").setAttribute("aria-pressed", String(chosen.down));
    for (const word of words) word.setAttribute("aria-pressed", String(chosen.status.has(word.dataset.word)));
    sorted();
    filtered();
  };

  const hash = () => {
    const parts = new URLSearchParams();
    for (const name of ["q", "op", "code"]) if (chosen[name]) parts.set(name, chosen[name]);
    if (chosen.status.size) parts.set("status", [...chosen.status].join(","));
    if (chosen.sort !== "") parts.set("sort", headings[Number(chosen.sort)].textContent);
    if (chosen.by !== "error") parts.set("by", chosen.by);
    if (chosen.down) parts.set("order", "down");
    return String(parts);
  };
  const change = (changes) => {
    Object.assign(chosen, changes);
    show();
    history.replaceState(null, "", `#${hash()}`);
  };

  // A hash without "=" is the anchor of a section. What the page does not have is left out.
  const read = () => {
    if (location.hash.length > 1 && !location.hash.includes("=")) return;
    const parts = new URLSearchParams(location.hash.slice(1)), known = (id, name) => (position(id, name) < 0 ? "" : name);
    reset();
    chosen.q = parts.get("q") ?? "";
    chosen.op = known("op", parts.get("op"));
    chosen.code = known("code", parts.get("code"));
    const column = headings.findIndex((heading) => heading.textContent === parts.get("sort"));
    chosen.sort = column < 0 ? "" : String(column);
    chosen.by = ["time", "memory"].find((name) => name === parts.get("by")) ?? "error";
    chosen.down = parts.get("order") === "down";
    const wanted = (parts.get("status") ?? "").split(",");
    for (const {dataset} of words) if (wanted.includes(dataset.word)) chosen.status.add(dataset.word);
    show();
    if (location.hash.length > 1) at("models").scrollIntoView();
  };

  headings.forEach((heading, column) =>
    heading.firstElementChild.addEventListener("click", () =>
      change({sort: String(column), down: heading.getAttribute("aria-sort") === "ascending"})));
  for (const word of words) {
    word.addEventListener("click", () => {
      const status = new Set(chosen.status);
      if (!status.delete(word.dataset.word)) status.add(word.dataset.word);
      change({status});
    });
  }
  for (const id of ["op", "code", "sort", "by"]) at(id)?.addEventListener("change", (event) => change({[id]: event.target.value}));
  at("down").addEventListener("click", () => change({down: !chosen.down}));
  at("filter").addEventListener("input", (event) => change({q: event.target.value}));
  at("all").addEventListener("click", () => {
    change({q: "", op: "", code: "", status: new Set()});
    at("filter").focus();
  });
  addEventListener("hashchange", read);
  read();
})();
