// The operator table: a row for each op of the run and module chosen, which unfolds to its calls.
"use strict";
const MOST_OPS = 200, CALLS_AT_ONCE = 25, MOST_CALLS = 500;  // rows; the search finds the others

// -- figures of some calls: what a row shows, of an op or of one call

const sumOf = (values) => values.reduce((a, b) => a + b, 0);
const worstOf = (values) => values.reduce((worst, value) => (value !== null && (worst === null || value > worst) ? value : worst), null);
const known = (values) => values.filter((value) => value !== null);

// The value below which that part of the sorted values lies, interpolated between two of them.
function quantile(sorted, part) {
  const at = part * (sorted.length - 1), below = Math.floor(at), next = sorted[Math.min(below + 1, sorted.length - 1)];
  return sorted[below] + (at - below) * (next - sorted[below]);
}

function changesDtype(dtypes) {
  const [before, after] = dtypes.split("→");
  return Boolean(before && after) && [...new Set(before.split("+"))].sort().join() !== [...new Set(after.split("+"))].sort().join();
}

function figuresOf(calls, table, rows) {
  const of = (name) => rows.map((i) => calls[name][i]);
  const times = known(of("time_ms")), pairs = rows.filter((i) => calls.time_ms[i] !== null && calls.reference_ms[i]);
  const ratios = pairs.map((i) => calls.time_ms[i] / calls.reference_ms[i]).sort((a, b) => a - b), isSpread = ratios.length > 1;
  const shares = calls.share.length ? known(of("share")) : [], lost = of("nonfinite"), counts = new Map();
  for (const i of rows) counts.set(table.dtypes[i], (counts.get(table.dtypes[i]) || 0) + 1);
  const dtypes = [...counts].reduce((most, one) => (one[1] > most[1] ? one : most), ["", 0])[0];
  return {
    calls: rows.length, time_ms: times.length ? sumOf(times) : null, paired: ratios.length,
    ratio: pairs.length ? sumOf(pairs.map((i) => calls.time_ms[i])) / sumOf(pairs.map((i) => calls.reference_ms[i])) : null,
    low: isSpread ? quantile(ratios, 0.25) : null, high: isSpread ? quantile(ratios, 0.75) : null,
    local: worstOf(of("local_error")), accumulated: worstOf(of("accumulated_error")), share: shares.length ? sumOf(shares) : null,
    changes: rows.filter((i) => changesDtype(table.dtypes[i])).length, recast: sumOf(of("recast")),
    dtypes, others: Math.max(0, counts.size - 1), nonfinite: sumOf(lost), nonfinite_calls: lost.filter(Boolean).length,
  };
}

const NOTHING = { calls: 0, time_ms: null, paired: 0, ratio: null, low: null, high: null, local: null, accumulated: null, share: null,
  changes: 0, recast: 0, dtypes: "", others: 0, nonfinite: 0, nonfinite_calls: 0 };

// -- the rows of the module chosen that match the search

function opRows(data, run, wanted) {
  const table = callsOf(data, run), byKey = new Map(), matches = matcher(data, run.calls, wanted), isSearch = Boolean(wanted);
  const row = (op, phase) => {
    const key = `${op}\n${phase}`;
    if (!byKey.has(key)) byKey.set(key, { op, phase, own: [], gaps: 0, extra: null });
    return byKey.get(key);
  };
  table.x.forEach((_, i) => { if (matches(i)) row(table.op[i], table.phase[i]).own.push(i); });
  const sums = isSearch ? null : sumsOf(run);
  if (sums) for (const one of sums) row(one.op, one.phase).figures = one;
  for (const extra of run.operators.extras) {
    const isFound = [extra.op, extra.module, extra.source, extra.dtypes].some((text) => text.toLowerCase().includes(wanted));
    if (!isInChosen(extra.module) || !isFound) continue;
    const found = row(extra.op, extra.phase);
    found.gaps += extra.gaps;
    if (extra.share !== null) found.extra = (found.extra || 0) + extra.share;
  }
  const rows = [...byKey.values()];
  for (const found of rows) {
    found.figures = found.figures || (found.own.length ? figuresOf(run.calls, table, found.own) : { ...NOTHING });
    if (found.extra !== null) found.figures.share = (found.figures.share || 0) + found.extra;
  }
  return { rows, isWhole: table.x.length === run.total || Boolean(sums) };
}

// The sums over all calls of a run that is too long to be packed whole; null if there are none for this module.
function sumsOf(run) {
  const sums = run.operators.sums;
  if (!sums) return null;
  const rows = sums.op.map((_, i) => i).filter((i) => sums.module[i] === chosen.module);
  return rows.length ? rows.map((i) => Object.fromEntries(Object.keys(sums).map((name) => [name, sums[name][i]]))) : null;
}

