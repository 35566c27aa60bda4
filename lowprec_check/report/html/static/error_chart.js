// Error along the network: one point per op call, and a slider that steps through them.
"use strict";
const DIMMED = 0.12;
const pointsOf = (name) => new M.ColumnDataSource({ name, data: { x: [], y: [], alpha: [] } });

// Error along the network: x is the op call, y is rel_l2.
function errorFigure(has_phases) {
  const plot = newFigure(360, "op call, in the order of the run", "relative error (rel_l2)");
  plot.toolbar_location = "below";  // above are the labels
  const at = { x: field("x"), y: field("y") }, dots = { ...at, fill_alpha: field("alpha"), line_color: null };
  plot.add_layout(box("origin", { left: 0, right: 0, fill_alpha: 0.22, line_width: 2, line_alpha: 0.9 }));
  plot.add_layout(span("tolerance", DASHED));
  plot.add_layout(span("cursor", { dimension: "height", line_width: 1, visible: false }));
  for (const phase of has_phases ? ["backward", "optimizer"] : []) plot.add_layout(span(`${phase}-start`, { dimension: "height", line_width: 1, line_dash: [3, 3] }));
  plot.scatter({ ...dots, source: pointsOf("local"), size: 5, name: "local-dots" });
  plot.line({ ...at, source: pointsOf("all"), line_width: 2, line_alpha: DIMMED * 2, name: "all-line" });
  plot.line({ ...at, source: pointsOf("inside"), line_width: 2, name: "accumulated-line" });
  plot.scatter({ ...dots, source: pointsOf("accumulated"), size: 5, name: "accumulated-dots" });
  plot.scatter({ ...at, source: pointsOf("zeros"), size: 5, fill_color: null, line_alpha: field("alpha"), name: "zero-dots" });
  plot.scatter({ ...at, source: new M.ColumnDataSource({ name: "marks", data: { x: [], y: [], alpha: [], marker: [] } }), size: 11, line_width: 2,
    line_alpha: field("alpha"), fill_alpha: field("alpha"), marker: field("marker"), name: "marks-dots" });
  // The call nearest to the mouse, at any height: each call has an area from halfway to the one before to halfway to the next.
  const texts = ["index", "op", "phase", "module", "source", "dtypes", "shape", "local_text", "accumulated_text", "note"];
  const areas = new M.ColumnDataSource({ name: "areas", data: Object.fromEntries(["x", "left", "right", "bottom", "top", ...texts].map((name) => [name, []])) });
  const sides = Object.fromEntries(["left", "right", "bottom", "top"].map((name) => [name, field(name)]));
  const hit = plot.quad({ ...sides, source: areas, fill_color: null, line_color: null, name: "call-areas" });
  hit.hover_glyph = hit.glyph.clone({ fill_color: "gray", fill_alpha: 0.18 });
  const tooltips = tip("@index: @op", [...(has_phases ? [["phase", "@phase"]] : []), ...PLACE, ["local", "@local_text"], ["accumulated", "@accumulated_text"]]);
  plot.add_tools(new M.HoverTool({ renderers: [hit], tooltips, limit: 1, point_policy: "follow_mouse" }));
  return plot;
}

