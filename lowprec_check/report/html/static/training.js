// Loss and distance of the weights by step: two charts, filled with the ways to train of one precision, and their tables.
"use strict";
const SIGNS = ["●", "■", "◆", "▼", "★", "⬟"], SHAPES = ["circle", "square", "diamond", "inverted_triangle", "star", "hex"];
const COLOURS = 6, LINES = 12, MOST_ROWS = 60;
const POINT = ["x", "y", "way", "step", "value", "other", "note"];
const points = (name, names = POINT) => new M.ColumnDataSource({ name, data: Object.fromEntries(names.map((column) => [column, []])) });
const shown = (value) => (value === null || value === undefined ? "–" : String(Number(value.toPrecision(4))));

function trajectoryFigure(y_axis_label, y_axis_type) {
  const plot = newFigure(300, "steps done", y_axis_label, y_axis_type), at = { x: field("x"), y: field("y") };
  plot.below[0].ticker.min_interval = 1;
  plot.varea({ x: field("x"), y1: field("low"), y2: field("high"), source: points("seeds", ["x", "low", "high"]), fill_alpha: 0.16, name: "seeds-area" });
  plot.line({ ...at, source: points("limit"), line_dash: [6], line_width: 1.5, name: "limit-line" });
  plot.line({ ...at, source: points("reference"), line_width: 6, line_alpha: 0.45, name: "reference-line" });
  const dots = [];
  for (let i = 0; i < LINES; i++) {
    const source = points(`way-${i}`), dash = i < COLOURS ? [] : [5, 3];
    plot.line({ ...at, source, line_width: 2, line_dash: dash, name: `way-${i}-line` });
    dots.push(plot.scatter({ ...at, source, size: 7, marker: SHAPES[i % COLOURS], line_color: null, name: `way-${i}-dots` }));
  }
  const names = [...POINT, "marker"];
  const marks = plot.scatter({ ...at, source: points("marks", names), size: 15, line_width: 3, fill_alpha: 0, marker: field("marker"), name: "marks-dots" });
  const tooltips = tip("@way", [["after step", "@step"], [y_axis_label, "@value"], ["fp32", "@other"]]);
  plot.add_tools(new M.HoverTool({ renderers: [marks, ...dots], tooltips, limit: 3, point_policy: "snap_to_data" }));
  return plot;
}

class TrajectoryChart extends Chart {
  colour() {
    super.colour();
    const colours = { "seeds-area": { fill_color: css("dim") }, "limit-line": { line_color: css("dim") }, "reference-line": { line_color: css("ink") } };
    for (let i = 0; i < LINES; i++) {
      const colour = css(`w${(i % COLOURS) + 1}`);
      Object.assign(colours, { [`way-${i}-line`]: { line_color: colour }, [`way-${i}-dots`]: { fill_color: colour } });
    }
    this.paint({ ...colours, "marks-dots": { line_color: css("bad") } });
  }
  fill(data, ways, values, other, mark, height) {
    const steps = data.steps, size = steps.length > 60 ? 3 : 7;
    for (let i = 0; i < LINES; i++) {
      const way = ways[i], rows = way ? steps.map((_, k) => k).filter((k) => values(way)[k] !== null) : [];
      this.source(`way-${i}`, {
        x: rows.map((k) => steps[k]), y: rows.map((k) => height(values(way)[k])), way: rows.map(() => way.label), step: rows.map((k) => steps[k]),
        value: rows.map((k) => shown(values(way)[k])), other: rows.map((k) => other(k)),
      });
      this.get(`way-${i}-dots`).glyph.size = size;
    }
    this.marks = ways.flatMap((way, i) => way.marks.filter((one) => one.chart === mark).map((one) => ({ ...one, way: way.label, line: i })));
    this.showMarks(() => true, height);
  }
  showMarks(isShown, height) {
    this.height = height || this.height;
    const kept = this.marks.filter((one) => isShown(one.line));
    this.source("marks", {
      x: kept.map((one) => one.step), y: kept.map((one) => this.height(one.value)), way: kept.map((one) => one.way), step: kept.map((one) => one.step),
      value: kept.map((one) => (one.value === null ? "Inf/NaN" : shown(one.value))), note: kept.map((one) => one.note), other: kept.map(() => "–"),
      marker: kept.map((one) => (one.value === null ? "triangle" : "x")),
    });
  }
  between(data, bottom, top) {
    const last = data.steps[data.steps.length - 1], margin = last * 0.02;
    this.frame(last + margin, bottom, top);
    this.plot.x_range.setv({ start: -margin, reset_start: -margin });
  }
}

