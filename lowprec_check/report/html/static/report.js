// The interactive parts of a report: charts, stepping through the calls, module tree, filter, copy.
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

// -- charts

class Chart {
  constructor(document_) { this.document = document_; this.plot = document_.roots()[0]; }
  get(name) { return this.document.get_model_by_name(name); }
  source(name, columns) {
    const source = this.get(name), length = columns.x.length, full = {};
    for (const key of Object.keys(source.data)) full[key] = columns[key] || new Array(length).fill("");
    source.data = full;
  }
  frame(right, bottom, top) {
    this.plot.x_range.setv({ start: 0, end: right, reset_start: 0, reset_end: right });
    this.plot.y_range.setv({ start: bottom, end: top, reset_start: bottom, reset_end: top });
    this.get("ticker").desired_num_ticks = innerWidth < 640 ? 4 : 10;
  }
  label(name, x, y, text) { this.get(name).setv({ x, y, text }); }
  colour() {
    const ink = css("ink"), dim = css("dim"), line = css("line");
    for (const model of this.document.all_models) {
      if (model.type.endsWith("Axis")) model.setv({ axis_line_color: line, major_tick_line_color: line, major_label_text_color: dim, axis_label_text_color: dim });
      else if (model.type === "Grid") model.setv({ grid_line_color: line, grid_line_alpha: 0.6 });
      else if (model.type === "Label") model.setv({ text_color: ink });
      else if (model.type === "CrosshairTool") model.setv({ line_color: dim });
    }
  }
  paint(colours) { for (const [name, values] of Object.entries(colours)) { const model = this.get(name); (model.glyph || model).setv(values); } }
}

class ErrorChart extends Chart {
  colour() {
    super.colour();
    const far = css("bar-ink"), near = css("local"), bad = css("bad"), mark = this.calm ? css("dim") : bad;
    this.paint({
      "accumulated-line": { line_color: far }, "accumulated-dots": { fill_color: far }, "local-dots": { fill_color: near },
      "marks-dots": { line_color: bad, fill_color: bad }, tolerance: { line_color: css("warn") }, origin: { fill_color: mark, line_color: mark },
      cursor: { line_color: css("ink") }, "origin-label": { text_color: mark }, "tolerance-label": { text_color: css("warn") },
    });
  }
  show(data, run) {
    const table = callsOf(data, run), calls = run.calls;
    const errors = [...calls.accumulated_error, ...calls.local_error, run.tolerance].filter((e) => e > 0);
    const adds = calls.local_error.map((error) => error || null);  // ops that add no error are left out
    const top = errors.reduce((a, b) => Math.max(a, b), 1e-3) * 6;
    const bottom = Math.max(FLOOR, errors.reduce((a, b) => Math.min(a, b), 1e-3) / 3);
    const rows = (values) => table.x.map((_, i) => i).filter((i) => values[i] !== null);
    const height = (value) => Math.min(top, Math.max(bottom, value));
    const lost = calls.nonfinite.findIndex((count) => count > 0), own = rows(adds);
    const has = table.x.map((_, i) => i).filter((i) => calls.accumulated_error[i] !== null || (lost >= 0 && i >= lost));
    const far = (i) => (calls.accumulated_error[i] === null ? NaN : height(calls.accumulated_error[i]));  // NaN breaks the line
    this.source("accumulated", pick(table, has, { y: has.map(far) }));
    this.source("local", pick(table, own, { y: own.map((i) => height(calls.local_error[i])) }));
    const marked = table.x.map((_, i) => i).filter((i) => calls.nonfinite[i] || calls.rescued[i]);
    this.source("marks", pick(table, marked, {
      y: marked.map((i) => (calls.nonfinite[i] ? top / 1.6 : height(calls.accumulated_error[i] || 0))),
      marker: marked.map((i) => (calls.nonfinite[i] ? "triangle" : "x")),
    }));
    const last = table.x.length ? table.x[table.x.length - 1] : 1;
    this.frame(last + 1, bottom, top);
    this.get("tolerance").setv({ location: run.tolerance || 1, visible: Boolean(run.tolerance) });
    this.label("tolerance-label", 0, run.tolerance || 1, run.tolerance ? `tolerance ${digits(run.tolerance)}` : "");
    this.markPhases(table, bottom);
    this.markOrigin(table, run, last, top);
  }
  markPhases(table, bottom) {
    for (const phase of ["backward", "optimizer"]) {
      const start = table.phase.indexOf(phase), line = this.get(`${phase}-start`);
      if (!line) continue;
      line.setv({ visible: start >= 0, location: start >= 0 ? table.x[start] - 0.5 : 0, line_color: css("dim") });
      this.label(`${phase}-label`, start >= 0 ? table.x[start] - 0.5 : 0, bottom, start >= 0 ? phase : "");
    }
  }
  markOrigin(table, run, last, top) {
    const remark = byId("origin"), origin = run.origin, band = this.get("origin");
    remark.textContent = "";
    band.visible = Boolean(origin);
    this.label("origin-label", 0, top, "");
    remark.classList.toggle("fine", !origin || origin.calm);
    if (!origin) { remark.textContent = run.total ? "No op stands out: none is over the tolerance." : ""; return; }
    const row = run.calls.index.indexOf(origin.call), wide = Math.max(0.5, last / 400);
    band.setv({ left: origin.call + 1 - wide, right: origin.call + 1 + wide });
    const right = origin.call > last * 0.6;
    this.get("origin-label").setv({ text_align: right ? "right" : "left", x_offset: right ? -8 : 8, y_offset: -16 });
    this.calm = origin.calm;
    this.label("origin-label", origin.call + 1, top, `${origin.title}: ${table.op[row]}`);
    this.colour();
    const where = `${table.op[row]} in ${table.module[row]}${inPhase(table, row)}` + (table.source[row] === "–" ? "" : ` at ${table.source[row]}`);
    const title = origin.title[0].toUpperCase() + origin.title.slice(1);
    remark.textContent = `${title}: ${where} (call ${origin.call + 1}), ${origin.sentence}.`;
    if (run.total > table.x.length) remark.textContent += ` The chart shows ${table.x.length} of ${run.total} calls, the worst of each segment.`;
  }
}

