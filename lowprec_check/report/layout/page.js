// What a page can do beyond showing: theme, copied code, sorted and searched tables, folded rows, the rows of one module.
"use strict";
(() => {
  const all = (what, within = document) => [...within.querySelectorAll(what)];
  const make = (tag, text, more = {}) => Object.assign(document.createElement(tag), { textContent: text }, more);
  const root = document.documentElement, themes = document.getElementById("themes");
  root.classList.add("js");
  themes.hidden = false;
  themes.querySelector("select").addEventListener("change", (event) => { root.dataset.theme = event.target.value; });

  for (const box of all(".code")) {
    const button = make("button", "Copy", { type: "button" }), code = box.querySelector("code");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {  // a local file may not copy: select the code instead
        getSelection().selectAllChildren(code);
        button.textContent = "Selected: press Ctrl+C";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2500);
    });
    box.prepend(button);
  }

  const OPEN = 30;  // rows of a tree that are visible at first
  let chosen = "";
  const inside = (module, other) => module === other || module.startsWith(`${other}.`);
  const twist = (row, change, open) => {
    const name = `Rows below ${row.cells[0].textContent.trim()}`;
    const button = make("button", "", { type: "button", className: "twist", ariaLabel: name, ariaExpanded: open });
    button.addEventListener("click", () => { button.ariaExpanded = button.ariaExpanded !== "true"; change(button.ariaExpanded === "true"); });
    row.cells[0].prepend(button);
  };
  const sorting = (cell) => cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
  const order = (a, b) => typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
  const unknown = (value) => value === "–" || Number.isNaN(value);

  const tables = all("table").map((table) => {
    const body = table.tBodies[0], closed = new Set(), items = [];
    let wanted = "";
    for (const row of [...body.rows]) {
      if (row.className === "below") items.at(-1).below = row;
      else items.push({ row, depth: Number(row.dataset.d ?? 0), text: row.textContent.toLowerCase() });
    }
    const isTree = items.some((item) => item.depth);
    const count = make("output", "");
    const draw = () => {
      let hiddenBelow = Infinity, shown = 0;
      for (const item of items) {
        const { module } = { module: item.row.dataset.m };
        if (item.depth <= hiddenBelow) hiddenBelow = Infinity;
        const folded = hiddenBelow !== Infinity && !wanted && !chosen;
        if (closed.has(item) && hiddenBelow === Infinity) hiddenBelow = item.depth;
        const elsewhere = chosen && module !== undefined && !inside(module, chosen) && !(isTree && (module === "" || inside(chosen, module)));
        item.row.hidden = folded || elsewhere || !item.text.includes(wanted);
        if (item.below) item.below.hidden = item.row.hidden;
        shown += !item.row.hidden;
      }
      count.textContent = `${shown} of ${items.length} rows`;
    };
    if (isTree) {
      const depths = items.map((item) => item.depth);
      let most = 1;
      while (most < Math.max(...depths) && depths.filter((depth) => depth <= most + 1).length <= OPEN) most += 1;
      items.forEach((item, index) => {
        if (!(items[index + 1]?.depth > item.depth)) return;
        if (item.depth >= most) closed.add(item);
        twist(item.row, (open) => { closed[open ? "delete" : "add"](item); draw(); }, item.depth < most);
      });
    }
    for (const item of items) if (item.below) twist(item.row, (open) => item.below.classList.toggle("open", open), false);
    table.classList.toggle("folds", isTree || items.some((item) => item.below));

    if (table.classList.contains("searchable")) {
      const search = make("input", "", { type: "search", placeholder: "search", ariaLabel: `Search ${table.caption.textContent}` });
      search.addEventListener("input", () => { wanted = search.value.trim().toLowerCase(); draw(); });
      const tools = make("div", "", { className: "tools" });
      tools.append(search, count);
      table.parentElement.before(tools);
      for (const [index, head] of isTree ? [] : [...table.tHead.rows[0].cells].entries()) {
        const button = make("button", head.textContent, { type: "button", className: "sort" });
        head.replaceChildren(button);
        button.addEventListener("click", () => {
          const down = head.ariaSort === "descending" || (!head.ariaSort && !head.classList.contains("n")) ? 1 : -1;
          all("[aria-sort]", table.tHead).forEach((other) => other.removeAttribute("aria-sort"));
          head.ariaSort = down === 1 ? "ascending" : "descending";
          items.sort((one, other) => {
            const [a, b] = [one, other].map((item) => sorting(item.row.cells[index]));
            return unknown(a) - unknown(b) || down * order(a, b);
          });
          body.append(...items.flatMap((item) => item.below ? [item.row, item.below] : [item.row]));
        });
      }
    }
    draw();
    return draw;
  });

  const filter = make("div", "", { id: "filter", hidden: true, role: "status" });
  document.body.append(filter);
  const choose = () => {
    if (location.hash.startsWith("#m=")) chosen = decodeURIComponent(location.hash.slice(3));
    filter.hidden = !chosen;
    filter.replaceChildren(`Only rows of ${chosen} · `, make("a", "show all", { href: "#m=" }));
    tables.forEach((draw) => draw());
  };
  addEventListener("hashchange", choose);
  choose();

  let opened = [];
  addEventListener("beforeprint", () => { opened = all("details:not([open])"); opened.forEach((one) => { one.open = true; }); });
  addEventListener("afterprint", () => opened.forEach((one) => { one.open = false; }));
})();