// Texts are compared once for each different one, not for each call.
function matcher(data, calls, wanted) {
  const inside = data.strings.module.map((module) => isInChosen(module || "(model)"));
  const found = {};
  for (const name of ["op", "module", "source", "dtypes"]) {
    found[name] = data.strings[name].map((text) => (text || (name === "module" ? "(model)" : "")).toLowerCase().includes(wanted));
  }
  return (i) => inside[calls.module[i]] && (found.op[calls.op[i]] || found.module[calls.module[i]] || found.source[calls.source[i]] || found.dtypes[calls.dtypes[i]]);
}

// -- columns: the key that sorts, the cell, and whether anything is known

const msText = (ms) => (ms === null ? "–" : ms >= 99.95 ? ms.toFixed(0) : ms >= 9.995 ? ms.toFixed(1) : ms >= 0.9995 ? ms.toFixed(2) : ms.toPrecision(2));
const ratioText = (ratio) => (ratio >= 9.95 ? ratio.toFixed(0) : ratio >= 0.995 ? ratio.toFixed(1) : ratio.toFixed(2));
const shortCount = (number) => number.toLocaleString("en");

// ``bf16+f32→bf16``, which may break after the arrow; a dash if nothing is floating.
function dtypesText(dtypes) {
  const [before, after] = dtypes.split("→");
  return after === undefined ? [dtypes || "–"] : before || after ? [`${before}→`, element("wbr"), after] : ["–"];
}

function levelOf(levels, error, tolerance) {
  return error && tolerance ? 1 + levels.filter((bound) => error > bound * tolerance).length : 0;
}

function opColumns(data, run, has) {
  const total = run.operators.time_ms, error = (cell, value, isLost) => {
    cell.append(element("span", { className: `error h${isLost ? 8 : levelOf(data.levels, value, run.tolerance)}` }, isLost ? "Inf/NaN" : digits(value)));
  };
  const dash = (cell, text) => { cell.textContent = text || "–"; };
  return [
    { name: "calls", key: (f) => f.calls, cell: (cell, f, isCall) => { if (!isCall) dash(cell, f.calls ? shortCount(f.calls) : ""); } },
    { name: "ms", if: has.time, key: (f) => f.time_ms, cell: (cell, f) => dash(cell, msText(f.time_ms)) },
    { name: "time share", title: "share of the time of all op calls of the run", if: has.time, key: (f) => f.time_ms, cell: (cell, f) => dash(cell, f.time_ms === null ? "" : percent(f.time_ms / total)) },
    { name: "× fp32", title: "time ÷ time of the same op in fp32", if: has.ratio, key: (f) => f.ratio, cell: (cell, f, isCall) => {
      dash(cell, f.ratio === null ? "" : `${ratioText(f.ratio)} ×`);
      const spread = f.low === null ? (f.calls > 1 ? "1 call timed" : "no spread") : `${ratioText(f.low)} – ${ratioText(f.high)}`;
      if (f.ratio !== null && !isCall) cell.append(" ", element("span", { className: "spread" }, spread));
    } },
    { name: "local", title: "the error that the op adds: the worst call", if: has.local, key: (f) => f.local, cell: (cell, f) => error(cell, f.local) },
    { name: "accumulated", title: "the error of the output: the worst call", if: has.accumulated, key: (f) => (f.nonfinite ? Infinity : f.accumulated), cell: (cell, f) => error(cell, f.accumulated, f.nonfinite) },
    { name: "error share", title: "share of the squared output error", if: has.share, key: (f) => f.share, cell: (cell, f) => dash(cell, shareText(f.share)) },
    { name: "dtype changes", title: "calls with another floating dtype out than in; repeated: casts that repeat or undo another", if: has.changes, wraps: true, key: (f) => f.changes + f.recast / 1e6, cell: (cell, f) => {
      dash(cell, f.changes || f.recast ? shortCount(f.changes) : "");
      if (f.recast) cell.append(" ", element("span", { className: "spread" }, `${shortCount(f.recast)} repeated`));
    } },
    { name: run.operators.autocast ? "autocast's choice" : "dtypes", title: "floating dtypes in → out: the most frequent", isText: true, key: (f) => f.dtypes, cell: (cell, f) => {
      cell.append(...dtypesText(f.dtypes));
      if (f.others) cell.append(" ", element("span", { className: "spread" }, `+${f.others} other${f.others > 1 ? "s" : ""}`));
    } },
    { name: "no kernel", if: has.gaps, key: (f, gaps) => gaps, cell: (cell, f, isCall, gaps) => { if (gaps) cell.append(element("span", { className: "gapmark" }, isCall ? "✕" : `✕ ${shortCount(gaps)}`)); } },
    { name: "Inf/NaN", title: "elements that are Inf or NaN although the inputs and the reference are finite", if: has.nonfinite, wraps: true, key: (f) => f.nonfinite, cell: (cell, f, isCall) => {
      if (f.nonfinite) cell.append(element("span", { className: "h8 error" }, shortCount(f.nonfinite)), isCall ? "" : ` in ${f.nonfinite_calls} call${f.nonfinite_calls > 1 ? "s" : ""}`);
    } },
  ].filter((column) => column.if !== false);
}