class LossChart extends TrajectoryChart {
  show(data, ways) {
    const known = [...data.losses, ...data.low, ...data.high].filter((value) => value !== null);
    const all = [...known, ...ways.flatMap((way) => way.losses)].filter((value) => value !== null);
    const low = Math.min(...(known.length ? known : all)), high = Math.max(...(known.length ? known : all)), wide = 1.5 * (high - low) || 1;
    // A loss that explodes is drawn at the edge, so that the others can be told apart.
    const bottom = Math.max(Math.min(...all), low - wide), top = Math.min(Math.max(...all), high + wide), margin = 0.06 * (top - bottom) || 1;
    this.between(data, bottom - margin, top + margin);
    const band = data.steps.map((_, k) => k).filter((k) => data.low[k] !== null && data.high[k] !== null);
    const x = band.map((k) => data.steps[k]);
    this.source("seeds", { x, low: band.map((k) => data.low[k]), high: band.map((k) => data.high[k]) });
    const limited = data.steps.map((_, k) => k).filter((k) => data.limit_low[k] !== null && data.limit_high[k] !== null);
    const at = limited.map((k) => data.steps[k]), limits = (side) => limited.map((k) => side[k]);
    this.source("limit", { x: [...at, NaN, ...at], y: [...limits(data.limit_low), NaN, ...limits(data.limit_high)] });
    const own = data.steps.map((_, k) => k).filter((k) => data.losses[k] !== null);
    this.source("reference", { x: own.map((k) => data.steps[k]), y: own.map((k) => data.losses[k]) });
    const height = (value) => (value === null ? top + margin / 3 : Math.min(top, Math.max(bottom, value)));
    this.fill(data, ways, (way) => way.losses, (k) => shown(data.losses[k]), "losses", height);
  }
}

class DistanceChart extends TrajectoryChart {
  show(data, ways) {
    const all = [...data.farthest, ...ways.flatMap((way) => way.distances)].filter((value) => value > 0);
    const decade = (value, round) => 10 ** round(Math.log10(value));
    const top = decade(Math.max(...all, 1e-3) * 1.5, Math.ceil), bottom = Math.max(FLOOR, decade(Math.min(...all, 0.1) / 1.5, Math.floor));
    this.between(data, bottom, top);
    const known = data.seeds ? data.steps.map((_, k) => k).filter((k) => data.farthest[k] !== null) : [];
    const x = known.map((k) => data.steps[k]), far = known.map((k) => data.farthest[k]);
    this.source("limit", { x, y: far.map((value) => Math.max(bottom, data.beyond * value)) });
    this.source("seeds", { x, low: x.map(() => bottom), high: far.map((value) => Math.max(bottom, value)) });
    const height = (value) => Math.min(top, Math.max(bottom, value));
    this.fill(data, ways, (way) => way.distances, () => "0", "distances", height);
  }
}

function writeRemark(ways) {
  const bad = ways.filter((way) => way.why && way.status !== "ok"), list = byId("ways-remark");
  list.classList.toggle("fine", !bad.length);
  const lines = bad.length ? bad.map((way) => `${way.label}: ${way.why}`) : ["Every line stays in the range of fp32 runs from other seeds."];
  list.replaceChildren(...lines.map((text) => element("div", { textContent: text })));
}

