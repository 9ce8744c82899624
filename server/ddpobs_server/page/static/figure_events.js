// What a click or a drag in a figure selects. `choose` changes the selection, `select` selects a finding.

import { byId, element } from "./elements.js";
import { markPointer, showRows, shown, views } from "./run_figures.js";
import { state } from "./run_state.js";

// Step under a position of a figure over steps.
const stepAt = (x) => String(Math.max(0, Math.floor(x)));

export function followFigures(choose, select) {
  for (const name of ["phases", "ranks"]) {
    views[name].onSelect = (x0, x1) => x1 - x0 >= 1 && choose({ steps: `${stepAt(x0)}-${stepAt(x1)}`, finding: "" });
    views[name].onPoint = (x) => markPointer(name, x);
  }
  views.phases.onTap = (x, y) => tapPhases(x, y, choose, select);
  views.ranks.onTap = (x, y) => choose({ step: stepAt(x), rank: String(shown("ranks").ranks[Math.round(y)] ?? "") });
  views.step.onTap = (x, y) => tapStep(x, y, choose);
  views.buckets.onTap = (x) => {
    const label = views.buckets.named("bars").data.label[Math.floor(x)];
    if (label !== undefined) choose({ bucket: String(label) });
  };
  views.ranks.onDrawn = offerRows;
  byId("rows").addEventListener("change", ({ target: { value } }) =>
    showRows(value === "all" ? null : Number(value) * shown("ranks").window),
  );
}

// The row of a source of rectangles that is at a place; -1 if none is.
function hitRow({ left, right, top, bottom }, x, y) {
  return Array.from(left).findIndex((from, row) => {
    return from <= x && x <= right[row] && Math.min(top[row], bottom[row]) <= y && y <= Math.max(top[row], bottom[row]);
  });
}

function tapPhases(x, y, choose, select) {
  const { data } = views.phases.named("findings");
  const row = hitRow({ left: data.from, right: data.right, top: data.lane_top, bottom: data.lane_bottom }, x, y);
  const index = row < 0 ? -1 : data.finding[row];
  const finding = state.diagnosis.findings[index];
  return finding ? select(finding, state.keys[index]) : choose({ step: stepAt(x) });
}

function tapStep(x, y, choose) {
  const { ranks, step } = shown("step");
  const rank = ranks[Math.floor(y)];
  for (const name of ["moving", "waiting", "compute"]) {
    const data = views.step.named(name)?.data;
    const row = data ? hitRow(data, x, y) : -1;
    if (row >= 0) return choose({ rank: String(rank), bucket: String(data.bucket[row]), step: String(step) });
  }
  return rank === undefined ? null : choose({ rank: String(rank), step: String(step) });
}

// With many ranks a part of the rows is seen at a time.
function offerRows() {
  const { ranks, window } = shown("ranks");
  const parts = Math.ceil(ranks.length / window);
  const options = Array.from({ length: parts }, (_, part) => {
    const last = Math.min((part + 1) * window, ranks.length);
    return element("option", { value: part }, `${part * window + 1} to ${last} of ${ranks.length}`);
  });
  byId("rows").parentElement.hidden = parts < 2;
  byId("rows").replaceChildren(...options, element("option", { value: "all" }, "all"));
}
