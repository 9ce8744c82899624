// The charts of a run, drawn from columns.

import { ms, svg } from "./api.js";

export const PHASES = ["data", "forward", "backward", "exposed_comm", "optimizer", "other"];
const WIDTH = 1120, LEFT = 64;

const tip = document.getElementById("tip");

export function explain(node, text) {
  node.addEventListener("pointermove", (event) => {
    tip.textContent = text();
    tip.hidden = false;
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.clientY + 14}px`;
  });
  node.addEventListener("pointerleave", () => (tip.hidden = true));
}

function canvas(height) {
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${height}` });
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * size).find((candidate) => candidate >= raw);
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) values.push(value);
  return values;
}

// points: [{step, wall, <phase>…}], one per step, times in ns.
export function phases(target, points) {
  const height = 240, bottom = height - 22, top = 8;
  const chart = canvas(height);
  if (points.length < 2) return target.replaceChildren("Fewer than two steps so far.");
  const walls = points.map((point) => point.wall).sort((a, b) => a - b);
  const highest = Math.min(walls.at(-1), 3 * walls[Math.floor(walls.length / 2)]) * 1.05;
  const first = points[0].step, last = points.at(-1).step;
  const x = (step) => LEFT + ((WIDTH - LEFT) * (step - first)) / (last - first);
  const y = (ns) => bottom - ((bottom - top) * Math.min(ns, highest)) / highest;
  for (const value of ticks(0, highest / 1e6, 4)) {
    const level = y(value * 1e6);
    chart.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: level, y2: level }), svg("text", { x: LEFT - 6, y: level + 4, "text-anchor": "end" }, `${+value.toPrecision(3)} ms`));
  }
  let below = points.map(() => 0);
  for (const phase of PHASES) {
    const above = below.map((sum, index) => sum + points[index][phase]);
    const up = points.map((point, index) => `${x(point.step).toFixed(1)},${y(above[index]).toFixed(1)}`);
    const down = points.map((point, index) => `${x(point.step).toFixed(1)},${y(below[index]).toFixed(1)}`).reverse();
    chart.append(svg("polygon", { class: phase, points: [...up, ...down].join(" ") }));
    below = above;
  }
  for (const step of ticks(first, last, 8)) if (Number.isInteger(step)) chart.append(svg("text", { x: x(step), y: height - 6, "text-anchor": "middle" }, String(step)));
  const overlay = svg("rect", { x: LEFT, y: 0, width: WIDTH - LEFT, height: bottom, "fill-opacity": 0 });
  let nearest = 0;
  overlay.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const step = first + (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT) * (last - first);
    nearest = points.reduce((best, point, index) => (Math.abs(point.step - step) < Math.abs(points[best].step - step) ? index : best), 0);
  });
  explain(overlay, () => `step ${points[nearest].step}: ${ms(points[nearest].wall)}\n${PHASES.map((phase) => `${phase}: ${ms(points[nearest][phase])}`).join("\n")}`);
  chart.append(overlay);
  target.replaceChildren(chart);
}

// Bins of the whole run: a bar from the least to the most of any rank, a line of medians; intervals of findings are shaded.
export function wholeRun(target, { first, last, wall_min_ns, wall_median_ns, wall_max_ns }, intervals) {
  if (first.length < 2) return target.replaceChildren("Too few steps so far.");
  const height = 160, bottom = height - 22, top = 8, chart = canvas(height), end = last.at(-1) + 1;
  // A step with an upload may be as long as thousands: longer bars end at the top, and the tip has their value.
  const highest = Math.min(Math.max(...wall_max_ns), 6 * Math.max(...wall_median_ns)) * 1.05;
  const x = (step) => LEFT + ((WIDTH - LEFT) * (step - first[0])) / (end - first[0]);
  const y = (ns) => bottom - ((bottom - top) * Math.min(ns, highest)) / highest;
  for (const { from, to } of intervals) chart.append(svg("rect", { class: "interval", x: x(Math.max(from, first[0])), width: Math.max(2, x(to + 1) - x(Math.max(from, first[0]))), y: top, height: bottom - top }));
  for (const value of ticks(0, highest / 1e6, 4)) {
    const level = y(value * 1e6);
    chart.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: level, y2: level }), svg("text", { x: LEFT - 6, y: level + 4, "text-anchor": "end" }, `${+value.toPrecision(3)} ms`));
  }
  first.forEach((step, row) => {
    const bar = svg("rect", { class: "spread", x: x(step), width: Math.max(0.5, x(last[row] + 1) - x(step)), y: y(wall_max_ns[row]), height: Math.max(1, y(wall_min_ns[row]) - y(wall_max_ns[row])) });
    explain(bar, () => `steps ${step} to ${last[row]}\nleast ${ms(wall_min_ns[row])}, median ${ms(wall_median_ns[row])}, most ${ms(wall_max_ns[row])}`);
    chart.append(bar);
  });
  chart.append(svg("polyline", { class: "median", points: first.map((step, row) => `${x((step + last[row] + 1) / 2).toFixed(1)},${y(wall_median_ns[row]).toFixed(1)}`).join(" ") }));
  for (const step of ticks(first[0], end, 8)) if (Number.isInteger(step)) chart.append(svg("text", { x: x(step), y: height - 6, "text-anchor": "middle" }, String(step)));
  target.replaceChildren(chart);
}

