// The state of the page of one run: what is known of the run, and what is selected.

import { read } from "./selection.js";

const LIVE = ["running", "stalled", "hung"];
const run = decodeURIComponent(location.pathname.split("/").at(-1));

export const state = {
  run,
  base: `/runs/${encodeURIComponent(run)}`,
  ...read(location.search), // `selection`, and the names of its malformed parts in `wrong`.
  details: null,
  attempts: [],
  shownAttempt: null,
  ranks: [],
  layouts: [],
  diagnosis: null,
  keys: [], // Of the findings.
  building: null, // The promise of the figures' elements.
  seen: null, // Attempt, time and steps that the figures show.
};

// The path of a read of the shown attempt.
export function address(name, query = "") {
  const all = new URLSearchParams(query);
  const { shownAttempt, selection } = state;
  if (shownAttempt) all.set("attempt", shownAttempt.attempt);
  else if (selection.attempt && !isOrdinal(selection.attempt)) all.set("attempt", selection.attempt);
  return `${state.base}/${name}${all.size ? `?${all}` : ""}`;
}

// Whether the shown attempt has a step, or one is selected, of which there may be spans: else there is nothing to draw.
export function hasSteps() {
  return (state.shownAttempt ?? state.details).steps > 0 || Boolean(state.selection.step);
}

// Whether the shown attempt may go on: a run of imported files has its state for ever.
export function isLive() {
  const { details, shownAttempt } = state;
  const isLatest = !shownAttempt || shownAttempt.attempt === details?.attempt;
  return isLatest && LIVE.includes(details?.state) && !details.hello?.settings.imported;
}

// Whether the address names an attempt by its number, and not by its id.
export function isOrdinal(attempt) {
  return /^\d{1,9}$/.test(attempt);
}

// The attempt that is selected; null if the run has none like it.
export function selectedAttempt(attempts, latest) {
  const wanted = state.selection.attempt;
  return attempts.find((row) => row.attempt === (wanted ?? latest) || String(row.ordinal + 1) === wanted) ?? null;
}