function writeLegend(data, ways, charts) {
  const items = [element("span", { className: "reference" }, "━ fp32"), ...(data.seeds ? [element("span", { className: "seeds" }, `▒ ${data.seeds} other seeds`), element("span", { className: "seeds" }, "┅ limit")] : [])];
  const hidden = new Set();
  ways.forEach((way, i) => {
    const box = element("input", { type: "checkbox", checked: true }), sign = element("span", { textContent: SIGNS[i % COLOURS], className: `w${(i % COLOURS) + 1}` });
    sign.setAttribute("aria-hidden", "true");
    const state = element("span", { className: `status s-${way.kind}`, textContent: way.status });
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(i); else hidden.add(i);
      for (const chart of charts) {
        for (const part of ["line", "dots"]) chart.get(`way-${i}-${part}`).visible = box.checked;
        chart.showMarks((line) => !hidden.has(line));
      }
    });
    items.push(element("label", {}, box, " ", sign, ` ${way.label} `, state));
  });
  byId("ways-legend").replaceChildren(...items);
  for (const chart of charts) for (let i = 0; i < LINES; i++) for (const part of ["line", "dots"]) chart.get(`way-${i}-${part}`).visible = true;
}

function writeTable(id, data, heads, columns) {
  const table = byId(id), every = Math.ceil(data.steps.length / MOST_ROWS), last = data.steps.length - 1;
  const rows = data.steps.map((_, k) => k).filter((k) => k % every === 0 || k === last);
  const head = ["steps done", ...heads].map((text) => element("th", { scope: "col", textContent: text }));
  table.tHead.replaceChildren(element("tr", {}, ...head));
  table.tBodies[0].replaceChildren(...rows.map((k) => element("tr", {},
    element("th", { scope: "row", textContent: data.steps[k] }), ...columns.map((cell) => element("td", { className: "figure", textContent: cell(k) })))));
}

function writeTables(data, ways) {
  const names = ways.map((way) => way.label), seeds = data.seeds ? ["other seeds"] : [];
  const band = (k) => (data.low[k] === null || data.high[k] === null ? "–" : `${shown(data.low[k])} – ${shown(data.high[k])}`);
  const lost = (way, k) => way.marks.some((one) => one.chart === "losses" && one.value === null && one.step <= data.steps[k]);
  const loss = (way) => (k) => (way.losses[k] === null && lost(way, k) ? "Inf/NaN" : shown(way.losses[k]));
  writeTable("loss-table", data, ["fp32", ...seeds, ...names], [(k) => shown(data.losses[k]), ...(data.seeds ? [band] : []), ...ways.map(loss)]);
  const limit = (k) => (data.farthest[k] === null ? "–" : `at most ${digits(data.farthest[k])}`);
  writeTable("distance-table", data, [...seeds, ...names], [...(data.seeds ? [limit] : []), ...ways.map((way) => (k) => digits(way.distances[k]))]);
}

async function drawTrajectories() {
  Bokeh.set_log_level("warn");
  const data = await unpack(byId("trajectories").textContent.trim());
  const embed = async (kind, plot, place) => new kind((await Bokeh.Plotting.show(plot, byId(place))).model.document);
  const charts = [await embed(LossChart, trajectoryFigure("loss", "linear"), "loss-chart"), await embed(DistanceChart, trajectoryFigure("distance from fp32", "log"), "distance-chart")];
  const choice = byId("ways-choice");
  const show = () => {
    const ways = data.groups[Number(choice.value)].ways;
    for (const chart of charts) chart.show(data, ways);
    writeLegend(data, ways, charts);
    writeRemark(ways);
    writeTables(data, ways);
  };
  const colour = () => { for (const chart of charts) chart.colour(); };
  document.addEventListener("theme", colour);
  choice.addEventListener("change", show);
  colour();
  show();
  document.documentElement.dataset.trained = "true";
}

drawTrajectories();
