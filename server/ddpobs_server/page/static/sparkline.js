// The step time over a run as a small picture, from zero to the largest value.

import { svg } from "./elements.js";
import { duration } from "./times.js";

const WIDTH = 110;
const HEIGHT = 24;

export function sparkline(times_ns) {
  const label = `step time over the run: ${duration(Math.min(...times_ns))} to ${duration(Math.max(...times_ns))}`;
  const frame = { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label };
  return svg("svg", frame, svg("polyline", { points: points(times_ns).join(" ") }));
}

function points(times_ns) {
  const highest = Math.max(...times_ns) || 1;
  const x = (index) => (times_ns.length > 1 ? (index * WIDTH) / (times_ns.length - 1) : 0);
  const y = (ns) => HEIGHT - 1 - ((HEIGHT - 3) * ns) / highest;
  const found = times_ns.map((ns, index) => `${x(index).toFixed(1)},${y(ns).toFixed(1)}`);
  return found.length === 1 ? [...found, `${WIDTH},${y(times_ns[0]).toFixed(1)}`] : found;
}