class RangeChart extends Chart {
  colour() {
    super.colour();
    const bad = css("bad"), cold = css("cold"), dim = css("dim");
    this.paint({
      bars: { fill_color: css("bar"), line_color: css("bar-ink") }, over: { fill_color: bad, line_color: bad }, tops: { fill_color: css("bar-ink"), line_color: null },
      other: { fill_color: css("good") }, "other-label": { text_color: css("good") },
      above: { fill_color: bad }, below: { fill_color: cold }, subnormals: { fill_color: cold },
      max: { line_color: bad }, normal: { line_color: dim }, subnormal: { line_color: cold },
      "max-label": { text_color: bad }, "normal-label": { text_color: dim }, "subnormal-label": { text_color: cold },
    });
  }
  show(data, run) {
    // The share of the range, in powers of two, that is subnormal: if it is small, the two labels would overlap.
    const share = (of) => Math.log2(of.normal / of.subnormal) / Math.log2(of.max / of.subnormal);
    const ranges = run.ranges, limits = data.limits[run.format], count = ranges.module.length;
    const x = ranges.module.map((_, i) => i + 1);
    const thin = (i) => ranges.high[i] / Math.max(ranges.low[i], 1e-45) < 1.02;
    const low = ranges.low.map((value, i) => Math.min(value, ranges.high[i] || value) * (thin(i) ? 0.98 : 1));
    const high = ranges.high.map((value, i) => Math.max(value, ranges.low[i]));
    const columns = {
      x, low, high, module: ranges.module, calls: ranges.calls,
      low_text: ranges.low.map(digits), high_text: ranges.high.map(digits),
      flushed_text: ranges.flushed.map(percent),
      note: ranges.overflow.map((n) => (n ? `${n} values overflow to Inf` : "")),
    };
    this.source("ranges", columns);
    this.source("overflows", pick(columns, x.map((_, i) => i).filter((i) => ranges.overflow[i]), {}));
    const bottom = limits.subnormal / 30, top = high.reduce((most, value) => Math.max(most, value * 2), limits.max * 30);
    this.frame(count + 1, bottom, top);
    this.get("below").setv({ bottom, top: limits.subnormal });
    this.get("subnormals").setv({ bottom: limits.subnormal, top: limits.normal });
    this.get("above").setv({ bottom: limits.max, top });
    for (const name of ["subnormal", "normal", "max"]) {
      this.get(name).location = limits[name];
      const words = { subnormal: "smallest subnormal", normal: "smallest normal", max: "maximum" }[name];
      const crowded = name === "normal" && share(limits) < 0.1;
      this.label(`${name}-label`, 0, limits[name], crowded ? "" : `${run.format} ${words} ${digits(limits[name])}`);
    }
    const other = data.limits.fp16, wide = limits.max > 1e3 * other.max;
    this.get("other").setv({ bottom: other.subnormal, top: other.max, visible: wide });
    this.label("other-label", 0, other.max, wide ? "fp16 range" : "");
    this.writeRemark(ranges, limits, run);
  }
  writeRemark(ranges, limits, run) {
    const room = (i) => limits.max / Math.max(ranges.high[i], 1e-45);
    const order = ranges.module.map((_, i) => i).sort((a, b) => (ranges.overflow[b] - ranges.overflow[a]) || room(a) - room(b));
    const remark = byId("range-remark");
    if (!order.length) { remark.textContent = "No value ranges are known of this run."; return; }
    const worst = order[0], over = ranges.overflow[worst];
    const small = ranges.small.indexOf(Math.max(...ranges.small)), most = ranges.small[small];
    remark.classList.toggle("fine", !over && room(worst) > 16 && most < 0.1);
    const margin = room(worst) >= 1e4 ? room(worst).toExponential(0) : room(worst).toFixed(1);
    const zero = ranges.flushed[small] ? `; ${percent(ranges.flushed[small])} become zero` : "";
    const bottom = most >= 0.001
      ? ` Closest to the minimum: ${ranges.module[small]}. ${percent(most)} of its non-zeros are below the smallest normal number of ${run.format}, ${digits(limits.normal)}${zero}.`
      : "";
    remark.textContent = (over
      ? `${ranges.module[worst]} overflows: ${over} values exceed the maximum of ${run.format}.`
      : `Closest to the maximum: ${ranges.module[worst]}. Its largest value is ${digits(ranges.high[worst])}; ${margin} times as much would overflow.`) + bottom;
    fillTable("nearest", order.slice(0, 20).map((i) => [
      ranges.module[i], ranges.overflow[i] ? "Inf" : digits(ranges.high[i]), digits(ranges.low[i]), percent(ranges.small[i]), percent(ranges.flushed[i]),
    ]));
  }
}

