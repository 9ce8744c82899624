// One row of the list of runs: its cells, its place in an order, and whether it matches the filters.

import { ago, element, ms, root, svg } from "./api.js";
import { labelsOf } from "./labels.js";

const SEVERITIES = ["critical", "warning", "info"];
const WIDTH = 110, HEIGHT = 24;

// `down`: whether a first click sorts the largest first.
export const COLUMNS = [
  { title: "Select" },
  { key: "run", title: "Run", down: false },
  { key: "state", title: "State", down: false },
  { key: "finding", title: "Worst finding", down: true },
  { key: "gain", title: "Gain", number: true, down: true },
  { key: "step", title: "Step time", number: true, down: true },
  { key: "rate", title: "Steps/s", number: true, down: true },
  { key: "steps", title: "Steps", number: true, down: true },
  { key: "goodput", title: "Goodput", number: true, down: false },
  { key: "duration", title: "Duration", number: true, down: true },
  { key: "started", title: "Started", down: true },
  { title: "Edit" },
];

// The value that a column sorts by; null if unknown.
export function value(run, key) {
  const { diagnosis } = run;
  const severity = SEVERITIES.indexOf(diagnosis?.severity);
  return {
    run: run.run,
    state: run.state,
    finding: diagnosis ? (severity < 0 ? 0 : SEVERITIES.length - severity) : null,
    gain: diagnosis?.gain?.ratio ?? null,
    step: run.step_ns,
    rate: run.steps_per_s,
    steps: run.steps,
    goodput: diagnosis?.goodput ?? null,
    duration: run.duration_ns,
    started: run.created_ns,
  }[key];
}

export function matches(run, { text, state, severity, days }, now_ms) {
  if (state && run.state !== state) return false;
  if (days && now_ms - run.created_ns / 1e6 > days * 86_400_000) return false;
  if (severity === "none" && !(run.diagnosis && !run.diagnosis.severity)) return false;
  if (severity && severity !== "none") {
    const place = SEVERITIES.indexOf(run.diagnosis?.severity);
    if (place < 0 || place > SEVERITIES.indexOf(severity)) return false;
  }
  const words = [run.run, run.note, run.host, ...run.tags.map((tag) => `#${tag}`)].join(" ").toLowerCase();
  return text.split(/\s+/).every((word) => words.includes(word));
}

// A row that stays when its run changes, so that focus, selection and the pointer's place are kept.
export class RunRow {
  #seen = new Map();

  constructor(select, edit) {
    this.box = element("input", { type: "checkbox" });
    this.box.addEventListener("change", () => select(this.run.run, this.box.checked));
    this.link = element("a", {});
    this.facts = element("span", { class: "muted facts" });
    this.labels = element("span", { class: "labels" });
    this.edit = element("button", { type: "button", class: "quiet" }, "✎");
    this.edit.addEventListener("click", () => edit(this.run));
    this.cells = Object.fromEntries(COLUMNS.filter(({ key }) => key).map(({ key, title, number }) =>
      [key, element("td", { "data-title": title, class: `c-${key}${number ? " n" : ""}` })]));
    this.cells.run.append(this.link, this.labels, this.facts);
    this.node = element("tr", {}, element("td", { class: "box" }, this.box), ...Object.values(this.cells), element("td", { class: "edit" }, this.edit));
  }

  // Fill a cell, unless it was filled from the same values: a reader may be in the middle of its text.
  #fill(node, values, content) {
    const text = JSON.stringify(values);
    if (this.#seen.get(node) === text) return;
    this.#seen.set(node, text);
    node.replaceChildren(...content());
  }

  show(run, isSelected) {
    this.run = run;
    this.box.checked = isSelected;
    const { cells } = this, { diagnosis } = run;
    this.box.setAttribute("aria-label", `Select ${run.run}`);
    this.edit.setAttribute("aria-label", `Edit tags and note of ${run.run}`);
    this.edit.title = "Tags and note";
    this.link.href = `${root}/runs/${encodeURIComponent(run.run)}`;
    this.link.textContent = run.run;
    this.#fill(this.labels, [run.tags, run.note], () => labelsOf(run));
    this.facts.textContent = `${run.ranks} of ${run.world_size} ranks${run.host ? ` on ${run.host}` : ""}`;
    cells.state.replaceChildren(element("span", { class: `state ${run.state}` }, run.state), element("span", { class: "muted seen" }, ago(run.last_seen_ns)));
    this.#fill(cells.finding, [diagnosis && { ...diagnosis, current: true }, run.steps > 0], () => finding(run));
    cells.gain.textContent = gain(diagnosis?.gain);
    this.#fill(cells.step, run.step_times_ns, () => (run.step_ns === null ? ["–"] : [sparkline(run.step_times_ns), element("span", {}, ms(run.step_ns))]));
    cells.rate.textContent = run.steps_per_s === null ? "–" : digits(run.steps_per_s);
    cells.steps.textContent = String(run.steps);
    cells.goodput.textContent = diagnosis?.goodput == null ? "–" : `${(100 * diagnosis.goodput).toFixed(0)} %`;
    cells.duration.textContent = duration(run.duration_ns);
    this.#fill(cells.started, run.created_ns, () => [started(run.created_ns)]);
  }
}

function finding({ diagnosis, steps }) {
  if (!diagnosis) return [element("span", { class: "muted" }, "…")];
  if (diagnosis.worst === null) {
    const nothing = diagnosis.missing ? `nothing found, ${diagnosis.missing} not judged` : "nothing found";
    return [element("span", { class: "muted" }, steps ? nothing : "not judged yet")];
  }
  const mark = element("span", { class: `severity ${diagnosis.severity}` }, diagnosis.severity);
  const more = diagnosis.findings > 1 ? [element("span", { class: "muted" }, `and ${diagnosis.findings - 1} more`)] : [];
  return [element("span", { class: "text", title: diagnosis.worst }, mark, ` ${diagnosis.worst}`), ...more];
}

function gain(gain) {
  if (!gain) return "–";
  return `−${(100 * gain.ratio).toFixed(0)} %${gain.whole === "run" ? " of run" : ""}`;
}

function digits(number) {
  return number >= 100 ? number.toFixed(0) : number.toPrecision(3);
}

export function duration(ns) {
  const seconds = Math.round(ns / 1e9), minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  if (seconds < 60) return `${seconds} s`;
  if (hours < 1) return `${minutes} min ${seconds % 60} s`;
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function started(ns) {
  const time = new Date(ns / 1e6);
  const short = time.toLocaleString([], { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23", timeZoneName: "short" });
  return element("time", { datetime: time.toISOString(), title: time.toLocaleString([], { dateStyle: "full", timeStyle: "long" }) }, short.replace(/ (\S+)$/, "\u00a0$1"));
}

// The step time over the run, from zero to the largest value.
function sparkline(times) {
  const picture = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `step time over the run: ${ms(Math.min(...times))} to ${ms(Math.max(...times))}` });
  const highest = Math.max(...times) || 1, x = (index) => (times.length > 1 ? (index * WIDTH) / (times.length - 1) : 0);
  const points = times.map((ns, index) => `${x(index).toFixed(1)},${(HEIGHT - 1 - ((HEIGHT - 3) * ns) / highest).toFixed(1)}`);
  if (times.length === 1) points.push(`${WIDTH},${points[0].split(",")[1]}`);
  picture.append(svg("polyline", { points: points.join(" ") }));
  return picture;
}