// What is known anywhere in the run: the other columns are left out.
function knownOf(run) {
  const calls = run.calls, any = (values) => values.some((value) => value !== null), extras = run.operators.extras, sums = run.operators.sums;
  return {
    time: run.operators.time_ms !== null, ratio: any(calls.reference_ms) && run.operators.time_ms !== null,
    local: any(calls.local_error), accumulated: any(calls.accumulated_error) || calls.nonfinite.some(Boolean),
    share: calls.share.length > 0 || extras.some((extra) => extra.share !== null), gaps: extras.some((extra) => extra.gaps) || calls.rescued.some(Boolean),
    changes: sums ? sums.changes.some(Boolean) || sums.recast.some(Boolean) : calls.recast.some(Boolean) || run.table.dtypes.some(changesDtype),
    nonfinite: sums ? sums.nonfinite.some(Boolean) : calls.nonfinite.some(Boolean),
  };
}

// -- the table

class OperatorTable {
  constructor(data) {
    this.data = data;
    this.head = byId("ops").tHead.rows[0];
    this.body = byId("ops").tBodies[0];
    this.open = new Set();
    this.sort = null;
    byId("ops-filter").addEventListener("input", () => this.fill());
    byId("ops-everywhere").addEventListener("click", () => choose({ module: null }));
  }
  show({ run, module }) {
    const shown = this.data.runs[run], everywhere = byId("ops-everywhere");
    if (shown !== this.run) {
      this.run = shown;
      callsOf(this.data, shown);
      this.columns = opColumns(this.data, shown, knownOf(shown));
      const names = this.columns.map((column) => column.name);
      if (!this.sort || !["op", ...names].includes(this.sort.name)) this.sort = { name: names.includes("ms") ? "ms" : "calls", isDown: true };
      this.fillHead();
    }
    everywhere.hidden = module === null;
    everywhere.textContent = `Module ${module} only: show the whole model`;
    this.fill();
  }
  fillHead() {
    this.head.replaceChildren(...[{ name: "op", isText: true }, ...this.columns].map((column) => {
      const button = element("button", { type: "button", title: column.title || "" }, column.name), heading = element("th", { scope: "col" }, button);
      heading.setAttribute("role", "columnheader");
      if (!column.isText) heading.className = "amount";
      button.addEventListener("click", () => {
        const isSame = this.sort.name === column.name;
        this.sort = { name: column.name, isDown: isSame ? !this.sort.isDown : !column.isText };  // the largest figure first
        this.markSort();
        this.fill();
      });
      return heading;
    }));
    this.markSort();
  }
  markSort() {
    for (const heading of this.head.cells) {
      if (heading.textContent === this.sort.name) heading.setAttribute("aria-sort", this.sort.isDown ? "descending" : "ascending");
      else heading.removeAttribute("aria-sort");
    }
  }
  // Unknown figures come last, whichever the direction; what is equal stays in the order of the run.
  sorted(rows, keyOf) {
    const keys = new Map(rows.map((row) => [row, keyOf(row)])), down = this.sort.isDown ? -1 : 1;
    const order = (a, b) => (a === null || b === null ? (a === null) - (b === null) : down * (typeof a === "string" ? a.localeCompare(b) : a === b ? 0 : a - b));
    return [...rows].sort((one, other) => order(keys.get(one), keys.get(other)));
  }
  fill() {
    const wanted = byId("ops-filter").value.trim().toLowerCase(), { rows, isWhole } = opRows(this.data, this.run, wanted);
    const column = this.columns.find((one) => one.name === this.sort.name);
    const ordered = this.sorted(rows, (row) => (column ? column.key(row.figures, row.gaps) : row.op));
    this.body.replaceChildren(...ordered.slice(0, MOST_OPS).flatMap((row) => this.opRow(row)));
    byId("ops-remark").textContent = this.remark(rows, isWhole, wanted);
  }
  remark(rows, isWhole, wanted) {
    const total = this.run.operators.time_ms, time = sumOf(known(rows.map((row) => row.figures.time_ms)));
    const counted = sumOf(rows.map((row) => row.figures.calls)), plural = (count, word) => `${shortCount(count)} ${word}${count === 1 ? "" : "s"}`;
    const packed = this.run.calls.index.length;
    return [
      `${plural(rows.length, "op")}, ${plural(counted, "call")}${wanted ? " found" : ""}${chosen.module === null ? "" : ` in ${chosen.module}`}`
        + (total === null ? "." : `; ${msText(time)} of ${msText(total)} ms.`),
      isWhole ? "" : `These are not all: of the ${shortCount(this.run.total)} calls of this run, ${shortCount(packed)} are drawn (the worst of each segment) and counted here.`,
      isWhole && packed < this.run.total ? `Figures are of all calls; the lists of calls hold only the ${shortCount(packed)} of ${shortCount(this.run.total)} that are drawn, the worst of each segment.` : "",
      rows.length > MOST_OPS ? `The first ${MOST_OPS} ops are listed; search for others.` : "",
    ].filter(Boolean).join(" ");
  }
  row(className) {
    const heading = element("th", { scope: "row" }), made = element("tr", { className }, heading);
    made.setAttribute("role", "row");
    heading.setAttribute("role", "rowheader");
    return [made, heading];
  }
  cells(made, figures, isCall, gaps) {
    for (const column of this.columns) {
      const cell = made.insertCell();
      cell.setAttribute("role", "cell");
      cell.dataset.head = column.name;
      if (!column.isText) cell.className = column.wraps ? "amount wraps" : "amount";
      column.cell(cell, figures, isCall, gaps);
    }
    return made;
  }
  opRow(row) {
    const [made, heading] = this.row("op"), key = `${row.op}\n${row.phase}`, name = element("bdi", {}, row.op);
    let calls = [];
    if (row.own.length) {
      const button = element("button", { type: "button", className: "unfold" }, element("span", { className: "twist" }), name);
      button.setAttribute("aria-expanded", this.open.has(key));
      button.addEventListener("click", () => {
        if (this.open.delete(key)) { for (const call of calls) call.remove(); calls = []; }
        else { this.open.add(key); calls = this.callRows(row, CALLS_AT_ONCE); made.after(...calls); }
        button.setAttribute("aria-expanded", this.open.has(key));
      });
      heading.append(button);
      if (this.open.has(key)) calls = this.callRows(row, CALLS_AT_ONCE);
    } else heading.append(name);
    if (row.phase) heading.append(" ", element("span", { className: "spread" }, row.phase));
    this.cells(made, row.figures, false, row.gaps);
    // "Show more" adds to the rows that folding removes.
    row.add = (more) => { calls.push(...more); };
    return [made, ...calls];
  }
  callRows(row, most, from = 0) {
    const table = this.run.table, packed = this.run.calls, column = this.columns.find((one) => one.name === this.sort.name);
    const figures = new Map(row.own.map((i) => [i, figuresOf(packed, table, [i])]));
    const ordered = column ? this.sorted(row.own, (i) => column.key(figures.get(i), packed.rescued[i])) : row.own;
    const made = ordered.slice(from, from + most).map((i) => {
      const [call, heading] = this.row("call");
      heading.append(element("span", { className: "spread" }, `call ${table.index[i]}`), " ", element("bdi", {}, table.module[i]), element("br"),
        element("span", { className: "spread" }, [table.source[i], table.shape[i]].filter((text) => text !== "–").join(" · ")));
      return this.cells(call, figures.get(i), true, packed.rescued[i]);
    });
    const rest = ordered.length - from - made.length;
    if (rest > 0) made.push(this.moreRow(row, from + made.length, rest));
    return made;
  }
  moreRow(row, from, rest) {
    const [made, heading] = this.row("call more");
    heading.colSpan = this.columns.length + 1;
    if (from >= MOST_CALLS) { heading.textContent = `${shortCount(rest)} more calls: search by module or line, or sort, to find one`; return made; }
    const button = element("button", { type: "button" }, `Show ${Math.min(rest, CALLS_AT_ONCE * 3)} more of ${shortCount(rest)}`);
    button.addEventListener("click", () => {
      const more = this.callRows(row, CALLS_AT_ONCE * 3, from);
      made.replaceWith(...more);
      row.add(more);
      const next = more[more.length - 1].querySelector("button") || more[0].cells[0];
      next.tabIndex = next.tagName === "BUTTON" ? 0 : -1;
      next.focus();
    });
    heading.append(button);
    return made;
  }
}
