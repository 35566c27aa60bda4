// The network as a strip: modules as blocks in the order of execution, with the connections that skip blocks as arcs above.
"use strict";
const Strip = (() => {

const FEWEST = 12, MOST = 40, FOLDS_FROM = 24, LONGEST_PERIOD = 8, LEAST_PX = 24, USUAL_PX = 1040;

// -- from segments to blocks: a block is { path, name, segments, children, times, pattern }

const depthOf = (path) => (path ? path.split(".").length : 0);
const cut = (path, depth) => path.split(".").slice(0, depth).join(".");
const isWithin = (path, module) => !module || path === module || path.startsWith(`${module}.`);

function segmentsOf(data, run) {
  if (run.segments) return run.segments;
  const packed = run.strip, modules = data.strings.module;
  run.segments = packed.module.map((number, i) => ({
    path: modules[number], op: modules[packed.op[i]], kind: packed.kind[i], calls: packed.calls[i], time: packed.time[i] || 0, error: packed.error[i],
    level: packed.level[i], gaps: packed.gaps[i], lost: packed.lost[i], reads: packed.reads[i], index: i,
  }));
  return run.segments;
}

// Blocks of the module `view` ("": the model), its paths cut after `levels` more parts.
function blocksAt(segments, view, levels) {
  const depth = depthOf(view) + levels, blocks = [];
  for (const segment of segments) {
    if (!isWithin(segment.path, view)) continue;
    const path = cut(segment.path, depth), last = blocks[blocks.length - 1];
    if (last && last.path === path) last.segments.push(segment);
    else blocks.push({ path, segments: [segment] });
  }
  return blocks.length <= 3 * MOST ? blocks : joined(blocks);
}

// A loop runs a few modules many times: one block for each.
function joined(blocks) {
  const known = new Map();
  for (const block of blocks) {
    if (known.has(block.path)) known.get(block.path).segments.push(...block.segments);
    else known.set(block.path, { path: block.path, segments: [...block.segments] });
  }
  return [...known.values()];
}

const role = (path) => path.replace(/\d+/g, "*");
const likeness = (block) => `${role(block.path)}:${block.segments.map((its) => `${role(its.path.slice(block.path.length))}=${its.kind}`).join()}`;

// Successive blocks that repeat become one; `unfolded` holds the first segments of those that the reader opened.
function folded(blocks, unfolded) {
  const like = blocks.map(likeness), found = [];
  for (let i = 0; i < blocks.length;) {
    let best = { period: 1, times: 1 };
    for (let period = 1; period <= LONGEST_PERIOD && i + 3 * period <= blocks.length; period += 1) {
      let end = i + period;
      while (end < blocks.length && like[end] === like[end - period]) end += 1;
      const times = Math.floor((end - i) / period);
      if (times >= 3 && period * times > best.period * best.times) best = { period, times };
    }
    const size = best.period * best.times, members = blocks.slice(i, i + size), first = blocks[i].segments[0].index;
    if (best.times > 1 && !unfolded.has(first)) {
      const segments = members.flatMap((block) => block.segments);
      found.push({ path: null, members, times: best.times, pattern: patternOf(members.slice(0, best.period)), first, segments });
    } else found.push(...members);
    i += size;
  }
  return found;
}
const patternOf = (members) => [...new Set(members.map((block) => role(block.path)))].map((path) => path || "(model)").join(", ");

// The fewest levels that give enough blocks, or as many as fit.
function layOut(segments, view, unfolded) {
  const deepest = segments.reduce((most, its) => (isWithin(its.path, view) ? Math.max(most, depthOf(its.path)) : most), 0) - depthOf(view);
  const wanted = view ? 2 : FEWEST;
  let best = null;
  for (let levels = 1; levels <= Math.max(1, deepest); levels += 1) {
    const all = blocksAt(segments, view, levels), blocks = all.length > FOLDS_FROM ? folded(all, unfolded) : all;
    if (best && (blocks.length < best.length || folded(all, new Set()).length > MOST)) break;  // a fold that shows less, or too many
    best = blocks;
    if (all.length >= wanted) break;
  }
  return best.map((block) => described(block, segments, view));
}

function described(block, segments, view) {
  const its = block.segments, sum = (name) => its.reduce((total, segment) => total + segment[name], 0);
  const ends = (block.members || [block]).map((member) => endOf(member.segments)), end = ends.reduce((worst, other) => (rank(other) > rank(worst) ? other : worst));
  const own = block.path !== null && block.path === view && view !== "" ? true : block.path === "";
  const name = block.path === null ? `${block.times} × ${block.pattern}` : own ? its[its.length - 1].op : view ? block.path.slice(view.length + 1) : block.path;
  const inside = new Set(its.map((segment) => segment.path)), skips = own ? 0 : skipsInside(block.members ? block.members[0] : block);
  return { ...block, name, own, end, calls: sum("calls"), time: sum("time"), gaps: sum("gaps"), lost: sum("lost"), skips, opens: block.path === null || (!own && (inside.size > 1 || !inside.has(block.path))) };
}
const rank = (end) => end.level + (end.error || 0) / 1e9;
const endOf = (segments) => [...segments].reverse().find((its) => its.error !== null || its.level) || { error: null, level: 0 };

// The number of connections that skip modules inside a block.
function skipsInside(block) {
  const paths = [...new Set(block.segments.map((its) => its.path))];
  let levels = 1, parts = [];
  do { parts = blocksAt(block.segments, block.path, levels); levels += 1; } while (parts.length === 1 && paths.length > 1 && levels < 99);
  return connections(parts).length;
}

// Pairs of blocks (from, to) that are not neighbours; from is -1 if the value comes from outside the module shown.
function connections(blocks) {
  const place = new Map(), found = new Map();
  blocks.forEach((block, i) => { for (const segment of block.segments) place.set(segment.index, i); });
  blocks.forEach((block, to) => {
    for (const segment of block.segments) {
      for (const source of segment.reads) {
        const from = place.has(source) ? place.get(source) : -1;
        if (from < to - 1) found.set(`${from}-${to}`, [from, to]);
      }
    }
  });
  return [...found.values()];
}

// -- drawing

const milliseconds = (value) => (value >= 10 ? `${value.toFixed(0)} ms` : `${value.toPrecision(2)} ms`);

class NetworkStrip {
  constructor(data) {
    this.data = data; this.views = [""]; this.unfolded = new Set(); this.focused = 0;
    this.root = byId("strip");
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.root.addEventListener("click", (event) => { const button = event.target.closest("button"); if (button) this.open(Number(button.dataset.at)); });
    for (const kind of ["focusin", "pointerover"]) this.root.addEventListener(kind, (event) => { const button = event.target.closest("button"); if (button) this.point(Number(button.dataset.at)); });
    this.root.addEventListener("pointerleave", () => this.point(this.pressed()));
    byId("crumbs").addEventListener("click", (event) => { const button = event.target.closest("button"); if (button) this.goTo(Number(button.dataset.at)); });
  }
  get view() { return this.views[this.views.length - 1]; }
  show({ run, module }) {
    const isNew = this.run !== this.data.runs[run];
    this.run = this.data.runs[run];
    const segments = segmentsOf(this.data, this.run);
    if (isNew && !segments.some((its) => isWithin(its.path, this.view))) this.views = [""];
    if (module === null && this.module) this.views = [""];
    this.module = module;
    if (module !== null && !isWithin(module, this.view)) this.views = [""];
    this.draw();
  }
  draw() {
    const segments = segmentsOf(this.data, this.run);
    this.blocks = segments.length ? layOut(segments, this.view, this.unfolded) : [];
    this.links = connections(this.blocks);
    this.timed = this.run.strip.time.length > 0;
    this.focused = Math.max(0, Math.min(this.blocks.length - 1, this.pressed() < 0 ? this.focused : this.pressed()));
    const shares = this.widths();
    this.root.style.minWidth = shares.length ? `${Math.ceil(LEAST_PX / Math.min(...shares))}px` : "";
    this.root.replaceChildren(this.arcs(shares), ...this.blocks.map((block, i) => this.block(block, i, shares[i])));
    this.crumbs();
    this.legend();
    this.point(this.pressed());
  }
  widths() {
    const count = this.blocks.length, weights = this.blocks.map((block) => (this.timed ? block.time : block.calls) || 0);
    const total = weights.reduce((a, b) => a + b, 0) || 1, least = Math.min(0.9 / count, Math.max(LEAST_PX / USUAL_PX, 0.5 / count));
    const free = new Set(weights.keys()), shares = weights.map(() => least);
    for (let before = -1; before !== free.size;) {  // those below the least width get it, the others share the rest
      before = free.size;
      const rest = 1 - least * (count - free.size), sum = [...free].reduce((a, i) => a + weights[i], 0) || total;
      for (const i of [...free]) { shares[i] = (weights[i] / sum) * rest; if (shares[i] < least) { shares[i] = least; free.delete(i); } }
    }
    const all = shares.reduce((a, b) => a + b, 0);
    return shares.map((share) => share / all);
  }
  block(block, i, share) {
    const button = element("button", { className: `block lv${block.end.level}${block.opens ? " opens" : ""}${block.own ? " own" : ""}` });
    Object.assign(button, { type: "button", tabIndex: i === this.focused ? 0 : -1 });
    Object.assign(button.dataset, { at: i, path: block.path === null ? "" : block.path || "(model)" });
    button.style.width = `${share * 100}%`;
    button.style.setProperty("--level", `${(block.end.level / 8) * 100}%`);
    button.setAttribute("aria-label", this.sentence(block, i));
    if (block.path !== null) button.setAttribute("aria-pressed", String(i === this.pressed()));
    const marks = element("span", { className: "block-marks", textContent: [block.lost ? "▲" : "", block.gaps ? `✕${block.gaps}` : ""].filter(Boolean).join(" ") });
    const name = element("span", { className: "block-name" });
    name.append(element("bdi", { textContent: block.name }));
    button.append(marks, name);
    return button;
  }
  arcs(shares) {
    const namespace = "http://www.w3.org/2000/svg", svg = document.createElementNS(namespace, "svg");
    svg.setAttribute("class", "arcs"); svg.setAttribute("viewBox", "0 0 1000 60"); svg.setAttribute("preserveAspectRatio", "none"); svg.setAttribute("aria-hidden", "true");
    const starts = shares.map((_, i) => shares.slice(0, i).reduce((a, b) => a + b, 0)), middle = (i) => (i < 0 ? 0 : (starts[i] + shares[i] / 2) * 1000);
    const longest = Math.max(2, ...this.links.map(([from, to]) => to - from));
    svg.style.setProperty("--fade", String(Math.max(0.3, Math.min(1, 24 / Math.max(1, this.links.length)))));
    for (const [from, to] of this.links) {
      const path = document.createElementNS(namespace, "path"), top = 60 - 76 * (0.3 + 0.7 * Math.sqrt((to - from) / longest));
      path.setAttribute("d", `M${middle(from)} 60 C${middle(from)} ${top} ${middle(to)} ${top} ${middle(to)} 60`);
      path.dataset.from = from; path.dataset.to = to;
      svg.append(path);
    }
    this.blocks.forEach((block, i) => {
      if (!block.skips) return;
      const path = document.createElementNS(namespace, "path"), left = (starts[i] + shares[i] * 0.2) * 1000, right = (starts[i] + shares[i] * 0.8) * 1000;
      path.setAttribute("d", `M${left} 60 C${left} 46 ${right} 46 ${right} 60`);
      path.setAttribute("class", "inside");
      svg.append(path);
    });
    svg.classList.toggle("low", !this.links.length);
    return svg;
  }
  pressed() { return this.blocks.findIndex((block) => block.path !== null && !block.own && this.module !== null && isWithin(this.module, block.path) && block.path !== ""); }
  point(i) {
    for (const path of this.root.querySelectorAll("path[data-from]")) path.classList.toggle("near", Number(path.dataset.from) === i || Number(path.dataset.to) === i);
    byId("strip-details").textContent = i >= 0 && this.blocks[i] ? this.sentence(this.blocks[i], i) : this.summary();
  }
  share(block) {
    const total = this.blocks.reduce((sum, its) => sum + its.time, 0) || 1;
    return this.timed ? `${milliseconds(block.time)}, ${percent(block.time / total)} of the time shown` : "";
  }
  sentence(block, i) {
    const { error, level } = block.end, tolerance = this.run.tolerance, names = (its) => its.map((j) => (j < 0 ? "outside" : this.blocks[j].name)).join(", ");
    const to = this.links.filter(([from]) => from === i).map(([, j]) => j), from = this.links.filter(([, j]) => j === i).map(([j]) => j);
    const size = error === null ? (level === 8 ? "error Inf or NaN" : "no error known") : `error ${digits(error)}${tolerance ? `, ${Number((error / tolerance).toPrecision(2))} × tolerance` : ""}`;
    return [
      `${block.own ? `${block.name} (in ${this.view || "the model"} itself)` : block.name}: ${block.calls} op call${block.calls === 1 ? "" : "s"}`, this.share(block),
      block.path === null && error !== null ? `worst ${size}` : size,
      block.lost ? "▲ Inf or NaN appears here" : "", block.gaps ? `✕ ${block.gaps} call${block.gaps === 1 ? " has" : "s have"} no kernel` : "",
      block.skips ? `${block.skips} connection${block.skips === 1 ? "" : "s"} inside skip${block.skips === 1 ? "s" : ""} modules` : "",
      to.length ? `also read by ${names(to)}` : "", from.length ? `also reads ${names(from)}` : "",
    ].filter(Boolean).join("; ");
  }
  summary() {
    if (!this.blocks.length) return "No op calls of the forward pass are known.";
    const skips = this.links.length, blocks = `${this.blocks.length} block${this.blocks.length === 1 ? "" : "s"}`;
    return this.run.strip.reads.some((its) => its.length)
      ? `${blocks}; ${skips} connection${skips === 1 ? " skips" : "s skip"} blocks.`
      : `${blocks}; their connections are not known: an older version saved this scan.`;
  }
  crumbs() {
    byId("crumbs").replaceChildren(...this.views.map((view, i) => {
      const item = element("li"), last = i === this.views.length - 1, button = element("button", { textContent: view ? view.slice(this.views[i - 1] ? this.views[i - 1].length + 1 : 0) : "(model)" });
      button.type = "button"; button.dataset.at = i;
      if (last) button.setAttribute("aria-current", "true");
      item.append(button);
      return item;
    }));
  }
  legend() {
    const shown = [...new Set(this.blocks.map((block) => block.end.level))].sort(), tolerance = this.run.tolerance;
    const parts = [element("span", { textContent: `Width: ${this.timed ? "time of the ops in this run, each called once" : "number of op calls (times are not known)"}. Fill: error at the module's end ÷ tolerance${tolerance ? ` (${digits(tolerance)})` : ""}:` })];
    for (const level of shown) { const entry = element("span", { className: "key" }); entry.append(element("i", { className: `swatch lv${level}` }), (level ? this.data.level_texts[level - 1] : "no error known, or none")); parts.push(entry); }
    if (this.links.length) parts.push(element("span", { textContent: "Arcs: a block reads the result of an earlier block that is not the one before it." }));
    if (this.blocks.some((block) => block.skips)) parts.push(element("span", { textContent: "Dashed arcs: such connections inside a block." }));
    if (this.blocks.some((block) => block.lost)) parts.push(element("span", { textContent: "▲ Inf or NaN appears." }));
    if (this.blocks.some((block) => block.gaps)) parts.push(element("span", { textContent: "✕n: n calls without a kernel." }));
    if (this.blocks.some((block) => block.own)) parts.push(element("span", { textContent: "Italic: ops of the module itself." }));
    byId("strip-legend").replaceChildren(...parts.flatMap((part) => [part, " "]));
  }
  focus(i) { const button = this.root.querySelectorAll("button")[i]; if (!button) return; for (const other of this.root.querySelectorAll("button")) other.tabIndex = -1; this.focused = i; button.tabIndex = 0; button.focus(); }
  open(i) {
    const block = this.blocks[i];
    this.focused = i;
    if (block.path === null) { this.unfolded.add(block.first); this.draw(); this.focus(i); return; }
    if (block.own) { choose({ module: this.view || null }); this.focus(i); return; }
    if (block.opens) { this.views.push(block.path); this.focused = 0; }
    this.module = block.path;
    choose({ module: block.path });
    this.focus(block.opens ? 0 : i);
  }
  goTo(at) {
    const left = this.views[at + 1];
    this.views.length = at + 1;
    this.module = this.view || null;
    choose({ module: this.view || null });
    this.focus(Math.max(0, this.blocks.findIndex((block) => left !== undefined && block.path === left)));
  }
  up() {
    if (this.views.length > 1) this.goTo(this.views.length - 2);
    else if (this.unfolded.size) { this.unfolded.clear(); this.draw(); this.focus(this.focused); }
    else if (this.module !== null) this.goTo(0);
  }
  key(event) {
    const at = Number(event.target.dataset.at), last = this.blocks.length - 1;
    const moves = { ArrowRight: () => this.focus(Math.min(last, at + 1)), ArrowLeft: () => this.focus(Math.max(0, at - 1)), Home: () => this.focus(0), End: () => this.focus(last), Escape: () => this.up() };
    if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
  }
}

return NetworkStrip;
})();
