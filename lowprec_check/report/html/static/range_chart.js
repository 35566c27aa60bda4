// Value ranges of the modules between the limits of the dtype.
"use strict";

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
