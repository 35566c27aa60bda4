// The trade-off chart: a dot for each way to run the model, speed across, error upwards, memory as its size.
"use strict";
const DOT = ["x", "y", "low", "high", "label", "size", "marker", "color", "edge", "status", "speed", "error_text", "memory_text", "dx", "dy", "align", "note"];
const ARROW = ["x", "y", "to_x", "to_y"];
const tradeoffColumns = (name, names) => new M.ColumnDataSource({ name, data: Object.fromEntries(names.map((column) => [column, []])) });
const LABEL_HEIGHT = 17, LETTER = 6.9;

function tradeoffFigure(tolerances) {
  const plot = newFigure(330, "times as fast as fp32 (right is faster)", "output error (lower is closer to fp32)", "log", "log");
  const dots = tradeoffColumns("dots", DOT), at = { x: field("x"), y: field("y"), source: dots };
  for (const [i] of tolerances.entries()) {
    plot.add_layout(span(`tolerance-${i}`, DASHED));
    plot.add_layout(label(`tolerance-label-${i}`, { x_units: "screen" }));
  }
  plot.add_layout(span("fp32", { location: 1, dimension: "height", line_width: 1.5, line_dash: [3, 3] }));
  plot.add_layout(label("fp32-label", { y_units: "screen" }));
  plot.segment({ x0: field("low"), x1: field("high"), y0: field("y"), y1: field("y"), source: dots, line_width: 2, line_alpha: 0.6, name: "whiskers" });
  const source = tradeoffColumns("arrows", ARROW);
  plot.add_layout(new M.Arrow({
    name: "arrow", source, x_start: field("x"), y_start: field("y"), x_end: field("to_x"), y_end: field("to_y"),
    line_width: 2, end: new M.NormalHead({ size: 11, name: "arrow-head" }),
  }));
  const shapes = plot.scatter({ ...at, size: field("size"), marker: field("marker"), fill_color: field("color"), line_color: field("edge"), fill_alpha: 0.75, line_width: 2, name: "dots-shapes" });
  plot.add_layout(new M.LabelSet({
    name: "names", source: dots, x: field("x"), y: field("y"), text: field("label"), x_offset: field("dx"), y_offset: field("dy"), text_align: field("align"),
    text_font_size: "12px", text_baseline: "middle",
  }));
  const figures = [["status", "@status"], ["times as fast as fp32", "@speed"], ["error", "@error_text"], ["memory", "@memory_text"]];
  plot.add_tools(new M.HoverTool({ renderers: [shapes], tooltips: tip("@label", figures), point_policy: "snap_to_data" }));
  return plot;
}

