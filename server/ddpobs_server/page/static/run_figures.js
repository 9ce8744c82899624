// The figures of the run's page: those of `/figures`, each with the part of the selection that it depends on.

import { get } from "./api.js";
import { byId } from "./elements.js";
import { FigureView } from "./figure_view.js";
import { address, hasSteps, state } from "./run_state.js";
import { isEmpty, markedRanks, stepRange } from "./selection.js";

// The figures whose horizontal axis is the steps.
const OVER_STEPS = ["phases", "ranks"];
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
      if (figure.kind.selection.length && ((isRefresh && isSelected) || !hasSteps())) continue;
      await figure.show(query(figure.kind), isRefresh);
      if (own !== drawing.number) return; // A later selection draws the rest.
      afterEach();
    }
  } finally {
    if (own === drawing.number) view.ariaBusy = "false";
  }
}

function query({ selection: names }) {
  const { rank, step, bucket, match, order } = state.selection;
  const [from, to] = stepRange(state.selection) ?? [];
  const all = { from, to, rank, step, bucket, match, order };
  return Object.fromEntries(names.filter((name) => all[name] !== undefined).map((name) => [name, all[name]]));
}

export function markSelection() {
  const range = stepRange(state.selection);
  const step = shown("step").step ?? null;
  for (const name of OVER_STEPS) {
    const isMarked = name === "phases" && range;
    views[name].mark("selection", isMarked ? { left: range[0], right: range[1] + 1 } : null);
    views[name].mark("step", step === null ? null : { location: step + 0.5 });
  }
  markRows();
  const labels = Array.from(views.buckets.named("bars")?.data.label ?? []);
  const bar = state.selection.bucket ? labels.indexOf(state.selection.bucket) : -1;
  views.buckets.mark("bucket", bar < 0 ? null : { left: bar, right: bar + 1 });
}

// Mark the rows of the selected ranks; if the first of them is out of sight, bring it in.
function markRows() {
  const drawn = shown("ranks").ranks ?? [];
  const marked = markedRanks(state.selection, state.diagnosis?.findings ?? [], state.keys, state.ranks.length);
  const rows = marked.map((rank) => drawn.indexOf(rank)).filter((row) => row >= 0);
  const source = views.ranks.named("rows");
  if (!source) return;
  source.data = { top: rows.map((row) => row - 0.5), bottom: rows.map((row) => row + 0.5) };
  const { y_range: range } = views.ranks.model;
  const first = Math.min(...rows);
  if (rows.length && !(range.end <= first && first <= range.start)) showRows(first);
}

// Show as many rows of the ranks as have room, from the part on that holds this row; all without a row.
export function showRows(row) {
  const { ranks, window } = shown("ranks");
  const first = row === null ? 0 : row - (row % window);
  const last = row === null ? ranks.length : Math.min(first + window, ranks.length);
  views.ranks.model.y_range.setv({ start: last - 0.5, end: first - 0.5 });
  byId("rows").value = row === null ? "all" : String(first / window);
}

// Mark the place of the pointer in the other figures over steps.
export function markPointer(name, x) {
  for (const other of OVER_STEPS) if (other !== name) views[other].mark("pointer", x === null ? null : { location: x });
}
