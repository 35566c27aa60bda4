// What the parts of the page share: the packed op calls, texts of figures, and what is chosen.
"use strict";
const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const FLOOR = 1e-9;

// -- data: unpacked once; the text columns of a run are made when it is first shown

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const digits = (value) => (value === null ? "–" : value === 0 ? "0" : value.toExponential(1));
const percent = (share) => `${(share * 100).toFixed(1)} %`;

const shareText = (share) => (share === null ? "–" : Math.abs(share) < 0.005 ? "< 1 %" : `${(share * 100).toFixed(0)} %`);

function callsOf(data, run) {
  if (run.table) return run.table;
  const packed = run.calls;
  const table = { x: packed.index.map((i) => i + 1), index: packed.index.map((i) => i + 1) };
  for (const name of ["op", "module", "source", "dtypes", "shape"]) {
    const words = data.strings[name];
    table[name] = packed[name].map((number) => words[number] || (name === "module" ? "(model)" : "–"));
  }
  table.phase = packed.phase || packed.index.map(() => "");
  table.local_text = packed.local_error.map(digits);
  table.accumulated_text = packed.accumulated_error.map((value, i) => (packed.nonfinite[i] ? "Inf/NaN" : digits(value)));
  table.share_text = packed.index.map((_, i) => (packed.share.length ? shareText(packed.share[i]) : "–"));
  table.note = packed.index.map((_, i) => {
    if (packed.nonfinite[i]) return `${packed.nonfinite[i]} values are Inf or NaN`;
    return packed.rescued[i] ? "no kernel: computed in fp32" : "";
  });
  run.table = table;
  return table;
}

const inPhase = (table, i) => (table.phase[i] && table.phase[i] !== "forward" ? ` (${table.phase[i]})` : "");

const pick = (table, rows, extra) => {
  const part = {};
  for (const name of Object.keys(table)) part[name] = rows.map((i) => table[name][i]);
  return Object.assign(part, extra);
};

// An element with these properties, holding texts and other elements.
function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function fillTable(id, rows) {
  byId(id).tBodies[0].replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    for (const text of cells) row.insertCell().textContent = text;
    return row;
  }));
}

// -- what is chosen: one run and one module (null: the whole model), which every part that shows op calls follows

const chosen = { run: 0, module: null };
const followers = [];
const whenChosen = (follow) => followers.push(follow);
function choose(change) {
  Object.assign(chosen, change);
  for (const follow of followers) follow(chosen);
}
// Whether the module of an op call, as the page names it, is the chosen one or inside it.
const isInChosen = (module) => chosen.module === null || module === chosen.module || module.startsWith(`${chosen.module}.`);
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-module]");
  if (link) choose({ module: link.dataset.module === "(model)" ? null : link.dataset.module });
});
