// Draws the grid of operators and versions. What is chosen is also the URL's hash: #torch=2.9&device=xpu&op=dot.
"use strict";
(() => {
  const at = (id) => document.getElementById(id);
  const { columns, dtypes, cells, lines } = JSON.parse(at("data").textContent);
  const words = { a: "yes", s: "part", n: "no", o: "–", f: "cpu", p: "mix", "-": "" };
  const spoken = { a: "yes", s: "some samples", n: "no", o: "no, not even in fp32", f: "yes, on the CPU", p: "yes, partly on the CPU", "-": "unknown" };
  const unique = (values) => [...new Set(values)];
  let shown = [];  // indices of the columns of the chosen device and version

  const make = (tag, text, className, more = {}) => {
    const element = Object.assign(document.createElement(tag), more);
    element.textContent = text;
    if (className) element.className = className;
    return element;
  };
  const first = (i) => (i > 0 && columns[i - 1].device !== columns[i].device && shown[0] !== i ? "first" : "");

  const head = () => {
    const device = at("device").value, torch = at("torch").value;
    shown = [...columns.keys()].filter((i) => (!device || columns[i].device === device) && (!torch || columns[i].label === torch));
    const groups = unique(shown.map((i) => columns[i].device)).map((name) => {
      const of = shown.filter((i) => columns[i].device === name);
      const declared = columns[of[0]].evidence === "declared" ? ", declared" : "";
      return make("th", name + declared, first(of[0]), { colSpan: of.length, scope: "colgroup" });
    });
    at("grid").className = torch ? "one" : "";
    at("devices").replaceChildren(make("td", ""), ...groups);
    const names = shown.map((i) => make("th", columns[i].label.replace(/ \+ ipex.*/, " +ipex"), first(i), { scope: "col", title: columns[i].label }));
    at("versions").replaceChildren(make("th", "operator", "", { scope: "col" }), ...names);
  };

  const toggle = (button, why) => {
    const open = button.getAttribute("aria-expanded") !== "true", row = button.closest("tr");
    button.setAttribute("aria-expanded", open);
    if (!open) return row.nextSibling.remove();
    const cell = make("td", "", "why", { colSpan: shown.length + 1 }), detail = document.createElement("tr");
    cell.append(make("div", why));
    detail.append(cell);
    row.after(detail);
  };

  const drawn = (line, states, why) => {
    const row = document.createElement("tr"), name = make("th", "", "", { scope: "row" });
    const button = make("button", line.op, "", { type: "button", title: why, disabled: !why, onclick: () => toggle(button, why) });
    if (why) button.setAttribute("aria-expanded", false);
    name.append(button);
    row.append(name, ...shown.map((i) => {
      const letter = states[i], { device, label } = columns[i], title = `${line.op} · ${device} ${label}: ${spoken[letter]}`;
      return make("td", (at("torch").value ? spoken : words)[letter], `${letter === "-" ? "x" : letter} ${first(i)}`, { title });
    }));
    return row;
  };

  const draw = () => {
    const dtype = at("dtype").value, cell = cells.indexOf(`${dtype}/${at("mode").value}`), wanted = at("name").value.trim().toLowerCase();
    const rows = [];
    for (const line of lines) {
      const states = line.states[cell], name = line.op.toLowerCase();
      if (at("gaps").checked && !shown.some((i) => "sn".includes(states[i]))) continue;
      if (!name.includes(wanted)) continue;
      const row = drawn(line, states, line.why[dtypes.indexOf(dtype)]);
      if (name === wanted) rows.unshift(row);
      else rows.push(row);
    }
    at("body").replaceChildren(...rows);
    const none = shown.length ? "" : `; no data for torch ${at("torch").value} on ${at("device").value}`;
    at("count").textContent = `${rows.length} of ${lines.length} operators${none}`;
  };

  // The names in the hash, and where they are chosen. What the page does not have is left out.
  const chosen = { torch: "torch", device: "device", precision: "dtype", mode: "mode" };
  const write = () => {
    const parts = new URLSearchParams();
    for (const [name, id] of Object.entries(chosen)) if (at(id).selectedIndex) parts.set(name, at(id).selectedOptions[0].textContent);
    if (at("name").value) parts.set("op", at("name").value);
    if (!at("gaps").checked) parts.set("all", "1");
    history.replaceState(null, "", `#${parts}`);
  };
  const read = () => {
    const parts = new URLSearchParams(location.hash.slice(1));
    for (const [name, id] of Object.entries(chosen)) {
      at(id).selectedIndex = Math.max(0, [...at(id).options].findIndex((option) => option.textContent === parts.get(name)));
    }
    at("name").value = parts.get("op") ?? "";
    at("gaps").checked = !(parts.has("all") || parts.has("op"));
    head();
    draw();
  };

  for (const [id, values] of [["torch", columns.map((c) => c.label)], ["device", columns.map((c) => c.device)]]) {
    at(id).append(...unique(values).map((value) => make("option", value, "", { value })));
  }
  for (const id of ["torch", "device", "dtype", "mode", "gaps", "name"]) {
    at(id).addEventListener("input", () => { head(); draw(); write(); });
  }
  addEventListener("hashchange", read);
  read();
})();
