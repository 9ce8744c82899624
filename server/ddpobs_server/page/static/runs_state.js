// The state of the list of runs, and the reads that keep it up to date.

import { get } from "./api.js";
import { isShown } from "./finding_parts.js";

const PAGE_LIMIT = 500;
const MAX_RUNS = 5000;
const RECENT_NS = 300e9; // Runs seen in this time before the newest batch are read again: their state may change.
const WHOLE_EVERY = 20; // Refreshes until all runs are read again: some may have been deleted.
const DIAGNOSE_MS = 15_000; // Least time between two requests for the diagnosis of one run.

export const PAGE_ROWS = 30;
export const state = {
  runs: new Map(), // By name.
  selected: new Set(), // Names of the marked runs.
  shown: PAGE_ROWS, // Rows of the page.
  order: { key: "started", down: true },
  refreshes: 0,
};
const diagnosing = { queue: [], isBusy: false, asked_ms: new Map() };

// Read the runs that may have changed, or all of them.
export async function readRuns() {
  const { runs } = state;
  const isWhole = state.refreshes++ % WHOLE_EVERY === 0 || !runs.size;
  const newest_ns = Math.max(0, ...[...runs.values()].map((run) => run.last_seen_ns));
  const found = await readPages(isWhole ? "" : `&seen_after_ns=${Math.max(0, newest_ns - RECENT_NS)}`);
  const former = new Map(runs);
  if (isWhole) runs.clear();
  for (const run of found) {
    const known = former.get(run.run)?.diagnosis;
    if (run.diagnosis === null && known) run.diagnosis = { ...known, current: false };
    runs.set(run.run, run);
  }
}

async function readPages(query) {
  const found = [];
  let next = null;
  do {
    const from = next === null ? "" : `&cursor=${encodeURIComponent(next)}`;
    const page = await get(`/runs?limit=${PAGE_LIMIT}${query}${from}`);
    found.push(...page.runs);
    next = page.next;
  } while (next !== null && found.length < MAX_RUNS);
  return found;
}

// Request the missing diagnoses one after the other; `show` shows a run with its new one.
export async function diagnose(wanted, show) {
  const time_ms = Date.now();
  const isDue = ({ run }) => !(time_ms - diagnosing.asked_ms.get(run) < DIAGNOSE_MS);
  diagnosing.queue = wanted.filter((run) => !run.diagnosis?.current && isDue(run));
  if (diagnosing.isBusy) return; // The loop goes on with the new queue.
  diagnosing.isBusy = true;
  while (diagnosing.queue.length) {
    const { run } = diagnosing.queue.shift();
    diagnosing.asked_ms.set(run, Date.now());
    const diagnosis = await readDiagnosis(run);
    const known = state.runs.get(run);
    if (!diagnosis || !known) continue;
    known.diagnosis = diagnosis;
    show(known);
  }
  diagnosing.isBusy = false;
}

// As the field `diagnosis` of `/runs`; null if there is none now.
async function readDiagnosis(run) {
  const response = await get(`/runs/${encodeURIComponent(run)}/diagnostics`).catch(() => null);
  if (!response) return null;
  const { summary, missing, goodput } = response;
  const findings = response.findings.filter(isShown);
  const { verdict: worst = null, severity = null, code = null, gain = null } = findings[0] ?? {};
  const counts = { findings: findings.length, missing: missing.length };
  return { summary, worst, severity, code, gain, goodput, ...counts, current: true };
}