class ErrorChart extends Chart {
  constructor(document_) {
    super(document_);
    const { x_range, properties } = this.plot, place = () => requestAnimationFrame(() => this.placeLabels());
    for (const property of [x_range.properties.start, x_range.properties.end, properties.inner_width, properties.inner_height]) property.change.connect(place);
  }
  colour() {
    super.colour();
    const far = css("bar-ink"), near = css("local"), bad = css("bad"), mark = this.calm ? css("dim") : bad;
    this.paint({
      "accumulated-line": { line_color: far }, "all-line": { line_color: far }, "accumulated-dots": { fill_color: far }, "zero-dots": { line_color: far },
      "local-dots": { fill_color: near }, "marks-dots": { line_color: bad, fill_color: bad },
      tolerance: { line_color: css("warn") }, origin: { fill_color: mark, line_color: mark }, cursor: { line_color: css("ink") },
    });
  }
  show(data, run) {
    const table = callsOf(data, run), calls = run.calls, all = table.x.map((_, i) => i);
    const errors = [...calls.accumulated_error, ...calls.local_error, run.tolerance].filter((e) => e > 0);
    const hasZeros = calls.accumulated_error.includes(0);
    const top = errors.reduce((a, b) => Math.max(a, b), 1e-3) * 6;
    const bottom = Math.max(FLOOR, errors.reduce((a, b) => Math.min(a, b), 1e-3) / (hasZeros ? 8 : 3));
    const floor = bottom * (top / bottom) ** 0.025;  // where an error of exactly 0 is drawn
    const height = (value) => Math.min(top, Math.max(bottom, value)), inside = table.module.map(isInChosen);
    const last = all.length ? table.x[all.length - 1] : 1;
    const points = (name, rows, y, strength, more) => this.source(name, {
      x: rows.map((i) => table.x[i]), y: rows.map(y), alpha: rows.map((i) => (inside[i] ? strength : Math.min(strength, DIMMED))), ...more,
    });
    const isDrawn = (error) => error !== null && error > 0;
    points("local", all.filter((i) => isDrawn(calls.local_error[i])), (i) => height(calls.local_error[i]), 0.55);
    points("accumulated", all.filter((i) => isDrawn(calls.accumulated_error[i])), (i) => height(calls.accumulated_error[i]), 1);
    points("zeros", all.filter((i) => calls.accumulated_error[i] === 0), () => floor, 1);
    // The line skips errors of exactly 0, and calls without a floating output before the first Inf or NaN; after it, NaN breaks it.
    const lost = calls.nonfinite.findIndex((count) => count > 0);
    const online = all.filter((i) => isDrawn(calls.accumulated_error[i]) || (calls.accumulated_error[i] === null && lost >= 0 && i >= lost));
    const far = (i) => (calls.accumulated_error[i] === null ? NaN : height(calls.accumulated_error[i]));
    points("all", online, far, 1);
    points("inside", online, (i) => (inside[i] ? far(i) : NaN), 1);
    const marked = all.filter((i) => calls.nonfinite[i] || calls.rescued[i]);
    points("marks", marked, (i) => (calls.nonfinite[i] ? top / 1.6 : Math.max(floor, height(calls.accumulated_error[i] || 0))), 1, {
      marker: marked.map((i) => (calls.nonfinite[i] ? "triangle" : "x")),
    });
    const middle = (i) => (table.x[i] + table.x[i + 1]) / 2;
    this.source("areas", { ...table, left: all.map((i) => (i ? middle(i - 1) : 0)), right: all.map((i) => (i + 1 < all.length ? middle(i) : last + 1)),
      bottom: all.map(() => bottom), top: all.map(() => top) });
    this.frame(last + 1, bottom, top);
    this.zoom(all.filter((i) => inside[i]).map((i) => table.x[i]), last);
    this.get("tolerance").setv({ location: run.tolerance || 1, visible: Boolean(run.tolerance) });
    byId("tolerance-text").textContent = run.tolerance ? `tolerance ${digits(run.tolerance)}` : "";
    byId("drawn").textContent = this.drawnText(run, table, calls);
    this.markPhases(table);
    this.markOrigin(table, run, last);
  }
  // To the calls of the module chosen, if they are a small part; resetting shows all.
  zoom(inside, last) {
    if (chosen.module === null || !inside.length) return;
    const from = inside[0], to = inside[inside.length - 1], margin = Math.max(1, (to - from) * 0.06);
    if (to - from < 0.6 * last) this.plot.x_range.setv({ start: Math.max(0, from - margin), end: Math.min(last + 1, to + margin) });
  }
  drawnText(run, table, calls) {
    const count = (number) => number.toLocaleString("en"), drawn = table.x.length;
    const empty = calls.index.filter((_, i) => calls.accumulated_error[i] === null && !calls.local_error[i] && !calls.nonfinite[i] && !calls.rescued[i]).length;
    return (run.total > drawn ? `${count(drawn)} of ${count(run.total)} op calls are drawn, the worst of each segment` : `All ${count(run.total)} op calls are drawn`)
      + (empty ? `, except ${count(empty)} without a measured error (not floating, all in fp32 so far, or Inf or NaN)` : "")
      + (calls.accumulated_error.includes(0) ? "; ○ at the bottom: an accumulated error of exactly 0, which the line passes over" : "")
      + (chosen.module === null ? "." : `. Those outside ${chosen.module} are dimmed.`);
  }
  markPhases(table) {
    this.labels = [];
    for (const phase of ["forward", "backward", "optimizer"]) {
      const start = table.phase.indexOf(phase), line = this.get(`${phase}-start`), label = byId(`${phase}-label`);
      if (line) line.setv({ visible: start >= 0, location: start >= 0 ? table.x[start] - 0.5 : 0, line_color: css("dim") });
      if (label) label.textContent = start >= 0 ? phase : "";
      if (label && start >= 0) this.labels.push({ label, x: table.x[start] - 0.5 });
    }
  }
  markOrigin(table, run, last) {
    const remark = byId("origin"), origin = run.origin, band = this.get("origin"), label = byId("origin-label");
    remark.textContent = label.textContent = "";
    band.visible = Boolean(origin);
    this.origin = null;
    remark.classList.toggle("fine", !origin || origin.calm);
    if (!origin) { remark.textContent = run.total ? "No op stands out: none is over the tolerance." : ""; this.placeLabels(); return; }
    const row = run.calls.index.indexOf(origin.call), wide = Math.max(0.5, last / 400);
    band.setv({ left: origin.call + 1 - wide, right: origin.call + 1 + wide });
    this.calm = origin.calm;
    this.origin = origin.call + 1;
    label.textContent = `${origin.title}: ${table.op[row]}`;
    label.classList.toggle("calm", origin.calm);
    this.colour();
    const where = `${table.op[row]} in ${table.module[row]}${inPhase(table, row)}` + (table.source[row] === "–" ? "" : ` at ${table.source[row]}`);
    const title = origin.title[0].toUpperCase() + origin.title.slice(1);
    remark.textContent = `${title}: ${where} (call ${origin.call + 1}), ${origin.sentence}.`;
    this.placeLabels();
  }
  // The labels are above the frame, so that they hide no dot and no line: those of the phases side by side, that of the origin over them.
  placeLabels() {
    const view = [...Bokeh.index].find((one) => byId("error-chart").contains(one.el)), frame = view && view.frame;
    if (!frame || !frame.bbox.width) return;
    const { left, right } = frame.bbox, { start, end } = this.plot.x_range, label = byId("origin-label");
    const put = (one, at) => { one.style.left = `${Math.max(left, at)}px`; };
    byId("error-labels").style.setProperty("--wide", `${right - left}px`);
    label.hidden = this.origin === null || this.origin < start || this.origin > end;
    if (!label.hidden) put(label, Math.min(frame.x_scale.compute(this.origin) - label.offsetWidth / 2, right - label.offsetWidth));
    let limit = right;
    for (const { label: one, x } of [...(this.labels || [])].reverse()) {
      one.hidden = x > end;
      if (one.hidden) continue;
      const at = Math.max(left, Math.min(frame.x_scale.compute(x), limit - one.offsetWidth));
      one.hidden = limit < at + one.offsetWidth;  // another phase starts left of it, out of view
      put(one, at);
      limit = at - 6;
    }
  }
}