function fillTable(id, rows) {
  byId(id).tBodies[0].replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    for (const text of cells) row.insertCell().textContent = text;
    return row;
  }));
}

// -- stepping through the calls: the chart for keyboards and screen readers

function stepThrough(chart, data, phases) {
  const slider = byId("call-slider"), details = byId("call-details");
  let table = null, run_ = null;
  slider.addEventListener("input", () => {
    const i = Number(slider.value), cursor = chart.get("cursor");
    cursor.setv({ visible: true, location: table.x[i] });
    const text = `Call ${table.index[i]}: ${table.op[i]} in ${table.module[i]}${inPhase(table, i)}, line ${table.source[i]}, ${table.dtypes[i]}, ${table.shape[i]}; `
      + `local ${table.local_text[i]}, accumulated ${table.accumulated_text[i]}${run_.calls.share.length ? `, share ${table.share_text[i]}` : ""}${table.note[i] ? "; " + table.note[i] : ""}`;
    details.textContent = text;
    slider.setAttribute("aria-valuetext", text);
  });
  return (run) => {
    table = callsOf(data, run);
    run_ = run;
    chart.get("cursor").visible = false;
    slider.disabled = !table.x.length;
    slider.max = Math.max(0, table.x.length - 1);
    slider.value = run.origin ? Math.max(0, run.calls.index.indexOf(run.origin.call)) : 0;
    details.textContent = "";
    const errors = run.calls.accumulated_error, shares = run.calls.share;
    const grows = (e, i) => (run.calls.nonfinite[i] ? Infinity : (e || 0) - (i ? errors[i - 1] || 0 : 0));
    const steps = errors.map((e, i) => [shares.length ? shares[i] || 0 : grows(e, i), i]);
    byId("steps-title").textContent = shares.length ? "The 20 calls with the largest shares (table)" : "The 20 largest increases (table)";
    steps.sort((a, b) => b[0] - a[0] || a[1] - b[1]);
    fillTable("steps", steps.slice(0, 20).map(([, i]) => [
      table.index[i], ...(phases ? [table.phase[i] || "–"] : []), table.op[i], table.module[i], table.source[i], table.local_text[i], table.accumulated_text[i], table.share_text[i],
    ]));
  };
}

