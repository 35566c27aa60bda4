// What all charts share: an empty Bokeh figure in the colours of the page, tooltips, and how it is filled.
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

function newFigure(height, x_axis_label, y_axis_label, y_axis_type = "log", x_axis_type = "linear") {
  const plot = Bokeh.Plotting.figure({
    height, x_axis_label, y_axis_label, x_range: new M.Range1d({ start: 0, end: 1 }), y_range: new M.Range1d({ start: FLOOR, end: 1 }),
    y_axis_type, x_axis_type, sizing_mode: "stretch_width", tools: "xpan,xbox_zoom,reset", toolbar_location: "above", lod_threshold: 4000,
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
