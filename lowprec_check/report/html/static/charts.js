// The two charts as empty Bokeh figures; report.js fills them with the selected run.
"use strict";
const COLUMNS = ["x", "y", "low", "high", "index", "op", "phase", "module", "source", "dtypes", "shape", "marker", "note", "calls",
  "local_text", "accumulated_text", "high_text", "low_text", "flushed_text"];
const PLACE = [["module", "@module"], ["line", "@source"], ["dtypes", "@dtypes"], ["shape", "@shape"]];
const DASHED = { line_dash: [6], line_width: 1.5 };
const field = (name) => ({ field: name });

// A tooltip is in a shadow tree, which only the page's CSS variables reach. Bokeh inserts values as text.
const TIP = "margin:-5px;padding:6px 10px;max-width:min(34rem,80vw);overflow-wrap:anywhere;white-space:normal;"
  + "background:var(--panel);color:var(--ink);border:1px solid var(--line);font:12.5px/1.5 system-ui,sans-serif";
const tip = (title, fields) => `<div style="${TIP}"><b>${title}</b>`
  + fields.map(([name, value]) => `<div><span style="color:var(--dim)">${name}</span> ${value}</div>`).join("")
  + '<div style="color:var(--bad)">@note</div></div>';

const M = Bokeh.Models;
const columns = (name) => new M.ColumnDataSource({ name, data: Object.fromEntries(COLUMNS.map((column) => [column, []])) });
const box = (name, more) => new M.BoxAnnotation({ name, ...more });
const span = (name, more) => new M.Span({ name, location: 1, dimension: "width", ...more });
const label = (name, more) => new M.Label({ name, x: 0, y: 1, text: "", text_font_size: "12px", x_offset: 4, y_offset: 3, ...more });

function newFigure(height, x_axis_label, y_axis_label, y_axis_type = "log") {
  const plot = Bokeh.Plotting.figure({
    height, x_axis_label, y_axis_label, x_range: new M.Range1d({ start: 0, end: 1 }), y_range: new M.Range1d({ start: FLOOR, end: 1 }),
    y_axis_type, sizing_mode: "stretch_width", tools: "xpan,xbox_zoom,reset", toolbar_location: "above", lod_threshold: 4000,
    background_fill_color: null, border_fill_color: null, outline_line_color: null,
  });
  for (const axis of [...plot.below, ...plot.left]) {
    axis.setv({ axis_label_text_font_style: "normal", axis_label_text_font_size: "12px", major_label_text_font_size: "12px", minor_tick_line_color: null });
  }
  for (const grid of plot.center) grid.visible = grid.dimension === 1;
  plot.below[0].ticker.name = "ticker";
  plot.toolbar.logo = null;
  plot.add_tools(new M.WheelZoomTool({ dimensions: "width", modifiers: { ctrl: true } }));  // the wheel without Ctrl scrolls the page
  plot.add_tools(new M.CrosshairTool({ dimensions: "height", line_alpha: 0.4 }));
  return plot;
}

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

// Value ranges: x is the module, y the magnitude, with the limits of the dtype.
function rangeFigure() {
  const plot = newFigure(380, "module, in the order of the run", "magnitude of values"), ranges = columns("ranges");
  const bar = { x: field("x"), bottom: field("low"), top: field("high"), width: 0.7, line_width: 1 };
  const shades = { other: 0.07, below: 0.16, subnormals: 0.09, above: 0.16 };
  for (const [name, fill_alpha] of Object.entries(shades)) plot.add_layout(box(name, { fill_alpha, line_width: 0 }));
  for (const name of ["subnormal", "normal", "max"]) plot.add_layout(span(name, DASHED));
  for (const name of ["subnormal", "normal", "other"]) plot.add_layout(label(`${name}-label`));
  plot.add_layout(label("max-label", { y_offset: -17 }));
  const bars = plot.vbar({ ...bar, source: ranges, name: "bars" });
  plot.vbar({ ...bar, source: columns("overflows"), name: "over" });
  plot.scatter({ x: field("x"), y: field("high"), size: 6, source: ranges, name: "tops" });
  const figures = [["largest", "@high_text"], ["smallest typical (RMS)", "@low_text"], ["flushed to zero", "@flushed_text"]];
  const tooltips = tip("@module", [...figures, ["op calls", "@calls"]]);
  plot.add_tools(new M.HoverTool({ renderers: [bars], tooltips, limit: 1, mode: "vline", point_policy: "snap_to_data" }));
  return plot;
}
