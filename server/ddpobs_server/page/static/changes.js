// The rows of two compared runs: each change with its interval, and whether it is a difference.

import { element, svg } from "./elements.js";
import { duration } from "./times.js";

const WIDTH = 220;
const HEIGHT = 22;
const DOT = 3.5;
const MIN_AXIS = 0.02;
const MAX_AXIS = 2;
const ARROW = 6;
const OF_BUCKET = ["compute", "comm"];

export function isOfBucket({ kind }) {
  return OF_BUCKET.includes(kind);
}

function percent(ratio) {
  if (ratio === null) return "–";
  return (ratio > 0 ? "+" : ratio < 0 ? "−" : "") + size(ratio);
}

function size(ratio) {
  const value = Math.abs(100 * ratio);
  return `${value.toFixed(value < 10 ? 1 : 0)} %`;
}

function range({ low_ratio, high_ratio }) {
  return low_ratio === null ? "–" : `${percent(low_ratio)} to ${percent(high_ratio)}`;
}

// Fill a table with changes. All have one axis, up to the largest end of an interval; its title is in the table's head.
export function showChanges(table, changes) {
  const ends = changes
    .filter(hasRatio)
    .flatMap(({ low_ratio, high_ratio }) => [Math.abs(low_ratio), Math.abs(high_ratio)]);
  const axis = Math.min(MAX_AXIS, Math.max(MIN_AXIS, ...ends));
  table.querySelector("th.interval-of").textContent = `Interval, −${size(axis)} to +${size(axis)}`;
  table.tBodies[0].replaceChildren(...changes.map((change) => row(change, axis)));
}

function hasRatio({ change_ratio }) {
  return change_ratio !== null;
}

function row(change, axis) {
  const { kind, name, title, verdict, words } = change;
  const number = (text) => element("td", { class: "n" }, text);
  const swatch = kind === "phase" ? [element("span", { class: `swatch ${name}` })] : [];
  return element(
    "tr",
    kind === "step" ? { class: "main" } : {},
    element("td", {}, ...swatch, title),
    ...[duration(change.a_ns), duration(change.b_ns)].map(number),
    element("td", {}, interval(change, axis)),
    element("td", { class: `verdict ${verdict}` }, words || "–"),
  );
}

// The interval of a change on an axis from -`most` to `most`. An end beyond the axis is an arrow.
function interval(change, most) {
  if (!hasRatio(change)) return element("span", { class: "muted" }, "–");
  const { change_ratio, low_ratio, high_ratio, smallest_ratio } = change;
  const share = (ratio) => (Math.max(-most, Math.min(most, ratio)) + most) / (2 * most);
  const x = (ratio) => DOT + share(ratio) * (WIDTH - 2 * DOT);
  const band = { x: x(-smallest_ratio), width: x(smallest_ratio) - x(-smallest_ratio) };
  const [x1, x2, middle] = [x(low_ratio), Math.max(x(high_ratio), x(low_ratio) + 2), HEIGHT / 2];
  const frame = { class: "interval", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": range(change) };
  return svg(
    "svg",
    frame,
    svg("rect", { class: "unseen", y: 2, height: HEIGHT - 4, ...band }),
    svg("line", { class: "zero", x1: x(0), x2: x(0), y1: 0, y2: HEIGHT }),
    svg("line", { class: `bar ${change.verdict}`, x1, x2, y1: middle, y2: middle }),
    ...[low_ratio, high_ratio].filter((end) => Math.abs(end) > most).map((end) => arrow(change, Math.sign(end))),
    ...(Math.abs(change_ratio) > most ? [] : [svg("circle", { cx: x(change_ratio), cy: middle, r: DOT })]),
  );
}

// An arrow at the left or the right end of the axis, by its sign.
function arrow({ verdict }, sign) {
  const [tip, middle] = [sign < 0 ? 1 : WIDTH - 1, HEIGHT / 2];
  const back = tip - sign * ARROW;
  return svg("path", {
    class: `arrow ${verdict}`,
    d: `M${back} ${middle - ARROW} L${tip} ${middle} L${back} ${middle + ARROW}`,
  });
}