class TradeoffChart extends Chart {
  colour() {
    super.colour();
    const ink = css("ink"), warn = css("warn");
    const shades = { good: css("good"), bad: css("bad"), none: css("dim") };
    const colours = { fp32: { line_color: css("dim") }, "fp32-label": { text_color: css("dim") }, whiskers: { line_color: css("dim") }, arrow: { line_color: ink }, "arrow-head": { fill_color: ink, line_color: ink }, names: { text_color: ink } };
    this.data.tolerances.forEach((_, i) => Object.assign(colours, { [`tolerance-${i}`]: { line_color: warn }, [`tolerance-label-${i}`]: { text_color: warn } }));
    this.paint(colours);
    const source = this.get("dots");
    if (source.data.x.length) source.data = { ...source.data, color: this.data.dots.map((dot) => shades[dot.color]), edge: this.data.dots.map((dot) => (dot.tag ? ink : shades[dot.color])) };
  }
  show() {
    const { dots, arrows, tolerances } = this.data;
    const errors = [...dots.map((dot) => dot.error), ...tolerances.map(([limit]) => limit)].filter((error) => error > 0);
    const top = Math.max(...errors) * 8, bottom = Math.min(...errors) / 8;
    const y = dots.map((dot) => (dot.error === null ? top / 2 : Math.max(dot.error, bottom * 2)));
    const speeds = [1, ...dots.flatMap((dot) => [Math.max(dot.low, dot.ratio / 8), Math.min(dot.high, dot.ratio * 8)])];
    const left = Math.min(...speeds) / 1.35, right = Math.max(...speeds) * 1.35;
    const size = (dot) => 9 + 15 * Math.sqrt(Math.min(2, dot.memory === null ? 1 : dot.memory));
    const inside = (value) => Math.min(right, Math.max(left, value));
    this.source("dots", {
      x: dots.map((dot) => dot.ratio), y, low: dots.map((dot) => inside(dot.low)), high: dots.map((dot) => inside(dot.high)), label: dots.map((dot) => dot.label),
      size: dots.map(size), marker: dots.map((dot) => (dot.error === null ? "triangle" : dot.error === 0 ? "square" : "circle")), status: dots.map((dot) => dot.status),
      speed: dots.map((dot) => dot.speed), error_text: dots.map((dot) => dot.error_text), memory_text: dots.map((dot) => dot.memory_text),
      dx: dots.map(() => 0), dy: dots.map(() => 0), align: dots.map(() => "left"), color: dots.map(() => "grey"), edge: dots.map(() => "grey"),
    });
    const place = (name) => dots.findIndex((dot) => dot.label === name), pairs = arrows.map(([from, to]) => [place(from), place(to)]);
    this.get("arrows").data = { x: pairs.map(([i]) => dots[i].ratio), y: pairs.map(([i]) => y[i]), to_x: pairs.map(([, i]) => dots[i].ratio), to_y: pairs.map(([, i]) => y[i]) };
    this.plot.x_range.setv({ start: left, end: right, reset_start: left, reset_end: right });
    this.plot.y_range.setv({ start: bottom, end: top, reset_start: bottom, reset_end: top });
    tolerances.forEach(([limit, formats], i) => {
      this.get(`tolerance-${i}`).location = limit;
      this.get(`tolerance-label-${i}`).setv({ x: 4, y: limit, text: `tolerance ${formats} ${digits(limit)}` });
    });
    this.get("fp32-label").setv({ x: 1, y: 3, text: "fp32" });
    this.colour();
  }
  // Names beside their dots, where they touch neither another name nor another dot.
  placeNames(view) {
    const frame = view.frame, box = frame.bbox, source = this.get("dots"), data = source.data;
    if (!box.width) return;
    const dots = data.x.map((x, i) => ({ x: frame.x_scale.compute(x), y: frame.y_scale.compute(data.y[i]), r: data.size[i] / 2 }));
    const taken = dots.map((dot) => [dot.x - dot.r, dot.y - dot.r, dot.x + dot.r, dot.y + dot.r]);
    this.data.tolerances.forEach(([limit, formats]) => {
      const y = frame.y_scale.compute(limit);
      taken.push([box.left, y - LABEL_HEIGHT, box.left + LETTER * (17 + formats.length), y]);
    });
    taken.push([frame.x_scale.compute(1), box.bottom - LABEL_HEIGHT - 3, frame.x_scale.compute(1) + 30, box.bottom]);
    data.low.forEach((low, i) => taken.push([frame.x_scale.compute(low), dots[i].y - 2, frame.x_scale.compute(data.high[i]), dots[i].y + 2]));
    const overlaps = (a) => taken.filter((b) => a[0] < b[2] && a[2] > b[0] && a[1] < b[3] && a[3] > b[1]).length;
    const out = (a) => (a[0] < box.left || a[2] > box.right || a[1] < box.top || a[3] > box.bottom ? 5 : 0);
    const placed = data.label.map((text, i) => {
      const wide = LETTER * text.length, dot = dots[i], gap = dot.r + 5;
      let best = null;
      for (const shift of [0, 1, -1, 2, -2, 3, -3, 4, -4]) {
        for (const [align, dx] of [["left", gap], ["right", -gap]]) {
          const dy = shift * LABEL_HEIGHT, start = dot.x + dx - (align === "right" ? wide : 0);
          const area = [start, dot.y + dy - LABEL_HEIGHT / 2, start + wide, dot.y + dy + LABEL_HEIGHT / 2];
          const cost = 10 * overlaps(area) + 10 * out(area) + Math.abs(shift);
          if (best === null || cost < best.cost) best = { cost, align, dx, dy, area };
        }
      }
      taken.push(best.area);
      return best;
    });
    const next = { dx: placed.map((one) => one.dx), dy: placed.map((one) => -one.dy), align: placed.map((one) => one.align) };
    if (String(next.dx) !== String(data.dx) || String(next.dy) !== String(data.dy)) source.data = { ...data, ...next };
  }
}

async function drawTradeoff() {
  const data = JSON.parse(byId("tradeoff-data").textContent), host = byId("tradeoff-chart");
  const view = await Bokeh.Plotting.show(tradeoffFigure(data.tolerances), host), chart = new TradeoffChart(view.model.document);
  chart.data = data;
  chart.show();
  document.addEventListener("theme", () => chart.colour());
  const place = () => requestAnimationFrame(() => { chart.placeNames(view); document.documentElement.dataset.tradeoff = "true"; });
  new ResizeObserver(place).observe(host);
  setTimeout(place, 50);
}

drawTradeoff();
