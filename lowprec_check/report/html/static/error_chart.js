// Error along the network: one point per op call, and a slider that steps through them.
"use strict";

// Error along the network: x is the op call, y is rel_l2.
function errorFigure(has_phases) {
  const plot = newFigure(360, "op call, in the order of the run", "relative error (rel_l2)");
  const at = { x: field("x"), y: field("y") }, accumulated = columns("accumulated");
  plot.add_layout(box("origin", { left: 0, right: 0, fill_alpha: 0.22, line_width: 2, line_alpha: 0.9 }));
  plot.add_layout(span("tolerance", DASHED));
  plot.add_layout(span("cursor", { dimension: "height", line_width: 1, visible: false }));
  for (const phase of has_phases ? ["backward", "optimizer"] : []) {
    plot.add_layout(span(`${phase}-start`, { dimension: "height", line_width: 1, line_dash: [3, 3] }));
    plot.add_layout(label(`${phase}-label`, { x_offset: 4, y_offset: 2 }));
  }
  plot.add_layout(label("tolerance-label"));
  plot.add_layout(label("origin-label", { text_font_style: "bold" }));
  const near = plot.scatter({ ...at, source: columns("local"), size: 5, fill_alpha: 0.55, line_color: null, name: "local-dots" });
  plot.line({ ...at, source: accumulated, line_width: 2, name: "accumulated-line" });
  const far = plot.scatter({ ...at, source: accumulated, size: 5, line_color: null, name: "accumulated-dots" });
  const marks = plot.scatter({ ...at, source: columns("marks"), size: 11, line_width: 2, marker: field("marker"), name: "marks-dots" });
  const tooltips = tip("@index: @op", [...(has_phases ? [["phase", "@phase"]] : []), ...PLACE, ["local", "@local_text"], ["accumulated", "@accumulated_text"]]);
  plot.add_tools(new M.HoverTool({ renderers: [far, near, marks], tooltips, limit: 1, point_policy: "snap_to_data" }));
  return plot;
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
