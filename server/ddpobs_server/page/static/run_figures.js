// The figures of the run's page: those of `/figures`, each with the part of the selection that it depends on.

import { get } from "./api.js";
import { byId } from "./elements.js";
import { FigureView } from "./figure_view.js";
import { address, state } from "./run_state.js";
import { isEmpty, stepRange } from "./selection.js";

// The figures whose horizontal axis is the steps.
const OVER_STEPS = ["overview", "phases", "ranks"];
const drawing = { number: 0 };

// By name, in the order of the page; empty before `buildFigures`.
export const views = {};

// What a figure shows; nothing before it is drawn.
export function shown(name) {
  return views[name]?.shown ?? {};
}

// Create the figures, once: those that depend on no selection above the form, the others below.
export async function buildFigures() {
  const { figures } = await get("/figures");
  for (const kind of figures) {
    const controls = document.querySelectorAll(`#controls > [data-figure="${kind.figure}"]`);
    views[kind.figure] = new FigureView(kind, [...controls], address);
    byId(kind.selection.length ? "selected" : "whole-run").append(views[kind.figure].section);
  }
}

// Draw figures one after another, from the top: each takes the collector some time, and the reader begins at the top.
// A refresh keeps the figures of a selection. `afterEach` marks the selection in those that are drawn.
export async function drawFigures(afterEach, isRefresh) {
  const view = byId("view");
  if (isRefresh && view.ariaBusy === "true") return;
  const isSelected = !isEmpty(state.selection);
  const own = ++drawing.number;
  view.ariaBusy = "true";
  try {
    for (const figure of Object.values(views)) {
      if (isRefresh && isSelected && figure.kind.selection.length) continue;
      await figure.show(query(figure.kind), isRefresh);
      if (own !== drawing.number) return; // A later selection draws the rest.
      afterEach();
    }
  } finally {
    if (own === drawing.number) view.ariaBusy = "false";
  }
}

function query({ selection: names }) {
  const { rank, step, match, order } = state.selection;
  const [from, to] = stepRange(state.selection) ?? [];
  const all = { from, to, rank, step, match, order };
  return Object.fromEntries(names.filter((name) => all[name] !== undefined).map((name) => [name, all[name]]));
}

export function markSelection() {
  const range = stepRange(state.selection);
  const step = shown("step").step ?? null;
  for (const name of OVER_STEPS) {
    const isMarked = name === "overview" && range;
    views[name].mark("selection", isMarked ? { left: range[0], right: range[1] + 1 } : null);
    views[name].mark("step", step === null ? null : { location: step + 0.5 });
  }
  const row = (shown("ranks").ranks ?? []).indexOf(Number(state.selection.rank ?? NaN));
  views.ranks.mark("rank", row < 0 ? null : { top: row - 0.5, bottom: row + 0.5 });
  const labels = Array.from(views.buckets.named("bars")?.data.label ?? []);
  const bar = state.selection.bucket ? labels.indexOf(state.selection.bucket) : -1;
  views.buckets.mark("bucket", bar < 0 ? null : { left: bar, right: bar + 1 });
}

// Mark the place of the pointer in the other figures over steps.
export function markPointer(name, x) {
  for (const other of OVER_STEPS) if (other !== name) views[other].mark("pointer", x === null ? null : { location: x });
}