// Rows are the ranks at `shown` (indices), columns are steps; if too many, neighbouring steps are merged. Colour is the
// own time above the other ranks.
export function heat(target, { steps, ranks: allRanks, excess_ns }, shown, chosen, choose) {
  if (!steps.length) return target.replaceChildren("No step yet in which all ranks can be compared.");
  const indices = [...shown].sort((a, b) => a - b), ranks = indices.map((index) => allRanks[index]);
  const merged = Math.ceil(steps.length / 200), columns = Math.ceil(steps.length / merged);
  const cell = Math.max(4, Math.min(26, 420 / ranks.length)), height = cell * ranks.length + 24;
  const chart = canvas(height), width = (WIDTH - LEFT) / columns;
  const table = Array.from({ length: columns }, (_, column) => {
    const rows = excess_ns.slice(column * merged, (column + 1) * merged);
    return indices.map((index) => rows.reduce((sum, row) => sum + row[index], 0) / rows.length);
  });
  const alone = allRanks.length < 2;
  const colour = (value) => (alone ? "#888888" : value >= 0 ? "#d55e00" : "#0072b2");
  const compared = (value) => (alone ? "" : `\n${value >= 0 ? ms(value) + " longer" : ms(-value) + " shorter"} than the other ranks`);
  const sorted = table.flat().map(Math.abs).sort((a, b) => a - b);
  const scale = Math.max(1e5, sorted[Math.floor(sorted.length * 0.95)] || 0);
  table.forEach((row, column) => row.forEach((value, rank) => {
    const strength = Math.min(1, Math.max(0, value / scale));
    const box = svg("rect", { class: "cell", x: LEFT + column * width, y: rank * cell, width: width + 0.3, height: cell - 1, fill: colour(value), "fill-opacity": value >= 0 ? 0.06 + 0.94 * strength : 0.06 });
    const step = steps[column * merged];
    explain(box, () => `rank ${ranks[rank]}, step ${step}${merged > 1 ? ` and ${merged - 1} more` : ""}${compared(value)}`);
    box.addEventListener("click", () => choose(step));
    chart.append(box);
  }));
  ranks.forEach((rank, index) => (ranks.length < 33 || index % 8 === 0) && chart.append(svg("text", { x: LEFT - 6, y: (index + 0.5) * cell + 4, "text-anchor": "end" }, `rank ${rank}`)));
  for (const index of ticks(0, columns - 1, 8)) chart.append(svg("text", { x: LEFT + (index + 0.5) * width, y: height - 6, "text-anchor": "middle" }, String(steps[Math.round(index) * merged])));
  const chosenIndex = steps.findIndex((step) => step >= chosen);
  if (chosenIndex >= 0) chart.append(svg("rect", { class: "chosen", x: LEFT + Math.floor(chosenIndex / merged) * width, y: 0, width, height: cell * ranks.length - 1 }));
  target.replaceChildren(chart);
}

// spans: rows of one step; layouts: sizes and parameters of the buckets.
export function timeline(target, spans, layouts) {
  if (!spans.length) return target.replaceChildren("No bucket spans of this step.");
  const ranks = [...new Set(spans.map((span) => span.rank))].sort((a, b) => a - b);
  const rows = ranks.flatMap((rank) => spans.filter((span) => span.rank === rank).sort((a, b) => a.module - b.module || a.bucket - b.bucket));
  const bar = 13, gap = 10, height = rows.length * bar + ranks.length * gap + 24, chart = canvas(height);
  const begin = Math.min(...rows.map((span) => span.ready)), end = Math.max(...rows.map((span) => span.done));
  const pad = (end - begin) * 0.06, x = (ns) => LEFT + 66 + ((WIDTH - LEFT - 70) * (ns - begin + pad)) / (end - begin + pad || 1);
  let y = 0, previous = null, rank = null, module = null;
  for (const span of rows) {
    if (span.rank !== rank) {
      if (rank !== null) y += gap;
      chart.append(svg("text", { x: 0, y: y + bar - 2 }, `rank ${span.rank}`));
      rank = span.rank;
      previous = null;
    }
    if (span.module !== module) previous = null;
    module = span.module;
    const name = `bucket ${module ? `${module}.` : ""}${span.bucket}`;
    chart.append(svg("text", { x: LEFT + 60, y: y + bar - 3, "text-anchor": "end" }, name));
    const from = previous === null ? begin - pad : Math.min(previous, span.ready);
    const compute = svg("rect", { class: "compute", x: x(from), y: y + 1, width: Math.max(1, x(span.ready) - x(from)), height: bar - 3, rx: 2 });
    const comm = svg("rect", { class: "comm", x: x(span.launched), y: y + 1, width: Math.max(1, x(span.done) - x(span.launched)), height: bar - 3, rx: 2 });
    const bucket = layouts.find((layout) => layout.module === span.module && layout.revision === span.revision)?.buckets[span.bucket];
    const describe = () => `rank ${span.rank}, ${name}\nall-reduce ${ms(span.done - span.launched)}${bucket ? `\n${(bucket.size_bytes / 1e6).toFixed(2)} MB ${bucket.dtype}, ${bucket.parameters.length} parameters\n${bucket.parameters.slice(0, 8).map((parameter) => parameter.name).join("\n")}${bucket.parameters.length > 8 ? "\n…" : ""}` : ""}`;
    explain(compute, describe);
    explain(comm, describe);
    chart.append(compute, comm);
    previous = span.ready;
    y += bar;
  }
  for (const value of ticks(0, (end - begin) / 1e6, 8)) {
    const position = x(begin + value * 1e6), anchor = position > WIDTH - 24 ? "end" : "middle";
    chart.append(svg("text", { x: position, y: height - 6, "text-anchor": anchor }, `${+value.toPrecision(3)} ms`));
  }
  target.replaceChildren(chart);
}
