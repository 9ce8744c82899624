// One row of the list of runs.

import { root } from "./api.js";
import { element } from "./elements.js";
import { severityBadge } from "./finding_parts.js";
import { labelsOf } from "./labels.js";
import { COLUMNS } from "./runs_columns.js";
import { sparkline } from "./sparkline.js";
import { ago, clock, duration, isKnown } from "./times.js";

export const CONTROLS = "input, a, button";
export const ROW_CONTROLS = 3;

// A row that stays when its run changes, so that focus, selection and the pointer's place are kept.
export class RunRow {
  #seen = new Map();

  constructor(select, edit) {
    this.box = element("input", { type: "checkbox" });
    this.box.addEventListener("change", () => select(this.run.run, this.box.checked));
    this.link = element("a", {});
    this.facts = element("span", { class: "muted facts" });
    this.labels = element("span", { class: "labels" });
    this.edit = element("button", { type: "button", class: "quiet", title: "Tags and note" }, "✎");
    this.edit.addEventListener("click", () => edit(this.run));
    this.cells = Object.fromEntries(COLUMNS.filter(({ key }) => key).map((column) => [column.key, cell(column)]));
    this.cells.run.append(this.link, this.labels, this.facts);
    const [box, edits] = [element("td", { class: "box" }, this.box), element("td", { class: "edit" }, this.edit)];
    this.node = element("tr", {}, box, ...Object.values(this.cells), edits);
    for (const control of [this.box, this.link, this.edit]) control.tabIndex = -1; // Arrow keys reach them.
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
    this.#showName(run);
    this.#showFinding(run);
    this.#showTimes(run);
  }

  #showName(run) {
    this.box.setAttribute("aria-label", `Select ${run.run}`);
    this.edit.setAttribute("aria-label", `Edit tags and note of ${run.run}`);
    this.link.href = `${root}/runs/${encodeURIComponent(run.run)}`;
    this.link.textContent = run.run;
    this.#fill(this.labels, [run.tags, run.note], () => labelsOf(run));
    const host = isKnown(run.host) ? `, the first on ${run.host}` : "";
    this.facts.textContent = `${run.ranks} of ${run.world_size} ranks${host}`;
    const state = element("span", { class: `state ${run.state}` }, run.state);
    const seen = element("span", { class: "muted seen" }, ago(run.ended_ns ?? run.last_seen_ns));
    this.cells.state.replaceChildren(state, seen);
  }

  #showFinding(run) {
    const { diagnosis } = run;
    const { worst, severity, findings, summary } = diagnosis ?? {};
    this.#fill(this.cells.finding, [worst, severity, findings, summary], () => finding(run));
    this.cells.gain.textContent = gain(diagnosis?.gain);
    this.cells.goodput.textContent = diagnosis?.goodput == null ? "–" : percent(diagnosis.goodput);
  }

  #showTimes(run) {
    const step = () => [sparkline(run.step_times_ns), element("span", {}, duration(run.step_ns))];
    this.#fill(this.cells.step, run.step_times_ns, () => (run.step_ns === null ? ["–"] : step()));
    this.cells.rate.textContent = run.steps_per_s === null ? "–" : digits(run.steps_per_s);
    this.cells.steps.textContent = String(run.steps);
    this.cells.duration.textContent = duration(run.duration_ns || null);
    this.#fill(this.cells.started, run.began_ns, () => [run.began_ns === null ? "–" : started(run.began_ns)]);
  }
}

function cell({ key, title, number }) {
  return element("td", { "data-title": title, class: `c-${key}${number ? " n" : ""}` });
}

function finding({ diagnosis }) {
  const muted = (text) => [element("span", { class: "muted" }, text)];
  if (!diagnosis) return muted("…");
  const { worst, severity, findings, summary } = diagnosis;
  if (worst === null) return [element("span", { class: "muted text", title: summary }, summary)];
  const text = element("span", { class: "text", title: worst }, severityBadge(severity), ` ${worst}`);
  return findings > 1 ? [text, ...muted(`and ${findings - 1} more`)] : [text];
}

function gain(value) {
  if (!value) return "–";
  return `${percent(value.ratio)}${value.whole === "run" ? " of run" : ""}`;
}

function percent(ratio) {
  return `${(100 * ratio).toFixed(0)} %`;
}

function digits(number) {
  return number >= 100 ? number.toFixed(0) : number.toPrecision(3);
}

// In UTC; the pointer shows it in the reader's zone.
function started(ns) {
  const time = new Date(ns / 1e6);
  const title = time.toLocaleString([], { dateStyle: "full", timeStyle: "long" });
  return element("time", { datetime: time.toISOString(), title }, clock(ns).slice(0, 16));
}