async function drawCharts() {
  Bokeh.set_log_level("warn");
  const data = await unpack(byId("calls").textContent.trim());
  const embed = async (kind, plot, place) => new kind((await Bokeh.Plotting.show(plot, byId(place))).model.document);
  const phases = data.runs.some((run) => run.calls.phase);
  const charts = { error: await embed(ErrorChart, errorFigure(phases), "error-chart"), range: await embed(RangeChart, rangeFigure(), "range-chart") };
  const showCalls = stepThrough(charts.error, data, phases);
  const choices = document.querySelectorAll(".run-choice");
  const show = (number) => {
    for (const choice of choices) choice.value = number;
    for (const chart of Object.values(charts)) chart.show(data, data.runs[number]);
    showCalls(data.runs[number]);
  };
  const colour = () => { for (const chart of Object.values(charts)) chart.colour(); };
  document.addEventListener("theme", colour);
  for (const box of document.querySelectorAll(".series input")) {
    box.addEventListener("change", () => { for (const name of box.value.split(" ")) charts.error.get(name).visible = box.checked; });
  }
  colour();
  for (const choice of choices) choice.addEventListener("change", () => show(Number(choice.value)));
  show(Number(choices[0].value));
  document.documentElement.dataset.ready = "true";
}

// -- the module tree: a WAI-ARIA tree grid of rows

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
    for (const step of document.querySelectorAll(".scale [data-a]")) step.textContent = step.dataset[event.target.value];
    for (const cell of body.querySelectorAll("td")) {
      const value = cell.dataset[event.target.value], bar = value.indexOf("|");
      cell.className = `h${value.slice(0, bar)}`;
      cell.firstElementChild.textContent = value.slice(bar + 1);
    }
  });
}

function findings() {
  const items = [...document.querySelectorAll(".finding")], count = byId("shown"), all = count.textContent;
  byId("filter").addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase();
    for (const item of items) item.hidden = !item.textContent.toLowerCase().includes(wanted);
    if (wanted && byId("no-effect")) byId("no-effect").open = true;
    count.textContent = wanted ? `${items.filter((item) => !item.hidden).length} of ${items.length} groups` : all;
  });
}

function copyButton() {
  byId("copy")?.addEventListener("click", async (event) => {
    const button = event.currentTarget, code = byId("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {  // a local file may not copy: select the code instead
      getSelection().selectAllChildren(code);
      button.textContent = "Selected: press Ctrl+C";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2500);
  });
}

copyButton();
findings();
if (byId("heat")) moduleTree();
if (byId("calls")) drawCharts();
