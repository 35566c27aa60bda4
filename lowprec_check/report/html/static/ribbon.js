// Value ranges of the module chosen: a histogram of magnitudes between the limits of fp16 and of bf16.
"use strict";
const { drawRibbon, writeRangeRemark } = (() => {

const HELD = ["fp16", "bf16"], LOWEST = -149, HIGHEST = 128, CENTRE_SHARE = 0.76;

// One histogram of the module chosen and all modules inside it: counts by exponent, zeros, Inf and NaN, op calls.
function magnitudesIn(data, run) {
  const packed = run.magnitudes, total = { counts: new Map(), zeros: 0, nonfinite: 0, ops: 0, nonzeros: 0 };
  packed.module.forEach((number, i) => {
    if (!isInChosen(data.strings.module[number] || "(model)")) return;
    packed.counts[i].forEach((count, j) => { if (count) total.counts.set(packed.lowest[i] + j, (total.counts.get(packed.lowest[i] + j) || 0) + count); total.nonzeros += count; });
    total.zeros += packed.zeros[i]; total.nonfinite += packed.nonfinite[i]; total.ops += packed.ops[i];
  });
  return total;
}

// What a format does to the values of a histogram: a value of less than half the smallest subnormal rounds to zero.
function predicted(histogram, limits) {
  const bottom = Math.round(Math.log2(limits.subnormal)) - 1, normal = Math.round(Math.log2(limits.normal)), top = Math.floor(Math.log2(limits.max)) + 1;
  const found = { flushed: 0, small: 0, over: 0 };
  for (const [exponent, count] of histogram.counts) {
    if (exponent < bottom) found.flushed += count;
    if (exponent < normal) found.small += count;
    if (exponent >= top) found.over += count;
  }
  const all = Math.max(1, histogram.nonzeros);
  return { flushed: found.flushed / all, small: found.small / all, over: found.over / all };
}
const counted = (count) => `${count} value${count === 1 ? "" : "s"}`;
const few = (share) => (share === 0 ? "none" : share > 0 && share < 0.001 ? "< 0.1 %" : share > 0.999 && share < 1 ? "> 99.9 %" : percent(share));

// Where a magnitude lies, in per cent: most of the width for the values and fp16's range, the rest of bf16's range on both sides.
function scaleOf(histogram) {
  const known = [...histogram.counts.keys()], low = Math.max(LOWEST + 1, Math.min(-28, ...known)), high = Math.min(HIGHEST - 1, Math.max(20, ...known.map((exponent) => exponent + 2)));
  const side = (1 - CENTRE_SHARE) / 2;
  const part = (x) => (x < low ? (side * (x - LOWEST)) / (low - LOWEST) : x > high ? 1 - (side * (HIGHEST - x)) / (HIGHEST - high) : side + (CENTRE_SHARE * (x - low)) / (high - low));
  return { low, high, at: (x) => 100 * Math.max(0, Math.min(1, part(x))), from: side * 100, to: 100 - side * 100 };
}

function drawRibbon(data, run) {
  const histogram = magnitudesIn(data, run), scale = scaleOf(histogram), root = byId("ribbon"), own = data.limits[run.format];
  const module = chosen.module || "the model", values = histogram.nonzeros + histogram.zeros + histogram.nonfinite;
  const calls = `${histogram.ops} op call${histogram.ops === 1 ? "" : "s"}`;
  byId("ribbon-about").textContent = values
    ? `Magnitudes of the fp32 reference's values in ${module}: ${values.toLocaleString("en")} values of ${calls}, a sample of at most ${run.magnitudes.sample.toLocaleString("en")} values per op. Height: logarithm of the number of values in a power of two.`
    : `No values of ${module} are known in this run.`;
  root.hidden = !values;
  if (values) {
    const plot = element("div", { className: "ribbon-plot" });
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", ribbonText(histogram, data.limits, module));
    plot.append(...bars(histogram, scale, own), ...limitLines(data.limits, scale), ...breaks(scale), ...ticks(scale));
    root.replaceChildren(plot, ...HELD.map((name) => lane(name, data.limits[name], scale)), ribbonLegend(histogram, own, run));
  }
  fillRibbonTable(histogram, data, run, values);
}

function ribbonText(histogram, limits, module) {
  const known = [...histogram.counts.keys()];
  const range = known.length ? `from ${digits(2 ** Math.min(...known))} to ${digits(2 ** (Math.max(...known) + 1))}` : "all zero";
  const of = HELD.map((name) => { const found = predicted(histogram, limits[name]); return `${name} flushes ${few(found.flushed)} and overflows ${few(found.over)}`; });
  return `Histogram of the magnitudes in ${module}: ${range}; ${of.join("; ")}`;
}

const zoneOf = (exponent, limits) => {
  if (exponent < Math.round(Math.log2(limits.subnormal)) - 1) return "flushed";
  if (exponent < Math.round(Math.log2(limits.normal))) return "small";
  return exponent > Math.floor(Math.log2(limits.max)) ? "over" : "held";
};
function bars(histogram, scale, own) {
  const most = Math.log1p(Math.max(1, ...histogram.counts.values()));
  return [...histogram.counts].map(([exponent, count]) => {
    const bar = element("div", { className: `ribbon-bar z-${zoneOf(exponent, own)}` });
    bar.style.left = `${scale.at(exponent)}%`;
    bar.style.width = `${scale.at(exponent + 1) - scale.at(exponent)}%`;
    bar.style.height = `${Math.max(1.5, (100 * Math.log1p(count)) / most)}%`;
    bar.dataset.exponent = exponent; bar.dataset.count = count;
    bar.title = `${digits(2 ** exponent)} to ${digits(2 ** (exponent + 1))}: ${count} values`;
    return bar;
  });
}
function limitLines(limits, scale) {
  return HELD.flatMap((name) => ["subnormal", "normal", "max"].map((limit) => {
    const line = element("div", { className: `ribbon-limit f-${name} l-${limit}` });
    line.style.left = `${scale.at(Math.log2(limits[name][limit]))}%`;
    return line;
  }));
}
const breaks = (scale) => [scale.from, scale.to].map((at) => { const line = element("div", { className: "ribbon-break" }); line.style.left = `${at}%`; return line; });
function ticks(scale) {
  const narrow = innerWidth < 640, step = narrow ? 6 : 3, found = [-38];
  for (let power = Math.ceil((scale.low * Math.LN2) / Math.LN10); power <= (scale.high * Math.LN2) / Math.LN10; power += 1) if (power % step === 0) found.push(power);
  if (scale.high < 100) found.push(38);
  return found.map((power) => {
    const tick = element("span", { className: "ribbon-tick", textContent: power === 0 ? "1" : `1e${power}` });
    tick.style.left = `${scale.at((power * Math.LN10) / Math.LN2)}%`;
    if (Math.abs(power) === 38) tick.classList.add(power < 0 ? "first" : "last");
    return tick;
  });
}
function lane(name, limits, scale) {
  const made = element("div", { className: "ribbon-lane" }), at = (limit) => scale.at(Math.log2(limits[limit]));
  made.setAttribute("aria-hidden", "true");
  for (const [kind, from, to] of [["subnormals", "subnormal", "normal"], ["normals", "normal", "max"]]) {
    const part = element("div", { className: `ribbon-${kind} f-${name}` });
    part.style.left = `${at(from)}%`; part.style.width = `${at(to) - at(from)}%`;
    made.append(part);
  }
  const label = element("span", { className: "ribbon-name", textContent: `${name}: ${digits(limits.subnormal)} … ${digits(limits.max)}` });
  made.append(label);
  label.style.left = `${(at("normal") + at("max")) / 2}%`;
  return made;
}
const ZONES = { flushed: "flushed to zero", small: "subnormal: fewer digits", held: "normal numbers", over: "overflow" };
function ribbonLegend(histogram, own, run) {
  const made = element("p", { className: "hint strip-legend" }), shown = new Set([...histogram.counts.keys()].map((exponent) => zoneOf(exponent, own)));
  made.append(`Colors: what ${run.format} makes of them. `);
  for (const [zone, text] of Object.entries(ZONES)) if (shown.has(zone)) { const entry = element("span", { className: "key" }); entry.append(element("i", { className: `swatch z-${zone}` }), text); made.append(entry, " "); }
  made.append("Below: the range of each format, its subnormal numbers lighter. The scale is compressed beyond the dotted lines.");
  if (histogram.zeros) made.append(` Not drawn: ${few(histogram.zeros / (histogram.nonzeros + histogram.zeros + histogram.nonfinite))} zeros.`);
  if (histogram.nonfinite) made.append(` ${histogram.nonfinite} values are Inf or NaN in the reference.`);
  return made;
}

function fillRibbonTable(histogram, data, run, values) {
  const limit = (name) => ["subnormal", "normal", "max"].map((which) => digits(data.limits[name][which]));
  const rows = values ? HELD.map((name) => { const found = predicted(histogram, data.limits[name]); return [`${name}, predicted from the histogram`, few(found.flushed), few(found.small), few(found.over), ...limit(name)]; }) : [];
  const rangeOf = run.ranges, its = rangeOf.module.map((_, i) => i).filter((i) => isInChosen(rangeOf.module[i]));
  const most = (name) => its.reduce((largest, i) => Math.max(largest, rangeOf[name][i] || 0), 0), over = its.reduce((sum, i) => sum + rangeOf.overflow[i], 0);
  if (its.length) {
    const measured = run.format === "fp16" ? [few(most("flushed")), few(most("small"))].map((text) => (text === "none" ? text : `at most ${text}`)) : ["–", "–"];
    rows.push([`${run.label}, worst op of the run`, ...measured, over ? counted(over) : "none", ...limit(run.format)]);
  }
  fillTable("ribbon-table", rows);
}

// The modules closest to the limits of the run's format, of those chosen.
function writeRangeRemark(data, run) {
  const ranges = run.ranges, limits = data.limits[run.format];
  const room = (i) => limits.max / Math.max(ranges.high[i], 1e-45);
  const order = ranges.module.map((_, i) => i).filter((i) => isInChosen(ranges.module[i])).sort((a, b) => (ranges.overflow[b] - ranges.overflow[a]) || room(a) - room(b));
  const remark = byId("range-remark");
  fillTable("nearest", order.slice(0, 20).map((i) => [
    ranges.module[i], ranges.overflow[i] ? "Inf" : digits(ranges.high[i]), digits(ranges.low[i]), percent(ranges.small[i]), percent(ranges.flushed[i]),
  ]));
  if (!order.length) { remark.textContent = "No value ranges are known of this run."; return; }
  const worst = order[0], over = ranges.overflow[worst];
  const small = order.reduce((most, i) => (ranges.small[i] > ranges.small[most] ? i : most), worst), most = ranges.small[small];
  remark.classList.toggle("fine", !over && room(worst) > 16 && most < 0.1);
  const margin = room(worst) >= 1e4 ? room(worst).toExponential(0) : room(worst).toFixed(1);
  const zero = ranges.flushed[small] ? `; ${percent(ranges.flushed[small])} become zero` : "";
  const bottom = most >= 0.001
    ? ` Closest to the minimum: ${ranges.module[small]}. ${percent(most)} of its non-zeros are below the smallest normal number of ${run.format}, ${digits(limits.normal)}${zero}.`
    : "";
  remark.textContent = (over
    ? `${ranges.module[worst]} overflows: ${counted(over)} exceed${over === 1 ? "s" : ""} the maximum of ${run.format}.`
    : `Closest to the maximum: ${ranges.module[worst]}. Its largest value is ${digits(ranges.high[worst])}; ${margin} times as much would overflow.`) + bottom;
}

return { drawRibbon, writeRangeRemark };
})();