// -- stepping through the calls: the chart for keyboards and screen readers

function stepThrough(chart, data, phases) {
  const slider = byId("call-slider"), details = byId("call-details");
  let table = null, run_ = null, rows = [];
  slider.addEventListener("input", () => {
    const i = rows[Number(slider.value)], cursor = chart.get("cursor");
    cursor.setv({ visible: true, location: table.x[i] });
    const text = `Call ${table.index[i]}: ${table.op[i]} in ${table.module[i]}${inPhase(table, i)}, line ${table.source[i]}, ${table.dtypes[i]}, ${table.shape[i]}; `
      + `local ${table.local_text[i]}, accumulated ${table.accumulated_text[i]}${run_.calls.share.length ? `, share ${table.share_text[i]}` : ""}${table.note[i] ? "; " + table.note[i] : ""}`;
    details.textContent = text;
    slider.setAttribute("aria-valuetext", text);
  });
  return (run) => {
    table = callsOf(data, run);
    run_ = run;
    rows = table.x.map((_, i) => i).filter((i) => isInChosen(table.module[i]));
    chart.get("cursor").visible = false;
    slider.disabled = !rows.length;
    slider.max = Math.max(0, rows.length - 1);
    slider.value = run.origin ? Math.max(0, rows.indexOf(run.calls.index.indexOf(run.origin.call))) : 0;
    details.textContent = "";
    const errors = run.calls.accumulated_error, shares = run.calls.share;
    const grows = (e, i) => (run.calls.nonfinite[i] ? Infinity : (e || 0) - (i ? errors[i - 1] || 0 : 0));
    const steps = rows.map((i) => [shares.length ? shares[i] || 0 : grows(errors[i], i), i]);
    byId("steps-title").textContent = shares.length ? "The 20 calls with the largest shares (table)" : "The 20 largest increases (table)";
    steps.sort((a, b) => b[0] - a[0] || a[1] - b[1]);
    fillTable("steps", steps.slice(0, 20).map(([, i]) => [
      table.index[i], ...(phases ? [table.phase[i] || "–"] : []), table.op[i], table.module[i], table.source[i], table.local_text[i], table.accumulated_text[i], table.share_text[i],
    ]));
  };
}
